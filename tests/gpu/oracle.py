"""Dense float64 attention over a tree on the GPU, and the error of torch's own attention on the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import visible_tokens
from prefixkit.attention.variants import CAUSAL, Variant
from prefixkit.attention.variants.evaluate import pointwise
from prefixkit.testing.forests import Case
from tests.gpu.cases import GPU


def gathered(case: Case) -> tuple[Tensor, Tensor]:
    """``[rows, longest]`` slots and positions of what each query sees, -1 where it sees less."""
    seen = [
        visible_tokens(case.snapshot, int(node), int(position))
        for node, position in zip(case.row_node, case.positions.tolist(), strict=True)
    ]
    longest = max(len(slots) for slots, _ in seen)
    padded = np.full((2, len(seen), longest), -1, dtype=np.int64)
    for row, (slots, positions) in enumerate(seen):
        padded[0, row, : len(slots)], padded[1, row, : len(slots)] = slots, positions
    slots, positions = torch.from_numpy(padded).to(GPU)
    return slots, positions


def dense(
    case: Case,
    variant: Variant = CAUSAL,
    dtype: torch.dtype = torch.float64,
    order: int = 0,
    *,
    together: bool = False,
) -> tuple[Tensor, Tensor]:
    """``out [rows, heads, v_dim]``, ``lse [rows, heads]`` with every product and sum in ``dtype``.

    Sums round otherwise in another order.  ``order``: of the keys: 0 as in the text, others shuffled.  ``together``:
    one product has the scores of all rows with all pages, as a matrix; else torch takes each row by itself.
    """
    slots, positions = gathered(case)
    if order:
        shuffled = torch.randperm(slots.shape[1], generator=torch.Generator().manual_seed(order)).to(GPU)
        slots, positions = slots[:, shuffled], positions[:, shuffled]
    q, k, v = (t.to(GPU) for t in (case.q, case.k_pages, case.v_pages))
    rows, heads, head_dim = q.shape
    kv_heads, page_size = k.shape[2], k.shape[1]
    where = slots.clamp(min=0)
    number = torch.arange(heads, device=GPU)[:, None, None]
    out, lse = (
        torch.empty(rows, heads, v.shape[3], dtype=dtype, device=GPU),
        torch.empty(rows, heads, dtype=dtype, device=GPU),
    )
    step = max(1, (1 << 26) // (slots.shape[1] * heads * head_dim))  # half a gigabyte of keys
    for row in range(0, rows, step):
        part = slice(row, row + step)
        keys, values = (
            t[where[part] // page_size, where[part] % page_size].to(dtype).repeat_interleave(heads // kv_heads, dim=2)
            for t in (k, v)
        )  # [rows, len, heads, head_dim]
        if together:
            score = scores_of_matrices(q[part].to(dtype), k.to(dtype)).gather(
                2, where[part, None].expand(-1, heads, -1)
            )
        else:
            score = torch.einsum("rhd,rlhd->rhl", q[part].to(dtype), keys)
        score = score[:, :, None, :] * case.scale
        b = torch.from_numpy(StepTree(case.snapshot, case.queries).sequences).to(GPU)[part, None, None, None]
        at = b, number[None], case.positions.to(GPU)[part, None, None, None], positions[part, None, None, :]
        for mod in variant.score_mods:
            score = pointwise(mod.function, score, *at)
        hidden = (slots[part] < 0)[:, None, None, :]
        for mod in variant.mask_mods:
            hidden = hidden | ~pointwise(mod.function, *at)
        score = score.masked_fill(hidden, -torch.inf)[:, :, 0]
        lse[part] = torch.logsumexp(score, dim=-1)
        if (sinks := case.sinks_for(variant)) is not None:
            lse[part] = torch.logaddexp(lse[part], sinks.to(lse))
        weight = torch.exp(score - lse[part].masked_fill(lse[part] == -torch.inf, 0.0)[..., None])
        out[part] = torch.einsum(
            "rhl,rlhd->rhd", weight.to(dtype), values.masked_fill((slots[part] < 0)[:, :, None, None], 0.0)
        )
    if variant.sums:  # in float32 a sum errs as the log-sum-exp does
        out *= lse.exp()[..., None]
    return out, lse


def scores_of_matrices(q: Tensor, k_pages: Tensor) -> Tensor:
    """Scores ``[rows, heads, slots]`` of every query with every slot, a product of two matrices for each KV head."""
    rows, heads, head_dim = q.shape
    keys = k_pages.nan_to_num().permute(2, 3, 0, 1).flatten(2)  # [kv_heads, head_dim, slots]
    of_heads = q.reshape(rows, len(keys), -1, head_dim).transpose(0, 1).flatten(1, 2)
    return (of_heads @ keys).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)


def torch_error(case: Case, exact: Tensor) -> float:
    """Largest error of torch's attention, a row at a time: of its fused kernel, and of its plain one."""
    slots, _ = gathered(case)
    q, k, v = (t.to(GPU) for t in (case.q, case.k_pages, case.v_pages))
    heads, kv_heads, page_size = q.shape[1], k.shape[2], k.shape[1]
    worst = 0.0
    for row in range(len(q)):
        mine = slots[row][slots[row] >= 0]
        keys, values = (
            t[mine // page_size, mine % page_size].repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1)[None]
            for t in (k, v)
        )
        for kernels in ([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH]):
            with sdpa_kernel(kernels):
                out = scaled_dot_product_attention(q[row][None, :, None], keys, values, scale=case.scale)
            worst = max(worst, float((out[0, :, 0].double() - exact[row]).abs().max()))
    return worst


def unit(case: Case) -> float:
    """What errors are counted in: a score is off by its size times eps, the output by as much relative to values."""
    q, k, v = (t.double().nan_to_num() for t in (case.q, case.k_pages, case.v_pages))
    score = case.scale * float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
    return torch.finfo(case.q.dtype).eps * (1 + score) * float(v.abs().max())


@dataclass
class Errors:
    """Largest errors of ours and of torch's, per forest, in units.

    Rounding is chance and a forest is small, so errors are held against torch's over all forests: neither the largest
    nor the root of the mean square may exceed 1.5 times torch's.
    """

    seeds: list[int] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, seed: int, case: Case, ours: float, theirs: float) -> None:
        self.seeds.append(seed)
        self.ours.append(ours / unit(case))
        self.theirs.append(theirs / unit(case))

    def check(self) -> None:
        ours, theirs = np.array(self.ours), np.array(self.theirs)
        worst = [f"forest {self.seeds[i]}: {ours[i]:.3g} (torch {theirs[i]:.3g})" for i in np.argsort(-ours)[:5]]
        assert np.isfinite(ours).all(), worst
        assert ours.max() <= 1.5 * theirs.max(), worst
        assert np.sqrt(np.mean(ours**2)) <= 1.5 * np.sqrt(np.mean(theirs**2)), worst
