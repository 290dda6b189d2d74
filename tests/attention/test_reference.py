"""The reference against something even simpler: one sequence at a time, torch's float64 attention with a mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention.reference import reference_attention, visible_tokens
from prefixkit.attention.variants import alibi, attention_sinks, sliding_window, soft_cap
from prefixkit.testing.forests import Case, random_case
from tests.seeds import seeds


def sequence(case: Case, node: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Slots of the sequence that ends at a node's end, walked page by page, with its K and V."""
    snapshot, slots = case.snapshot, []
    path = [node]
    while snapshot.parent[path[0]] >= 0:
        path.insert(0, int(snapshot.parent[path[0]]))
    for at in path:
        pages = snapshot.pages[snapshot.page_indptr[at] : snapshot.page_indptr[at + 1]].tolist()
        own = [page * snapshot.page_size + offset for page in pages for offset in range(snapshot.page_size)]
        first = int(snapshot.first_slot[at])
        slots += own[first : first + int(snapshot.length[at])]
    return slots, *(pages.flatten(0, 1)[slots].double() for pages in (case.k_pages, case.v_pages))


@seeds(10)
def test_causal_equals_one_sequence_at_a_time(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    positions = case.positions.numpy()
    state = reference_attention(case.snapshot, case.row_node, positions, case.q, case.k_pages, case.v_pages, case.scale)
    assert state.out.dtype == state.lse.dtype == torch.float64
    for row, (node, position) in enumerate(zip(case.row_node.tolist(), positions.tolist(), strict=True)):
        _, k, v = sequence(case, node)
        k, v = (x[: position + 1].transpose(0, 1)[None] for x in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            case.q[row][None, :, None].double(), k, v, scale=case.scale, enable_gqa=True
        )
        torch.testing.assert_close(state.out[row], expected[0, :, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_query_sees_is_its_sequence_up_to_itself(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    for node, position in zip(case.row_node.tolist(), case.positions.tolist(), strict=True):
        slots, positions = visible_tokens(case.snapshot, node, position)
        assert slots.tolist() == sequence(case, node)[0][: position + 1]
        assert positions.tolist() == list(range(position + 1))


@pytest.mark.parametrize("name", ["window", "cap", "alibi", "sinks"])
def test_variants_in_five_lines_each(name: str) -> None:
    rng = np.random.default_rng(3)
    case = random_case(rng, heads=(4, 2, 32))
    numbers = torch.rand(4)
    variant = {
        "window": sliding_window(5),
        "cap": soft_cap(1.5),
        "alibi": alibi(numbers),
        "sinks": attention_sinks(),
    }[name]
    positions = case.positions.numpy()
    state = reference_attention(
        case.snapshot, case.row_node, positions, case.q, case.k_pages, case.v_pages, case.scale, variant, numbers
    )
    for row, (node, position) in enumerate(zip(case.row_node.tolist(), positions.tolist(), strict=True)):
        _, k, v = sequence(case, node)
        for head in range(4):
            score = case.scale * k[: position + 1, head // 2] @ case.q[row, head].double()
            distance = position - torch.arange(position + 1)
            if name == "window":
                score[distance >= 5] = -torch.inf
            if name == "cap":
                score = 1.5 * torch.tanh(score / 1.5)
            if name == "alibi":
                score = score - numbers[head].double() * distance
            weight = torch.exp(score)
            total = weight.sum() + (torch.exp(numbers[head].double()) if name == "sinks" else 0)
            expected = weight @ v[: position + 1, head // 2] / total
            torch.testing.assert_close(
                state.out[row, head], expected, rtol=1e-6, atol=1e-6 if name == "alibi" else 1e-12
            )
            torch.testing.assert_close(state.lse[row, head], torch.log(total), rtol=1e-6, atol=1e-6)


def test_no_queries_no_rows() -> None:
    case = random_case(np.random.default_rng(0))
    state = reference_attention(
        case.snapshot, np.zeros(0, int), np.zeros(0, int), case.q[:0], case.k_pages, case.v_pages, case.scale
    )
    assert state.out.shape == (0, *case.q.shape[1:])
    assert state.lse.shape == (0, case.q.shape[1])
