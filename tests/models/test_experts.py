"""Experts in prefixkit's steps run by the op, waiting for nothing; plain forwards and unpatched models do not."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed.tensor_parallel import TensorParallelLayer

from prefixkit import Session
from prefixkit.backends.cuda import probe
from prefixkit.models import patch, unpatch
from prefixkit.models.attention_class import original_class
from prefixkit.models.experts import VARIABLE, expert_modules, experts_by_ops, most_rows
from prefixkit.ops.backend import choose_again
from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.runners.waiting import RefuseWaiting
from tests.fake_gpu import pretend
from tests.models.compile.decode import Decode, traced

FAMILIES = {
    "gpt_oss": {},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture
def by_ops(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ops")


class Products(TorchDispatchMode):
    """How often the op is called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.prefixkit.expert_product.default
        return function(*args, **(kwargs or {}))


def products_of(work):
    with Products() as seen:
        work()
    return seen.calls


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_run_experts_by_the_op_and_plain_forwards_do_not(family, by_ops, tiny, drive, dense_logits, rng):
    model = tiny(family, **FAMILIES[family])
    run = drive(model)
    tokens = rng.integers(3, 128, 12).tolist()
    run.tree.insert(tokens)
    assert products_of(run.run) == 2 * len(expert_modules(model.modules())) == 4
    assert products_of(lambda: dense_logits(run.model, tokens)) == 0
    assert torch.equal(dense_logits(run.model, tokens), dense_logits(model, tokens))


def test_experts_and_attention_that_tensor_parallelism_wraps_are_patched_below_that(by_ops, tiny, drive, rng):
    """transformers gives a module that holds parameters itself, as experts and sinks, a forward of its own."""
    model = tiny("qwen3_moe")
    want = dict(model.named_modules())
    layers = [part for layer in model.model.layers for part in (layer.mlp.experts, layer.self_attn)]
    for module in layers:
        TensorParallelLayer().install_forward(module, None)
    forwards, plain = [module.forward for module in layers], model(torch.arange(9)[None]).logits
    run = drive(model, copied=False)
    run.tree.insert(range(9))
    assert products_of(run.run) == 4
    torch.testing.assert_close(run.logits_of([*range(9)]), plain[0], rtol=1e-4, atol=1e-4)
    unpatch(model)
    assert [module.forward for module in layers] == forwards and dict(model.named_modules()) == want
    assert torch.equal(model(torch.arange(9)[None]).logits, plain)


def test_on_a_cpu_experts_stay_as_they_are(tiny, drive, rng):
    run = drive(tiny("gpt_oss"))
    run.tree.insert(rng.integers(3, 128, 12))
    assert products_of(run.run) == 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_are_those_of_the_models_own_experts(family, tiny, rng, monkeypatch):
    model = patch(tiny(family, **FAMILIES[family]))
    prompts = rng.integers(3, 128, (3, 9)).tolist()
    found = {}
    for experts in ("model", "ops"):
        monkeypatch.setenv(VARIABLE, experts)
        with Session(model, kv_budget="16MiB") as session:
            found[experts] = session.generate(prompts, n=2, seed=1, max_new_tokens=12, stop_token_ids=())
    assert [sample.tokens for sample in found["ops"]] == [sample.tokens for sample in found["model"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_close_to_float64_as_the_models_own_experts(family, dtype, tiny, rng):
    """One layer's experts: the router of a whole model may fall to another expert by rounding."""
    module = expert_modules(patch(tiny(family, **FAMILIES[family])).modules())[0].to(dtype)
    exact = copy.deepcopy(module).double()
    width = module.down_proj.shape[1 + module.is_transposed]
    hidden = torch.randn(64, width).to(dtype)
    index = torch.rand(64, module.num_experts).argsort(-1)[:, :2].contiguous()
    weights = torch.rand(64, 2).softmax(-1).to(dtype)
    with torch.inference_mode():
        own = module(hidden, index, weights)
        with experts_by_ops():
            ours = module(hidden, index, weights)
        exact.config._experts_implementation = "eager"
        truth = exact(hidden.double(), index, weights.double())
    assert (ours - truth).norm() <= 1.5 * (own - truth).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_waits_for_nothing(family, tiny):
    """The meta device stands for a GPU: transformers' loop asks it which experts have rows."""
    module = expert_modules(patch(tiny(family, **FAMILIES[family])).modules())[0].to(device="meta")
    module.config._experts_implementation = "eager"
    width = module.down_proj.shape[1 + module.is_transposed]
    call = torch.empty(8, width, device="meta"), torch.empty(8, 2, dtype=torch.int64, device="meta")
    weights = torch.empty(8, 2, device="meta")
    with torch.inference_mode(), RefuseWaiting():
        with experts_by_ops():
            assert module(*call, weights).shape == (8, width)
        with pytest.raises(CannotCapture):
            module(*call, weights)


@pytest.mark.parametrize("chosen", ["batched_mm", "sonicmoe"])
def test_what_the_user_has_chosen_runs(chosen, tiny):
    module = expert_modules(patch(tiny("qwen3_moe")).modules())[0]
    module.config._experts_implementation = chosen
    hidden = torch.randn(8, module.down_proj.shape[1])
    call = hidden, torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)
    with torch.no_grad(), experts_by_ops():
        if chosen == "batched_mm":
            assert products_of(lambda: module(*call)) == 0
        else:  # a kernel that is not installed: asked for nonetheless
            with pytest.raises(Exception, match=r"(?i)sonicmoe|kernels|cuda"):
                module(*call)


def test_a_compiled_layer_holds_both_products_in_one_graph(by_ops, dynamo, tiny, drive, rng):
    held = []

    def compiler(graph, inputs):
        held.append(len(graph.graph.find_nodes(op="call_function", target=torch.ops.prefixkit.expert_product)))
        return traced(graph, inputs)

    decode = Decode(drive, tiny("mixtral"), rng)
    runner = decode.runner(compiler=compiler)
    for _ in range(2):
        step = decode.step()
        assert torch.equal(runner(step), decode.driver.runner(step))
        decode.done()
    assert runner.compiled.reason is None and held == [2], "layers of a kind share it"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("first", "graphs"), [(4, [1, 1, 2, 2, 2, 2]), (9, [1, 2, 2, 2, 2, 2])])
def test_steps_of_few_rows_and_of_many_have_a_graph_each(first, graphs, dynamo, tiny, drive, rng, monkeypatch):
    """Of 2 of 4 experts for each token, 6 rows have 3 pairs an expert."""
    monkeypatch.setenv(VARIABLE, "3")
    held, made = [], []

    def compiler(graph, inputs):
        held.append(len(graph.graph.find_nodes(op="call_function", target=torch.ops.prefixkit.expert_product)))
        return traced(graph, inputs)

    decode = Decode(drive, tiny("mixtral"), rng)
    runner = decode.runner(compiler=compiler)
    for rows in (first, 6, 7, 24, 2, 5):
        if rows > len(decode.sequences):
            decode.sequences += decode.driver.tree.fork(decode.sequences[0], rows - len(decode.sequences))
        while len(decode.sequences) > rows:
            decode.driver.tree.release(decode.sequences.pop())
        step, before = decode.step(), len(held)
        served = runner.serves(step, compiling=False)
        assert torch.equal(runner(step), decode.driver.runner(step))
        assert served is (len(held) == before), "it is said before a step whether it will be compiled"
        assert products_of(lambda step=step: decode.driver.runner(step)) == (4 if rows <= 6 else 0)
        decode.done()
        made.append(runner.compiled.graphs)
    assert runner.compiled.reason is None
    assert made == graphs and held == ([2, 0] if first == 4 else [0, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_how_many_rows_the_op_serves(family, tiny, monkeypatch):
    """All these give each token 2 of 4 experts."""
    model, device = tiny(family, **FAMILIES[family]), torch.device("cpu")
    for value, expected in (("ops", math.inf), ("model", 0), ("", 0), ("24", 48)):
        monkeypatch.setenv(VARIABLE, value)
        assert most_rows(model.modules(), device, torch.bfloat16) == expected
        assert most_rows(tiny("llama").modules(), device, torch.bfloat16) == 0, "no experts"


@pytest.mark.parametrize("chosen", ["grouped_mm", "eager"])
def test_on_a_gpu_the_op_serves_all_rows_where_the_host_would_wait(chosen, tiny, monkeypatch):
    """It does for transformers' loop everywhere, for its grouped product but in bfloat16 on some GPUs."""
    pretend(monkeypatch, (9, 0), (8, 0))
    monkeypatch.setattr(probe, "driver_cuda", lambda: (99, 0))
    model = tiny("mixtral")
    model.config._experts_implementation = chosen
    choose_again()
    try:
        rows = {
            (gpu, dtype): most_rows(model.modules(), torch.device("cuda", gpu), dtype)
            for gpu in range(2)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        }
    finally:
        choose_again()
    bounded = rows.pop((0, torch.bfloat16))
    assert bounded == (math.inf if chosen == "eager" else 48), "24 pairs an expert"
    assert {dtype: most for (_, dtype), most in rows.items() if most != math.inf} == {torch.float32: 0}


def test_experts_are_patched_copied_pickled_and_unpatched(tiny):
    model = tiny("gpt_oss")
    before = [type(module) for module in model.modules()]
    module = expert_modules(patch(model).modules())[0]
    assert type(module) is not original_class(module)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(made) is type(module)
    unpatch(model)
    assert [type(module) for module in model.modules()] == before
