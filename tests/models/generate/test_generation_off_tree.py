"""Generations that cannot be on a tree, or leave it: transformers goes on, with the same tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from prefixkit import TreeCache, patch, unpatch
from prefixkit.models.generate.forward import NotOnTree
from tests.models.generate.generating import NEW, SAMPLED, compared, generate
from tests.models.tiny_families import VOCAB, make_model


class TestWhatCannotBeOnATree:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is asked for"),
            ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is asked for"),
        ],
    )
    def test_runs_as_before_and_one_line_says_why(self, options, reason, padded, said):
        model = make_model()
        want = generate(model, padded, **SAMPLED, **options)
        got = generate(patch(model, tree_cache="always"), padded, **SAMPLED, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert type(got.past_key_values) is DynamicCache
        assert len(said()) == 1
        assert reason in said()[0]

    @pytest.mark.parametrize("holes", ["right", "middle"])
    def test_masks_that_are_no_left_padding(self, holes, padded, said):
        mask, model = padded["attention_mask"], make_model()
        mask[1, 18:] = 0 if holes == "right" else mask[1, 18:]
        mask[2, 12] = 0
        want, got, cache = compared(model, padded, **SAMPLED)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "has holes, or padding on the right" in said()[0]

    def test_positions_that_the_model_would_count_from_elsewhere_than_zero(self, rng):
        model = patch(make_model("roberta", is_decoder=True, pad_token_id=1))
        tokens, cache = torch.from_numpy(rng.integers(3, 128, (2, 9))), TreeCache(model)
        with torch.no_grad():
            with pytest.raises(NotOnTree, match="without them the model counts from elsewhere than 0"):
                model(tokens, past_key_values=cache)
            at = torch.arange(9).expand(2, 9)
            got = model(tokens, position_ids=at, past_key_values=cache).logits
            torch.testing.assert_close(got, model(tokens, position_ids=at).logits)

    def test_embeddings(self, padded, said):
        model = make_model()
        given = {"inputs_embeds": model.get_input_embeddings()(padded["input_ids"]).detach()}
        given["attention_mask"] = padded["attention_mask"]
        want, got, cache = compared(model, given, do_sample=True, num_return_sequences=2)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "given as embeddings" in said()[0]

    @pytest.mark.parametrize("implementation", ["static", "offloaded"])
    def test_caches_that_were_asked_for(self, implementation, padded, said):
        if implementation == "offloaded" and not torch.cuda.is_available():
            pytest.skip("transformers offloads from GPUs")
        want, got, cache = compared(make_model(), padded, cache_implementation=implementation, do_sample=False)
        assert torch.equal(got, want)
        assert not isinstance(cache, TreeCache)
        assert f"cache_implementation='{implementation}' is asked for" in said()[0]

    def test_no_cache(self, padded, said):
        want, got, cache = compared(make_model(), padded, use_cache=False, do_sample=False)
        assert torch.equal(got, want)
        assert cache is None
        assert "use_cache=False is asked for" in said()[0]

    def test_a_model_that_drops_at_random(self, padded, said):
        model = make_model(attention_dropout=0.5).train()
        want, got, cache = compared(model, padded, do_sample=False)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "attention_dropout is random" in said()[0]

    def test_in_training_mode_without_dropout_the_tree_is_taken(self, padded):
        want, got, cache = compared(make_model().train(), padded, **SAMPLED)
        assert torch.equal(got, want)
        assert isinstance(cache, TreeCache)

    def test_kv_that_does_not_fit(self, padded, said, free_memory):
        free_memory(10_000)
        want, got, cache = compared(make_model(), padded, **SAMPLED)
        assert torch.equal(got, want)
        assert type(cache) is DynamicCache
        assert "a tree cache takes at most 50% of" in said()[0]


class TestWhereAGenerationLeavesTheTree:
    def test_a_hole_that_comes_in_a_later_chunk(self, rng, said):
        ids, mask = torch.from_numpy(rng.integers(3, VOCAB, (2, 20))), torch.ones(2, 20, dtype=torch.int64)
        mask[1, 5:12] = 0
        for chunk in (1, 3):
            inputs = {"input_ids": ids, "attention_mask": mask, "prefill_chunk_size": chunk}
            want, got, _ = compared(make_model(), inputs, do_sample=False)
            assert torch.equal(got, want)
        assert said()

    @pytest.mark.parametrize("new", [1, 3])
    def test_a_mask_that_hides_what_was_seen(self, new, padded, said):
        model, outs = make_model(), []
        for prepare in (unpatch, patch):
            prepare(model)
            first = generate(model, padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None)
            longer = torch.cat([first.sequences[:, :-1], torch.full((12, new), 9)], 1)
            mask = torch.ones_like(longer)
            mask[:, :9], mask[:, 12:15] = 0, 0
            inputs = {"input_ids": longer, "attention_mask": mask, "past_key_values": first.past_key_values}
            outs.append((generate(model, inputs, do_sample=False), first.past_key_values))
        assert torch.equal(outs[0][0], outs[1][0])
        assert "hides other tokens" in said()[-1] or "holes" in said()[-1]
        left, stock = outs[1][1], outs[0][1]
        assert (left.get_seq_length(), len(left)) == (stock.get_seq_length(), len(stock)), "it is that cache by now"
        torch.testing.assert_close(left.layers[1].keys[:, :, 15:], stock.layers[1].keys[:, :, 15:])

    def test_rows_that_were_cropped_into_their_padding(self, padded):
        model, outs = make_model(), []
        for prepare in (unpatch, patch):
            prepare(model)
            cache = generate(model, padded, **SAMPLED, return_dict_in_generate=True).past_key_values
            cache.crop(7 - cache.get_seq_length())
            again = {name: given.repeat_interleave(4, 0) for name, given in padded.items()}
            outs.append(generate(model, again, do_sample=True, past_key_values=cache))
        assert torch.equal(*outs)

    def test_padding_does_not_come_back_unseen(self, padded):
        model = patch(make_model())
        cache = generate(model, padded, **SAMPLED, return_dict_in_generate=True, eos_token_id=None).past_key_values
        longer = torch.randint(3, VOCAB, (12, 20 + NEW))
        with pytest.raises(ValueError, match=r"lets rows see their padding, .* never computed; pass the same"):
            generate(model, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}, past_key_values=cache)

    def test_a_model_that_was_changed_after_the_patch(self, rng, said):
        inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (2, 12)))}
        want = generate(make_model(seed=1).double(), inputs, **SAMPLED)
        model = patch(make_model(seed=1), tree_cache="always").double()
        assert torch.equal(generate(model, inputs, **SAMPLED), want)
        assert "are torch.float64" in said()[0]

    def test_an_assistant_that_is_the_model_without_its_last_layer(self, rng, said):
        inputs = {"input_ids": torch.from_numpy(rng.integers(3, VOCAB, (1, 12)))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        want, got, _ = compared(make_model(), inputs, do_sample=False, assistant_early_exit=1)
        assert torch.equal(got, want)
        assert "did not attend" in said()[0]
