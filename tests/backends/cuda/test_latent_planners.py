"""Plans of both parts of attention over latents for kernels, run as they are cut by plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.gpu.capacity import PlanTooLarge
from prefixkit.attention.gpu.gpu_cost import H200, H200_LATENT, tiles_only
from prefixkit.attention.gpu.latent_cost import LatentCost
from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.device_planner import PLAN_TENSORS
from prefixkit.backends.cuda.latents.expansion import PAGE, ExpandedTokens, Expansion, expand, expanded_tokens
from prefixkit.backends.cuda.latents.latent_planners import LatentPlanner
from prefixkit.backends.cuda.latents.static_expanded import StaticExpanded, StaticExpansion
from prefixkit.backends.torch.host_planner import bind
from prefixkit.backends.torch.latent_attention import absorbed_state
from prefixkit.backends.torch.run_program import tree_attention
from prefixkit.models.latents.latent_maps import LatentMaps
from prefixkit.ops.partial_states import State, merge_rows
from prefixkit.testing.forests import Case, fill, make_snapshot

CPU, HEADS, LATENT, ROTARY, OWN, V_DIM = torch.device("cpu"), 4, 32, 16, 24, 20
WHOLE = HeadShape(HEADS, HEADS, OWN + ROTARY, 4, V_DIM)
ABSORBED = HeadShape(HEADS, 2, LATENT + ROTARY, 4, LATENT)  # two groups of heads
EAGER_TO_EXPAND = LatentCost(absorbed=1e-3, part=0.0)


def planner(part: Part, most_kept: int = 10**6) -> LatentPlanner:
    shape, gpu = (WHOLE, tiles_only(H200)) if part is Part.EXPANDED else (ABSORBED, H200_LATENT)
    return LatentPlanner(LatentPart(part, WHOLE, LATENT, ROTARY), shape, gpu, 5, most_kept, EAGER_TO_EXPAND)


def tree_of(rng: np.random.Generator, rows: int, *, prompt: bool = False) -> tuple[Case, StepTree]:
    """Rows below two shared nodes, and maybe a prompt besides; latents are the case's keys."""
    lengths = [int(rng.integers(60, 150)), int(rng.integers(1, 90)), *rng.integers(1, 40, rows).tolist(), 50]
    parents = [-1, 0, *[1 if n % 3 else 0 for n in range(rows)], -1]
    order = [0, 1, *[2 + n for n in range(rows) if n % 3], *[2 + n for n in range(rows) if not n % 3], rows + 2]
    snapshot, pages = make_snapshot(rng, [parents[n] for n in order], [lengths[n] for n in order], 16)
    last = np.arange(2, rows + 2 + prompt, dtype=np.int32)
    count = np.array([*[1] * rows, *[50] * prompt], np.int32)
    snapshot = replace(snapshot, content=np.arange(snapshot.num_nodes))
    queries = Queries(last, snapshot.length[last] - count, snapshot.length[last])
    snapshot.computed[:] = snapshot.length
    snapshot.computed[last] = queries.begin
    case = fill(rng, snapshot, pages, queries, (HEADS, 1, LATENT + ROTARY), torch.float32)
    return case, StepTree(snapshot, queries)


def maps_of(rng: np.random.Generator) -> LatentMaps:
    key, value = (torch.from_numpy(rng.standard_normal((HEADS, dim, LATENT), dtype=np.float32)) for dim in (OWN, V_DIM))
    return LatentMaps(key, value, slice(0, OWN), slice(OWN, OWN + ROTARY))


def expected(case: Case, q: Tensor, maps: LatentMaps) -> Tensor:
    """Attention over K and V of all tokens."""
    c, r = case.k_pages[..., :LATENT], case.k_pages[..., LATENT:].expand(-1, -1, HEADS, -1)
    k, v = (torch.einsum("pshc,ndc->psnd", c, weight) for weight in (maps.key, maps.value))
    k, positions = torch.cat((k, r), 3), case.positions.numpy()
    return reference_attention(case.snapshot, case.row_node, positions, q, k, v, case.scale)[0]


def by_parts(case: Case, tree: StepTree, q: Tensor, maps: LatentMaps) -> tuple[Tensor, dict[Part, int]]:
    """Both parts as they are planned for kernels, merged; how many query rows each has."""
    pages, found, counts = (case.k_pages[..., :LATENT], case.k_pages[..., LATENT:]), [], {}
    for part in Part:
        of_part = planner(part)
        rows = of_part.rows_of(tree, of_part.chosen(tree))
        counts[part], index = len(rows.index), torch.from_numpy(rows.index)
        if not len(rows.index):
            continue
        plan, at = of_part.plan_of(tree, rows), case.positions[index]
        if part is Part.ABSORBED:
            bound = bind(plan, rows.tree(tree), HeadShape(HEADS, 1, LATENT + ROTARY, 4, LATENT))
            state = absorbed_state(maps.absorb(q[index]), pages, at, bound.tensors, case.scale, "causal")
            found.append((State(maps.values(state.out), state.lse), index))
            continue
        tokens = expanded_tokens(tree, rows.bsr)
        k, v, rotary = (of.contiguous() for of in expand(pages, maps, torch.from_numpy(tokens.slots)))
        start, length, indptr, numbers, first = (of[: max(1, tree.snapshot.num_nodes)] for of in tokens.nodes)
        snapshot = replace(
            rows.tree(tree).snapshot,
            page_size=PAGE,
            length=length,
            computed=length,
            page_indptr=tokens.nodes[2][: tree.snapshot.num_nodes + 1],
            pages=numbers if len(numbers) > indptr[-1] else tokens.nodes[3],
            first_slot=first,
        )
        bound = bind(plan, StepTree(snapshot, rows.tree(tree).queries))
        out = tree_attention(q[index], k, v, at, bound.tensors, case.scale, "causal", None, rotary)
        found.append((State(*out), index))
    return merge_rows(found, len(q)).out, counts


@pytest.mark.drawn(2)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("rows", [3, 40, 200])
def test_both_parts_together_are_attention_over_all_keys(rows: int, prompt: bool) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        case, tree = tree_of(rng, rows, prompt=prompt)
        q, maps = (
            torch.from_numpy(rng.standard_normal((len(case.q), HEADS, OWN + ROTARY), dtype=np.float32)),
            maps_of(rng),
        )
        out, counts = by_parts(case, tree, q, maps)
        torch.testing.assert_close(out.double(), expected(case, q, maps).double(), rtol=1e-3, atol=1e-4)
        assert counts[Part.EXPANDED] >= rows, "the shared nodes are expanded"


def test_what_is_kept_is_known_by_what_nodes_hold_not_by_where_they_lie() -> None:
    _, tree = tree_of(np.random.default_rng(0), 40)
    part = planner(Part.EXPANDED)
    tokens = expanded_tokens(tree, part.rows_of(tree, part.chosen(tree)).bsr)
    moved = StepTree(replace(tree.snapshot, pages=tree.snapshot.pages[::-1].copy()), tree.queries)
    assert expanded_tokens(moved, part.rows_of(moved, part.chosen(moved)).bsr).key == tokens.key
    content = tree.snapshot.content.copy()
    content[0] += 1000
    other = StepTree(replace(tree.snapshot, content=content), tree.queries)
    assert expanded_tokens(other, part.rows_of(other, part.chosen(other)).bsr).key != tokens.key


def test_static_buffers_say_which_rows_have_a_part_and_refuse_what_does_not_fit() -> None:
    _, tree = tree_of(np.random.default_rng(1), 40)
    static = StaticExpanded(planner(Part.EXPANDED), tree, 64, tree.snapshot.num_nodes, CPU)
    assert static.holds(tree)
    static.upload(tree)
    plan = static.plan_of(tree)
    assert plan.rows is None and plan.tensors[PLAN_TENSORS].tolist() == [*range(40), *[-1] * 24]
    _, larger = tree_of(np.random.default_rng(1), 200)
    assert not static.holds(larger)
    with pytest.raises(PlanTooLarge, match="capture graphs anew"):
        static.stage(larger)


def test_the_absorbed_part_of_a_graph_reads_no_node_that_is_expanded() -> None:
    _, tree = tree_of(np.random.default_rng(2), 40)
    absorbed, made = planner(Part.ABSORBED), planner(Part.EXPANDED)
    unseen = absorbed.unseen(tree)
    assert np.array_equal(unseen > 0, made.chosen(tree).nodes) and unseen.sum() > 0
    assert made.variant(tree) == "kept" and absorbed.variant(tree) == ""
    assert planner(Part.EXPANDED, most_kept=0).variant(tree) in ("made", "")


class Scarce:
    """Maps of a layer, for whose K and V there is memory so many times."""

    made, copied, key_bias, value_bias = slice(0, OWN), slice(OWN, OWN + ROTARY), None, None

    def __init__(self, maps: LatentMaps, times: int) -> None:
        self._maps, self.left, self.value = maps, times, maps.value

    @property
    def key(self) -> Tensor:
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("no memory")
        return self._maps.key


def a_layer(tokens: int) -> tuple[Tensor, Tensor]:
    latents, rotary = (torch.randn(-(-tokens // 16), 16, 1, dim) for dim in (LATENT, ROTARY))
    return latents, rotary


def test_k_and_v_are_made_once_for_each_layer_while_they_are_kept() -> None:
    maps, slots = maps_of(np.random.default_rng(0)), torch.arange(2 * PAGE)
    expansion = Expansion(LatentPart(Part.EXPANDED, WHOLE, LATENT, ROTARY), slots, (b"tokens",))
    layers = [a_layer(2 * PAGE) for _ in range(2)]
    first = [expansion.of(layer, maps) for layer in layers]
    assert all(one is other for one, other in zip(first, [expansion.of(layer, maps) for layer in layers], strict=True))
    for made, layer in zip(first, layers, strict=True):
        for one, other in zip(made, expand(layer, maps, slots), strict=True):
            assert torch.equal(one, other)


def test_without_memory_to_keep_them_k_and_v_are_made_at_each_call(caplog: pytest.LogCaptureFixture) -> None:
    plain, slots = maps_of(np.random.default_rng(1)), torch.arange(2 * PAGE)
    maps = Scarce(plain, 1)  # for one layer
    expansion = Expansion(LatentPart(Part.EXPANDED, WHOLE, LATENT, ROTARY), slots, (b"tokens",))
    layers = [a_layer(2 * PAGE) for _ in range(3)]
    for _ in range(2):
        for layer in layers:
            for one, other in zip(expansion.of(layer, maps), expand(layer, plain, slots), strict=True):
                assert torch.equal(one, other)
    assert not expansion.keeps and caplog.text.count("no memory to keep K and V") == 1
    expansion.set_keeps(True)
    assert not expansion.keeps


def test_static_buffers_are_filled_when_other_tokens_come() -> None:
    case, tree = tree_of(np.random.default_rng(3), 40)
    static = StaticExpanded(planner(Part.EXPANDED), tree, 64, tree.snapshot.num_nodes, CPU)
    static.plan_of(tree)
    layer, maps = (case.k_pages[..., :LATENT], case.k_pages[..., LATENT:]), maps_of(np.random.default_rng(4))
    with torch.inference_mode():
        made = static.expansion.of(layer, maps)  # before a graph is captured: of no tokens
    static.upload(tree)
    part = planner(Part.EXPANDED)
    tokens = expanded_tokens(tree, part.rows_of(tree, part.chosen(tree)).bsr)
    wanted = expand(layer, maps, torch.from_numpy(tokens.slots))
    length, indptr = tokens.nodes[1], tokens.nodes[2]
    for node in np.flatnonzero(length):
        for one, other in zip(made, wanted, strict=True):
            rows = slice(int(indptr[node]), int(indptr[node + 1]))
            own = [of[rows].flatten(0, 1)[: length[node]] for of in (one, other)]
            torch.testing.assert_close(*own)
    assert static.expansion.of(layer, maps) is made


def test_k_and_v_are_made_again_after_steps_that_did_not_keep_them() -> None:
    """Buffers then hold what was kept before these steps, also if the tokens have not changed since."""
    part = LatentPart(Part.EXPANDED, WHOLE, LATENT, ROTARY)
    layer, maps = a_layer(4 * PAGE), maps_of(np.random.default_rng(5))
    expansion = StaticExpansion(part, 2, CPU)
    expansion.set_keeps(True)
    with torch.inference_mode():
        made = expansion.of(layer, maps)
    first, second = (
        ExpandedTokens([np.zeros(2, np.int32), np.full(2, PAGE, np.int32)], np.arange(at, at + PAGE), (key,))
        for at, key in ((0, b"first"), (2 * PAGE, b"second"))
    )
    expansion.change(first, keeps=True)
    expansion.change(second, keeps=False)
    expansion.change(second, keeps=True)
    for one, wanted in zip(made, expand(layer, maps, torch.from_numpy(second.slots)), strict=True):
        torch.testing.assert_close(one[:1], wanted)


def test_k_and_v_that_memory_did_not_suffice_to_make_are_made_when_they_are_asked_for_again() -> None:
    part = LatentPart(Part.EXPANDED, WHOLE, LATENT, ROTARY)
    plain = maps_of(np.random.default_rng(6))
    layer, maps = a_layer(2 * PAGE), Scarce(plain, 1)
    expansion = StaticExpansion(part, 2, CPU)
    expansion.set_keeps(True)
    with torch.inference_mode():
        made = expansion.of(layer, maps)
    tokens = ExpandedTokens([np.zeros(2, np.int32), np.full(2, PAGE, np.int32)], np.arange(PAGE, 2 * PAGE), (b"key",))
    maps.left = 0
    with pytest.raises(torch.OutOfMemoryError):
        expansion.change(tokens, keeps=True)
    maps.left = 1
    expansion.change(tokens, keeps=True)
    for one, wanted in zip(made, expand(layer, plain, torch.from_numpy(tokens.slots)), strict=True):
        torch.testing.assert_close(one[:1], wanted)
