"""Attention over latents in plain torch: the planner of both parts, and the absorbed part, which reads latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prefixkit.attention.bsr import BSR
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.latent_parts import LatentPart, Part, PartRows
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.planner import Planner, StepArrays, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST, CostModel
from prefixkit.attention.variants import CAUSAL, lookup
from prefixkit.backends.torch.host_planner import BoundPlan, bind
from prefixkit.backends.torch.program.attention_calls import Call
from prefixkit.backends.torch.read_keys import Keys, check_layouts, read_latents
from prefixkit.backends.torch.run_program import bound_plan, run_reading
from prefixkit.ops.arguments import BadShape, check_absorbed, check_latents
from prefixkit.ops.partial_states import State, merge_rows


class LatentPlanner(Planner):
    """Plans one part: each BSR row of the part is one item, over the part's query rows."""

    def __init__(self, part: LatentPart, cost: CostModel) -> None:
        super().__init__(part.shape, cost)
        self.part = part
        self._rows: PartRows | None = None  # of the last plan

    def formats(self, tree: StepTree) -> tuple[BSR, ...]:
        return (self.part.rows_of(tree, self.cost).bsr,)

    def specify(self, tree: StepTree) -> Plan:
        rows = self.part.rows_of(tree, self.cost)
        return make_plan((rows.bsr,), tree.length, len(rows.index))

    def _make(self, tree: StepTree, device: torch.device, step_arrays: StepArrays) -> tuple[StepPlan, list[Tensor]]:
        rows = self._rows = self.part.rows_of(tree, self.cost)
        plan = make_plan((rows.bsr,), tree.length, len(rows.index))
        *tensors, index = upload([*step_arrays(), rows.index], device)
        return self._bound(plan, tree, rows, None if len(index) == tree.queries.num_rows else index), tensors

    def _renew(
        self, last: StepPlan, tree: StepTree, device: torch.device, step_arrays: StepArrays
    ) -> tuple[StepPlan, list[Tensor]]:
        assert self._rows is not None, "made with the last plan"
        return self._bound(last.plan, tree, self._rows, last.rows), upload(step_arrays(), device)

    def _bound(self, plan: Plan, tree: StepTree, rows: PartRows, index: Tensor | None) -> StepPlan:
        bound = bind(plan, rows.tree(tree), self.part.shape)
        return replace(bound, tree=tree, rows=index, adds=self.part.part is Part.ABSORBED)


def planner_for(part: LatentPart, device: torch.device, dtype: torch.dtype, layers: int) -> LatentPlanner:
    """The planner of a part, for plain torch on a CPU or a GPU."""
    return LatentPlanner(part, CPU_COST if device.type == "cpu" else H200.sharing)


@torch.no_grad()
def absorbed_state(
    q: Tensor,
    cached: Sequence[Tensor],
    q_positions: Tensor,
    plan: Sequence[Tensor] | BoundPlan,
    scale: float,
    variant: str,
) -> State:
    """Attention of absorbed queries over latents; see ``PartBackend.attend``."""
    op, modifier = "absorbed_attention", lookup(variant)
    check_absorbed(q, cached, q_positions)
    if modifier.score_mods or modifier.has_sinks:
        raise BadShape(f"{op}: variant {variant!r} changes scores or has sinks; such layers expand all latents")
    bound, (num_pages, page_size, _, latent) = bound_plan(op, plan, q), cached[0].shape
    pool = num_pages, page_size, 1, sum(pages.shape[3] for pages in cached)
    # Scores are in memory: so K and V are read in place, and V is a part of K.
    program = bound.program(pool, q.shape[1], cached[0].dtype, q.device, variant, latent, scored=True)
    if program.on_cpu:
        check_layouts(op, cached)

    def read(call: Call) -> tuple[Keys, Tensor]:
        return read_latents(call, cached, on_cpu=program.on_cpu)

    return run_reading(program, q, read, scale, modifier)


def latent_attention(
    q: Tensor,
    latent_pages: Tensor,
    rotary_pages: Tensor,
    q_positions: Tensor,
    plan: Sequence[Tensor] | BoundPlan,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``latent_attention``."""
    check_latents(q, latent_pages, rotary_pages, q_positions)
    state = absorbed_state(q, (latent_pages, rotary_pages), q_positions, plan, scale, CAUSAL.name)
    return state.out.to(q.dtype), state.lse


def merge_states(
    first: Tensor,
    first_lse: Tensor,
    first_place: Tensor,
    second: Tensor,
    second_lse: Tensor,
    second_place: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``merge_states``."""
    parts = []
    for out, lse, place in ((first, first_lse, first_place), (second, second_lse, second_place)):
        there = place >= 0
        parts.append((State(out[place[there].long()].float(), lse[place[there].long()]), there.nonzero()[:, 0]))
    return merge_rows(parts, len(first_place)).out.to(dtype or first.dtype)
