"""``generate()`` and ``forward()`` with a tree cache that the caller made."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache

from prefixkit import TreeCache, patch, unpatch
from prefixkit.models import NotPatched
from prefixkit.models.requirements import CACHE
from tests.models.generate.generating import NEW, generate
from tests.models.tiny_families import VOCAB, make_model


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("family", "more"), [*(("llama", more) for more in (-4, -1, 0, 1, 3)), ("gemma2", -4), ("gemma2", 3)]
)
def test_a_prompt_beside_a_cache_of_any_length_is_taken_as_transformers_takes_it(more, family, padded):
    """Also as many tokens as there are in the cache, or fewer, which transformers appends to them."""
    model, outs = make_model(family), []
    ids, there = (torch.cat([given, given[:, :5].clamp(min=1)], 1) for given in padded.values())
    for prepare in (unpatch, patch):
        prepare(model)
        for prompt in (padded, {"input_ids": padded["input_ids"][:, 9:]}):
            cache = TreeCache(model) if prepare is patch else DynamicCache(config=model.config)
            begin, end = 20 - prompt["input_ids"].shape[1], 20 + more
            mask = there[:, begin:end] if "attention_mask" in prompt else torch.ones_like(there[:, begin:end])
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            with torch.no_grad():
                held = {"input_ids": ids[:, begin:end], "attention_mask": mask, "position_ids": positions}
                model(**held, past_key_values=cache)
            outs.append((generate(model, prompt, do_sample=True, past_key_values=cache), cache.get_seq_length()))
    for want, got in zip(outs[:2], outs[2:], strict=True):
        assert torch.equal(got[0], want[0])
        assert got[1] == want[1]


@pytest.mark.parametrize("new", [5, 9, 12])
@pytest.mark.parametrize("given", ["nothing", "positions", "masks"])
def test_tokens_go_on_from_those_it_holds_or_are_fed_again_as_with_transformers(new, given, rng, said):
    model, caches = make_model(), []
    held, ids, last = (torch.from_numpy(rng.integers(3, VOCAB, (2, count))) for count in (9, new, 1))
    more = {
        "nothing": {},
        "positions": {"position_ids": torch.arange(new)[None]},
        "masks": {"position_ids": torch.arange(new)[None], "attention_mask": torch.ones(2, new, dtype=torch.int64)},
    }[given]
    logits = []
    for prepare in (unpatch, patch):
        prepare(model)
        caches.append(TreeCache(model) if prepare is patch else DynamicCache())
        with torch.no_grad():
            model(held, past_key_values=caches[-1])
            logits.append(model(ids, past_key_values=caches[-1], **more).logits)
            caches[-1].batch_select_indices(torch.tensor([1, 0]))
            logits.append(model(last, past_key_values=caches[-1]).logits)
    torch.testing.assert_close(logits[2], logits[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(logits[3], logits[1], rtol=2e-5, atol=2e-5)
    assert len(said()) == (given != "nothing")
    assert [one.get_seq_length() for one in caches] == [10 + new] * 2


def test_goes_on_where_it_was(padded):
    model = patch(make_model())
    cache = TreeCache(model, page_size=4)
    first = generate(model, padded, do_sample=False, past_key_values=cache, eos_token_id=None)
    mask = torch.cat([padded["attention_mask"], torch.ones(3, NEW + 5, dtype=torch.int64)], 1)
    longer = torch.cat([first, torch.randint(3, VOCAB, (3, 5))], 1)
    got = generate(model, {"input_ids": longer, "attention_mask": mask}, do_sample=False, past_key_values=cache)
    want = generate(unpatch(model), {"input_ids": longer, "attention_mask": mask}, do_sample=False)
    assert torch.equal(got, want)


def test_rows_may_be_repeated_chosen_and_cropped(rng):
    model = patch(make_model())
    ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 11))), TreeCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([5, 1, 0]))
        cache.crop(torch.tensor(-3))
        assert (cache.batch_size, cache.get_seq_length()) == (3, 8)
        more = torch.from_numpy(rng.integers(3, VOCAB, (3, 4)))
        got = model(more, past_key_values=cache).logits
        want = unpatch(model)(torch.cat([ids[[1, 0, 0], :8], more], 1)).logits[:, 8:]
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_logits_of_all_tokens_come_where_they_are_wanted(padded):
    model = make_model()
    there = padded["attention_mask"].bool()
    positions = (there.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(**padded, position_ids=positions).logits
        patch(model)
        got = model(**padded, position_ids=positions, past_key_values=TreeCache(model)).logits
    torch.testing.assert_close(got[there], want[there], rtol=2e-5, atol=2e-5)
    assert (got[~there] == 0).all()


def test_a_copy_goes_on_by_itself(padded):
    """As scripts do that compute a prompt once and deep-copy its cache for each question."""
    model = patch(make_model())
    cache, there = TreeCache(model, page_size=4), padded["attention_mask"]
    positions = (there.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**padded, position_ids=positions, past_key_values=cache)
    mask = torch.cat([there, torch.ones(3, 2, dtype=torch.int64)], 1)
    for seed in range(2):
        torch.manual_seed(seed)
        longer = torch.cat([padded["input_ids"], torch.randint(3, VOCAB, (3, 2))], 1)
        inputs = {"input_ids": longer, "attention_mask": mask}
        mine = copy.deepcopy(cache)
        assert mine.model is model
        assert mine.kv_tokens == cache.kv_tokens == 20 + 15 + 11 - 6
        got = generate(patch(model), inputs, do_sample=False, past_key_values=mine)
        assert torch.equal(got, generate(unpatch(model), inputs, do_sample=False))
        assert cache.get_seq_length() == 20
        patch(model)


def test_its_pool_grows_as_tokens_come(rng):
    model = patch(make_model())
    ids, cache = torch.from_numpy(rng.integers(3, VOCAB, (2, 5))), TreeCache(model, page_size=2)
    more = torch.from_numpy(rng.integers(3, VOCAB, (60, 2)))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        got = torch.stack([model(one[:, None], past_key_values=cache).logits[:, 0] for one in more], 1)
        want = unpatch(model)(torch.cat([ids, more.T], 1)).logits[:, 5:]
    torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)


def test_is_refused_where_it_cannot_be_used(padded):
    model, other = patch(make_model()), patch(make_model())
    with pytest.raises(NotPatched, match=r"LlamaForCausalLM is not patched; call prefixkit.patch"):
        TreeCache(make_model())
    with pytest.raises(ValueError, match="belongs to another LlamaForCausalLM"):
        generate(model, padded, past_key_values=TreeCache(other))
    with pytest.raises(ValueError, match="output_hidden_states is asked for"):
        generate(model, padded, past_key_values=TreeCache(model), output_hidden_states=True)
    with pytest.raises(ValueError, match=r"has no backward; call the model under torch\.no_grad"):
        model(**padded, past_key_values=TreeCache(model))
    with pytest.raises(NotPatched, match="was given a TreeCache"):
        generate(make_model(), padded, past_key_values=TreeCache(model))
    cache = TreeCache(model)
    with torch.no_grad():
        model(padded["input_ids"], past_key_values=cache)
        with pytest.raises(ValueError, match="has 2 rows, and the cache 3"):
            model(padded["input_ids"][:2], past_key_values=cache)
    with pytest.raises(ValueError, match=r"crop: got 3 for 20 tokens; use a negative number"):
        cache.crop(3)


def test_an_error_in_the_model_leaves_the_model_usable(padded):
    model = patch(make_model(), tree_cache="always")
    want = generate(model, padded, do_sample=False)
    handle = model.model.layers[1].register_forward_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        generate(model, padded, do_sample=False)
    handle.remove()
    assert torch.equal(generate(model, padded, do_sample=False), want)


@pytest.mark.parametrize("keyword", sorted({CACHE, "past_key_values"}))
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_it_is_taken_under_the_present_keyword_and_the_one_before(family, keyword, padded):
    """transformers renames the keyword of ``generate()``, and warns; a decoder's ``forward`` takes both."""
    model, text = make_model(family), {name: rows[:1] for name, rows in padded.items()}  # without padding
    want = generate(model, text, do_sample=False)
    cache = TreeCache(patch(model))
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        out = generate(model, text, do_sample=False, return_dict_in_generate=True, **{keyword: cache})
        assert torch.equal(out.sequences, want)
        assert out[CACHE] is cache and not cache.fell_back
        with torch.no_grad():
            step = model(out.sequences[:, -1:], attention_mask=torch.ones_like(want), **{keyword: cache})
    assert step[CACHE] is cache
    assert cache.get_seq_length() == want.shape[1]
