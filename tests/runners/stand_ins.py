"""Stand-ins for what graphs of steps need a GPU for: each replay of a graph does its work again."""

from __future__ import annotations

import torch

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.capacity import PlanCapacity
from prefixkit.attention.plan import make_plan
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.visible import ALL
from prefixkit.runners.graph import GraphRunner


def specified(planner, tree):
    """The plan of a graph's step, over the nodes of its static buffers alone: each row of the formats is one item."""
    return make_plan([decompose(tree, planner.shape, planner.cost)], tree.length, tree.queries.num_rows)


class Planner:
    """Plans as plain torch runs them, into tensors that stay."""

    def __init__(self, planner, nodes, capacity):
        self.nodes, self.capacity, self._planner = nodes, capacity, planner
        self.length = torch.zeros(nodes, dtype=torch.int32)
        self.work = [torch.zeros(shape, dtype=torch.int32) for shape in capacity.shapes()]
        self.plans = 0

    def upload(self, tree):
        self._next = specified(self._planner, tree)

    stage = upload

    def enqueue_copy(self):
        pass

    def holds(self, tree):
        return self.capacity.holds(Planning(self._planner).capacity_for(tree))

    def by_paths(self, tree):
        return False

    def plan(self):
        self.plans += 1
        for there, array in zip(self.work, self._next.arrays(), strict=True):
            there.fill_(-12345)
            there[: len(array)] = torch.from_numpy(array)
        return self.work


class Planning:
    """How steps in such graphs are planned; every row is one item."""

    visible, trims, partial_bytes = ALL, False, 8

    def variant(self, tree):
        return None

    def static_plans(self, tree, rows, nodes, device):
        return None

    def __init__(self, planner):
        self._planner, self.planners = planner, []

    def capacity_for(self, tree, *, now=False):
        return PlanCapacity(99, 9, 999, tree.queries.num_rows, 999)

    def planner(self, nodes, capacity, device, *, now=False):
        self.planners.append(Planner(self._planner, nodes, capacity))
        return self.planners[-1]

    def step_plan(self, work, nodes, tree, *, paths=False):
        own = torch.arange(len(nodes))  # which nobody else holds, as the plan of attention over latents has one
        return StepPlan([*work, *nodes, own], tree, lambda: specified(self._planner, tree))


class RoomyPlanning(Planning):
    """For trees of any size."""

    def capacity_for(self, tree, *, now=False):
        nodes, rows = tree.snapshot.num_nodes, tree.queries.num_rows
        return PlanCapacity(2 * nodes, 2, 2 * nodes * nodes, rows, nodes * rows)


def graph_runner(engine, model, capturing=None, planning=Planning, **options):
    """A runner that replays the steps of an engine's model by stand-ins; its own runner launches the others."""
    planning = planning(engine.runner.planners[0])
    capture = Capturing if capturing is None else lambda: capturing
    return GraphRunner(
        engine.runner, model, [planning], engine.store.tree.page_size, capture=capture, **{"fewest_steps": 1} | options
    )


class Capturing:
    """Captures work as graphs that do it again, or raises when it comes to the n-th.

    Args:
        error: What to raise.
        fails: When: the n-th capture, or those after the n-th that are for more rows than ``runs``.
        where: Says where weights lie; a graph must find them where they lay when it was captured.
    """

    bytes = 0

    def __init__(self, error=None, fails=1, always=False, where=lambda: 0):
        self.error, self.fails, self.always, self.where, self.count = error, fails, always, where, 0

    def __call__(self, work):
        self.count += 1
        late = self.count >= self.fails if self.always else self.count == self.fails
        if self.error is not None and late:
            raise self.error
        there, where = self.where(), self.where

        class Again:
            def replay(self):
                assert there == where(), "these weights are gone, that memory may be another's"
                work()

        return Again()
