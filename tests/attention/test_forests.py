"""Random forests: the op against dense float64 attention; ``torch_errors`` has the bound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import Queries
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
    random_plan,
    random_split_plan,
    run_on,
)
from tests.attention.torch_errors import Errors, Truth, check_forests
from tests.seeds import seeds

VARIANTS = ("causal", "window", "cap", "alibi", "sinks", "by_head", "composed")


def random_variant(rng: np.random.Generator, name: str, heads: int) -> Variant:
    slopes = torch.from_numpy(rng.random(heads, dtype=np.float32))
    window = int(rng.integers(1, 40))
    # Tracing one takes longer than attending to a small forest.
    make: dict[str, Callable[[], Variant]] = {
        "causal": lambda: CAUSAL,
        "window": lambda: sliding_window(window),
        "cap": lambda: soft_cap(float(rng.uniform(0.5, 30))),
        "alibi": lambda: alibi(slopes),
        "sinks": attention_sinks,
        "by_head": lambda: variant(mask_mod=by_head),
        "composed": lambda: compose(alibi(slopes), sliding_window(window), soft_cap(5.0), attention_sinks()),
    }
    return make[name]()


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv <= q) & ((q - kv < 3 + 4 * h) | (kv % 5 == h % 3))


Run = Callable[[Case, Plan, Variant], tuple[Tensor, Tensor]]


def by_op(case: Case, plan: Plan, variant: Variant) -> tuple[Tensor, Tensor]:
    return attend(case, plan, register(variant))


def tuned(costs: Tuning) -> Run:
    """The executor with costs of one's own."""
    return lambda case, plan, variant: run_on(case, program_of(case, plan, variant, costs), variant)


def as_on_a_gpu(case: Case, plan: Plan, variant: Variant) -> tuple[Tensor, Tensor]:
    return run_on(case, gpu_program_of(case, plan, variant), variant)


RUNS = (
    by_op,
    # As if forests were large: nearly every tile alone, runs detached, keys and batches split, tiles of a few rows.
    tuned(replace(CPU, call_us=1e-6, call_elements=1 << 10, scored_rows=3, masked_rows=3, group_rows=2)),
    # As if calls were dear: everything in few padded batches.
    tuned(replace(CPU, call_us=1e6, batch_elements=1 << 12, scored_rows=2, masked_rows=2, group_rows=1 << 20)),
)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("dtype", "variant"),
    [*product((torch.float32, torch.bfloat16), VARIANTS), (torch.float16, "causal"), (torch.float16, "sinks")],
    ids=str,
)
def test_every_forest_within_torchs_error(dtype: torch.dtype, variant: str, num_forests: int) -> None:
    """By the program for a CPU, with its costs and others; the first forests by the program for a GPU too."""
    share = num_forests // 4 if dtype == torch.float32 and variant == "causal" else num_forests * 3 // 4 // 20

    @functools.cache
    def forest(seed: int) -> tuple[Case, Plan, Variant, Truth]:
        rng = np.random.default_rng([seed, VARIANTS.index(variant), dtype.itemsize])
        case = random_case(rng, dtype)
        plan, chosen = random_plan(rng, case), random_variant(rng, variant, case.q.shape[1])
        return case, plan, chosen, Truth.of(case, chosen)

    def on_cpu(errors: Errors, seed: int) -> None:
        *given, truth = forest(seed)
        errors.add(seed, truth, *RUNS[seed % len(RUNS)](*given))

    def on_gpu(errors: Errors, seed: int) -> None:
        *given, truth = forest(seed)
        errors.add(seed, truth, *as_on_a_gpu(*given))

    check_forests(on_cpu, max(share, 12))
    check_forests(on_gpu, 8)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("head_dim", [33, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_every_head_shape_within_torchs_error(head_dim: int, group: int) -> None:
    def judge(errors: Errors, seed: int) -> None:
        rng = np.random.default_rng([seed, head_dim, group])
        case = random_case(rng, torch.float32, (2 * group, 2, head_dim))
        errors.add(seed, Truth.of(case, CAUSAL), *attend(case, random_plan(rng, case)))

    check_forests(judge, 8)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("variant", "split"), [*((variant, 0.0) for variant in VARIANTS), ("causal", 1.0), ("sinks", 1.0)]
)
def test_large_nodes_within_torchs_error(variant: str, split: float) -> None:
    """Long shared prefixes, long runs, prefill of hundreds of rows, more keys than one block of the kernel holds."""

    def judge(errors: Errors, seed: int) -> None:
        rng = np.random.default_rng([seed, VARIANTS.index(variant)])
        lengths = [int(rng.integers(400, 700)), *rng.integers(1, 150, 4).tolist()]
        parents = [[-1, 0, 0, 0, 0], [-1, 0, 1, 1, 0], [-1, 0, 1, 2, 3]][seed % 3]
        snapshot, num_pages = make_snapshot(rng, parents, lengths, int(rng.choice([1, 16])), orderly=seed % 2 == 0)
        case = fill(rng, snapshot, num_pages, prefill_or_decode(rng, lengths), (6, 2, 32), torch.float32)
        plan, chosen = random_plan(rng, case, split=split), random_variant(rng, variant, 6)
        errors.add(seed, Truth.of(case, chosen), *by_op(case, plan, chosen))

    check_forests(judge, 6 if variant == "causal" else 3)  # each shape of tree, with orderly pages and with others


def prefill_or_decode(rng: np.random.Generator, lengths: list[int]) -> Queries:
    """Most nodes, each either by its last token or whole, but of long ones only the last 260.

    With three query heads per KV head these are more than the 768 rows from which torch's kernel takes its largest
    blocks.
    """
    node = np.flatnonzero(rng.random(len(lengths)) < 0.8)
    node = node if len(node) else np.array([0])
    end = np.array(lengths)[node]
    begin = np.where(rng.random(len(node)) < 0.5, np.maximum(end - 260, 0), end - 1)
    return Queries(*(column.astype(np.int32) for column in (node, begin, end)))


@seeds(20)
def test_equal_runs_are_bitwise_equal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    plan = random_plan(rng, case)
    first = attend(case, plan)
    assert all(map(torch.equal, first, attend(case, plan)))


@seeds(20)
def test_the_order_of_items_does_not_change_a_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    plan = plan_of(case, SHARE_ALL)
    shuffled = replace(plan, tile_items=rng.permutation(plan.tile_items))
    assert all(map(torch.equal, attend(case, plan), attend(case, shuffled)))


@seeds(20)
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

    def judge(errors: Errors, seed: int) -> None:
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

    check_forests(judge, 12)
