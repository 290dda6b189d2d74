"""Models with attention code of their own generate on a tree what they generate without."""

from __future__ import annotations

import pickle

import pytest
import torch

from prefixkit import Session, TreeCache, patch, unpatch
from prefixkit.attention.visible import ALL, Visible
from prefixkit.models import facts_of
from prefixkit.testing.tiny import ByteTokenizer
from tests.models.generate.generating import BEAMS, SAMPLED, compared, generate
from tests.models.own_attention.own_models import CASES, own_model
from tests.models.tiny_families import VOCAB


def padded(rng):
    """Three left-padded rows of different length that share most of their head."""
    ids = torch.from_numpy(rng.integers(3, VOCAB, (3, 24)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, 9)):
        ids[row, pad:20] = ids[0, : 20 - pad].clone()
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_the_patch(case, rng):
    model, inputs = own_model(case), padded(rng)
    alone = {name: value[:1] for name, value in inputs.items()}
    for given, options in [(inputs, {"do_sample": False}), (inputs, BEAMS), (alone, SAMPLED)]:
        want, got, cache = compared(model, given, max_new_tokens=5, **options)
        assert isinstance(cache, TreeCache) and not cache.fell_back
        assert torch.equal(want, got)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_as_close_to_float64_as_the_original_model(case, drive, dense_logits, rng):
    all_experts = {"num_local_experts": 2} if case == "jetmoe" else {}  # none is chosen by rounding
    exact = own_model(case, seed=5, **all_experts)
    tokens = rng.integers(3, VOCAB, 40).tolist()
    model = own_model(case, seed=5, **all_experts).bfloat16()
    # XGLM's mask fits no float64.
    reference = dense_logits(exact if case == "xglm" else exact.double(), tokens)
    run = drive(model)
    run.tree.insert(tokens)
    run.run(budget=13)
    own_error = (dense_logits(model, tokens) - reference).abs().mean()
    assert (run.logits_of(tokens) - reference).abs().mean() <= 1.5 * own_error


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", CASES)
def test_a_session_generates_the_same(case):
    model, prompts = own_model(case), ["the quick brown fox", "the quick brown dog"]
    with Session(patch(model), ByteTokenizer(), kv_budget="4MiB") as session:
        got = session.generate(prompts, n=1, max_new_tokens=5, temperature=0.0)
    unpatch(model)
    for one in got:
        ids = torch.tensor([list(prompts[one.prompt_index].encode())])
        want = generate(model, {"input_ids": ids}, do_sample=False, max_new_tokens=5)
        assert one.tokens == want[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("case", ["falcon", "falcon, the newer architecture", "diffllama", "bloom", "gpt_neo"])
def test_without_the_tree_a_cache_goes_on_as_transformers_own(case, rng):
    """Also where a pool holds other heads than the class caches."""
    model = patch(own_model(case), tree_cache="always")
    ids = torch.from_numpy(rng.integers(3, VOCAB, (2, 12)))
    with torch.no_grad():
        cache = model(input_ids=ids[:, :9], past_key_values=TreeCache(model), use_cache=True).past_key_values
        plain = pickle.loads(pickle.dumps(cache))
        rest = {"input_ids": ids[:, 9:], "attention_mask": torch.ones_like(ids)}
        got = model(**rest, position_ids=torch.arange(9, 12)[None], past_key_values=plain).logits
        want = model(input_ids=ids).logits[:, 9:]
    assert torch.allclose(want, got, atol=1e-4)


def test_long_texts_get_falcons_rounded_biases(drive, dense_logits, rng):
    """Positions beyond 256 are no bfloat16 numbers, and slopes of three heads are none either."""
    model = own_model("falcon, ALiBi, 3 heads", max_position_embeddings=512)
    run, tokens = drive(model, num_pages=200), rng.integers(3, VOCAB, 400).tolist()
    run.tree.insert(tokens)
    run.run(budget=150)
    assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4


def test_falcons_sdpa_counts_its_bias_once(rng):
    model, inputs = own_model("falcon, ALiBi"), padded(rng)
    model.set_attn_implementation("sdpa")
    want, got, cache = compared(model, inputs, do_sample=False)
    assert not cache.fell_back and torch.equal(want, got)


def test_a_pool_holds_each_kv_head_of_falcon_once():
    for case, heads in (("falcon, the newer architecture", 2), ("falcon", 1), ("falcon, a KV head each", 4)):
        assert {tensor.heads for cached in facts_of(own_model(case)).spec.layers for tensor in cached} == {heads}


def test_local_layers_of_gpt_neo_have_a_window():
    for sizes, window in (({}, 7), ({"window_size": 40}, 40), ({"window_size": 256}, 256)):
        assert [kind.visible for kind in facts_of(own_model("gpt_neo", **sizes)).layers] == [ALL, Visible(window)]
