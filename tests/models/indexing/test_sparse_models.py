"""Attention to tokens that an indexer selects, in texts longer than what it selects, which is 8 tokens here."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers.cache_utils import DynamicCache

import prefixkit
from prefixkit import TreeCache
from prefixkit.models import IncompleteStep, UnsupportedModel, facts_of, kv_spec
from scripts.tiny_models import tiny_config, tiny_model
from tests.models.generate.generating import BEAMS, SAMPLED, compared, generate
from tests.models.tiny_families import VOCAB

# GLM's second layer takes what the first has selected; dots' second sees a window, and has no indexer.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "hy_v4": {},
    "axk2": {},
    "dots3_note_text": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if request.param not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    return str(request.param)


def make_model(family: str, seed: int | None = None, **options: Any) -> PreTrainedModel:
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    print(f"make_model({family!r}, seed={seed})")
    torch.manual_seed(seed)
    return tiny_model(tiny_config(family, vocab_size=VOCAB, **{**FAMILIES[family], **options}), "")


@pytest.fixture(scope="module")
def made(family: str) -> PreTrainedModel:
    """One for all tests of a family: to measure an indexer takes long."""
    return make_model(family)


@pytest.fixture
def model(made: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """It, without the patch before a test and after it."""
    yield made
    prefixkit.unpatch(made)


def padded(rng) -> dict[str, torch.Tensor]:
    """Three rows behind padding, which share the head of their text."""
    ids = torch.from_numpy(rng.integers(3, VOCAB, (3, 24)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, 7)):
        ids[row, :pad], mask[row, :pad] = 0, 0
        ids[row, pad : pad + 12] = ids[0, :12]
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.drawn(1)
def test_a_tree_gives_the_logits_of_the_original_model(model, drive, dense_logits, rng):
    """Prompts in steps of 13 tokens, some within what is selected and some beyond, then decode steps of all."""
    run, head = drive(model), rng.integers(3, VOCAB, 20).tolist()
    sequences = [run.tree.insert([*head, *rng.integers(3, VOCAB, own).tolist()]) for own in (1, 9, 17)]
    sequences.append(run.tree.insert(rng.integers(3, VOCAB, 5).tolist()))
    run.run(13)
    sequences += run.tree.fork(sequences[1], 2)
    for _ in range(4):
        run.tree.extend_each(sequences, rng.integers(3, VOCAB, len(sequences)).tolist())
        run.run()
    for sequence in sequences:
        tokens = sequence.tokens().tolist()
        assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4
    assert run.tokens_run == run.tree.snapshot().num_tokens, "a shared token runs once"


def test_what_is_selected_matters(family, dense_logits, rng):
    """Or the other tests would compare dense attention with dense attention."""
    model, tokens = make_model(family, seed=1), rng.integers(3, VOCAB, 30).tolist()
    wide = make_model(family, seed=1, index_topk=64)
    assert (dense_logits(model, tokens) - dense_logits(wide, tokens)).abs().max() > 0.1


@pytest.mark.drawn(3)
@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}], ids=["samples", "beams", "greedy"])
def test_tokens_are_those_without_the_patch(model, options, rng):
    want, got, cache = compared(model, padded(rng), max_new_tokens=5, **options)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


@pytest.mark.drawn(1)
def test_a_cache_goes_on_with_more_text(model, rng):
    """Twice, the second time cropped; and without a tree the cache that it falls back to goes on as well."""
    more, given = torch.from_numpy(rng.integers(3, VOCAB, (3, 6))), padded(rng)

    def turns(cache: Any) -> torch.Tensor:
        cache.activate_past_recording()
        ids, mask = given["input_ids"], given["attention_mask"]
        for turn in range(3):
            ids = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache, max_new_tokens=5)
            if turn == 1:
                cache.crop(-4)
                ids = ids[:, :-3]
            if turn == 1 and isinstance(cache, TreeCache):
                cache.fall_back()
            ids = torch.cat((ids, more), 1)
            mask = torch.nn.functional.pad(given["attention_mask"], (0, ids.shape[1] - 24), value=1)
        return ids

    want = turns(DynamicCache(config=model.config))
    prefixkit.patch(model, tree_cache="always")
    assert torch.equal(turns(TreeCache(model)), want)


@pytest.mark.drawn(1)
def test_a_cache_shows_and_pickles_what_transformers_caches(model, rng):
    """Keys, values or latents, and index keys, with what padding holds left out."""
    given = padded(rng)
    own = generate(model, given, do_sample=False, return_dict_in_generate=True).past_key_values
    prefixkit.patch(model, tree_cache="always")
    tree = generate(model, given, do_sample=False, return_dict_in_generate=True).past_key_values
    assert isinstance(tree, TreeCache)
    indexed = 0
    for mine, other in zip(own.layers, pickle.loads(pickle.dumps(tree)).layers, strict=True):
        for row, pad in enumerate((0, 4, 7)):
            length = min(mine.keys.shape[2], 17)  # of layers with a window the last tokens
            assert torch.allclose(other.keys[row, :, -length:], mine.keys[row, :, -length:], atol=1e-4)
            if getattr(mine, "indexer_keys", None) is not None:
                indexed += 1
                assert torch.allclose(other.indexer_keys[row, pad:], mine.indexer_keys[row, pad:], atol=1e-4)
    assert indexed


@pytest.mark.drawn(1)
def test_a_session_saves_what_it_has_computed_and_another_finds_it(model, tmp_path, rng):
    prefixkit.patch(model)
    prompt, options = rng.integers(3, VOCAB, 40).tolist(), {"n": 3, "max_new_tokens": 5, "stop_token_ids": ()}
    with prefixkit.Session(model, kv_budget="4MiB") as session:
        want = [sample.tokens for sample in session.generate([prompt], **options)]
        session.save(tmp_path / "prefixes", [prompt])
    with prefixkit.Session(model, kv_budget="4MiB") as session:
        session.load(tmp_path / "prefixes")
        found = session.generate([prompt], **options)
    assert found.report.prompt_tokens_found >= 39
    assert [sample.tokens for sample in found] == want


@pytest.mark.drawn(1)
def test_samples_that_make_way_for_others_come_back(model, rng):
    """With less memory than all need: preempted, their KV and index keys are copied out and back."""
    prefixkit.patch(model)
    memory = prefixkit.MemoryPolicy(preemption="swap", headroom=0)
    prompts = [rng.integers(3, VOCAB, 20).tolist() for _ in range(3)]
    found = []
    for pages in (200, 12):
        budget = pages * 16 * kv_spec(model).bytes_per_token
        with prefixkit.Session(model, kv_budget=budget, memory=memory) as session:
            found.append(session.generate(prompts, n=3, max_new_tokens=20, seed=5, stop_token_ids=()))
    assert found[1].report.preempted_swapped
    assert [sample.tokens for sample in found[1]] == [sample.tokens for sample in found[0]]


def test_scores_are_the_log_probabilities_of_the_original_model(model, dense_logits, rng):
    tokens = rng.integers(3, VOCAB, 30).tolist()
    want = dense_logits(model, tokens).log_softmax(-1)[range(19, 29), tokens[20:]]
    (score,) = prefixkit.score(prefixkit.patch(model), None, tokens[:20], [tokens[20:]])
    assert (torch.from_numpy(score.logprobs) - want).abs().max() <= 1e-4


def test_a_search_finds_what_the_unpatched_model_finds(model, rng):
    ids = torch.from_numpy(rng.integers(3, VOCAB, (1, 24)))
    want = generate(model, {"input_ids": ids}, do_sample=False, num_beams=3, max_new_tokens=6)
    found = prefixkit.beam_search(prefixkit.patch(model), None, ids, num_beams=3, max_new_tokens=6)
    best = next(iter(found)).tokens
    assert list(best) == want[0, 24 : 24 + len(best)].tolist()


@pytest.mark.drawn(1)
def test_it_errs_no_more_than_the_unpatched_model(family, drive, dense_logits, rng):
    """Against the same weights in float64, at most tokens: rounding makes either select others now and then."""
    dtype = (torch.bfloat16, torch.float16)[list(FAMILIES).index(family) % 2]
    theirs, ours = [], []
    for seed in range(3):
        model = make_model(family, seed, num_experts_per_tok=4, index_topk=24).to(dtype)
        exact, tokens = copy.deepcopy(model).double(), rng.integers(3, VOCAB, 64).tolist()
        exact.config._experts_implementation = "eager"  # the default has no float64
        reference, own = dense_logits(exact, tokens).double(), dense_logits(model, tokens).double()
        run = drive(model)
        run.tree.insert(tokens)
        run.run(25)
        ours.append((run.logits_of(tokens).double() - reference).norm(dim=1)[24:])
        theirs.append((own - reference).norm(dim=1)[24:])
    tree, plain = torch.cat(ours).median(), torch.cat(theirs).median()
    print(f"errors {tree:.4f} on a tree, {plain:.4f} without")
    assert tree <= 1.5 * plain


@pytest.mark.drawn(1)
def test_a_text_no_longer_than_what_is_selected_attends_as_if_all_was(family, drive, rng):
    """Bit by bit, whatever more the indexer would select."""
    tokens = rng.integers(3, VOCAB, 30).tolist()
    found = []
    for most in (30, 64):
        run = drive(make_model(family, seed=2, index_topk=most))
        run.tree.insert(tokens)
        run.run(13)
        found.append(run.logits_of(tokens))
    assert torch.equal(*found)


def test_index_keys_are_cached_beside_what_is_attended_to(family, model):
    facts = facts_of(model)
    first, second = facts.layers
    assert first.selects == 8
    assert first.index_dtype == torch.float32
    assert len(first.cached) == 3
    assert (first.cached[-1].heads, first.cached[-1].head_dim) == (1, 16)
    assert "8 tokens selected by index keys of 1 x 16" in str(first)
    kv = 24 + 8 if first.expands else 4 * (24 + 16)
    of_second = {"glm_moe_dsa": kv, "dots3_note_text": 40 + 8}.get(family, kv + 16)
    assert facts.spec.bytes_per_token == 4 * (kv + 16 + of_second)


def test_a_layer_that_reuses_a_selection_caches_no_index_keys():
    first, second = facts_of(make_model("glm_moe_dsa")).layers
    assert second.index_dtype is None
    assert second.selects == first.selects == 8
    assert len(second.cached) == 2
    assert "8 tokens selected by an earlier layer" in str(second)


def test_index_keys_wider_than_the_pool_keep_all_their_bits():
    """Those of dots are float32 in a bfloat16 model."""
    if "dots3_note_text" not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    first, _ = facts_of(make_model("dots3_note_text").bfloat16()).layers
    assert first.dtype == torch.bfloat16
    assert first.index_dtype == torch.float32
    assert first.cached[-1].head_dim == 2 * 16


def test_a_layer_of_latents_may_have_no_rotary_keys(rng):
    """Mistral Large 4 has such layers, and scales the queries of its indexers by their positions."""
    if "mistral_large4" not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    config = tiny_config("mistral_large4", text_config={"no_rope_layers": [1, 0]})
    model = tiny_model(config, "", AutoModelForImageTextToText)
    sizes = [[tensor.head_dim for tensor in kind.cached] for kind in facts_of(model).layers]
    assert sizes == [[24, 8, 16], [24, 0, 16]]
    want, got, cache = compared(model, padded(rng), max_new_tokens=12, do_sample=False)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


def _unmasked(indexer: Any) -> type:
    class Unmasked(type(indexer)):  # type: ignore[misc]
        def forward(self, hidden, q, embeddings, mask, positions, **cache):
            self.update_indexer = None
            shown = torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)
            return super().forward(hidden, q, embeddings, shown, positions, **cache)

    return Unmasked


def _of_masks(indexer: Any) -> type:
    class OfMasks(type(indexer)):  # type: ignore[misc]
        def forward(self, *args: Any, **cache: Any) -> Any:
            self.update_indexer = None
            return super().forward(*args, **cache).bool()

    return OfMasks


@pytest.mark.parametrize(
    ("changed", "message"),
    [(_unmasked, "selects tokens that its mask hides"), (_of_masks, "something else than indices of tokens")],
)
def test_an_indexer_that_does_something_else_is_refused(changed, message):
    model = make_model("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = changed(layer.self_attn.indexer)
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.self_attn .*{message}"):
        kv_spec(model)


def test_a_step_in_which_an_indexer_does_not_run_is_refused(drive, rng):
    """It would leave no index keys for later steps."""
    run = drive(make_model("glm_moe_dsa", indexer_types=["full", "full"]))
    run.tree.insert(rng.integers(3, VOCAB, 20).tolist())
    layers = run.model.model.layers
    layers[1].self_attn.indexer = None
    with pytest.raises(IncompleteStep, match="layer 1 attends, but its indexer has not run in this step"):
        run.run()
