"""Every tuned number of the executor: for a CPU thread, and for a GPU on which our kernels do not run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prefixkit.attention.sharing import HeadShape


@dataclass(frozen=True)
class Tuning:
    """Costs and limits.  They decide how work is split and batched, never what is computed.

    Times are microseconds; the defaults are those of one thread of a 2.6 GHz x86 server core with AVX-512, float32, 3
    KV heads of 64.

    Attributes:
        call_us: One more kernel call, with the Python around it.
        copy_us: Gathering one element of K and one of V.
        read_us: Reading one element of K and one of V in the kernel.
        multiply_us: One multiplication and addition.
        batch_elements: Elements of K in a batched call; gathered, about half fit a core's second-level cache.
            Twice as many cost 10 % more per element; a quarter as many need twice the calls.
        call_elements: The most elements of gathered K, or of a mask or biases, in any call, 64 MB of float32; and of
            the biases that a program holds from layer to layer.
        score_elements: Elements of a call's scores that are computed in plain torch: 4 MB of float32, most of which
            stay in the caches from one operation to the next.
        scored_rows: Queries per tile if scores are computed in plain torch: it bounds their memory, and the number
            of keys in a tile that are hidden from some of its queries.
        masked_rows: Queries per tile if torch's flash attention gets a mask or biases; from 192 queries on it processes
            64 at a time instead of 32, which saves 8 % to 15 % of the time under a mask.
        distance_rows: Queries per tile if biases depend on distances, so that no biases are written to memory.
        group_rows: With fewer queries than this per block, the query heads of one KV head become rows of one matrix: 45
            us a query instead of 60 for 1,000 keys.  With more queries that saves no time, and costs a copy of them.
    """

    call_us: float = 20.0
    copy_us: float = 3.5e-4
    read_us: float = 4.5e-4
    multiply_us: float = 2.7e-5
    batch_elements: int = 1 << 19
    call_elements: int = 1 << 24
    score_elements: int = 1 << 20
    scored_rows: int = 64
    masked_rows: int = 192
    distance_rows: int = 256
    group_rows: int = 64


CPU = Tuning()
# A call is a dozen launches; gathering runs at 1 TB/s, products at 100 TFLOP/s; a call has 256 MB of float32 scores.
GPU = Tuning(
    call_us=100.0,
    copy_us=2e-6,
    read_us=1e-6,
    multiply_us=1e-8,
    batch_elements=1 << 26,
    call_elements=1 << 26,
    score_elements=1 << 26,
    scored_rows=512,
    masked_rows=512,
    distance_rows=512,
    group_rows=0,
)


@dataclass(frozen=True)
class Heads(HeadShape):
    """The heads of a layer, and the costs of work on them where it runs."""

    tuning: Tuning = field(kw_only=True)

    @property
    def kv_elements(self) -> int:
        """Elements of one token's K or V, whichever has more."""
        return self.kv_heads * max(self.head_dim, self.value_dim)

    @property
    def longest_copy(self) -> int:
        """The number of tokens from which copying K and V costs more than one more call."""
        return max(1, int(self.tuning.call_us / (self.tuning.copy_us * self.kv_elements)))

    @property
    def score_us(self) -> float:
        """Microseconds of arithmetic for one query and one key, over all heads."""
        return self.heads * (self.head_dim + self.value_dim) * self.tuning.multiply_us

    def numbers(self, device: torch.device | str = "cpu") -> Tensor:
        """``[heads, 1, 1]`` int64 head numbers, for variants."""
        return torch.arange(self.heads, device=device)[:, None, None]
