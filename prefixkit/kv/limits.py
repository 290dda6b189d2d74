"""Memory limits of KV stores: the share of free memory for each use, and the limit of all stores of a model."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.tree.pages import check_page_size

# Shares of the free memory, without kv_budget: for the store of sessions;
SESSION_SHARE = 0.5
# for the store of one call of prefixkit.generate, less the workspace of its steps on a GPU;
CALL_SHARE = {"cpu": 0.5, "cuda": 0.95}
# for the rows of a TreeCache, which all run at once: the rest is for logits and activations;
ROWS_SHARE = {"cpu": 0.5, "cuda": 0.8}
# and, on a CPU, for a store that no session holds and that is idle between two calls of generate().
IDLE_SHARE = 0.1
# Share for all stores of a model together, of the memory that was free when the first of them was made.
LIMIT_SHARE = 0.95

# Share of the memory for KV that states may take, where layers keep a state in place of KV.
STATE_SHARE = 0.5

# Limit for one store: a page takes some 20 bytes on the host, and next to nothing on the device for models without
# attention.
MOST_PAGES = 1 << 22

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class DoesNotFit(ValueError):
    """KV does not fit its share of memory."""


def parse_size(size: float | str, name: str = "kv_budget", least: int = 1) -> int:
    """Bytes from ``"2GiB"``, ``"512 MiB"``, ``"1.5GB"``, ``"1048576"``, or from a number of them.

    Args:
        size: What a user gave.
        name: The parameter or option, for messages.
        least: The fewest bytes that a string may state.

    Raises:
        ValueError: ``size`` is a string that is not a number with a known unit, or is below ``least``; or a number that
            is not finite.
        TypeError: ``size`` is neither a string nor a number.
    """
    looks = 'a size must look like "2GiB", "512MiB" or "1.5GB", or be a number of bytes'
    if isinstance(size, bool) or not isinstance(size, str | int | float | np.integer | np.floating):
        raise TypeError(f"{name}: {looks}, got {type(size).__name__} {size!r}")
    if not isinstance(size, str):
        if not math.isfinite(size):
            raise ValueError(f"{name}: {looks}, got {size}")
        return int(size)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    unit = None if found is None else _UNITS.get(found[2].upper())
    number = -1 if found is None or unit is None else int(Fraction(found[1]) * unit)
    if number < least:
        raise ValueError(f'{name}: {looks}, got "{size}"')
    return number


def session_pages(spec: KVSpec, kv_budget: float | str | None, page_size: int, free: int) -> int:
    """Pages of a store that outlives its calls: those that fit the budget, or half of the ``free`` bytes without one.

    Raises:
        ValueError: ``kv_budget``, or the free memory, holds no page; or ``page_size`` is not supported.
    """
    return _pages_in(int(free * SESSION_SHARE), spec, kv_budget, page_size)


def call_pages(spec: KVSpec, kv_budget: float | str | None, page_size: int, free: int, workspace: int = 0) -> int:
    """The most pages that the store of a single call may have; errors as :func:`session_pages`.

    ``workspace``: bytes of the free memory that steps need in addition, on each GPU; ``free`` has room for them.
    """
    share = int(free * CALL_SHARE[spec.device.type])
    left = share if spec.device.type == "cpu" else max(0, share - workspace)
    return _pages_in(left, spec, kv_budget, page_size, workspace)


def bytes_for_workspace(spec: KVSpec, workspace: int) -> int:
    """The free bytes of each device of which :func:`call_pages` leaves ``workspace`` bytes to steps."""
    return 0 if spec.device.type == "cpu" else int(workspace / CALL_SHARE[spec.device.type])


def left_for_states(spec: KVSpec, kv_budget: float | str | None, tokens: int) -> int | None:
    """Bytes that the KV of ``tokens`` tokens leaves of a budget for states; None without a budget."""
    return None if kv_budget is None else max(0, parse_size(kv_budget) - tokens * spec.bytes_per_token)


def check_rows(spec: KVSpec, tokens: int, free: int) -> None:
    """Raise DoesNotFit unless the KV of ``tokens`` tokens is within the share of rows, which all run at once."""
    share, need = ROWS_SHARE[spec.device.type], tokens * spec.bytes_per_token
    if need > share * free:
        raise DoesNotFit(
            f"KV for {tokens} tokens takes {need / 2**30:.2f} GiB, and a tree cache takes at most {share:.0%} of "
            f"the {free / 2**30:.2f} GiB that are free on {spec.places}"
        )


def _pages_in(left: int, spec: KVSpec, kv_budget: float | str | None, page_size: int, workspace: int = 0) -> int:
    """Pages that fit the budget, or ``left`` bytes without one; ValueError if not even one does."""
    check_page_size(page_size)
    budget = left if kv_budget is None else parse_size(kv_budget)
    page_bytes = page_size * spec.bytes_per_token
    whole, budget = budget, budget if not spec.states else int((1 - STATE_SHARE) * budget)
    if budget >= page_bytes:
        pages = budget // page_bytes
        return min(pages, MOST_PAGES) if kv_budget is None or spec.states else pages
    page = f"a page of {page_size} tokens takes {page_bytes} bytes ({page_bytes / 2**20:.2f} MiB)"
    page += ", and half of it is for states" if spec.states else ""
    if kv_budget is not None:
        raise ValueError(f"kv_budget={whole} bytes holds no page; {page}; raise kv_budget")
    raise ValueError(
        f"the memory left for KV ({whole} bytes) holds no page; {page}, "
        f"and a step {workspace / 2**20:.0f} MiB besides; "
        "free some memory, ask for fewer samples, or lower prefill_chunk"
    )
