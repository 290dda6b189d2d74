"""Modules with products of one input, a compiler that keeps its graphs, and the bound on their results."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from prefixkit.models.compile.packing import compile_packed

WIDTH = 32


class Heads(nn.Module):
    """Three products of one input, of different widths, and one of another."""

    def __init__(self, bias=False, rows=(24, 8, 16)):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, count, bias=bias) for count in rows)
        self.last = nn.Linear(sum(rows), WIDTH, bias=bias)

    def forward(self, x):
        return self.last(torch.cat([part(x) for part in self.parts], -1))

    def weights(self):
        return [part.weight for part in self.parts]


def is_output(node):
    """Every product that counts is packed, not only those which prefixkit's ops read."""
    return node.op == "output"


class Compiler:
    """Runs graphs as they are, and keeps them.

    Attributes:
        reads: Which nodes depend on the products that are packed.
    """

    def __init__(self):
        self.graphs, self.reads = [], is_output

    def __call__(self, graph, inputs):
        assert len(inputs) == len(graph.graph.find_nodes(op="placeholder"))
        self.graphs.append(graph)
        return graph.forward

    def of(self, function):
        """``function`` with packed products."""
        torch._dynamo.reset()
        backend = functools.partial(compile_packed, compiler=self, reads=self.reads)
        made = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        return torch.inference_mode()(lambda *args: made(*args))

    @property
    def products(self):
        """How many products each graph computes."""
        return [sum("linear" in node.name for node in graph.graph.nodes) for graph in self.graphs]


def input_of(rng, rows=5):
    return torch.from_numpy(rng.standard_normal((1, rows, WIDTH))).float()


def unlike(module, x, found):
    """Where ``found`` is further from the exact result of two products in a row than float32 allows, in any order."""
    exact = copy.deepcopy(module).double()
    inner = torch.cat([part(x.double()) for part in exact.parts], -1)
    spread = torch.cat([reach(part, x.double().abs()) for part in exact.parts], -1) * gamma(WIDTH)
    outer = reach(exact.last, inner.abs() + spread) * gamma(inner.shape[-1]) + spread @ exact.last.weight.abs().T
    return (found.double() - exact.last(inner)).abs() > outer


def reach(linear, x):
    return x @ linear.weight.abs().T + (0 if linear.bias is None else linear.bias.abs())


def gamma(terms):
    """The bound on a sum of so many products and a bias, relative to the sum of magnitudes."""
    unit = 2.0**-24
    return (terms + 1) * unit / (1 - (terms + 1) * unit)
