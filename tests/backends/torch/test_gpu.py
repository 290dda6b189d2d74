"""The torch backend, which is made for GPUs but runs anywhere, against the dense reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import CAUSAL, Variant, alibi, attention_sinks, register, sliding_window, soft_cap
from prefixkit.backends.cuda.checks import BadPlan, check_packed_numbers
from prefixkit.backends.torch import gpu as torch_backend
from tests.attention.forests import FOLD_ALL, SHARE_ALL, gpu_plan_of, int_tensors, node_tensors, plan_of, random_case


def head_major(pages: torch.Tensor) -> torch.Tensor:
    return pages.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("packing", [False, True], ids=["plan", "packed"])
@pytest.mark.parametrize("seed", range(40))
def test_a_forest_under_a_variant_equals_the_reference(seed, packing):
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    heads = case.q.shape[1]
    variants: list[Variant] = [
        CAUSAL,
        sliding_window(int(rng.integers(1, 20))),
        soft_cap(5.0),
        alibi(rng.random(heads)),
        attention_sinks(rng.standard_normal(heads)),
    ]
    variant = variants[seed % len(variants)]
    cost = SHARE_ALL if seed % 2 else FOLD_ALL
    plan = gpu_plan_of(case, cost) if packing else plan_of(case, cost)
    work, nodes = int_tensors(*plan.arrays()), node_tensors(case)
    if packing:
        check_packed_numbers(len(case.q), case.k_pages.shape[:2], work, nodes)
    out, lse = torch_backend.tree_attention(
        case.q,
        head_major(case.k_pages),
        head_major(case.v_pages),
        case.positions,
        work,
        nodes,
        case.scale,
        register(variant),
    )
    exact = reference_attention(
        case.snapshot,
        case.row_node,
        case.positions.numpy(),
        case.q,
        case.k_pages,
        case.v_pages,
        case.scale,
        variant,
    )
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


def test_large_pieces_are_cut_to_bound_the_memory(monkeypatch):
    case = random_case(np.random.default_rng(5))
    monkeypatch.setattr(torch_backend, "TILE_ROWS", 4)
    monkeypatch.setattr(torch_backend, "BLOCK_ELEMENTS", 600)
    monkeypatch.setattr(torch_backend, "_kept", [])
    test_a_forest_under_a_variant_equals_the_reference(5, packing=False)
    (_, _, program), *_ = torch_backend._kept
    heads = case.q.shape[1]
    for block in program.blocks:
        assert block.row.shape[1] <= 4
        assert block.row.numel() * block.slot.shape[1] * heads <= 600 or block.slot.shape[1] == 1


def test_a_plan_that_names_missing_pages_is_refused():
    case = random_case(np.random.default_rng(1))
    nodes = node_tensors(case)
    nodes[3] += 1000
    plan = plan_of(case, SHARE_ALL)
    with pytest.raises(IndexError, match="nodes name slots"):
        torch_backend.tree_attention(
            case.q, case.k_pages, case.v_pages, case.positions, int_tensors(*plan.arrays()), nodes, 1.0, "causal"
        )


def change_pages(work, nodes):
    nodes[3][0] = 1000


def change_length(work, nodes):
    nodes[1][0] += 1000


def change_node(work, nodes):
    work[3][0, 0] = 99


def change_end(work, nodes):
    work[3][0, 1:] = torch.tensor([0, 5000], dtype=torch.int32)


def change_rows(work, nodes):
    work[0][2] += 1


def change_queries(work, nodes):
    (work[1] if len(work[1]) else work[2])[0, 1] = 5000


def change_segments(work, nodes):
    (work[1] if len(work[1]) else work[2])[0, 4] = 5000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_pages, "of another pool"),
        (change_length, "but its pages have room for"),
        (change_node, "of another tree"),
        (change_end, "of an older tree"),
        (change_rows, "and q has"),
        (change_queries, "items take queries"),
        (change_segments, "items take segments"),
    ],
)
def test_checked_mode_names_what_is_wrong_with_a_packed_plan(change, words):
    case = random_case(np.random.default_rng(3))
    nodes, work = node_tensors(case), int_tensors(*gpu_plan_of(case, SHARE_ALL).arrays())
    check_packed_numbers(len(case.q), case.k_pages.shape[:2], work, nodes)
    change(work, nodes)
    with pytest.raises(BadPlan, match=words):
        check_packed_numbers(len(case.q), case.k_pages.shape[:2], work, nodes)
