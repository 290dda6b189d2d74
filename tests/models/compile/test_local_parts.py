"""Compiled layers of a model that is split over processes; here over one, which holds all of each weight."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from prefixkit import unpatch
from prefixkit.models.compile.local_parts import SummedLinear, copy_of_module
from prefixkit.models.compile.packed_weights import packed_view
from tests.models.compile.decode import Decode

STYLES = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
STYLES |= {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


@pytest.fixture
def split(tmp_path):
    """A function that splits a model as transformers does: modules get local tensors for the length of a call."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)

    def lent(module, x):
        weight, bias = (None if one is None else one.to_local() for one in (module.weight, module.bias))
        return F.linear(x, weight, bias)

    def made(model, styles=STYLES):
        model._device_mesh, model._tp_size = init_device_mesh("cpu", (1,)), 2
        model._tp_plan = {}
        for name, module in model.named_modules():
            if (style := styles.get(name.rpartition(".")[2])) is not None:
                model._tp_plan[".".join("*" if part.isdigit() else part for part in name.split("."))] = style
                for each, weight in module._parameters.items():
                    if weight is not None:
                        place = Shard(1) if style == "rowwise" and weight.ndim == 2 else Shard(0)
                        there = distribute_tensor(weight.detach(), model._device_mesh, [place])
                        module._parameters[each] = nn.Parameter(there, requires_grad=False)
                module.forward = partial(lent, module)
        return model

    yield made
    torch.distributed.destroy_process_group()


def projections(model):
    attention = model.model.layers[0].self_attn
    return [one.weight.to_local() for one in (attention.q_proj, attention.k_proj, attention.v_proj)]


def test_products_of_local_weights_are_those_of_layers_that_are_not_compiled(split, dynamo, tiny, drive, rng):
    biased = tiny("llama", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, bias in biased.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    decode = Decode(partial(drive, copied=False), split(biased), rng)
    runner, model = decode.runner(), decode.driver.model
    for _ in range(2):
        step = decode.step()
        torch.testing.assert_close(runner(step), decode.driver.runner(step), rtol=1e-4, atol=1e-4)
        decode.done()
    assert runner.compiled.reason is None and runner.compiled.graphs == 1
    assert packed_view(projections(model)) is not None, "q, k and v are packed"
    other = nn.Parameter(model.model.layers[1].mlp.up_proj.weight * 2, requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = other
    step = decode.step()
    torch.testing.assert_close(runner(step), decode.driver.runner(step), rtol=1e-4, atol=1e-4)
    unpatch(model)
    assert packed_view(projections(model)) is None


def test_layers_that_are_split_in_another_style_run_as_they_are(split, tiny, drive, rng, caplog):
    decode = Decode(partial(drive, copied=False), split(tiny("llama"), {**STYLES, "up_proj": "colwise_rep"}), rng)
    step = decode.step()
    torch.testing.assert_close(decode.runner()(step), decode.driver.runner(step))
    assert "layers run without torch.compile: a Linear of model.layers.0 has a forward of its own" in caplog.text


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "float32 under autocast"])
def test_where_two_gpus_see_one_memory_products_are_float32_until_they_are_summed(autocast, dynamo):
    """And the sum has the dtype that the module's product would have."""
    linear = nn.Linear(16, 8, bias=False, dtype=torch.float32 if autocast else torch.bfloat16)
    to = {"group": None, "addresses": torch.zeros(5, dtype=torch.int64)}
    module, found = copy_of_module(linear, SummedLinear, **to), []

    def sums(graph, inputs):
        ops = torch.ops.prefixkit
        for part in graph.graph.find_nodes(op="call_function", target=ops.part_of_product):
            found.append([one.meta["example_value"].dtype for one in (*part.args, part, *part.users)])
        return lambda *inputs: (torch.zeros(3, 8),)

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.compile(module, backend=sums, fullgraph=True)(torch.zeros(3, 16, dtype=linear.weight.dtype))
    assert found == [[torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]]
