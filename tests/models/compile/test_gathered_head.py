"""A head whose columns processes gather by their op; here one process has all columns, and a stand-in of the op."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from prefixkit import patch, unpatch
from prefixkit.models.compile import gathered_head as heads
from prefixkit.models.compile.gathered_head import gathered_head
from prefixkit.models.compile.part_exchange import PartExchange
from tests.models.compile.decode import Decode

ADDRESSES = torch.zeros(5, dtype=torch.int64)


@pytest.fixture
def split(tmp_path):
    """A function that splits a model's head as transformers does, by its own code."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)

    def made(model, style="colwise_gather_output"):
        mesh = model._device_mesh = init_device_mesh("cpu", (1,))
        model._tp_size, model._tp_plan = 2, {"lm_head": style}
        there = distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)])
        model.lm_head.weight = nn.Parameter(there, requires_grad=False)
        ALL_PARALLEL_STYLES[style].install_forward(model.lm_head, mesh)
        return model

    yield made
    torch.distributed.destroy_process_group()


@pytest.fixture
def gathered(monkeypatch):
    """Shapes of what the op was given."""
    shapes = []

    def gather_parts(part, addresses, rank, sent):
        assert addresses is ADDRESSES and rank == 0 and part.is_contiguous()
        assert sent is None or (sent.shape == part.shape and sent.is_contiguous())
        shapes.append(tuple(part.shape))
        return part.clone()

    monkeypatch.setattr(torch.ops.prefixkit, "gather_parts", gather_parts)
    exchange_by(monkeypatch, torch.distributed.group.WORLD, ADDRESSES)
    return shapes


def exchange_by(monkeypatch, *group):
    """Let processes exchange parts by this group, and memory that they share."""
    monkeypatch.setattr(heads, "part_exchange", lambda model: PartExchange(*group))


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([[5, 6, 7]])).logits


def test_steps_of_compiled_layers_gather_wanted_rows_alone_and_others_do_not(split, gathered, dynamo, tiny, drive, rng):
    decode = Decode(partial(drive, copied=False), split(tiny("llama")), rng)
    runner, model = decode.runner(), decode.driver.model
    for count in (1, 2):
        step = decode.step()
        expected = decode.driver.runner(step)
        assert len(gathered) == count - 1
        torch.testing.assert_close(runner(step), expected, rtol=1e-4, atol=1e-4)
        assert gathered == [(1, len(step.logit_rows), model.config.vocab_size)] * count
        decode.done()
    logits_of(model)
    assert len(gathered) == 2, "a call of the model's own"


def test_logits_are_those_of_transformers_and_unpatch_leaves_no_trace(split, gathered, tiny):
    model = split(tiny("llama"))
    before, expected = dict(vars(model.lm_head)), logits_of(model)
    head = gathered_head(patch(model))
    with head.in_step():
        assert torch.equal(logits_of(model), expected) and len(gathered) == 1
        model(torch.tensor([[5, 6, 7]]))
    assert len(gathered) == 1, "the op has no backward"
    assert gathered_head(model) is not None, "of another engine of the model"
    unpatch(model)
    assert type(model.lm_head) is nn.Linear and vars(model.lm_head) == before
    with head.in_step():
        assert torch.equal(logits_of(model), expected)
    assert len(gathered) == 1


def test_a_process_gets_the_logits_of_its_half_of_the_rows(split, gathered, tiny):
    model = split(tiny("llama"))
    head = gathered_head(patch(model))
    for tokens in ([5, 6, 7, 8], [5, 6, 7]):
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits
            with head.in_step(own_rows=True):
                own = model(torch.tensor([tokens])).logits
        even = len(tokens) % 2 == 0
        assert torch.equal(own, expected[:, : len(tokens) // 2] if even else expected)
        assert gathered.pop() == tuple(own.shape)


def test_hooks_of_the_head_run_and_see_whole_logits(split, gathered, tiny):
    model = split(tiny("llama"))
    head, seen = gathered_head(patch(model)), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append((type(out), out.shape[-1])))
    with head.in_step():
        logits_of(model)
    assert seen == [(torch.Tensor, model.config.vocab_size)] and len(gathered) == 1


@pytest.mark.parametrize("style", ["colwise", "unknown", "forward of its own", "no memory"])
def test_heads_that_are_split_otherwise_stay_as_they_are(style, split, gathered, tiny, monkeypatch):
    model = split(tiny("llama"), style if style == "colwise" else "colwise_gather_output")
    if style == "unknown":
        model._tp_plan = {"lm_head": "colwise_in_turns"}
    if style == "forward of its own":
        model.lm_head.forward = partial(model.lm_head.forward)
    if style == "no memory":
        exchange_by(monkeypatch, None)
    assert gathered_head(patch(model)) is None and type(model.lm_head) is nn.Linear


def test_columns_that_no_vectors_hold_are_gathered_by_transformers(split, gathered, tiny):
    model = split(tiny("llama", vocab_size=251))
    expected = logits_of(model)
    with gathered_head(patch(model)).in_step():
        assert torch.equal(logits_of(model), expected) and not gathered
