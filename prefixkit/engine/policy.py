"""How calls run, and what is done where KV does not fit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

import torch

from prefixkit.attention.uncomputed import prefill_chunk_for
from prefixkit.kv.limits import parse_size
from prefixkit.sampling.params import as_integer
from prefixkit.tree.eviction import POLICIES

Eviction = Literal["lru", "lfu", "cost"]
Preemption = Literal["auto", "swap", "recompute"]

_PREEMPTIONS = "auto", "swap", "recompute"


@dataclass(frozen=True)
class MemoryPolicy:
    """What is evicted from the prefix cache, and what becomes of requests that were admitted and no longer fit.

    Attributes:
        eviction: Which of the prefixes that no request needs goes first: the one used least recently (``"lru"``), the
            one used least often (``"lfu"``), or the one that costs least to compute again for each byte of its KV
            (``"cost"``).
        preemption: Where the KV of a preempted request's samples goes: to host memory (``"swap"``), or nowhere, so
            that what is evicted meanwhile is computed again (``"recompute"``); ``"auto"`` takes what costs less time by
            what copies and prompts have taken so far.
        headroom: Tokens for which each running sequence must find pages before more is admitted.  A request is
            preempted once some sequence finds none for a quarter of them: what lies between keeps the two from taking
            turns.
        swap_space: Host memory for swapped KV at most, in bytes or as a size such as ``"4GiB"``; beyond it, KV is
            computed again.
        patience: Steps that a request waits at most while others that came later, or of a higher priority, are
            admitted before it.

    Raises:
        ValueError: a name that is not one of these, a number below 0, or no size.
        TypeError: a number that is no integer.
    """

    eviction: Eviction = "lru"
    preemption: Preemption = "auto"
    headroom: int = 64
    swap_space: float | str = 4 * 2**30
    patience: int = 1024

    @property
    def longest(self) -> int:
        """Tokens for which each running sequence must find pages before more is admitted: the next one at least."""
        return max(1, self.headroom)

    @property
    def shortest(self) -> int:
        """Tokens for which each running sequence has pages, or something is preempted."""
        return max(1, self.headroom // 4)

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("eviction", self.eviction, tuple(POLICIES)),
            ("preemption", self.preemption, _PREEMPTIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        for name in ("headroom", "patience"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 0, "use 0 for none"))
        size = as_integer("swap_space", parse_size(self.swap_space, "swap_space", least=0), 0, "use 0 for none")
        object.__setattr__(self, "swap_space", size)


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs its calls.

    Attributes:
        prefill_chunk: Prompt tokens that one step computes at most, beside one token for each running sequence; None:
            by the device.
        most_running: Samples, or beam searches, that run at once at most; the rest wait.
        retain_samples: Whether the KV of finished samples is retained in the prefix cache, as that of prompts is.
        policy: What happens where KV does not fit.

    Raises:
        ValueError, TypeError: one of the numbers is below 1, or no integer.
    """

    prefill_chunk: int | None = None
    most_running: int = sys.maxsize
    retain_samples: bool = False
    policy: MemoryPolicy = field(default_factory=MemoryPolicy)

    def __post_init__(self) -> None:
        if self.prefill_chunk is not None:
            as_integer("prefill_chunk", self.prefill_chunk, 1, "compute at least one token a step")
        as_integer("most_running", self.most_running, 1, "let at least one sample run")

    def chunk_for(self, device: torch.device) -> int:
        """Prompt tokens that one step computes at most on a device."""
        return prefill_chunk_for(device) if self.prefill_chunk is None else int(self.prefill_chunk)
