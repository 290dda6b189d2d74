"""K and V of different head sizes, and K and V that are expanded from what the pool holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.variants import CAUSAL, Variant, alibi, attention_sinks, register, sliding_window
from prefixkit.backends.cuda.kernels import kernel_for
from prefixkit.backends.torch.host_planner import bind
from prefixkit.backends.torch.run_program import expanded_attention
from prefixkit.ops.arguments import BadShape
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
    random_case,
    random_split_plan,
    run_on,
)

SIZES = {"wider K": (48, 32), "wider V": (24, 40), "one element": (16, 1)}
VARIANTS = {
    "causal": CAUSAL,
    "window": sliding_window(5),
    "sinks": attention_sinks(),
    "alibi": alibi(torch.linspace(0.1, 1.0, 6)),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def exact(case: Case, variant: Variant) -> State:
    where = case.snapshot, case.row_node, case.positions.numpy()
    return reference_attention(*where, case.q, case.k_pages, case.v_pages, case.scale, variant, case.sinks_for(variant))


def any_plan(rng: np.random.Generator, case: Case) -> Plan:
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)]
    return random_split_plan(rng, case, cost) if rng.random() < 0.3 else plan_of(case, cost)


def assert_equal(found: tuple[Tensor, Tensor], state: State, dtype: torch.dtype) -> None:
    for ours, theirs in zip(found, state, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# K and V in the pool


@pytest.mark.drawn(8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_heads_of_v_may_have_another_size(size: str, variant: str, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng([seed, dtype.itemsize])
    k_dim, v_dim = SIZES[size]
    case, chosen = random_case(rng, dtype, (6, 2, k_dim), v_dim), VARIANTS[variant]
    plan = any_plan(rng, case)
    out, lse = attend(case, plan, register(chosen))
    assert out.shape == (len(case.q), 6, v_dim) and out.dtype == dtype
    want = exact(case, chosen)
    assert_equal((out, lse), want, dtype)
    assert_equal(run_on(case, gpu_program_of(case, plan, chosen), chosen), want, dtype)


def test_a_long_prompt_with_heads_of_two_sizes() -> None:
    rng = np.random.default_rng(0)
    snapshot, num_pages = make_snapshot(rng, [-1, 0, 0], [600, 200, 3], 16)
    queries = Queries(*(np.array(column, dtype=np.int32) for column in ([0, 1, 2], [300, 0, 2], [600, 200, 3])))
    case = fill(rng, snapshot, num_pages, queries, (4, 2, 48), torch.float32, v_dim=32)
    assert_equal(attend(case, plan_of(case, CPU_COST)), exact(case, CAUSAL), torch.float32)


def test_bytes_of_kv_and_of_partial_states_count_each_size() -> None:
    alike, unlike = HeadShape(8, 2, 128, 2), HeadShape(8, 2, 192, 2, 128)
    assert (alike.value_dim, unlike.value_dim) == (128, 128)
    assert (alike.kv_bytes, unlike.kv_bytes) == (2 * 2 * 128 * 2, 2 * (192 + 128) * 2)
    assert alike.partial_bytes == unlike.partial_bytes == 4 * 8 * 129


@pytest.mark.parametrize(("sizes", "is_served"), [((192, 128), True), ((128, 96), False), ((64, 128), False)])
def test_a_kernel_for_hopper_takes_some_heads_of_two_sizes(sizes: tuple[int, int], is_served: bool) -> None:
    assert (kernel_for("sm_90a", sizes[0], 4, sizes[1]) is not None) == is_served
    assert kernel_for("sm_80", sizes[0], 4, sizes[1]) is None


def test_the_fake_says_the_size_of_v() -> None:
    case = random_case(np.random.default_rng(1), heads=(6, 2, 48), v_dim=32)
    step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries))
    arguments = case.q, case.k_pages, case.v_pages, case.positions, step.tensors, case.scale, "causal"
    torch.library.opcheck(torch.ops.prefixkit.tree_attention.default, arguments)


# Expanded


class Latents:
    """A latent and a rotary key of each token, from which K and V of all heads are computed, as in MLA."""

    def __init__(self, case: Case, kv_heads: int, sizes: tuple[int, int], rng: np.random.Generator) -> None:
        self.case, self.kv_heads, (self.k_dim, self.v_dim) = case, kv_heads, sizes
        self.cached = case.k_pages[:, :, :1], case.v_pages[:, :, :1]
        self.rotary = self.cached[1].shape[3]
        columns = kv_heads * (self.k_dim - self.rotary + self.v_dim)
        latent = self.cached[0].shape[3]
        weight = rng.standard_normal((columns, latent), dtype=np.float32) * latent**-0.5
        self.weight = torch.from_numpy(weight).to(case.q.dtype)
        self.tokens = 0

    def expand(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        self.tokens += latent.shape[2]
        made = torch.nn.functional.linear(latent[0, 0], self.weight).view(1, -1, self.kv_heads, self.v_dim + self.rest)
        k, v = made.transpose(1, 2).split([self.rest, self.v_dim], dim=3)
        return torch.cat((k, rotary.expand(-1, self.kv_heads, -1, -1)), dim=3), v

    @property
    def rest(self) -> int:
        return self.k_dim - self.rotary

    def expanded(self) -> Case:
        """The case with K and V in the pool."""
        pages, size = self.cached[0].shape[:2]
        k, v = self.expand(*(x.reshape(1, pages * size, 1, -1).transpose(1, 2) for x in self.cached))
        k, v = (x[0].transpose(0, 1).reshape(pages, size, self.kv_heads, -1).contiguous() for x in (k, v))
        self.tokens = 0
        return replace(self.case, k_pages=k, v_pages=v)


def latents(rng: np.random.Generator, case: Case, heads: tuple[int, int], sizes: tuple[int, int]) -> Latents:
    q = torch.from_numpy(rng.standard_normal((len(case.q), heads[0], sizes[0]), dtype=np.float32)).to(case.q.dtype)
    sinks = torch.from_numpy(rng.standard_normal(heads[0])).to(q.dtype)
    return Latents(replace(case, q=q, sinks=sinks, scale=sizes[0] ** -0.5), heads[1], sizes, rng)


def by_expansion(found: Latents, plan: Plan, variant: Variant = CAUSAL) -> tuple[Tensor, Tensor]:
    case = found.case
    shape = HeadShape(case.q.shape[1], found.kv_heads, found.k_dim, case.q.itemsize, found.v_dim)
    step = bind(plan, StepTree(case.snapshot, case.queries), shape)
    key, sinks = register(variant), case.sinks_for(variant)
    return expanded_attention(case.q, found.cached, found.expand, case.positions, step.tensors, case.scale, key, sinks)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kv_heads", "sizes"), [(6, (40, 32)), (2, (24, 40)), (6, (32, 32))])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_expanded_kv_is_attended_as_if_it_lay_in_the_pool(
    kv_heads: int, sizes: tuple[int, int], variant: str, dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng([seed, dtype.itemsize])
    case = random_case(rng, dtype, (1, 1, 64), 16)
    found, chosen = latents(rng, case, (6, kv_heads), sizes), VARIANTS[variant]
    assert_equal(by_expansion(found, any_plan(rng, case), chosen), exact(found.expanded(), chosen), dtype)


def test_a_shared_node_is_expanded_once_and_a_prompt_too() -> None:
    rng = np.random.default_rng(0)
    lengths = [500] + [20] * 10
    snapshot, num_pages = make_snapshot(rng, [-1] + [0] * 10, lengths, 16, orderly=True)
    leaf = np.arange(1, 11, dtype=np.int32)
    for queries in (Queries(leaf, leaf * 0 + 19, leaf * 0 + 20), Queries(leaf[:0].copy(), leaf[:0], leaf[:0])):
        if not len(queries.node):
            queries = Queries(*(np.array([x], dtype=np.int32) for x in (0, 0, 500)))
        case = fill(rng, snapshot, num_pages, queries, (1, 1, 64), torch.float32, v_dim=16)
        found = latents(rng, case, (6, 6), (40, 32))
        by_expansion(found, plan_of(found.case, SHARE_ALL))
        assert found.tokens == (500 + 10 * 20 if queries.num_rows == 10 else 500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k[..., 1:], v), r"expand must return k \[1, 6, \d+, 40\]"),
        (lambda k, v: (k, v[:, :3]), r"expand must return v \[1, 6, \d+, 32\]"),
    ],
)
def test_what_expand_returns_is_checked(change, message: str) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    case = random_case(rng, torch.float32, (1, 1, 64), 16)
    found = latents(rng, case, (6, 6), (40, 32))
    expand = found.expand
    found.expand = lambda *cached: change(*expand(*cached))  # type: ignore[method-assign]
    with pytest.raises(BadShape, match=message):
        by_expansion(found, plan_of(case, CPU_COST))


def test_a_plan_of_other_heads_is_refused() -> None:
    rng = np.random.default_rng(0)
    case = random_case(rng, torch.float32, (1, 1, 64), 16)
    found = latents(rng, case, (6, 6), (40, 32))
    for shape, said in ((None, "no heads"), (HeadShape(6, 6, 41, 4, 32), "6 heads of 41")):
        step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries), shape)
        with pytest.raises(BadShape, match=f"the plan was made for {said}"):
            expanded_attention(found.case.q, found.cached, found.expand, case.positions, step.tensors, 1.0, "causal")
    with pytest.raises(BadShape, match="cached must hold the pages of one tensor at least"):
        expanded_attention(found.case.q, (), found.expand, case.positions, step.tensors, 1.0, "causal")
