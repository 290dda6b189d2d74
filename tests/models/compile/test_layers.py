"""Compiled decoder layers: one graph for layers of a kind, as accurate as eager ones, and no trace afterwards."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from prefixkit.models import IncompleteStep, is_patched, patch, unpatch
from prefixkit.models.attention_class import original_class
from prefixkit.models.compile.layers import compile_layer
from tests.models.compile.decode import Decode
from tests.models.forwards import class_level_forward


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("family", "dtype", "graphs"),
    [("llama", torch.float32, 1), ("gemma2", torch.bfloat16, 2)],
    ids=str,
)
def test_compiled_logits_err_no_more_than_eager_ones(family, dtype, graphs, dynamo, tiny, drive, dense_logits, rng):
    """Against the same weights in float64.  Fusion keeps more of an activation's bits, never fewer."""
    model = tiny(family).to(dtype)
    decode = Decode(drive, model, rng)
    runner = decode.runner(compiler=compile_layer)
    exact = copy.deepcopy(model).double()
    ours, eager, truth = [], [], []
    for _ in range(3):
        step = decode.step()
        eager.append(decode.driver.runner(step))
        ours.append(runner(step))
        decode.done()
        truth.append(torch.stack([dense_logits(exact, s.tokens().tolist())[-1] for s in decode.sequences]))
    assert runner.compiled.reason is None
    assert runner.compiled.graphs == graphs, "one for each kind of layer"
    assert runner.compiled.seconds > 0
    # Rows of a step come in the tree's order.
    rows = [_rows_of(truth[i], eager[i]) for i in range(3)]
    error = {
        name: torch.cat([(made[i] - truth[i][rows[i]]).double() for i in range(3)]).norm()
        for name, made in (("ours", ours), ("eager", eager))
    }
    assert error["ours"] <= 1.5 * error["eager"], error


def _rows_of(truth, logits):
    """Which sequence each row of logits is of."""
    return torch.cdist(logits, truth).argmin(-1)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("family", "graphs"), [("mixtral", 1), ("gpt_oss", 2)])
def test_layers_of_a_kind_share_one_graph_while_the_tree_changes(family, graphs, dynamo, tiny, drive, rng, caplog):
    layers = {"num_hidden_layers": 4}
    if graphs == 2:
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    decode = Decode(drive, tiny(family, **layers), rng)
    runner = decode.runner()
    with caplog.at_level(logging.INFO, "prefixkit"):
        for turn in range(6):
            if turn == 2:
                decode.driver.tree.release(decode.sequences.pop())
                decode.sequences += decode.driver.tree.fork(decode.sequences[0], 1)
            if turn == 4:  # another tree, with another plan
                decode.sequences.append(decode.driver.tree.insert(rng.integers(3, 128, 30).tolist()))
                decode.driver.tree.release(decode.sequences.pop(0))
                decode.driver.run()
            step = decode.step()
            assert step.num_rows == 4
            assert torch.equal(runner(step), decode.driver.runner(step))
            decode.done()
    assert runner.compiled.reason is None
    assert runner.compiled.graphs == graphs
    assert caplog.text.count("compiling a layer, which takes seconds") == graphs
    assert caplog.text.count("compiled layer") == graphs


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", [24, 2])
def test_any_number_of_rows_shares_a_graph_but_one(first, dynamo, tiny, drive, rng):
    """Whether the first is the size of a head, 24, or the number of KV heads, 2."""
    decode = Decode(drive, tiny(), rng)
    runner, graphs = decode.runner(), []
    for rows in (first, 4, 3, 9, 24, 2, 1, 5):
        if rows > len(decode.sequences):
            decode.sequences += decode.driver.tree.fork(decode.sequences[0], rows - len(decode.sequences))
        while len(decode.sequences) > rows:
            decode.driver.tree.release(decode.sequences.pop())
        step = decode.step()
        assert step.num_rows == rows
        assert torch.allclose(runner(step), decode.driver.runner(step), atol=1e-5)
        decode.done()
        graphs.append(runner.compiled.graphs)
    assert graphs == [1, 1, 1, 1, 1, 1, 2, 2]
    assert runner.compiled.reason is None


def test_only_the_rows_asked_for_are_compiled(dynamo, tiny, drive, rng):
    decode = Decode(drive, tiny(), rng)
    runner = decode.runner(compiled=[1, 3])
    step = decode.step()
    assert torch.equal(runner(step), decode.driver.runner(step))
    assert runner.compiled.graphs == 0
    decode.done()
    decode.driver.tree.release(decode.sequences.pop())
    step = decode.step()
    assert torch.equal(runner(step), decode.driver.runner(step))
    assert runner.compiled.graphs == 1


def test_weights_and_modules_that_change_are_seen(dynamo, tiny, drive, rng):
    decode = Decode(drive, tiny(), rng)
    runner, step = decode.runner(), decode.step()
    before = runner(step)
    layers = decode.driver.model.model.layers
    with torch.no_grad():
        layers[0].mlp.up_proj.weight.mul_(2)
    layers[1].mlp = copy.deepcopy(layers[0].mlp)
    after = runner(step)
    assert not torch.allclose(before, after)
    assert torch.equal(after, decode.driver.runner(step))


def test_a_forward_given_to_a_class_later_is_seen(dynamo, tiny, drive, rng):
    """By layers that are compiled, and by those that run as they are because no compiled step is asked for."""
    decode = Decode(drive, tiny(), rng)
    runner, step = decode.runner(), decode.step()
    before = runner(step)
    for cls in (modeling_llama.LlamaAttention, modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaMLP):
        with class_level_forward(cls, 3.0):
            after = runner(step)
            assert not torch.allclose(after, before), cls
            assert torch.equal(after, decode.driver.runner(step)), cls
        assert torch.equal(runner(step), before), cls


def test_sinks_that_change_in_place_are_seen_without_another_graph(dynamo, tiny, drive, rng):
    decode = Decode(drive, tiny("gpt_oss", layer_types=["full_attention"] * 2), rng)
    runner, step = decode.runner(), decode.step()
    before = runner(step)
    with torch.no_grad():
        decode.driver.model.model.layers[1].self_attn.sinks.add_(2)
    after = runner(step)
    assert not torch.allclose(before, after)
    assert torch.equal(after, decode.driver.runner(step))
    assert runner.compiled.reason is None
    assert runner.compiled.graphs == 1


def test_what_cannot_be_traced_runs_as_it_is_after_one_warning(dynamo, tiny, drive, rng, caplog):
    class Break(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break(msg="a stone in the way")
            return x

    model = tiny()
    model.model.layers[1].mlp.act_fn = Break()
    decode = Decode(drive, model, rng)
    runner = decode.runner()
    for _ in range(2):
        step = decode.step()
        assert torch.equal(runner(step), decode.driver.runner(step))
        decode.done()
    said = [record.getMessage() for record in caplog.records if record.name == "prefixkit"]
    assert len(said) == 1
    assert "a stone in the way" in said[0]


def test_a_layer_behind_a_wrapper_is_not_compiled(dynamo, tiny, drive, rng, caplog):
    decode = Decode(drive, tiny(), rng)
    layer = decode.driver.model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    runner, step = decode.runner(), decode.step()
    runner(step)
    assert "LlamaDecoderLayer of model.layers.0 has a forward of its own" in caplog.text
    assert runner.compiled.graphs == 0


def test_wrong_positions_and_masks_are_noticed(dynamo, tiny, drive, rng):
    decode = Decode(drive, tiny(), rng)
    runner, cache = decode.runner(), decode.driver.runner.cache
    cache = runner.cache
    for wrong, message in [
        ({"position_ids": torch.arange(4)[None]}, "position_ids other than the step's"),
        ({"attention_mask": None}, "instead of the empty one"),
    ]:
        cache.begin(decode.step())
        with pytest.raises(ValueError, match=message):
            decode.driver.model(**{**cache.inputs(), **wrong})
        cache.abandon()
        decode.done()
    assert runner.compiled.reason is None


def test_a_layer_that_runs_twice_is_an_error(dynamo, tiny, drive, rng):
    decode = Decode(drive, tiny(), rng)
    runner = decode.runner()
    layers = decode.driver.model.model.layers
    layers[1] = layers[0]
    with pytest.raises(IncompleteStep, match="layer 0 ran twice"):
        runner(decode.step())


def test_after_an_error_in_a_step_the_next_one_runs(dynamo, tiny, drive, rng):
    decode = Decode(drive, tiny(), rng)
    runner, step = decode.runner(), decode.step()
    hook = decode.driver.model.model.norm.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner(step)
    hook.remove()
    assert torch.equal(runner(step), decode.driver.runner(step))


def test_unpatch_and_copies_leave_no_trace(dynamo, tiny, drive, rng):
    model = tiny()
    kinds = [type(module) for module in model.modules()]
    decode = Decode(drive, model, rng)
    runner, patched = decode.runner(), decode.driver.model
    runner(decode.step())
    assert is_patched(patched)
    layer = type(patched.model.layers[0])
    assert layer is not original_class(patched.model.layers[0])
    assert (layer.__name__, layer.__module__) == ("LlamaDecoderLayer", type(model).__module__)
    for duplicate in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert type(duplicate.model.layers[0]) is original_class(patched.model.layers[0])
        assert is_patched(duplicate), "its attention is"
    tokens = torch.arange(3, 9)[None]
    assert torch.equal(patched(tokens).logits, model(tokens).logits)
    unpatch(patched)
    assert [type(module) for module in patched.modules()] == kinds
    assert not any("_prefixkit" in name for module in patched.modules() for name in vars(module))


def test_a_runner_whose_model_was_unpatched_says_that_it_no_longer_compiles(dynamo, tiny, drive, rng, caplog):
    decode = Decode(drive, tiny(), rng)
    runner, step = decode.runner(), decode.step()
    expected = runner(step)
    patch(unpatch(decode.driver.model))
    assert torch.equal(runner(step), expected)
    assert "layers run without torch.compile: the model was unpatched" in caplog.text
    again = decode.runner()
    assert torch.equal(again(step), expected)
    assert again.compiled.graphs == 1
    assert again.compiled.reason is None
