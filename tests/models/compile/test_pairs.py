"""Pairs of products of one input, such as gate and up: one product where rows are few."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from prefixkit.models.compile.packed_weights import packed_view
from prefixkit.models.compile.packing import compile_packed, is_own_op
from prefixkit.ops.backend import BackendError
from tests.models.compile.products import WIDTH, Compiler, input_of
from tests.models.compile.weights import storage_bytes

PAIR = torch.ops.prefixkit.linear_pair


class Gated(nn.Module):
    """Two products of one input, of one shape unless told otherwise, that none of prefixkit's ops depends on."""

    def __init__(self, rows=(24, 24), bias=False):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, count, bias=bias) for count in rows)

    def forward(self, x):
        gate, up = (part(x) for part in self.parts)
        return torch.sigmoid(gate[..., :8]) * up[..., :8]


def pairs(compiler):
    return [len(graph.graph.find_nodes(op="call_function", target=PAIR)) for graph in compiler.graphs]


@pytest.fixture
def plain():
    """A compiler of graphs in which no op of prefixkit's reads anything."""
    made = Compiler()
    made.reads = is_own_op
    return made


@pytest.mark.parametrize("rows", [5, 200])
def test_two_other_products_of_one_shape_are_a_pair_of_the_same_parameters(rows, plain, rng):
    """One product for few rows, two for many."""
    module, x = Gated(), input_of(rng, rows)
    before, size = [part.weight for part in module.parts], storage_bytes(module)
    function = plain.of(module)
    with torch.inference_mode():
        expected = module(x)
    for _ in range(2):
        assert torch.allclose(function(x), expected, atol=1e-5)
    assert pairs(plain) == [1] and plain.products == [1]
    assert packed_view(before).shape == (48, WIDTH)
    assert all(part.weight is weight for part, weight in zip(module.parts, before, strict=True))
    assert storage_bytes(module) == size


def test_a_graph_of_pairs_serves_any_number_of_rows(plain, rng):
    module = Gated()
    torch._dynamo.reset()
    backend = functools.partial(compile_packed, compiler=plain)
    function = torch.inference_mode()(torch.compile(module, backend=backend, fullgraph=True, dynamic=True))
    for rows in (5, 128, 129, 300, 2):
        x = input_of(rng, rows)
        with torch.inference_mode():
            assert torch.allclose(function(x), module(x), atol=1e-5), rows
    assert pairs(plain) == [1]


def test_products_whose_result_processes_sum_are_pairs_too(plain, rng):
    module, weight, addresses = Gated(), torch.zeros(8, 8), torch.zeros(5, dtype=torch.int64)
    part_of_product, sum_parts = torch.ops.prefixkit.part_of_product, torch.ops.prefixkit.sum_parts
    with pytest.raises(BackendError, match="sum_parts"):  # which no CPU computes
        plain.of(lambda x: sum_parts(part_of_product(module(x), weight), addresses, x.dtype))(input_of(rng))
    assert pairs(plain) == [1]


@pytest.mark.parametrize("module", [Gated((24, 16)), Gated(bias=True), Gated((16, 16)).half()], ids=str)
def test_products_of_other_shapes_with_biases_or_under_autocast_are_no_pair(module, plain, rng):
    x = input_of(rng)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=module.parts[0].weight.dtype == torch.half):
        plain.of(module)(x)
    assert pairs(plain) == [0]
    assert packed_view([part.weight for part in module.parts]) is None


def test_where_gradients_are_recorded_there_are_no_pairs(plain, rng):
    module, x = Gated(), input_of(rng)
    torch._dynamo.reset()
    backend = functools.partial(compile_packed, compiler=plain)
    torch.compile(module, backend=backend, fullgraph=True)(x).sum().backward()
    assert pairs(plain) == [0]
    assert all(part.weight.grad is not None for part in module.parts)
