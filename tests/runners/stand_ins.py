"""Stand-ins for what graphs of steps need a GPU for: each replay of a graph does its work again."""

from __future__ import annotations

import torch

from prefixkit.attention.capacity import PlanCapacity
from prefixkit.attention.planner import StepPlan
from prefixkit.runners import graph as graphs
from prefixkit.runners import graph_arrays


class Planner:
    """Plans as plain torch runs them, into tensors that stay."""

    def __init__(self, planner, nodes, capacity):
        self.nodes, self.capacity, self._planner = nodes, capacity, planner
        self.length = torch.zeros(nodes, dtype=torch.int32)
        self.work = [torch.zeros(shape, dtype=torch.int32) for shape in capacity.shapes()]
        self.plans = 0

    def load(self, tree):
        planned, _ = self._planner.plan(tree, torch.device("cpu"))
        self._next = planned.plan

    def plan(self):
        self.plans += 1
        for there, array in zip(self.work, self._next.arrays(), strict=True):
            there.fill_(-12345)
            there[: len(array)] = torch.from_numpy(array)
        return self.work


class Planning:
    """How steps in such graphs are planned; every row is one item."""

    def __init__(self, planner):
        self._planner = planner

    def capacity_for(self, tree):
        return PlanCapacity(99, 9, 999, tree.queries.num_rows, 999)

    def planner(self, nodes, capacity, device):
        return Planner(self._planner, nodes, capacity)

    def step_plan(self, work, nodes, tree):
        return StepPlan([*work, *nodes], tree, lambda: self._planner.specify(tree))


class Ring(graph_arrays.Ring):
    @staticmethod
    def of(rows):
        class Ready:
            def record(self):
                pass

            def synchronize(self):
                pass

        tokens, logprobs = torch.zeros((16, rows), dtype=torch.int64), torch.zeros((16, rows))
        return Ring(tokens, logprobs, [Ready() for _ in range(16)])


class Graph:
    def __init__(self, arrays, step, model):
        self.arrays, self.step, self.model = arrays, step, model

    def replay(self):
        self.arrays.tree.advance(self.step.num_rows)
        self.arrays.sampler.sample(self.model(self.step))


class Decoder(graphs.GraphDecoder):
    graph_bytes = 0

    def _capture(self, arrays, step):
        return Graph(arrays, step, self.model)


class Capturing:
    """What captures: graphs that do their work again, or an error when it comes to the n-th."""

    def __init__(self, error=None, fails=1):
        self.error, self.fails, self.count = error, fails, 0

    def __call__(self, work, pool):
        self.count += 1
        if self.error is not None and self.count == self.fails:
            raise self.error

        class Again:
            def replay(self):
                work()

        return Again()


def with_capture(made, capture):
    """An engine whose decoder captures by that."""
    old = made.decoder

    class Decoder(graphs.GraphDecoder):
        graph_bytes = 0

    made.decoder = Decoder(old.model, old.planning, old.page_size, "cpu", capture=capture)
    return made.decoder
