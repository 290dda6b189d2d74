"""Both parts of attention over latents, merged, against attention over the expanded K and V in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import BSR
from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.queries import StepTree, decode_tree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import CPU_COST, CostModel, HeadShape
from prefixkit.attention.variants import CAUSAL, Variant, attention_sinks, register, sliding_window, soft_cap
from prefixkit.backends.torch.latent_attention import LatentPlanner, absorbed_state
from prefixkit.backends.torch.run_program import expanded_state
from prefixkit.ops.arguments import BadDtype, BadShape
from prefixkit.ops.partial_states import State, merge_rows
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, make_snapshot, random_case

HEADS, MADE, V = 4, 12, 10
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Forced(LatentPart):
    """A part whose rows are chosen by chance, the same for both parts."""

    absorbed: float = 0.5

    def absorbs(self, bsr: BSR, tree: StepTree) -> NDArray[np.bool_]:
        chosen: NDArray[np.bool_] = np.random.default_rng(len(bsr.kind)).random(len(bsr.kind)) < self.absorbed
        return chosen


class Model:
    """Latents, rotary keys and what makes K and V of them; queries of K's size."""

    def __init__(self, rng: np.random.Generator, latent: int, rotary: int, dtype: torch.dtype) -> None:
        case = random_case(rng, dtype, (1, 1, latent), max(rotary, 1))
        self.cached = case.k_pages, case.v_pages[..., :rotary]
        sizes = (len(case.q), HEADS, MADE + rotary), (HEADS, MADE + V, latent)
        q, weight = (torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).to(dtype) for size in sizes)
        self.case, self.weight = replace(case, q=q, scale=(MADE + rotary) ** -0.5), weight * latent**-0.5
        self.whole = HeadShape(HEADS, HEADS, MADE + rotary, q.element_size(), V)
        self.sizes = latent, rotary

    def expand(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (latent @ self.weight.transpose(1, 2)).split([MADE, V], dim=3)
        return torch.cat((k, rotary.expand(-1, HEADS, -1, -1)), dim=3), v

    def exact(self, variant: Variant) -> State:
        """In float64, of K and V that are not rounded."""
        weight, self.weight = self.weight, self.weight.double()
        pages, size = self.cached[0].shape[:2]
        rows = (x.double().reshape(1, pages * size, 1, -1).transpose(1, 2) for x in self.cached)
        k, v = (x[0].transpose(0, 1).reshape(pages, size, HEADS, -1).contiguous() for x in self.expand(*rows))
        self.weight, case = weight, self.case
        where = case.snapshot, case.row_node, case.positions.numpy()
        return reference_attention(*where, case.q.double(), k, v, case.scale, variant, None)


def by_parts(model: Model, cost: CostModel, absorbed: float, variant: Variant = CAUSAL) -> State:
    """Each row by the part that chance gives it to."""
    case, found = model.case, []
    tree, key = StepTree(case.snapshot, case.queries), register(variant)
    for part in Part:
        plan, _ = LatentPlanner(Forced(part, model.whole, *model.sizes, absorbed), cost).plan(tree, CPU)
        rows = torch.arange(len(case.q)) if plan.rows is None else plan.rows
        if not len(rows):
            continue
        q, positions = case.q[rows], case.positions[rows]
        if part is Part.EXPANDED:
            found.append(
                (expanded_state(q, model.cached, model.expand, positions, plan.tensors, case.scale, key), plan.rows)
            )
            continue
        made, rest = q.float().split([MADE, model.sizes[1]], dim=2)
        weight = model.weight.float()
        q = torch.cat((torch.einsum("qhm,hml->qhl", made, weight[:, :MADE]), rest), dim=2)
        out, lse = absorbed_state(q, model.cached, positions, plan.tensors, case.scale, key)
        found.append((State(torch.einsum("qhl,hvl->qhv", out, weight[:, MADE:]), lse), plan.rows))
    return merge_rows(found, len(case.q))


@pytest.mark.drawn(8)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("absorbed", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rotary", [8, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_merge_into_the_whole(dtype: torch.dtype, rotary: int, absorbed: float, seed: int) -> None:
    """In bfloat16 the expanded part rounds K and V, as a model does; the absorbed part rounds nothing."""
    rng = np.random.default_rng([seed, rotary, int(10 * absorbed)])
    model = Model(rng, 16, rotary, dtype)
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)]
    close = 2e-5 if dtype == torch.float32 or absorbed == 1.0 else 3e-2
    for found, want in zip(by_parts(model, cost, absorbed), model.exact(CAUSAL), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=close, atol=close)


@pytest.mark.parametrize("seed", range(5))
def test_both_parts_hide_what_a_variant_hides(seed: int) -> None:
    model, variant = Model(np.random.default_rng(seed), 16, 8, torch.float32), sliding_window(5)
    for found, want in zip(by_parts(model, CPU_COST, 0.5, variant), model.exact(variant), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-5)


def test_plans_are_renewed_for_leaves_that_have_grown() -> None:
    """The same tree with longer leaves keeps its plan, which reads what is there now."""
    snapshot, _ = make_snapshot(np.random.default_rng(0), [-1, 0, 0], [30, 5, 7], 16, orderly=True)
    tree = decode_tree(snapshot, np.array([1, 2], dtype=np.int32))
    planner = LatentPlanner(Forced(Part.ABSORBED, HeadShape(4, 4, 20, 4, V), 16, 8, 1.0), SHARE_ALL)
    plan, arrays = planner.plan(tree, CPU, lambda: [np.arange(3)])
    again, more = planner.plan(tree.grown(2), CPU, lambda: [np.arange(4)])
    assert planner.plans_made == 1
    assert [len(of) for of in (*arrays, *more)] == [3, 4]
    assert plan.kv_tokens(tree) == (30 + 5 + 7, 0), "what it would read unshared, another plan counts"
    assert again.kv_tokens(tree.grown(2)) == (30 + 7 + 9, 0)


def test_what_does_not_fit_is_refused() -> None:
    model = Model(np.random.default_rng(0), 16, 8, torch.float32)
    case = model.case
    planner = LatentPlanner(Forced(Part.ABSORBED, model.whole, 16, 8, 1.0), CPU_COST)
    plan, _ = planner.plan(StepTree(case.snapshot, case.queries), CPU)
    q = torch.zeros(len(case.q), HEADS, 24)
    for variant in (soft_cap(2.0), attention_sinks()):
        with pytest.raises(BadShape, match="changes scores or has sinks"):
            absorbed_state(q, model.cached, case.positions, plan.tensors, 1.0, register(variant))
    with pytest.raises(BadShape, match=r"q must have shape \[rows, heads, 24\]"):
        absorbed_state(q[..., 1:], model.cached, case.positions, plan.tensors, 1.0, "causal")
    with pytest.raises(BadDtype, match="q must be"):
        absorbed_state(q.half(), model.cached, case.positions, plan.tensors, 1.0, "causal")
    with pytest.raises(BadShape, match="cached must have one head"):
        two = [pages.expand(-1, -1, 2, -1) for pages in model.cached]
        absorbed_state(q, two, case.positions, plan.tensors, 1.0, "causal")
