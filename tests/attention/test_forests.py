"""Random forests: the op against dense float64 attention.

The bound is torch's own error.  Its kernel gets the same rows in the same dtype, all keys of the forest at once and a
mask that says who sees whom; where it cannot do the variant, plain torch does it in that dtype, as models do.  A forest
is small and rounding is chance, so errors are counted in the unit of the chance:

    unit = eps of the dtype x (1 + largest possible |score|) x largest |value|

for a score is off by its own size times eps, and the output by as much relative to the values (for the log-sum-exp,
which is always float32, the unit is eps of float32 x (1 + largest possible |score|)).  Over the forests of a dtype and
a variant,

- no error may exceed 1.5 times the largest one of torch, which adds up each forest in four orders of keys and of head
  elements, for its largest error is chance as well;
- the root of our mean square may not exceed 1.5 times torch's in the natural order.

The rule is about sums over forests, but every forest's error is held against it, and the worst ones' seeds are printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import Queries
from prefixkit.attention.reference import reference_attention, visible_tokens
from prefixkit.attention.sharing import CPU_COST
from prefixkit.attention.variants import (
    CAUSAL,
    Variant,
    alibi,
    attention_sinks,
    compose,
    register,
    sliding_window,
    soft_cap,
    variant,
)
from prefixkit.backends.torch.tuning import CPU, Tuning
from prefixkit.ops.partial_states import State
from prefixkit.testing.forests import (
    SHARE_ALL,
    SHARE_NONE,
    Case,
    attend,
    fill,
    gpu_program_of,
    make_snapshot,
    plan_of,
    program_of,
    random_case,
    random_split_plan,
    run_on,
)

ALLOWED = 1.5
ORDERS = 4
VARIANTS = ("causal", "window", "cap", "alibi", "sinks", "by_head", "composed")


@dataclass
class Errors:
    """Errors of the op and of torch, per forest, in units, for out and lse; torch's in each order."""

    seed: list[int] = field(default_factory=list)
    ours: list[list[float]] = field(default_factory=list)  # [forests, 2]
    theirs: list[list[list[float]]] = field(default_factory=list)  # [forests, orders, 2]

    def add(self, seed: int, truth: Truth, out: Tensor, lse: Tensor) -> None:
        """What the op made of the forest."""
        self.seed.append(seed)
        self.ours.append(truth.error(out, lse))
        self.theirs.append(truth.theirs)

    def check(self) -> None:
        for column, name in enumerate(("out", "lse")):
            ours, theirs = np.array(self.ours)[:, column], np.array(self.theirs)[:, :, column]
            worst = [
                f"forest {self.seed[i]}: {ours[i]:.2f} (torch {theirs[i].max():.2f})" for i in np.argsort(-ours)[:5]
            ]
            assert np.isfinite(ours).all(), f"{name}: not a number, {worst}"
            assert ours.max() <= ALLOWED * theirs.max(), f"{name}: torch's largest error is {theirs.max():.2f}; {worst}"
            natural = _rms(theirs[:, 0])
            assert _rms(ours) <= ALLOWED * natural, f"{name}: {_rms(ours):.2f}, torch {natural:.2f} rms"


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def random_variant(rng: np.random.Generator, name: str, heads: int) -> Variant:
    slopes = torch.from_numpy(rng.random(heads, dtype=np.float32))
    return {
        "causal": CAUSAL,
        "window": sliding_window(int(rng.integers(1, 40))),
        "cap": soft_cap(float(rng.uniform(0.5, 30))),
        "alibi": alibi(slopes),
        "sinks": attention_sinks(),
        "by_head": variant(mask_mod=lambda b, h, q, kv: (kv <= q) & ((q - kv < 3 + 4 * h) | (kv % 5 == h % 3))),
        "composed": compose(alibi(slopes), sliding_window(int(rng.integers(1, 40))), soft_cap(5.0), attention_sinks()),
    }[name]


def random_plan(rng: np.random.Generator, case: Case, *, split: float = 0.3) -> Plan:
    """Any plan that computes the case: node by node shared or not; in ``split`` of them with rows and KV split."""
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)]
    shared = rng.random(case.snapshot.num_nodes) < 0.5 if rng.random() < 0.4 else None
    if split and rng.random() < split:
        return random_split_plan(rng, case, cost, shared)
    return plan_of(case, cost, shared=shared)


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
        visible[row, token_of_slot[visible_tokens(snapshot, at, position)[0]]] = True
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
    none = torch.zeros((), dtype=torch.int64)
    where = none, torch.arange(heads)[:, None, None], case.positions[:, None], kv_position[keys][:, None, None, :]
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


Run = Callable[[Case, Plan, Variant], tuple[Tensor, Tensor]]


def by_op(case: Case, plan: Plan, variant: Variant) -> tuple[Tensor, Tensor]:
    return attend(case, plan, register(variant))


def tuned(costs: Tuning) -> Run:
    """The executor with costs of one's own."""
    return lambda case, plan, variant: run_on(case, program_of(case, plan, variant, costs), variant)


def as_on_a_gpu(case: Case, plan: Plan, variant: Variant) -> tuple[Tensor, Tensor]:
    return run_on(case, gpu_program_of(case, plan, variant), variant)


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
        dense = reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant, sinks)
        score = case.scale * case.q.float().norm(dim=-1).max() * case.k_pages.float().nan_to_num().norm(dim=-1).max()
        value = case.v_pages.float().nan_to_num().abs().max()
        eps, eps32 = (torch.finfo(dtype).eps for dtype in (case.q.dtype, torch.float32))
        truth = cls(dense, (float(eps * (1 + score) * value), float(eps32 * (1 + score))), [])
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
        return [float((found - exact).abs().max()) / unit for found, exact, unit in pairs]


RUNS = (
    by_op,
    # As if forests were large: nearly every tile alone, runs detached, keys and batches split, tiles of a few rows.
    tuned(replace(CPU, call_us=1e-6, call_elements=1 << 10, scored_rows=3, group_rows=2)),
    # As if calls were dear: everything in few padded batches.
    tuned(replace(CPU, call_us=1e6, batch_elements=1 << 12, scored_rows=2, group_rows=1 << 20)),
)


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [*product((torch.float32, torch.bfloat16), VARIANTS), (torch.float16, "causal"), (torch.float16, "sinks")],
    ids=str,
)
def test_every_forest_within_torchs_error(dtype: torch.dtype, variant: str, num_forests: int) -> None:
    """By the program for a CPU, with its costs and others; the first forests by the program for a GPU too."""
    share = num_forests // 4 if dtype == torch.float32 and variant == "causal" else num_forests * 3 // 4 // 20
    on_cpu, on_gpu = Errors(), Errors()
    for seed in range(max(share, 24)):
        rng = np.random.default_rng([seed, VARIANTS.index(variant), dtype.itemsize])
        case = random_case(rng, dtype)
        plan, chosen = random_plan(rng, case), random_variant(rng, variant, case.q.shape[1])
        truth = Truth.of(case, chosen)
        on_cpu.add(seed, truth, *RUNS[seed % len(RUNS)](case, plan, chosen))
        if seed < 24:
            on_gpu.add(seed, truth, *as_on_a_gpu(case, plan, chosen))
    on_cpu.check(), on_gpu.check()


@pytest.mark.parametrize("head_dim", [33, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_every_head_shape_within_torchs_error(head_dim: int, group: int) -> None:
    errors = Errors()
    for seed in range(8):
        rng = np.random.default_rng([seed, head_dim, group])
        case = random_case(rng, torch.float32, (2 * group, 2, head_dim))
        errors.add(seed, Truth.of(case, CAUSAL), *attend(case, random_plan(rng, case)))
    errors.check()


@pytest.mark.parametrize(
    ("variant", "split"), [*((variant, 0.0) for variant in VARIANTS), ("causal", 1.0), ("sinks", 1.0)]
)
def test_large_nodes_within_torchs_error(variant: str, split: float) -> None:
    """Long shared prefixes, long runs, prefill of hundreds of rows, more keys than one block of the kernel holds."""
    errors = Errors()
    for seed in range(6 if variant == "causal" else 3):  # each shape of tree, with orderly pages and with others
        rng = np.random.default_rng([seed, VARIANTS.index(variant)])
        lengths = [int(rng.integers(400, 700)), *rng.integers(1, 150, 4).tolist()]
        parents = [[-1, 0, 0, 0, 0], [-1, 0, 1, 1, 0], [-1, 0, 1, 2, 3]][seed % 3]
        snapshot, num_pages = make_snapshot(rng, parents, lengths, int(rng.choice([1, 16])), orderly=seed % 2 == 0)
        case = fill(rng, snapshot, num_pages, prefill_or_decode(rng, lengths), (6, 2, 32), torch.float32)
        plan, chosen = random_plan(rng, case, split=split), random_variant(rng, variant, 6)
        errors.add(seed, Truth.of(case, chosen), *by_op(case, plan, chosen))
    errors.check()


def prefill_or_decode(rng: np.random.Generator, lengths: list[int]) -> Queries:
    """Most nodes, each either whole or by its last token."""
    node = np.flatnonzero(rng.random(len(lengths)) < 0.8)
    node = node if len(node) else np.array([0])
    end = np.array(lengths)[node]
    begin = np.where(rng.random(len(node)) < 0.5, 0, end - 1)
    return Queries(*(column.astype(np.int32) for column in (node, begin, end)))


@pytest.mark.parametrize("seed", range(20))
def test_equal_runs_are_bitwise_equal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    plan = random_plan(rng, case)
    first = attend(case, plan)
    assert all(map(torch.equal, first, attend(case, plan)))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_items_does_not_change_a_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    plan = plan_of(case, SHARE_ALL)
    shuffled = replace(plan, tile_items=rng.permutation(plan.tile_items))
    assert all(map(torch.equal, attend(case, plan), attend(case, shuffled)))


@pytest.mark.parametrize("seed", range(20))
def test_pages_do_not_change_a_bit_while_copies_are_cheap(seed: int) -> None:
    """Where KV lies decides whether it is copied, and long runs are not; below that, numbers do not depend on it."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, 6).tolist()
    parents = [-1, 0, 0, 2, 2, 0]
    results = []
    for page_size, orderly in ((1, False), (16, True), (128, False), (7, False)):
        layout, numbers = np.random.default_rng(page_size), np.random.default_rng(seed)
        snapshot, num_pages = make_snapshot(layout, parents, lengths, page_size, orderly=orderly)
        queries = prefill_or_decode(numbers, lengths)
        case = fill(numbers, snapshot, num_pages, queries, (6, 2, 64), torch.float32)
        results.append(attend(case, plan_of(case, SHARE_ALL)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_however_a_forest_is_cut_the_answer_is_within_torchs_error(dtype: torch.dtype) -> None:
    """Share everything, nothing or some nodes, in any tiles and splits: equal up to rounding."""
    errors = Errors()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        case = random_case(rng, dtype)
        truth = Truth.of(case, CAUSAL)
        some = [rng.random(case.snapshot.num_nodes) < share for share in (0.3, 0.7)]
        for plan in (
            plan_of(case, SHARE_ALL),
            plan_of(case, SHARE_NONE),
            random_split_plan(rng, case, SHARE_ALL),
            random_split_plan(rng, case, SHARE_NONE),
            *(plan_of(case, CPU_COST, shared=s) for s in some),
        ):
            errors.add(seed, truth, *attend(case, plan))
    errors.check()
