"""What attention over a tree takes for granted is measured, and a model that does otherwise is refused, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prefixkit.attention.visible import Visible
from prefixkit.kv.layer_kinds import CachedTensor, LayerKind
from prefixkit.models import UnsupportedModel, facts_of, is_patched, kv_spec, patch
from prefixkit.models.probe.measured import Probed
from prefixkit.models.probe.passes import ignores_zeros, probe
from prefixkit.models.requirements import CACHE
from tests.models.tiny_families import WINDOW

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
# Models that would answer wrongly without a word if attention over a tree took their layers' place.
WRONG = {
    "doge": ({}, "DogeAttention: RuntimeError"),
}


@pytest.mark.parametrize("model_type", WRONG)
def test_what_a_tree_would_ignore_is_refused(model_type, tiny):
    overrides, why = WRONG[model_type]
    model = tiny(model_type, **overrides)
    with pytest.raises(UnsupportedModel, match=why):
        kv_spec(model)
    assert not is_patched(model)


def test_a_window_is_the_masks_whether_the_attention_function_is_told_or_not(tiny, drive, dense_logits, rng):
    """Qwen2-MoE and PhiMoE put it into the mask alone; OLMoE tells its attention function of one that no mask has."""
    tokens = rng.integers(3, 128, 4 * WINDOW).tolist()
    alternate = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    for model_type, overrides, expected in [
        ("qwen2_moe", alternate, [WINDOW, None]),
        ("phimoe", {}, [WINDOW, WINDOW]),
        ("olmoe", {}, [None, None]),
        ("mistral", {}, [WINDOW, WINDOW]),
        ("mistral", {"sliding_window": 1000}, [1000, 1000]),
    ]:
        model = tiny(model_type, **{**EXPERTS, "sliding_window": WINDOW, **overrides})
        assert [kind.visible for kind in facts_of(model).layers] == [Visible(window) for window in expected]
        run = drive(model)
        run.tree.insert(tokens)
        run.run()
        assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("implementation", "size"),
    [*((name, size) for name in ("eager", "sdpa") for size in (7, 8, 300, 200_000)), ("flex_attention", 300)],
)
def test_a_chunk_of_attention_is_what_queries_see(size, implementation, tiny):
    """Also a chunk that is longer than the 256 positions of the model."""
    model = tiny("llama4_text", **EXPERTS, attention_chunk_size=size, head_dim=16, floor_scale=10**6)
    model.set_attn_implementation(implementation)
    assert [kind.visible for kind in facts_of(model).layers] == [Visible(chunk=size)] * 2


def test_queries_that_are_scaled_by_their_position_are_those_of_layers_without_rotary_embedding(tiny):
    rotary = {"attention_chunk_size": 40, "head_dim": 16, "no_rope_layers": [1, 0]}
    facts = facts_of(tiny("llama4_text", **EXPERTS, **rotary, floor_scale=30, attn_scale=0.25))
    assert [kind.temperature for kind in facts.layers] == [None, (30.0, 0.25)]
    assert facts.scales_from == 29
    facts = facts_of(tiny("llama4_text", **EXPERTS, **rotary, attn_temperature_tuning=False, floor_scale=30))
    assert facts.scales_from is None


def test_a_window_that_only_the_mask_shows_may_be_longer_than_the_models_positions(tiny):
    for window in (300, 150_000):
        kinds = facts_of(tiny("phimoe", **EXPERTS, sliding_window=window)).layers
        assert [kind.visible for kind in kinds] == [Visible(window)] * 2


@pytest.mark.parametrize(("size", "floor_scale"), [(7, 10**6), (300, 10**6), (40, 11)])
def test_texts_go_on_beyond_a_chunk_and_beyond_where_queries_are_scaled(
    size, floor_scale, tiny, drive, dense_logits, rng
):
    options = {"attention_chunk_size": size, "head_dim": 16, "floor_scale": floor_scale, "no_rope_layers": [1, 0]}
    model = tiny("llama4_text", **EXPERTS, **options)
    run, tokens = drive(model, num_pages=200), rng.integers(3, 128, size + 60).tolist()
    run.tree.insert(tokens)
    run.run(50)
    assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4


@pytest.mark.parametrize(("model_type", "ignored"), [("bert", True), ("gpt2", False), ("gpt_bigcode", False)])
def test_kinds_of_tokens_are_ignored_where_zeros_are_what_the_model_takes_for_none(model_type, ignored, tiny):
    model = tiny(model_type, is_decoder=True)
    assert ignores_zeros(model, "token_type_ids", whole=False) is ignored
    assert not ignores_zeros(model, "token_type_ids", whole=True), "which it does not take"
    assert not ignores_zeros(model, "labels_of_mine", whole=False), "which nobody takes"


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_every_attention_implementation_is_probed(implementation, tiny):
    model = tiny("cohere2")
    model.set_attn_implementation(implementation)
    cached = (CachedTensor(2, 24), CachedTensor(2, 24))
    kinds = [LayerKind(4, 2, 24, 24, cached, torch.float32, CPU, visible) for visible in (Visible(WINDOW), Visible())]
    assert probe(model) == Probed(tuple(kinds))


def forward_of(module, change):
    """Let what a module returns go through ``change``."""
    module.register_forward_hook(lambda _, args, output: change(output))


def test_tokens_that_mix_outside_of_attention_are_noticed(tiny):
    model = tiny("llama")
    forward_of(model.model.layers[0].mlp, lambda x: x + 0.5 * x.roll(1, 1))
    with pytest.raises(UnsupportedModel, match=r"before model.layers.1.self_attn the model mixes tokens"):
        kv_spec(model)


def test_tokens_that_mix_after_the_last_layer_are_noticed(tiny):
    model = tiny("llama")
    forward_of(model.model.norm, lambda x: x + 0.5 * x.roll(1, 1))
    with pytest.raises(UnsupportedModel, match=r"after its last attention layer the model mixes tokens"):
        kv_spec(model)


def test_positions_that_are_not_those_given_are_noticed(tiny):
    model = tiny("llama")
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"position_ids": torch.arange(kwargs["position_ids"].shape[1])[None]}),
        with_kwargs=True,
    )
    with pytest.raises(UnsupportedModel, match=r"mixes tokens, or takes no position_ids"):
        kv_spec(model)


def test_positions_of_a_model_that_counts_from_its_padding_token_are_known(tiny):
    assert not facts_of(tiny("roberta", is_decoder=True, pad_token_id=1)).counts_from_zero
    assert facts_of(tiny("bert", is_decoder=True)).counts_from_zero


def test_an_eager_function_that_means_something_else_is_noticed(tiny, scaled_twice):
    import transformers.models.llama.modeling_llama as llama

    scaled_twice(llama)
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModel, match=r"LlamaAttention\) attends in a way of its own"):
        kv_spec(model)


def test_a_difference_that_comes_and_goes_is_no_reason(tiny):
    """Sums of experts come in any order on a GPU, and a tie between experts may fall to the one or the other."""
    model, calls = tiny("llama"), []

    def once(x):
        calls.append(x)
        return x + 0.5 * x.roll(1, 1) if len(calls) == 1 else x

    forward_of(model.model.layers[0].mlp, once)
    assert len(kv_spec(model).layers) == 2


def test_a_probe_is_made_once_and_again_after_a_change(tiny):
    model, passes = tiny("llama"), []
    model.model.norm.register_forward_hook(lambda *args: passes.append(1))
    kv_spec(model), kv_spec(model), kv_spec(patch(model))
    assert len(passes) == 3
    assert kv_spec(model.bfloat16()).dtype == torch.bfloat16
    assert len(passes) == 6
    model.model.layers[1].self_attn.q_proj = nn.Sequential(model.model.layers[1].self_attn.q_proj)
    kv_spec(model)
    assert len(passes) == 9


def test_a_layer_that_asks_for_the_length_of_its_cache_is_refused(tiny):
    model = tiny("llama")
    attention = model.model.layers[1].self_attn

    class Asking(type(attention)):
        """As Llama-4's, for a scale that grows with the text."""

        def forward(self, hidden_states, **kwargs):
            kwargs[CACHE].get_seq_length()
            kwargs[CACHE].update(hidden_states, hidden_states, self.layer_idx)
            return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)

    attention.__class__ = Asking
    with pytest.raises(UnsupportedModel, match=r"\(Asking\) asks its cache for 'get_seq_length', which a tree"):
        kv_spec(model)


def test_no_pass_looks_up_positions_that_a_model_does_not_know(tiny):
    """BART counts its positions from the cache's length; on a GPU a row beyond its table ends the process's context."""
    model = tiny("bart")
    table, seen = model.model.decoder.embed_positions, []
    table.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    probe(model)
    assert seen and all(int(positions.max()) + table.offset < table.num_embeddings for positions in seen)
