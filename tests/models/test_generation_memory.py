"""``generate()`` of a patched model finds the tokens of earlier calls."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from prefixkit.models import TreeCache, patch, unpatch
from prefixkit.models.tree_memory import idle_of
from tests.tiny import tiny_llama

FEW_SHOT = torch.arange(5, 85)


def prompt(*tokens):
    return torch.cat((FEW_SHOT, torch.tensor(tokens)))[None]


@pytest.fixture
def model():
    return patch(tiny_llama(), tree_cache="always")


@pytest.fixture
def ran(model):
    """Tokens that went through the model, step by step."""
    greedy(model, torch.tensor([[3]]))  # the first call probes the model
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    return counts


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


def test_a_known_beginning_is_not_computed_again(model, ran):
    plain = tiny_llama()
    for tokens, new in (((1, 2, 3), 83), ((1, 2, 4), 1), ((1, 2, 4), 1), ((7,), 1)):
        ran.clear()
        found = greedy(model, prompt(*tokens), num_return_sequences=2, num_beams=2)
        assert torch.equal(found, greedy(plain, prompt(*tokens), num_return_sequences=2, num_beams=2))
        assert ran[0] == new


def test_what_was_generated_is_known_too(model, ran):
    turn = greedy(model, prompt(1))
    ran.clear()
    ids = torch.cat((turn, torch.tensor([[9, 9]])), 1)
    assert torch.equal(greedy(model, ids), greedy(tiny_llama(), ids))
    assert ran[0] == 3, "the last token that was generated, and the two new ones"


def test_logits_of_all_tokens_are_computed_again(model, ran):
    greedy(model, prompt(1))
    ran.clear()
    with torch.no_grad():
        logits = model(prompt(1), past_key_values=TreeCache(model)).logits
        expected = tiny_llama()(prompt(1)).logits
    assert ran[0] == 81
    torch.testing.assert_close(logits, expected)


def test_kv_of_old_weights_is_not_used(model, ran):
    greedy(model, prompt(1))
    other = tiny_llama(1)
    model.load_state_dict(other.state_dict())
    ran.clear()
    assert torch.equal(greedy(model, prompt(1)), greedy(other, prompt(1)))
    assert ran[0] == 81


def test_after_writes_that_torch_does_not_count_a_second_patch_forgets(model, ran):
    greedy(model, prompt(1))
    other = tiny_llama(1)
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)
    patch(model, tree_cache="always")
    ran.clear()
    assert torch.equal(greedy(model, prompt(1)), greedy(other, prompt(1)))
    assert ran[0] == 81


def test_longer_calls_make_room(model):
    for length in (1, 40, 3, 90):
        ids = torch.randint(5, 200, (2, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(greedy(model, ids), greedy(tiny_llama(), ids))


def test_in_auto_mode_one_row_takes_the_tree_where_much_of_it_is_known():
    model = patch(tiny_llama(), tree_cache="auto")
    greedy(model, prompt(1).expand(4, -1))
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    assert torch.equal(greedy(model, prompt(2)), greedy(tiny_llama(), prompt(2)))
    assert counts[0] == 1
    counts.clear()
    greedy(model, torch.arange(100, 150)[None])
    assert counts[0] == 50


def test_memory_goes_with_the_patch(model):
    greedy(model, prompt(1))
    assert len(idle_of(model)) == 1
    pool = weakref.ref(idle_of(model)._memory[0].pool)
    unpatch(model)
    gc.collect()
    assert pool() is None


def test_a_model_that_trains_keeps_none(model):
    greedy(model, prompt(1))
    model.train()
    greedy(model, prompt(1))
    assert len(idle_of(model)) == 0
