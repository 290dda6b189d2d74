"""``latent_attention``, ``merge_states`` and keys whose rotary part lies apart, in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.backends.torch.host_planner import bind
from prefixkit.ops import library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.ops.arguments import BadDtype, BadShape
from prefixkit.testing.forests import Case, plan_of, random_case

OPS = torch.ops.prefixkit


def case_of(seed: int, v_dim: int | None = None, heads: tuple[int, int, int] = (6, 3, 48)) -> Case:
    return random_case(np.random.default_rng(seed), heads=heads, v_dim=v_dim)


@pytest.mark.parametrize("seed", range(8))
def test_latents_are_keys_whose_first_elements_are_the_values(seed: int) -> None:
    case = case_of(seed, heads=(6, 1, 48))
    latent, rotary = case.k_pages[..., :32], case.k_pages[..., 32:]
    shape = HeadShape(6, 1, 48, 4, 32)
    step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries), shape)
    out, lse = OPS.latent_attention(case.q, latent, rotary, case.positions, step.tensors, case.scale)
    whole = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries), shape)
    given = case.q, case.k_pages, latent, case.positions, whole.tensors, case.scale, "causal"
    expected, expected_lse = OPS.tree_attention(*given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_rotary_part_that_lies_apart_is_that_of_every_key(seed: int) -> None:
    case = case_of(seed, 24)
    rotary = case.k_pages[:, :, :1, 32:].contiguous()
    whole = torch.cat((case.k_pages[..., :32], rotary.expand(-1, -1, 3, -1)), dim=3)
    found = []
    for k_pages, more in ((whole, ()), (case.k_pages[..., :32], (None, rotary))):
        step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries))
        given = case.q, k_pages, case.v_pages, case.positions, step.tensors, case.scale, "causal"
        found.append(OPS.tree_attention(*given, *more))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def states(rng: np.random.Generator, rows: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Two states that have some rows of a step each, and the step's float64 outputs and weights."""
    outs, lses = torch.randn(2, rows, 3, 8, dtype=torch.float64), 3 * torch.randn(2, rows, 3, dtype=torch.float64)
    given, weight = list[Tensor](), torch.zeros(2, rows, 3, dtype=torch.float64)
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        has = torch.from_numpy(rng.random(rows) < 0.6)
        place = torch.full((rows,), -1, dtype=torch.int32)
        place[has] = torch.arange(int(has.sum()), dtype=torch.int32)
        weight[number, has] = lse[has].exp()
        given += [out[has].float(), lse[has].float(), place]
    return given, outs, weight


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_states_merge_by_their_weights_and_a_row_that_none_has_is_zero(rows: int) -> None:
    given, outs, weight = states(np.random.default_rng(rows), rows)
    total = weight.sum(0)
    expected = (outs * (weight / total.where(total > 0, 1.0))[..., None]).sum(0)
    torch.testing.assert_close(OPS.merge_states(*given).double(), expected, rtol=1e-5, atol=1e-6)


def test_opcheck() -> None:
    torch.library.opcheck(OPS.merge_states.default, tuple(states(np.random.default_rng(1), 5)[0]))
    case = case_of(1, heads=(6, 1, 48))
    step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries), HeadShape(6, 1, 48, 4, 32))
    pages = case.k_pages[..., :32].contiguous(), case.k_pages[..., 32:].contiguous()
    torch.library.opcheck(OPS.latent_attention.default, (case.q, *pages, case.positions, step.tensors, 0.1))


def test_wrong_arguments_are_named() -> None:
    given, _, _ = states(np.random.default_rng(2), 6)
    with pytest.raises(BadShape, match=r"merge_states: second_place must have shape \[6\], contiguous"):
        OPS.merge_states(*given[:5], given[5][1:])
    with pytest.raises(BadDtype, match=r"merge_states: first_lse must be torch\.float32"):
        OPS.merge_states(given[0], given[1].double(), *given[2:])
    case = case_of(1, heads=(6, 1, 48))
    with pytest.raises(BadShape, match=r"latent_attention: q must have shape \[T, heads, 48\]"):
        OPS.latent_attention(
            case.q[..., 1:], case.k_pages[..., :32], case.k_pages[..., 32:], case.positions, [case.positions], 1.0
        )


def test_a_part_has_the_heads_that_it_attends_with() -> None:
    whole = HeadShape(8, 8, 48, 2, 24)
    assert LatentPart(Part.EXPANDED, whole, 64, 16).shape == whole
    assert LatentPart(Part.ABSORBED, whole, 64, 16).shape == HeadShape(8, 1, 80, 2, 64)
