"""Models with states whose attention selects groups of tokens, or adds a bias of its own to the scores.

Texts are longer than what is selected (8 tokens), than windows (7), and than the reach of a bias (9).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.cache_utils import DynamicCache

import prefixkit
from prefixkit import TreeCache
from prefixkit.models import IncompleteStep, UnsupportedModel, facts_of, kv_spec
from scripts.tiny_models import VARIANTS, tiny_config, tiny_model
from tests.models.generate.generating import BEAMS, SAMPLED, compared, generate
from tests.models.states.hybrids import HYBRIDS, VOCAB, assert_logprobs, assert_samples, make_hybrid, padded

# The kind of layer, by its name in this transformers.
_INDEXED = tiny_config("glm5_next").text_config.layer_types[-1] if "glm5_next" in CONFIG_MAPPING else ""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": VARIANTS["qwen4_exp_text"]["embeddings of n-grams"],
    "glm5_next": {"text_config": {"layer_types": [_INDEXED] * 2, "indexer_types": ["full", "shared"]}},
    "inkling_text": {"rel_extent": 9},
    "inkling2_text": {
        "rel_extent": 9,
        "log_scaling_n_floor": 6,
        "log_scaling_alpha": 0.5,
        "unpadded_vocab_size": VOCAB,
    },
}
IMAGES = ["glm5_next"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seed() -> int:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return seed


def make(family: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    if family in HYBRIDS:
        return make_hybrid(family)
    if family not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    torch.manual_seed(seed)
    config = tiny_config(family, vocab_size=VOCAB, **{**FAMILIES[family], **options})
    if family in IMAGES:
        config.text_config.vocab_size = VOCAB
    return tiny_model(config, "", AutoModelForImageTextToText if family in IMAGES else AutoModelForCausalLM)


def logits(model: PreTrainedModel, seed: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(padded(seed)["input_ids"][:1], use_cache=False).logits[0]
    return found


def test_samples_have_the_probabilities_of_one_forward_pass(family, seed):
    """Prompts that part anywhere, in steps of few tokens, and calls that go on from samples."""
    assert_samples(make(family, seed), seed)


@pytest.mark.drawn(1)
def test_tokens_are_those_without_the_patch(family, seed):
    model = make(family, seed)
    for options in (SAMPLED, BEAMS):
        want, got, cache = compared(model, padded(seed), max_new_tokens=6, **options)
        assert isinstance(cache, TreeCache), options
        assert not cache.fell_back, options
        assert torch.equal(got, want), options


@pytest.mark.drawn(1)
@pytest.mark.parametrize("family", [*FAMILIES, "lfm2"])
def test_a_cache_goes_on_with_more_text(family, seed):
    """And without a tree, the cache that it falls back to does as well, at the same positions behind padding."""
    model, given = make(family, seed), padded(seed)
    more = torch.randint(3, VOCAB, (3, 4), generator=torch.Generator().manual_seed(seed + 1))

    def turns(cache: Any) -> torch.Tensor:
        ids, mask = given["input_ids"], given["attention_mask"]
        for turn in range(3):
            ids = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache, max_new_tokens=3)
            if turn == 1 and isinstance(cache, TreeCache):
                cache.fall_back()
            ids = torch.cat((ids, more), 1)
            mask = torch.nn.functional.pad(given["attention_mask"], (0, ids.shape[1] - 24), value=1)
        return ids

    want = turns(DynamicCache(config=model.config))
    prefixkit.patch(model, tree_cache="always")
    assert torch.equal(turns(TreeCache(model)), want)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen4_exp_text", {"indexer_budget": 64}),
        ("glm5_next", {"text_config": {**FAMILIES["glm5_next"]["text_config"], "index_topk": 64}}),
        ("inkling_text", {"rel_extent": 1}),
        ("inkling2_text", {"rel_extent": 1}),
    ],
)
def test_what_is_selected_or_added_matters(family, options):
    """Or the other tests would compare plain attention with plain attention."""
    one, other = make(family), make(family, **options)
    values = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(values[name][tuple(map(slice, parameter.shape))])
    assert (logits(one, 0) - logits(other, 0)).abs().max() > 0.05


def test_a_layer_is_measured_as_what_it_is():
    qwen, glm = facts_of(make("qwen4_exp_text")), facts_of(make("glm5_next"))
    (layer,) = qwen.layers
    assert (layer.selects, layer.selection_is_mask, layer.cached[-1].size) == (8, True, 16)
    assert [str(state) for state in qwen.spec.states[1]] == [  # of the embedding of n-grams, its convolution and itself
        "convolution 256 x 9 torch.float32",
        "convolution 2 torch.int64",
    ]
    first, second = glm.layers
    assert (first.selects, first.selection_is_mask, first.cached[-1].size) == (8, False, 2 * 16 + 1)
    assert (second.selects, second.index_dtype) == (8, None)
    window, whole = facts_of(make("inkling_text")).layers
    assert window.biased
    assert whole.biased
    assert (window.visible.window, whole.visible.window) == (7, None)
    assert "with a bias for each head, query and position" in str(whole)
    assert whole.plan_kinds[0].plain


def test_rows_are_padded_only_as_far_as_queries_are_not_scaled(seed):
    """Inkling scales them by their place in the batch, behind padding as well."""
    model = make("inkling_text", seed, log_scaling_n_floor=68, log_scaling_alpha=0.5)
    assert facts_of(model).scales_from == 68
    assert facts_of(make("inkling2_text", seed)).scales_from is None, "which scales them by their positions"
    for pads, new, on_tree in (((0, 7), 5, True), ((0, 7), 7, False), ((0, 0), 7, True)):
        length = {"max_new_tokens": new, "min_new_tokens": new}  # a row that ends sooner would not reach position 68
        want, got, cache = compared(model, padded(seed, 64, pads), **length, do_sample=False)
        assert isinstance(cache, TreeCache) == on_tree
        assert torch.equal(got, want)


def test_a_bias_errs_no_more_than_in_the_unpatched_model(seed):
    """Against the same weights in float32; where rounding decides which tokens are selected, errors say little."""
    exact, model = (make("inkling_text", seed, rel_extent=9, num_experts_per_tok=4) for _ in range(2))
    prompt = padded(seed)["input_ids"][0, :13].tolist()
    found = prefixkit.generate(
        prefixkit.patch(model.bfloat16()), None, [prompt], n=6, max_new_tokens=5, stop_token_ids=()
    )
    assert_logprobs(model, [prompt], found, exact=exact, allowed=0)


class _KeptMask(torch.Tensor):
    """A mask that no other narrows."""

    def __and__(self, other: Any) -> Any:
        return self


def _ignores_its_indexer(module: Any) -> None:
    cls = type(module)

    @functools.wraps(cls.forward)
    def forward(self: Any, hidden: Any, embeddings: Any, attention_mask: Any, **given: Any) -> Any:
        return cls.forward(self, hidden, embeddings, attention_mask.as_subclass(_KeptMask), **given)

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def _makes_another_mask(module: Any) -> None:
    cls = type(module)

    def mask_of(self: Any, **given: Any) -> torch.Tensor:
        return torch.zeros_like(cls.build_attention_mask_from_topk(self, **given))

    module.__class__ = type(cls.__name__, (cls,), {"build_attention_mask_from_topk": mask_of})


def _selects_whole_pools(module: Any) -> None:
    module.indexer.index_kpool_always_select_tail = False


def _drops_its_bias(module: Any) -> None:
    module.rel_logits_proj.forward = lambda states, at, keys: torch.zeros(1, states.shape[2], len(at), 1)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen4_exp_text", _ignores_its_indexer, "attends to tokens that its indexer has not selected"),
        ("glm5_next", _makes_another_mask, "makes another mask than that of the tokens that are selected"),
        ("glm5_next", _selects_whole_pools, "an indexer selects no token of a short text"),
        ("inkling_text", _drops_its_bias, "adds .* to its scores, which are not numbers of each position"),
    ],
)
def test_a_layer_that_does_something_else_is_refused(family, change, message):
    model = make(family)
    model.set_attn_implementation("sdpa")
    for module in [*model.modules()]:
        if hasattr(module, "rel_logits_proj") or getattr(module, "indexer", None) is not None:
            change(module)
    with pytest.raises(UnsupportedModel, match=message):
        kv_spec(model)


def test_a_step_without_its_bias_is_refused(seed):
    """It would attend without one."""
    model = prefixkit.patch(make("inkling_text", seed))
    assert all(layer.biased for layer in facts_of(model).layers)
    for layer in model.model.layers:
        layer.self_attn.rel_logits_proj.forward = lambda *given: None
    with pytest.raises(IncompleteStep, match="layer 0 attends without its selected tokens, its bias"):
        prefixkit.generate(model, None, [[5, 6, 7, 8]], max_new_tokens=2, stop_token_ids=())
