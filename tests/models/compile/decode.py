"""Decoding by compiled layers, and the compilers that tests take for them."""

from __future__ import annotations

from torch._dynamo.backends.debugging import aot_eager

from prefixkit.models import ModelRunner
from prefixkit.models.compile.layers import compile_layer


def traced(graph, inputs):
    """Graphs are traced but not compiled: faster, and their results are those of eager layers bit by bit."""
    return compile_layer(graph, inputs, as_traced)


def functional(graph, inputs):
    """The same in half the speed: what is written in place is written out of place, as Inductor sees it."""
    return compile_layer(graph, inputs, aot_eager)


def as_traced(graph, inputs):
    """What runs a graph as it is."""
    return graph.forward


class Decode:
    """Four sequences with a shared head, prefilled; each :meth:`step` gives every one a token."""

    def __init__(self, drive, model, rng):
        self.driver, self.rng = drive(model), rng
        head = rng.integers(3, 128, 20).tolist()
        self.sequences = [self.driver.tree.insert([*head, *rng.integers(3, 128, n).tolist()]) for n in (6, 3, 9, 9)]
        self.driver.run()

    def runner(self, compiled=True, compiler=traced):
        return ModelRunner(self.driver.model, self.driver.pool, compiled, compiler)

    def step(self):
        tokens = self.rng.integers(3, 128, len(self.sequences)).tolist()
        self.driver.tree.extend_each(self.sequences, tokens)
        return self.driver.step()

    def done(self):
        runs = self.driver.runs
        self.driver.tree.mark_computed([node for node, _, _ in runs], [end for _, _, end in runs])
