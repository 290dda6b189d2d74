"""A patched model applies its user's variants wherever it runs on a tree, and nowhere runs without them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache

import prefixkit
from prefixkit import TreeCache, UnsupportedVariant, patch, patched, unpatch
from prefixkit.attention.variants import alibi, attention_sinks, compose, sliding_window, soft_cap
from prefixkit.models import IncompleteStep, facts_of
from prefixkit.models.variants.layer_variants import LAYER_VARIANT
from scripts.tiny_models import tiny_config, tiny_model
from tests.models.states.hybrids import make_hybrid
from tests.models.variant_oracle import whole_pass, with_additive_mask
from tests.op_calls import Calls

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
ALIBI = alibi(SLOPES)
CAP = soft_cap(1.5)
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}


def in_documents(length):
    """Tokens see their own document, of which each has so many tokens."""
    documents = torch.arange(256) // length

    def mask_mod(b, h, q_idx, kv_idx):
        return (documents[q_idx] == documents[kv_idx]) & (kv_idx <= q_idx)

    return prefixkit.variant(mask_mod=mask_mod, name=f"documents of {length}")


def scaled(factor, **options):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor + h

    return prefixkit.variant(score_mod, name="scaled", **options)


VARIANTS = {
    "alibi": ALIBI,
    "cap": CAP,
    "window": sliding_window(5),
    "documents": in_documents(6),
    "all": compose(scaled(torch.tensor(0.75)), ALIBI, CAP, in_documents(9)),
    "not traced": scaled(torch.tensor(0.75), traced=False),
}


def texts_of(rng):
    """Texts that share prefixes."""
    head = rng.integers(3, 128, 9).tolist()
    middle = [*head, *rng.integers(3, 128, 5).tolist()]
    return [[*one, *rng.integers(3, 128, n).tolist()] for one, n in ((head, 4), (middle, 3), (middle, 8))]


def run_on_tree(drive, model, texts, variant, **options):
    run = drive(model, variant=variant, **options)
    for text in texts:
        run.tree.insert(text)
    run.run(budget=7)
    return [run.logits_of(text) for text in texts]


def check(drive, model, texts, variant, **options):
    for text, logits in zip(texts, run_on_tree(drive, model, texts, variant, **options), strict=True):
        assert torch.allclose(logits, whole_pass(model, text, variant), atol=1e-4)


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen2", "cohere2"])
def test_logits_are_those_of_a_whole_pass_under_the_variant(family, name, tiny, drive, rng):
    check(drive, tiny(family), texts_of(rng), VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_latents_are_expanded_under_a_variant(name, tiny, drive, rng):
    check(drive, tiny("deepseek_v2", **LATENT), texts_of(rng), VARIANTS[name])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {"layer_types": ["full_attention"] * 2}),
        ("gptj", {"n_head": 4, "n_layer": 2, "n_embd": 64, "rotary_dim": 8}),
        ("diffllama", {}),
    ],
)
def test_an_additive_variant_is_an_additive_mask_of_transformers(family, options, tiny, drive, rng):
    """So the variant comes after the layer's own cap."""
    model, texts = tiny(family, **options), texts_of(rng)
    nearer = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score + 0.3 * (kv_idx - q_idx))
    for text, logits in zip(texts, run_on_tree(drive, model, texts, nearer), strict=True):
        want = with_additive_mask(model, text, lambda q, kv: 0.3 * (kv - q)[None])
        assert torch.allclose(logits, want, atol=1e-4)


def test_a_layers_own_alibi_stays(tiny, drive, rng):
    model, texts = tiny("bloom", n_head=4, n_layer=2), texts_of(rng)
    found, build = run_on_tree(drive, model, texts, ALIBI), model.transformer.build_alibi_tensor

    def both(mask, heads, dtype):
        of_key = build(mask, heads, dtype)
        return of_key + SLOPES[:, None, None] * torch.arange(of_key.shape[2])

    model.transformer.build_alibi_tensor = both
    for text, logits in zip(texts, found, strict=True):
        with torch.no_grad():  # with a mask it calls what was put there
            want = model(torch.tensor([text]), attention_mask=torch.ones(1, len(text), dtype=torch.long)).logits[0]
        assert torch.allclose(logits, want, atol=1e-4)


def test_layers_have_variants_of_their_own(tiny, drive, rng):
    model, texts = tiny("llama", num_hidden_layers=3), texts_of(rng)
    by_number = {0: ALIBI, 2: CAP}
    check(drive, model, texts, by_number)
    found = run_on_tree(drive, model, texts, by_number.get)
    for text, logits in zip(texts, found, strict=True):
        assert torch.allclose(logits, whole_pass(model, text, by_number), atol=1e-4)


def test_of_a_hybrid_model_the_layers_with_scores_have_variants(rng):
    model, text = make_hybrid("lfm2"), texts_of(rng)[0]
    want = whole_pass(model, text, ALIBI).log_softmax(-1)[4:-1].gather(1, torch.tensor(text[5:])[:, None])[:, 0]
    assert facts_of(patch(model, variant=ALIBI)).variants == {1: ALIBI}
    (score,) = prefixkit.score(model, None, text[:5], [text[5:]])
    assert torch.allclose(torch.from_numpy(score.logprobs), want, atol=1e-4)
    with pytest.raises(UnsupportedVariant, match="names layer 0, and the model's attention layers are 1; only these"):
        patch(model, variant={0: ALIBI})


def test_a_variants_window_ends_what_is_read(tiny):
    model = patch(tiny("gemma2"), variant=sliding_window(5))
    assert [kind.read_range.window for kind in facts_of(model).layers] == [5, 5]
    patch(model, variant=sliding_window(9))
    assert [kind.read_range.window for kind in facts_of(model).layers] == [7, 9]


# -- what a patch keeps ------------------------------------------------------------------------------------------------


def variants_in(model):
    return [layer.self_attn.__dict__.get(LAYER_VARIANT) for layer in model.model.layers]


def test_the_same_variant_given_twice_stays_what_it_is(tiny):
    factor = torch.tensor(2.0)
    model = patch(tiny(), variant=scaled(factor))
    first, kinds = variants_in(model), facts_of(model).layers
    patch(model, variant=scaled(factor))
    assert variants_in(model) == first, "of the same code and tensors"
    assert facts_of(model).layers == kinds
    patch(model, variant=scaled(factor.clone()))
    assert variants_in(model) != first, "a tensor of its own may change apart"
    assert facts_of(model).layers != kinds


def test_patching_without_a_variant_takes_it_away_and_unpatching_leaves_no_trace(tiny, drive, dense_logits, rng):
    model, texts = tiny(), texts_of(rng)
    before = dict(vars(model.model.layers[0].self_attn))
    patch(model, variant=ALIBI)
    (logits, *_) = run_on_tree(drive, model, texts, None, copied=False)
    assert variants_in(model) == [None, None]
    assert torch.allclose(logits, dense_logits(model, texts[0]), atol=1e-4)
    patch(model, variant=ALIBI)
    unpatch(model)
    assert vars(model.model.layers[0].self_attn) == before
    dense_logits(model, texts[0])


def test_the_context_manager_leaves_variants_as_they_are(tiny):
    model = patch(tiny(), variant={1: ALIBI})
    with patched(model):
        assert variants_in(model) == [None, ALIBI]
    assert variants_in(model) == [None, ALIBI]


def test_a_copy_of_a_patched_model_has_its_variant(tiny, drive, rng):
    model, texts = tiny(), texts_of(rng)
    other = copy.deepcopy(patch(copy.deepcopy(model), variant=CAP))
    (logits, *_) = run_on_tree(drive, other, texts, facts_of(other).variants, copied=False)
    assert torch.allclose(logits, whole_pass(model, texts[0], CAP), atol=1e-4)


def test_one_line_says_what_layers_apply(tiny, caplog):
    caplog.set_level("INFO", "prefixkit")
    model = patch(tiny("llama", num_hidden_layers=4), variant={0: CAP, 1: CAP, 3: ALIBI})
    said = [line for line in caplog.messages if line.startswith("attention applies")]
    assert len(said) == 1
    assert "soft_cap(1.5)#" in said[0]
    assert "in layers 0 to 1, alibi(4 heads)#" in said[0]
    patch(model)
    assert caplog.messages[-1] == "attention applies no variant"


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(model, variant, message, error=UnsupportedVariant):
    classes = [type(module) for module in model.modules()]
    with pytest.raises(error, match=message):
        patch(model, variant=variant)
    assert [type(module) for module in model.modules()] == classes, "nothing was changed"


def test_what_is_no_variant_is_refused(tiny):
    refused(tiny(), 3, "variant must be a prefixkit variant, a mapping or a function .* got int 3", TypeError)
    refused(tiny(), lambda score, b, h, q_idx, kv_idx: score, "function of score, b, .*becomes a variant by", TypeError)
    refused(tiny(), {0: len}, "variant gives layer 0 a builtin_function_or_method .*becomes a variant by", TypeError)
    refused(tiny(), {2: CAP}, "names layer 2, and the model's attention layers are 0 to 1")
    held = object()
    unknown = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score + held.bias, traced=False)
    refused(tiny(), unknown, "numbers, strings, tensors and plain functions, got a object", TypeError)
    for traced in (True, False):
        of = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score + b, name="by sequence", traced=traced)
        refused(tiny(), of, "cannot apply the variant 'by sequence': it reads b, and a model's sequences have no")


def test_layers_that_cannot_apply_a_variant_are_refused_at_once(tiny):
    refused(tiny("diffllama"), ALIBI, r"layer 0 \(DiffLlamaAttention\) cannot apply .*alibi.*: it reads h, .* order")
    if "deepseek_v32" in CONFIG_MAPPING:
        refused(tiny_model(tiny_config("deepseek_v32"), ""), CAP, "an indexer selects the tokens that its queries see")
    if "deepseek_v4" in CONFIG_MAPPING:
        refused(tiny_model(tiny_config("deepseek_v4"), ""), CAP, "an indexer selects|attends to compressed tokens too")
    refused(tiny(), attention_sinks(), "sinks are logits that a layer brings itself")


def test_a_step_that_does_not_say_how_far_tokens_see_is_refused(tiny, drive, rng):
    ahead = prefixkit.variant(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 1)
    with pytest.raises(IncompleteStep, match="tokens see later ones, and the step does not say how far"):
        run_on_tree(drive, tiny(), texts_of(rng), ahead)


def test_a_call_that_would_leave_the_variant_out_is_refused(tiny):
    model = patch(tiny(), variant={1: CAP})
    ids = torch.arange(3, 12)[None]
    for options in ({}, {"past_key_values": DynamicCache(config=model.config)}):
        with pytest.raises(UnsupportedVariant, match=r"LlamaAttention was called without a prefix tree, .*soft_cap"):
            model(ids, **options)
    with pytest.raises(UnsupportedVariant, match="without a prefix tree"):
        model.model(ids)
    with torch.no_grad():
        model(ids, past_key_values=TreeCache(model))


# -- what is known of blocks -------------------------------------------------------------------------------------------


def classified(run, **options):
    step = run.step(**options)
    with Calls(torch.ops.prefixkit.classify_blocks.default) as counted:
        run.runner(step)
    run.tree.mark_computed([node for node, _, _ in run.runs], [end for _, _, end in run.runs])
    return counted.times


@pytest.mark.parametrize(
    ("variant", "prompt", "decode"),
    [
        (in_documents(6), 1, 1),
        (compose(CAP, in_documents(6), sliding_window(5)), 1, 1),
        (prefixkit.variant(mask_mod=lambda b, h, q, kv: (kv <= q) & ((q - kv) % (h + 2) == 0)), 1, 1),
        (sliding_window(5), 1, 0),
        (prefixkit.variant(mask_mod=lambda b, h, q, kv: (kv <= q) & (q // 7 - kv // 7 < 2)), 1, 0),
        (ALIBI, 0, 0),
    ],
    ids=["documents", "composed", "by head", "window", "chunks", "no mask"],
)
def test_layers_of_a_kind_share_one_classification_in_a_step(variant, prompt, decode, tiny, drive, rng):
    """Decode steps have none where ranges of positions decide what is hidden."""
    run = drive(tiny("llama", num_hidden_layers=3), variant=variant)
    sequences = [run.tree.insert(text) for text in texts_of(rng)[:1]]
    assert classified(run, logit_rows=[-1 + len(sequences[0].tokens())]) == prompt
    run.tree.extend_each(sequences, [5])
    assert classified(run) == decode


def test_layers_with_windows_of_their_own_are_classified_apart(tiny, drive, rng):
    layers = ["sliding_attention", "full_attention"] * 2
    run = drive(tiny("gemma2", num_hidden_layers=4, layer_types=layers), variant=in_documents(6))
    sequence = run.tree.insert(texts_of(rng)[0])
    run.run()
    run.tree.extend_each([sequence], [5])
    assert classified(run) == 2, "of four layers, two of each kind"
