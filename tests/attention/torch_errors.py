"""Errors of attention over a forest, held against torch's own.

The bound is torch's own error.  Its kernel gets the same rows in the same dtype, all keys of the forest at once and a
mask that says who sees whom; where it cannot do the variant, plain torch does it in that dtype, as models do.  A forest
is small and rounding is chance, so errors are counted in the unit of the chance:

    unit = eps of the dtype x (1 + largest possible |score|) x largest |value|

for a score is off by its own size times eps, and the output by as much relative to the values (for the log-sum-exp,
which is always float32 and, of many small scores, larger than each, the unit is eps of float32 x (1 + the larger of
|score| and itself)).  Over the forests of a dtype and a variant,

- no error may exceed 1.5 times the largest one of torch, which adds up each forest in four orders of keys and of head
  elements, for its largest error is chance as well;
- the root of our mean square may not exceed 1.5 times torch's in the natural order.

The rule is about sums over forests, but every forest's error is held against it, and the worst ones' seeds are printed.
The largest error of some hundred forests is chance, ours and torch's: of the same size over thousands, they differ by
half in one test of fifty.  ``check_forests`` therefore judges more forests before it fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import reference_attention, visible_tokens
from prefixkit.attention.variants import Variant
from prefixkit.ops.partial_states import State
from prefixkit.testing.forests import Case

ALLOWED = 1.5
ORDERS = 4


@dataclass
class Errors:
    """Errors of the op and of torch, per forest, in units, for out and lse; torch's in each order."""

    seed: list[int] = field(default_factory=list)
    ours: list[list[float]] = field(default_factory=list)  # [forests, 2]
    theirs: list[list[list[float]]] = field(default_factory=list)  # [forests, orders, 2]

    def add(self, seed: int, truth: Truth, out: Tensor, lse: Tensor) -> None:
        """What the op made of the forest."""
        hidden = truth.dense.lse == -torch.inf
        assert bool((out[hidden] == 0).all()), f"forest {seed}: a row that sees nothing is not 0"
        assert bool((lse[hidden] == -torch.inf).all()), f"forest {seed}: a row that sees nothing has a log-sum-exp"
        self.seed.append(seed)
        self.ours.append(truth.error(out, lse))
        self.theirs.append(truth.theirs)

    def check(self, *, only_out: bool = False) -> None:
        """Hold every error against torch's; ``only_out`` where log-sum-exps are held against something else."""
        assert not (wrong := self.wrong(only_out)), wrong

    def wrong(self, only_out: bool = False) -> str:
        """The first rule that is broken, and the worst forests, or nothing."""
        for column, name in enumerate(("out",) if only_out else ("out", "lse")):
            ours, theirs = np.array(self.ours)[:, column], np.array(self.theirs)[:, :, column]
            worst = [
                f"forest {self.seed[i]}: {ours[i]:.2f} (torch {theirs[i].max():.2f})" for i in np.argsort(-ours)[:5]
            ]
            assert np.isfinite(ours).all(), f"{name}: not a number, {worst}"
            if ours.max() > ALLOWED * theirs.max():
                return f"{name}: torch's largest error is {theirs.max():.2f}; {worst}"
            if _rms(ours) > ALLOWED * (natural := _rms(theirs[:, 0])):
                return f"{name}: {_rms(ours):.2f}, torch {natural:.2f} rms"
        return ""


def check_forests(judge: Callable[[Errors, int], object], count: int, *, first: int = 0) -> None:
    """Let ``judge`` add the errors of ``count`` forests, by their seeds from ``first``, and hold them against torch's.

    Where an error is too large, as many more forests are judged, at most four times; those judged before stay.
    """
    errors, seeds, wrong = Errors(), itertools.count(first), ""
    print("seeds from", first)
    for more in (1, 1, 2, 4, 8):
        for seed in itertools.islice(seeds, more * count):
            judge(errors, seed)
        if not (wrong := errors.wrong()):
            return
        print(f"of {len(errors.seed)} forests:", wrong)
    raise AssertionError(wrong)


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def torch_attention(case: Case, variant: Variant) -> tuple[Tensor, Tensor]:
    """All rows against all tokens of the forest, by torch in the same dtype: ``[orders, rows, heads, ...]``.

    Order 0 is the natural one, the others shuffle keys and head elements, which changes rounding only.
    """
    rng = np.random.default_rng(0)
    snapshot, (rows, heads, head_dim) = case.snapshot, case.q.shape
    node = np.repeat(np.arange(snapshot.num_nodes), snapshot.length)
    offset = np.concatenate([np.arange(length) for length in snapshot.length])
    slots = snapshot.slots(node, offset)
    kv_position = torch.from_numpy(snapshot.start[node].astype(np.int64) + offset)
    token_of_slot = np.zeros(snapshot.page_size * len(case.k_pages), dtype=np.int64)
    token_of_slot[slots] = np.arange(len(slots))
    visible = torch.zeros(rows, len(slots), dtype=torch.bool)
    for row, (at, position) in enumerate(zip(case.row_node.tolist(), case.positions.tolist(), strict=True)):
        seen = visible_tokens(snapshot, at, None if variant.looks_ahead else position)[0]
        visible[row, token_of_slot[seen]] = True
    shuffles = [(rng.permutation(len(slots)), rng.permutation(head_dim)) for _ in range(ORDERS)]
    shuffles[0] = (np.arange(len(slots)), np.arange(head_dim))
    keys, elements = (torch.from_numpy(np.stack(column)) for column in zip(*shuffles, strict=True))
    q = torch.stack([case.q[..., e] for e in elements]).transpose(1, 2)
    k, v = (
        torch.stack([pages.flatten(0, 1)[torch.from_numpy(slots)[order]] for order in keys])
        .transpose(1, 2)
        .repeat_interleave(case.shape.gqa_group, dim=1)
        for pages in (case.k_pages, case.v_pages)
    )
    k = torch.stack([of[..., e] for of, e in zip(k, elements, strict=True)])
    shown = torch.stack([visible[:, order] for order in keys])[:, None]
    b, h = torch.from_numpy(StepTree(snapshot, case.queries).sequences)[:, None], torch.arange(heads)[:, None, None]
    where = b, h, case.positions[:, None], kv_position[keys][:, None, None, :]
    shown = shown & variant.shows(*where)
    hidden = torch.zeros(shown.shape, dtype=q.dtype).masked_fill_(~shown, -torch.inf)
    if not variant.score_mods and not variant.has_sinks:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=hidden, scale=case.scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)
    score = torch.matmul(q, k.transpose(2, 3)) * case.scale
    score = variant.change(score, *where).to(q.dtype)
    score = score + hidden
    if (sinks := case.sinks_for(variant)) is not None:
        sinks = sinks.to(q.dtype)[:, None, None].expand(ORDERS, heads, rows, 1)
        score, v = torch.cat((score, sinks), dim=3), torch.cat((v, torch.zeros_like(v[:, :, :1])), dim=2)
    out = torch.matmul(torch.softmax(score, dim=-1, dtype=torch.float32).to(q.dtype), v)
    return out.transpose(1, 2), score.float().logsumexp(dim=-1).transpose(1, 2)


@dataclass
class Truth:
    """Exact attention of a forest, the units of errors, and torch's errors in each order."""

    dense: State
    units: tuple[float, float]
    theirs: list[list[float]]  # [orders, 2]

    @classmethod
    def of(cls, case: Case, variant: Variant) -> Truth:
        where = case.snapshot, case.row_node, case.positions.numpy()
        sinks = case.sinks_for(variant)
        numbers = StepTree(case.snapshot, case.queries).sequences
        dense = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant, sinks, numbers)
        score = case.scale * case.q.float().norm(dim=-1).max() * case.k_pages.float().nan_to_num().norm(dim=-1).max()
        seen = dense.lse[dense.lse > -torch.inf]
        largest = seen.abs().max().float() if len(seen) else score.new_zeros(())
        if variant.score_mods:  # scores may be larger than products; the log-sum-exp is about as large
            score = torch.maximum(score, largest)
        value = case.v_pages.float().nan_to_num().abs().max()
        eps, eps32 = (torch.finfo(dtype).eps for dtype in (case.q.dtype, torch.float32))
        lse_unit = eps32 * (1 + torch.maximum(score, largest))
        truth = cls(dense, (float(eps * (1 + score) * value), float(lse_unit)), [])
        out, lse = torch_attention(case, variant)
        if (
            case.q.dtype != torch.float32
        ):  # log-sum-exps are float32 whatever the inputs: torch gets float32 for its own
            q, k_pages, v_pages = case.q.float(), case.k_pages.float(), case.v_pages.float()
            _, lse = torch_attention(replace(case, q=q, k_pages=k_pages, v_pages=v_pages), variant)
        truth.theirs = [truth.error(*results) for results in zip(out, lse, strict=True)]
        return truth

    def error(self, out: Tensor, lse: Tensor) -> list[float]:
        pairs = zip((out, lse), (self.dense.out, self.dense.lse), self.units, strict=True)
        seen = self.dense.lse > -torch.inf
        if not bool(seen.any()):
            return [0.0, 0.0]
        return [float((found - exact)[seen].abs().max()) / unit for found, exact, unit in pairs]
