"""``model.generate()`` of a patched model on the GPU: its decode steps replay graphs, and err no more than before."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch

import prefixkit
from prefixkit.models.model_stores import stores_of
from tests.gpu.test_model import model_of, prompts

NEW = 40
ENDS = {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def padded() -> dict[str, torch.Tensor]:
    """Six rows of different length, left-padded, whose first 700 tokens are equal."""
    rows = prompts(7)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device="cuda")
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device="cuda")
    return {"input_ids": ids, "attention_mask": mask}


def errors(model: torch.nn.Module, exact: torch.nn.Module, padded: dict[str, torch.Tensor], out) -> float:
    """How far the logits of sampled tokens are from those of float64 weights, over all rows."""
    sequences, length = out.sequences, padded["input_ids"].shape[1]
    rows = len(sequences) // len(padded["input_ids"])
    mask = padded["attention_mask"].repeat_interleave(rows, 0)
    mask = torch.cat([mask, torch.ones_like(sequences[:, length:])], 1)
    with torch.no_grad():
        there = exact(sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    truth = there[:, length - 1 : -1].transpose(0, 1)
    found = torch.stack(out.logits).double()
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("options", [{"do_sample": True, "num_return_sequences": 4}, {"do_sample": False}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_err_no_more_than_those_of_the_unpatched_model(options, dtype, padded):
    model = model_of(64, dtype)
    exact = copy.deepcopy(model).double()
    torch.manual_seed(5)
    stock = errors(model, exact, padded, model.generate(**padded, max_new_tokens=NEW, **ENDS, **options))
    prefixkit.patch(model)
    torch.manual_seed(5)
    out = model.generate(**padded, max_new_tokens=NEW, **ENDS, **options)
    assert isinstance(out.past_key_values, prefixkit.TreeCache)
    assert errors(model, exact, padded, out) <= 1.5 * stock


@pytest.mark.parametrize("options", [{"do_sample": True, "num_return_sequences": 4}, {"num_beams": 4}])
def test_steps_replay_graphs_and_a_third_call_captures_none(options, padded, caplog):
    """The second finds the tokens of the first, in a tree of more nodes, and computes what is left in other shapes."""
    caplog.set_level(logging.INFO, "prefixkit")
    model = prefixkit.patch(model_of(64, torch.bfloat16))

    def call():
        torch.manual_seed(5)
        out = model.generate(**padded, max_new_tokens=NEW, **ENDS, **options)
        runner = out.past_key_values.steps.runner
        return runner.graphs.captures, runner.graphs.replays

    captures, steps = call()
    assert 1 <= captures <= 3, "a tree that grows may need larger arrays"
    assert steps == NEW - 1
    captures, steps = call()
    assert captures <= 4 and steps == 2 * (NEW - 1)
    assert call() == (captures, 3 * (NEW - 1))


def test_a_single_row_replays_graphs_where_it_goes_on_for_long(padded):
    model = prefixkit.patch(model_of(64, torch.bfloat16))
    one = {name: given[:1] for name, given in padded.items()}
    for new, tree in ((NEW, True), (8, False)):
        out = model.generate(**one, max_new_tokens=new, **ENDS)
        assert isinstance(out.past_key_values, prefixkit.TreeCache) == tree


def test_memory_goes_with_the_patch_and_while_training(padded):
    model = model_of(64, torch.bfloat16)

    def held(train: bool = False) -> tuple[int, int]:
        """What a call leaves allocated, and what is left once the patch is gone."""
        prefixkit.patch(model).train(train)
        model.generate(**padded, max_new_tokens=NEW, do_sample=True, num_return_sequences=4)
        gc.collect()
        kept = torch.cuda.memory_allocated()
        assert len(stores_of(model)) == (0 if train else 1)
        assert len(stores_of(copy.deepcopy(model))) == 0
        prefixkit.unpatch(model)
        gc.collect()
        return kept, torch.cuda.memory_allocated()

    _, nothing = held()  # but cuBLAS's workspaces, which stay
    assert held()[0] > held()[1] == nothing
    assert held(train=True) == (nothing, nothing)


def test_a_cache_that_is_continued_cropped_and_reordered(padded):
    """Greedy tokens in float32 in place of graphs: the same whether rows are in graphs or not."""
    model = model_of(64, torch.float32)
    want = model.generate(**padded, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    prefixkit.patch(model)
    cache = prefixkit.TreeCache(model)
    half = model.generate(
        **padded, max_new_tokens=NEW // 2, do_sample=False, pad_token_id=0, eos_token_id=None, past_key_values=cache
    )
    cache.crop(-3)
    mask = torch.cat([padded["attention_mask"], torch.ones(6, NEW // 2 - 3, dtype=torch.int64, device="cuda")], 1)
    rest = {"input_ids": half[:, : mask.shape[1]], "attention_mask": mask}
    got = model.generate(
        **rest,
        max_new_tokens=NEW - NEW // 2 + 3,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        past_key_values=cache,
    )
    assert torch.equal(got, want)
