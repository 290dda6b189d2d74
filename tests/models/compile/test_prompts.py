"""Steps with prompts in them run through the graphs of decode steps, whatever lists their plans have."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from prefixkit.attention.gpu.capacity import capacity_for
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import decode_tree
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.backends.cuda.plan_launch import GraphPlanner, plan_on_gpu
from prefixkit.models import ModelRunner
from prefixkit.models.compile.layers import compile_layer
from prefixkit.runners.batch import Batch, Outputs
from prefixkit.runners.decode_tree import DecodeTree, TreeCapacity
from prefixkit.runners.eager import EagerRunner
from tests.models.compile.decode import traced
from tests.models.driver import TreeDriver


class KernelPlans:
    """Plans as our kernels take them, made on the host or by the op that GPUs have; plain torch finds its own behind.

    Graphs are traced with the lists of the former; attention reads the latter.
    """

    def __init__(self, planner, by_op):
        launch = (lambda *given: plan_on_gpu(planner.shape, H200, 4, *given)) if by_op else None
        self.theirs, self.ours = planner, CudaPlanner(planner.shape, H200, 4, launch)
        self.sizes = set()

    def plan(self, tree, device, step_arrays=tuple):
        found, _ = self.theirs.plan(tree, device)
        made, tensors = self.ours.plan(tree, device, step_arrays)
        self.sizes.add(tuple(len(tensor) for tensor in made.tensors))
        both = StepPlan([*made.tensors, *found.tensors], tree, found.specify, owners=found)
        return both, tensors


@pytest.fixture
def driving(tiny, rng):
    """A function that makes a driver whose plans are those of kernels, and compiled layers of its model."""

    def make(family="llama", by_op=False, compiler=traced, **sizes):
        driver = TreeDriver(tiny(family, **sizes), num_pages=256)
        driver.planners = tuple(KernelPlans(planner, by_op) for planner in driver.planners)
        return driver, ModelRunner(driver.model, driver.pool, True, compiler)

    return make


FIRST = itertools.cycle(range(3, 128))


def prompts(rng, *lengths):
    """No two begin alike, or they would share rows."""
    return [[next(FIRST), *rng.integers(3, 128, length - 1).tolist()] for length in lengths]


def run(driver, runner):
    """A step of all that is uncomputed, by compiled layers and by others."""
    step = driver.step()
    ours = runner(step)
    assert torch.allclose(ours, driver.runner(step), atol=2e-5)
    driver.tree.mark_computed([node for node, _, _ in driver.runs], [end for _, _, end in driver.runs])
    return step


@pytest.mark.parametrize(
    ("family", "graphs", "by_op"), [("llama", 1, True), ("gemma2", 2, False)], ids=["by the op", "planned on the host"]
)
def test_prompts_and_decode_steps_share_graphs_whatever_lists_are_empty(family, graphs, by_op, dynamo, driving, rng):
    """A single prompt of one page or of many, several that share a head, decode steps of many rows and of two."""
    driver, runner = driving(family, by_op)
    driver.tree.insert(prompts(rng, 3)[0])
    rows = [run(driver, runner).num_rows]
    assert runner.compiled.graphs == graphs
    head = prompts(rng, 20)[0]
    sequences = [driver.tree.insert([*head, *rest]) for rest in prompts(rng, 6, 3, 100)]
    rows.append(run(driver, runner).num_rows)
    while len(sequences) > 1:
        driver.tree.extend_each(sequences, rng.integers(3, 128, len(sequences)).tolist())
        rows.append(run(driver, runner).num_rows)
        sequences.pop()
    driver.tree.insert(prompts(rng, 200)[0])
    rows.append(run(driver, runner).num_rows)
    assert rows == [3, 129, 3, 2, 200]
    lists = np.array(sorted(driver.planners[0].sizes))
    assert len(lists) == len(rows) and lists.min() == 2, "the shortest lists are padded"
    assert runner.compiled.graphs == graphs
    assert runner.compiled.reason is None


@pytest.mark.parametrize("first", ["decode", "prompts"])
def test_inductor_has_one_graph_for_both_whichever_comes_first(first, dynamo, driving, rng):
    driver, runner = driving(compiler=compile_layer)
    sequences = [driver.tree.insert(tokens) for tokens in prompts(rng, 40, 7)]
    if first == "decode":
        driver.run()
        driver.tree.extend_each(sequences, [5, 6])
    rows = [run(driver, runner).num_rows]
    driver.tree.extend_each(sequences, [7, 8])
    rows.append(run(driver, runner).num_rows)
    driver.tree.insert(prompts(rng, 500)[0])
    rows.append(run(driver, runner).num_rows)
    assert rows == [2 if first == "decode" else 47, 2, 500]
    assert runner.compiled.graphs == 1
    assert runner.compiled.reason is None


def test_decode_steps_in_the_static_buffers_of_a_graph_have_no_graph_of_their_own(dynamo, driving, rng):
    """Which are larger than what they hold."""
    driver, runner = driving(by_op=True)
    sequences = [driver.tree.insert(tokens) for tokens in prompts(rng, 40, 7, 9)]
    run(driver, runner)
    tokens = torch.tensor([5, 6, 7])
    driver.tree.extend_each(sequences, tokens.tolist())
    snapshot = driver.tree.snapshot()
    tree = decode_tree(snapshot, np.array([sequence.node.index for sequence in sequences], np.int32))
    shape, rows = driver.planners[0].ours.shape, len(tokens)
    buffers = DecodeTree(TreeCapacity(8, 9, 50), driver.pool.page_size, "cpu")
    planner = GraphPlanner(shape, 9, capacity_for(tree, shape, 4)._replace(rows=8), "cpu", H200, 4)
    buffers.upload(tree)
    buffers.sampled[:rows] = tokens
    planner.upload(tree)
    planner.plan()
    buffers.advance(rows)
    found, _ = driver.planners[0].theirs.plan(tree, torch.device("cpu"))
    planned = StepPlan([*planner.work, *buffers.nodes, *found.tensors], tree, found.specify, owners=found)
    step = buffers.step(tree, torch.arange(rows), (planned,), (1,))
    assert torch.allclose(runner(step), driver.runner(driver.step()), atol=2e-5)
    assert runner.compiled.graphs == 1
    assert runner.compiled.reason is None


# -- a runner that may choose ------------------------------------------------------------------------------------


@pytest.fixture
def choosing(driving):
    """A function that makes a driver, its compiled layers, and an eager runner over both kinds."""

    def make():
        driver, compiled = driving()
        plain = driver.runner
        return driver, compiled, EagerRunner(plain, driver.planners, hidden=plain.hidden, compiled=compiled)

    return make


def launch(driver, runner, outputs, compiling=False):
    """A step of all that is uncomputed; ``outputs`` makes those of so many rows."""
    step = driver.step()
    assert step is not None
    tokens = step.tokens.numpy()
    runner.launch(Batch(step.plans[0].tree, tokens, outputs(len(tokens))), compiling)
    driver.tree.mark_computed([node for node, _, _ in driver.runs], [end for _, _, end in driver.runs])


def test_what_is_wanted_of_prompts_is_the_same_through_compiled_layers(dynamo, choosing, rng):
    """Logits of some rows, log-probabilities of targets, hidden states: by the one graph that prompts were compiled
    with."""
    driver, compiled, runner = choosing()
    plain = EagerRunner(driver.runner, driver.planners, hidden=driver.runner.hidden)
    kinds = {
        "logits": lambda rows: Outputs(logits=np.array([2, rows - 1])),
        "target_logprobs": lambda rows: Outputs(target_rows=np.array([0, 3, 3]), targets=np.array([5, 6, 7])),
        "hidden": lambda rows: Outputs(hidden=np.array([1, rows - 2])),
    }
    for name, outputs in kinds.items():
        own = prompts(rng, 30, 9)
        found = []
        for one in (runner, plain):
            driver.tree = type(driver.tree)(256, 4)
            for tokens in own:
                driver.tree.insert(tokens)
            launch(driver, one, outputs, compiling=True)
            found.append(getattr(one.read(), name))
        assert torch.allclose(*found, atol=2e-5), name
        assert compiled.compiled.graphs == 1, name


class Noted:
    """Compiled layers that note how many rows the steps have that they run."""

    def __init__(self, compiled):
        self.serves, self._compiled, self.rows = compiled.serves, compiled, []

    def __call__(self, step):
        self.rows.append(step.num_rows)
        return self._compiled(step)


def test_layers_are_compiled_where_a_step_may_wait_for_it_and_serve_all_others_afterwards(dynamo, choosing, rng):
    """But steps of one row, which run as they are."""
    driver, compiled, runner = choosing()
    noted = runner.compiled = Noted(compiled)
    graphs = []
    for length, compiling in ((12, False), (13, True), (14, False), (1, True)):
        driver.tree.insert(prompts(rng, length)[0])
        launch(driver, runner, lambda rows: Outputs(logits=np.array([rows - 1])), compiling)
        graphs.append(compiled.compiled.graphs)
    assert graphs == [0, 1, 1, 1]
    assert noted.rows == [13, 14]
