"""Variants of attention reach every verb, and KV of one variant is never that of another."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import PrefixFileError, Session
from prefixkit.attention.variants import Variant, alibi, compose, soft_cap
from prefixkit.testing.tiny import tiny_llama
from tests.models.variant_oracle import whole_pass

SLOPES = [0.5, 0.25, 0.125, 0.0625]
VARIANT = compose(alibi(SLOPES), soft_cap(2.0))
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "stop_token_ids": ()}
GREEDY = OPTIONS | {"temperature": 0.0}


@pytest.fixture
def plain() -> Any:
    return tiny_llama()


@pytest.fixture
def model(plain: Any) -> Any:
    return prefixkit.patch(copy.deepcopy(plain), variant=VARIANT)


@pytest.fixture
def prompts() -> list[list[int]]:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(5, 250, 40).tolist()
    return [[*head, *rng.integers(5, 250, n).tolist()] for n in (9, 3, 17)]


def biased(bias: Tensor, traced: bool = True) -> Variant:
    """What each head adds for each distance of up to 7 tokens."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx).clamp(0, 7)]

    return prefixkit.variant(score_mod, name="bias by distance", traced=traced)


def logprobs(plain: Any, prompt: list[int], tokens: list[int], variant: Variant) -> Tensor:
    """Those of the tokens after the prompt, in one whole pass under a variant."""
    rows = whole_pass(plain, [*prompt, *tokens], variant).log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check(plain: Any, prompts: list[list[int]], samples: Any, variant: Variant = VARIANT) -> None:
    for sample in samples:
        want = logprobs(plain, prompts[sample.prompt_index], sample.tokens, variant)
        assert torch.allclose(torch.tensor(sample.logprobs), want, atol=2e-4)


# -- every verb --------------------------------------------------------------------------------------------------------


def test_samples_of_prompts_in_chunks(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    samples = prefixkit.generate(model, None, prompts, n=3, seed=1, prefill_chunk=13, **OPTIONS)
    check(plain, prompts, samples)


def test_samples_that_are_preempted(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    policy = prefixkit.MemoryPolicy(headroom=1, preemption="recompute")
    with Session(model, kv_budget="72KiB", memory=policy) as session:
        result = session.generate(prompts, n=6, seed=1, **OPTIONS | {"max_new_tokens": 24})
    assert result.report.preempted_recomputed
    check(plain, prompts, result)


def test_beams(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    for beam in prefixkit.beam_search(model, None, prompts, num_beams=3, max_new_tokens=6, length_penalty=0.0):
        want = logprobs(plain, prompts[beam.prompt_index], beam.tokens, VARIANT).sum()
        assert abs(beam.score - want) < 1e-3


def test_scores(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    continuations = [[5, 6, 7], [5, 9]]
    for prompt, scores in zip(prompts, prefixkit.score(model, None, prompts, continuations), strict=True):
        for tokens, score in zip(continuations, scores, strict=True):
            assert torch.allclose(torch.tensor(score.logprobs), logprobs(plain, prompt, tokens, VARIANT), atol=2e-4)


def test_a_session_goes_on_from_what_it_holds(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    with Session(model) as session:
        first = session.generate(prompts[:1], **GREEDY)
        check(plain, prompts, first)
        longer = [*prompts[0], *first[0].tokens, 7]
        result = session.generate([longer], n=2, seed=3, **OPTIONS)
        assert result.report.prompt_tokens_found >= len(prompts[0])
        check(plain, [longer], result)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_the_models_own_generate_takes_a_tree_whatever_pays(
    options: dict[str, Any], plain: Any, model: Any, prompts: list[list[int]]
) -> None:
    """One row alone shares nothing; without the tree it would be without the variant."""
    ids = torch.tensor([prompts[0]])
    how = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": False, **options}
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **how)
    assert isinstance(out.past_key_values, prefixkit.TreeCache)
    for row, sequence in enumerate(out.sequences.tolist()):
        want = whole_pass(plain, sequence, VARIANT)
        for step in (0,) if "num_beams" in options else range(6):  # later rows of beams are of other sequences
            assert torch.allclose(out.logits[step][row], want[ids.shape[1] - 1 + step], atol=2e-3)
    if "num_beams" in options:
        (beam, *_) = prefixkit.beam_search(model, None, prompts[:1], num_beams=3, max_new_tokens=6, stop_token_ids=())
        assert beam.tokens == out.sequences[0, ids.shape[1] :].tolist()


def test_generate_off_the_tree_is_an_error(model: Any) -> None:
    ids = torch.arange(5, 20)[None]
    with pytest.raises(prefixkit.UnsupportedVariant, match="was called without a prefix tree"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    prefixkit.patch(model, tree_cache="never", variant=VARIANT)
    with pytest.raises(prefixkit.UnsupportedVariant, match="tree_cache='auto'"):
        model.generate(ids, max_new_tokens=2)
    prefixkit.patch(model, variant=VARIANT)
    with pytest.raises(ValueError, match="output_hidden_states is asked for"):
        model.generate(ids, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)


# -- whose KV it is ----------------------------------------------------------------------------------------------------


def test_another_variant_finds_no_kv_of_the_one_before(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    with Session(model) as session:
        pin = session.pin(prompts[0])
        store = session.store
        prefixkit.patch(model, variant=VARIANT)
        session.generate(prompts[:1], **GREEDY)
        assert session.store is store, "the same one: the pool stays"
        other = alibi([-slope for slope in SLOPES])
        prefixkit.patch(model, variant=other)
        result = session.generate(prompts[:1], n=2, **OPTIONS)
        assert session.store is not store
        assert not result.report.prompt_tokens_found
        check(plain, prompts, result, other)
        pin.release()
        prefixkit.patch(model)
        (sample,) = session.generate(prompts[:1], **GREEDY)
        with torch.no_grad():
            assert sample.tokens[0] == plain(torch.tensor([prompts[0]])).logits[0, -1].argmax()


def test_sessions_of_models_with_other_variants_share_nothing(plain: Any, prompts: list[list[int]]) -> None:
    by_layer = {0: VARIANT}, {1: VARIANT}
    for variants in by_layer:
        model = prefixkit.patch(copy.deepcopy(plain), variant=variants)
        with Session(model) as session:
            (sample,) = session.generate(prompts[:1], **GREEDY)
        rows = whole_pass(plain, [*prompts[0], *sample.tokens], variants).log_softmax(-1)
        want = rows[len(prompts[0]) - 1 : -1].gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), want, atol=2e-4)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("how", ["in place", "data", "inference"])
def test_a_captured_tensor_that_changes_in_place_is_noticed(
    how: str, traced: bool, plain: Any, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prefixkit")
    bias = torch.from_numpy(np.random.default_rng().normal(size=(4, 8))).float()
    model, variant = prefixkit.patch(copy.deepcopy(plain), variant=biased(bias, traced)), biased(bias)
    with Session(model) as session:
        check(plain, prompts, session.generate(prompts, **GREEDY), variant)
        if how == "in place":
            bias.neg_()
        elif how == "data":
            bias.data.copy_(-bias)
        else:
            with torch.inference_mode():
                bias.neg_()
        result = session.generate(prompts, **GREEDY)
        assert not result.report.prompt_tokens_found
        assert any("weights, adapters or numbers changed" in line for line in caplog.messages)
        check(plain, prompts, result, variant)
        assert session.generate(prompts, **GREEDY).report.prompt_tokens_found, "nothing has changed since"


def test_a_number_that_an_untraced_function_captures_may_change(plain: Any, prompts: list[list[int]]) -> None:
    factor = 0.5

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * factor

    variant = prefixkit.variant(score_mod, traced=False)
    model = prefixkit.patch(copy.deepcopy(plain), variant=variant)
    with Session(model) as session:
        check(plain, prompts, session.generate(prompts, **GREEDY), variant)
        factor = 2.0
        check(plain, prompts, session.generate(prompts, **GREEDY), variant)


class Gains:
    """What a key transform reads by name."""

    by_channel = torch.ones(16)


def test_a_tensor_that_a_class_holds_may_change(plain: Any, prompts: list[list[int]]) -> None:
    variant = prefixkit.variant(key=lambda x, positions: x * Gains.by_channel[: x.shape[-1]])
    model = prefixkit.patch(copy.deepcopy(plain), variant=variant)
    with Session(model) as session:
        session.generate(prompts, **GREEDY)
        assert session.generate(prompts, **GREEDY).report.prompt_tokens_found
        Gains.by_channel.mul_(2.0)
        assert not session.generate(prompts, **GREEDY).report.prompt_tokens_found
        Gains.by_channel.fill_(1.0)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_what_a_variant_captures_is_freed_with_the_patch(
    ahead: bool, traced: bool, plain: Any, prompts: list[list[int]]
) -> None:
    model, bias = copy.deepcopy(plain), torch.randn(4, 8)
    variant = biased(bias, traced)
    if ahead:
        variant = compose(variant, prefixkit.variant(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 1))
    known = weakref.ref(bias)
    with Session(prefixkit.patch(model, variant=variant)) as session:
        session.generate(prompts, **GREEDY)
    prefixkit.generate(model, None, prompts, **GREEDY)
    model.generate(torch.tensor(prompts[:1]), max_new_tokens=2)
    prefixkit.unpatch(model)
    del variant, bias, session
    gc.collect()
    assert known() is None


def test_a_cache_goes_on_with_its_own_variant_only(model: Any, prompts: list[list[int]]) -> None:
    cache, ids = prefixkit.TreeCache(model), torch.tensor([prompts[0]])
    with torch.no_grad():
        model(ids, past_key_values=cache)
        prefixkit.patch(model, variant=VARIANT)
        model(ids[:, :1], past_key_values=cache)
        prefixkit.patch(model, variant=soft_cap(3.0))
        with pytest.raises(
            prefixkit.UnsupportedVariant, match=r"computed with alibi.*soft_cap.2..*now applies soft_cap.3."
        ):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)


def test_files_of_prefixes_name_the_variant(plain: Any, model: Any, prompts: list[list[int]], tmp_path: Any) -> None:
    path = tmp_path / "prefixes.safetensors"
    with Session(model) as session:
        session.save(path, prompts)
    equal = compose(alibi(SLOPES), soft_cap(2.0))
    other = prefixkit.patch(copy.deepcopy(plain), variant=equal)
    with Session(other) as session:
        assert session.load(path)
        check(plain, prompts, session.generate(prompts, **GREEDY))
    for variant, named in ((None, "none"), (soft_cap(2.0), "soft_cap.2.#"), ({0: VARIANT}, "alibi.*in layers 0:")):
        prefixkit.patch(other, variant=variant)
        with (
            Session(other) as session,
            pytest.raises(
                PrefixFileError, match=rf"KV under alibi.*soft_cap.*in layers 0 to 1, and the model applies {named}"
            ),
        ):
            session.load(path)
