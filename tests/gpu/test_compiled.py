"""A compiled model in a CUDA graph says what the model says in float64, wherever bf16 is sure of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit.attention.gpu.capacity import PlanCapacity, capacity_for
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.backends.cuda.device_planner import TREE_TENSORS, WORK_TENSORS, CudaPlanner
from prefixkit.engine.request import Request
from prefixkit.kv.kv_pool import KVPool
from prefixkit.models import ModelRunner, facts_of, kv_spec
from prefixkit.models.compile.packed_weights import packed_view
from prefixkit.models.steps.step_runner import planners_of
from prefixkit.models.weights.state import weights_places
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.tree import PrefixTree
from tests.gpu.test_model import model_of, prompts

PAGES, PAGE = 512, 16
TOKENS = 48


class StaticStep:
    """A decode step in tensors that stay, filled anew for each token."""

    def __init__(self, first: Step, capacity: PlanCapacity, planner: CudaPlanner) -> None:
        start, length, indptr, pages, first_slot = first.plan[WORK_TENSORS : WORK_TENSORS + TREE_TENSORS]
        space = [start.clone(), length.clone(), indptr.clone(), pages.new_zeros(PAGES), first_slot.clone()]
        names = ("tokens", "positions", "slots", "logit_rows")
        work = [torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in capacity.shapes()]
        planned = planner.step_plan(work, space, first.plans[0].tree)
        same = {name: getattr(first, name).clone() for name in names}
        self.step = replace(first, plans=(planned,), **same)
        self.names = names

    def load(self, step: Step) -> None:
        for name in self.names:
            getattr(self.step, name).copy_(getattr(step, name))
        for there, here in zip(self.step.plan, step.plan[: WORK_TENSORS + TREE_TENSORS], strict=True):
            there[: len(here)].copy_(here)


class Decode:
    """Six prompts with a shared head, prefilled by layers that are not compiled."""

    def __init__(self, model: torch.nn.Module) -> None:
        spec = kv_spec(model)
        self.shape = facts_of(model).layers[0].plan_kinds[0].shape
        self.pool = KVPool(spec, PAGES, PAGE)
        for layer in range(len(spec.layers)):
            for pages in self.pool.pages(layer):
                pages.fill_(torch.nan)
        self.tree = PrefixTree(PAGES, PAGE)
        (self.planner,) = planners_of(facts_of(model))
        assert isinstance(self.planner, CudaPlanner)
        self.prompts = prompts(6)
        self.sequences = [self.tree.insert(prompt) for prompt in self.prompts]
        self.eager = ModelRunner(model, self.pool)
        nodes, snapshot = self.tree.nodes(), self.tree.snapshot()
        runs = self.pending()
        ends = [int(end) - 1 for end in np.cumsum(runs.end - runs.begin)]
        tokens = np.concatenate([nodes[n].tokens[b:e] for n, b, e in zip(runs.node, runs.begin, runs.end, strict=True)])
        step = build_step(StepTree(snapshot, runs), tokens, np.array(ends), self.planner, "cuda")
        logits = self.eager(step)
        self.tree.mark_computed([nodes[n] for n in runs.node], runs.end.tolist())
        leaf = {nodes[n].id: row for row, n in enumerate(runs.node)}
        self.next = [int(logits[leaf[sequence.node.id]].argmax()) for sequence in self.sequences]

    def pending(self) -> Queries:
        snapshot = self.tree.snapshot()
        node = np.flatnonzero(snapshot.computed < snapshot.length).astype(np.int32)
        return Queries(node, snapshot.computed[node], snapshot.length[node])

    def step(self, planner: CudaPlanner) -> Step:
        """Append the next tokens; the step that runs them, in the order of the tree."""
        self.tree.extend_each(self.sequences, self.next)
        nodes, runs = self.tree.nodes(), self.pending()
        self.rows = {nodes[n].id: row for row, n in enumerate(runs.node)}
        tokens = np.array([nodes[n].tokens[-1] for n in runs.node])
        self.ran = [nodes[n] for n in runs.node], runs.end.tolist()
        return build_step(StepTree(self.tree.snapshot(), runs), tokens, np.arange(len(tokens)), planner, "cuda")

    def choose(self, logits: Tensor) -> None:
        best = logits.argmax(-1).tolist()
        self.next = [best[self.rows[sequence.node.id]] for sequence in self.sequences]
        self.tree.mark_computed(*self.ran)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tokens_of_a_captured_compiled_step_are_right_where_the_model_is_sure(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph, captured once and replayed for each token with other trees and plans.  As in ``test_model``, a token
    counts where its lead in float64 is beyond the unpatched bf16 model's own error."""
    monkeypatch.setenv("PREFIXKIT_BACKEND", "cuda")
    torch._dynamo.reset()
    model = model_of(head_dim, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    with prefixkit.patched(model):
        decode = Decode(model)
        snapshot, shape, planner = decode.tree.snapshot(), decode.shape, decode.planner
        leaves = np.array([index for index, node in enumerate(decode.tree.nodes()) if node.id in _leaves(decode)])
        ends = snapshot.length[leaves]
        queries = Queries(leaves.astype(np.int32), ends - 1, ends)
        capacity = capacity_for(StepTree(snapshot, queries), shape, planner.num_sms, planner.gpu)
        runner = ModelRunner(model, decode.pool, compiled=True)
        assert runner.compiled is not None
        first = decode.step(planner)
        static = StaticStep(first, capacity, planner)
        static.load(first)
        runner(static.step)  # compiles
        decode.choose(runner(static.step))
        graphs = runner.compiled.graphs
        graph = torch.cuda.CUDAGraph()
        static.load(decode.step(planner))
        with torch.cuda.graph(graph):
            logits = runner(static.step)
        for turn in range(TOKENS):
            if turn:
                static.load(decode.step(planner))
            with torch.inference_mode():
                logits.fill_(torch.nan)
            graph.replay()
            decode.choose(logits)
        assert runner.compiled.reason is None
        assert runner.compiled.graphs == graphs == 1, "four layers and every step share one graph"
    found = [
        (prompt, s.tokens()[len(prompt) :].tolist()) for s, prompt in zip(decode.sequences, decode.prompts, strict=True)
    ]
    assert _sure_and_right(found, model, exact) > TOKENS, "too few sure tokens to say anything"


def test_an_engine_with_compiled_layers_samples_what_the_model_is_sure_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows end at different steps, so that several buckets are captured; one graph of torch.compile serves them all,
    those of another engine with another pool, and the prompts, of which a single one has few lists in its plan."""
    monkeypatch.setenv("PREFIXKIT_BACKEND", "cuda")
    torch._dynamo.reset()
    model = model_of(128, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    lengths = (12, 24, 36, 48, 48, 48)
    requests = [
        Request(i, np.array(prompt), SamplingParams(n=3, temperature=0.0, max_new_tokens=length, stop_token_ids=()))
        for i, (prompt, length) in enumerate(zip(prompts(9), lengths, strict=True))
    ]
    with prefixkit.patched(model):
        engine = make_engine(model, requests, compiled=True)
        samples = engine.run(requests[:1])
        runner = engine.runner.model.__self__  # type: ignore[attr-defined]
        assert runner.compiled.graphs == 1
        samples += engine.run(requests)
        samples += make_engine(model, requests, page_size=32, compiled=True).run(requests)
    assert runner.compiled.reason is None
    assert runner.compiled.graphs == 1 < engine.report.captures
    found = [(requests[sample.prompt_index].tokens.tolist(), list(sample.tokens)) for sample in samples]
    assert _sure_and_right(found, model, exact) > TOKENS, "too few sure tokens to say anything"


def test_a_captured_step_is_the_compiled_one_bit_by_bit_over_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXKIT_BACKEND", "cuda")
    torch._dynamo.reset()
    with prefixkit.patched(model_of(128, torch.bfloat16)) as model:
        decode = Decode(model)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        runner = ModelRunner(model, decode.pool, compiled=True)
        step = decode.step(decode.planner)
        runner(step)
        where = weights_places(model)
        expected = runner(step).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = runner(step)
        with torch.inference_mode():
            logits.fill_(torch.nan)
        graph.replay()
        assert torch.equal(logits, expected)
        assert weights_places(model) == where
        for layer in model.model.layers:
            attention = layer.self_attn
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            assert packed_view([part.weight for part in parts]) is not None
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(storages.values()) == sum(parameter.nbytes for parameter in model.parameters()), "nothing is there twice"


@pytest.mark.parametrize("midst", [False, True], ids=["between runs", "in the midst of one"])
def test_graphs_of_other_engines_are_captured_again_once_compiled_layers_have_moved_weights(
    midst: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that was freed is filled with NaN before the older engine goes on."""
    monkeypatch.setenv("PREFIXKIT_BACKEND", "cuda")
    torch._dynamo.reset()
    model = model_of(128, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    params = SamplingParams(n=3, temperature=0.0, max_new_tokens=TOKENS, stop_token_ids=())
    requests = [Request(i, np.array(prompt), params) for i, prompt in enumerate(prompts(10))]
    with prefixkit.patched(model):
        engine = make_engine(model, requests)
        engine.run(requests)
        captures = engine.runner.graphs.captures
        freed: list[torch.Tensor] = []

        def move(_: int = 0) -> None:
            if not freed:
                make_engine(model, requests, compiled=True).run(requests)
                torch.cuda.synchronize()
                freed.extend(torch.full_like(parameter, torch.nan) for parameter in model.parameters())

        if midst:
            engine.options["on_step"] = move
        else:
            move()
        samples = engine.run(requests)
        assert engine.runner.graphs.captures == 2 * captures > 0
        engine.run(requests)
        assert engine.runner.graphs.captures == 2 * captures
    freed.clear()
    found = [(requests[sample.prompt_index].tokens.tolist(), list(sample.tokens)) for sample in samples]
    assert _sure_and_right(found, model, exact) > TOKENS, "too few sure tokens to say anything"


def _leaves(decode: Decode) -> set[int]:
    return {sequence.node.id for sequence in decode.sequences}


def _sure_and_right(found: list[tuple[list[int], list[int]]], model: torch.nn.Module, exact: torch.nn.Module) -> int:
    """How many tokens after their prompts have a lead beyond the bf16 model's error; all of these must be the best."""
    compared = 0
    for prompt, tokens in found:
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        with torch.no_grad():
            truth = exact(ids).logits[0, len(prompt) - 1 : -1]
            noise = (model(ids).logits[0, len(prompt) - 1 : -1].double() - truth).abs().amax(-1)
        top = truth.topk(2).values
        for at, token in enumerate(tokens):
            if top[at, 0] - top[at, 1] > 2.5 * noise[at]:
                assert token == int(truth[at].argmax()), at
                compared += 1
    return compared


def test_a_step_that_was_never_compiled_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXKIT_BACKEND", "cuda")
    torch._dynamo.reset()
    with prefixkit.patched(model_of(64, torch.bfloat16)) as model:
        decode = Decode(model)
        runner = ModelRunner(model, decode.pool, compiled=True)
        step = decode.step(decode.planner)
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="run such a step once before"):
            runner(step)
        torch.cuda.synchronize()
        assert runner(step).isfinite().all(), "the refusal left nothing behind"
        assert runner.compiled is not None and runner.compiled.reason is None
