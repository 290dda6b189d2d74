"""Settings of calls, and the policy for KV that does not fit."""

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
    """Which KV is evicted from the prefix cache, and what happens to admitted requests that no longer fit.

    Attributes:
        eviction: Which unused prefix is evicted first: the one used least recently (``"lru"``), the one used least
            often (``"lfu"``), or the one with the lowest cost to compute again per byte of its KV (``"cost"``).
        preemption: What happens to the KV of a preempted request's samples: ``"swap"`` copies it to host memory;
            ``"recompute"`` leaves it in the prefix cache, and evicted KV is computed again; ``"auto"`` takes whichever
            needs less time, as estimated from the times of earlier copies and prompts.
        headroom: A request is admitted only if there are pages for this many further tokens of each running sequence.
            A request is preempted once there are no pages for a quarter of as many; the gap between the two bounds is a
            hysteresis.
        swap_space: Most host memory for swapped KV, in bytes or as a size such as ``"4GiB"``; KV beyond it is computed
            again.
        patience: Most steps for which later requests, or requests of a higher priority, are admitted before a waiting
            request.

    Raises:
        ValueError: a name is not one of these, a number is below 0, or a size is malformed.
        TypeError: a number that is no integer.
    """

    eviction: Eviction = "lru"
    preemption: Preemption = "auto"
    headroom: int = 64
    swap_space: float | str = 4 * 2**30
    patience: int = 1024

    @property
    def longest(self) -> int:
        """Tokens of each running sequence that must find pages before a request is admitted: at least the next one."""
        return max(1, self.headroom)

    @property
    def shortest(self) -> int:
        """Tokens of each running sequence that must find pages; if they do not, a request is preempted."""
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
        prefill_chunk: Most prompt tokens that one step computes, in addition to one token for each running sequence;
            None: chosen by the device.
        most_running: Most samples, or beam searches, that run at once; the rest wait.
        retain_samples: Whether the KV of finished samples is retained in the prefix cache, like the KV of prompts.
        policy: What happens when KV does not fit.

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
        """Most prompt tokens that one step computes on a device."""
        return prefill_chunk_for(device) if self.prefill_chunk is None else int(self.prefill_chunk)
