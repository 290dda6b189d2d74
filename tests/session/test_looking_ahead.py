"""Masks that show later tokens: what sees one another is computed in one step, and shared as a whole or not at all."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import MemoryPolicy, Session, SpanTooLong, TreeCache, UnsupportedVariant
from prefixkit.attention.variants import Variant, alibi, compose
from prefixkit.testing.tiny import tiny_llama
from tests.models.states.hybrids import make_hybrid
from tests.models.tiny_families import make_model
from tests.models.variant_oracle import whole_pass
from tests.models.variants.test_layer_variants import LATENT

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "stop_token_ids": ()}
GREEDY = OPTIONS | {"temperature": 0.0}


def prefix_lm(length: int) -> Variant:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) | (kv_idx < length)

    return prefixkit.variant(mask_mod=mask_mod, name=f"prefix-LM of {length}")


def images(*spans: tuple[int, int]) -> Variant:
    """Tokens of an image see one another, all else is causal."""
    which = torch.zeros(512, dtype=torch.long)
    for number, (begin, end) in enumerate(spans, 1):
        which[begin:end] = number

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        inside = (which[q_idx] == which[kv_idx]) & (which[q_idx] > 0)
        return (kv_idx <= q_idx) | inside

    return prefixkit.variant(mask_mod=mask_mod, name=f"images at {spans}")


NONE = prefixkit.variant(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 0, name="none")
VARIANTS = {
    "none": NONE,
    "prefix-LM": prefix_lm(30),
    "a prefix beyond the prompt": prefix_lm(44),
    "images": images((3, 17), (25, 40)),
    "with ALiBi": compose(prefix_lm(30), alibi([0.5, 0.25, 0.125, 0.0625])),
}


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_llama()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def prompts(rng: np.random.Generator) -> list[list[int]]:
    head = rng.integers(5, 250, 40).tolist()
    return [[*head, *rng.integers(5, 250, n).tolist()] for n in (9, 3, 17)] + [head]


def patched(plain: Any, variant: Any) -> Any:
    return prefixkit.patch(copy.deepcopy(plain), variant=variant)


def logprobs(plain: Any, prompt: list[int], tokens: list[int], variant: Variant, text: int | None = None) -> Tensor:
    rows = whole_pass(plain, [*prompt, *tokens], variant, len(prompt) if text is None else text).log_softmax(-1)
    return rows[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check(plain: Any, prompts: list[list[int]], samples: Any, variant: Variant) -> None:
    for sample in samples:
        want = logprobs(plain, prompts[sample.prompt_index], sample.tokens, variant)
        assert torch.allclose(torch.tensor(sample.logprobs), want, atol=2e-4)


# -- every verb --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_samples(name: str, plain: Any, prompts: list[list[int]]) -> None:
    variant = VARIANTS[name]
    samples = prefixkit.generate(patched(plain, variant), None, prompts, n=3, seed=1, page_size=4, **OPTIONS)
    check(plain, prompts, samples, variant)


@pytest.mark.parametrize("chunk", [15, 19, 41])
def test_chunks_of_prompts_end_where_spans_do(chunk: int, plain: Any, prompts: list[list[int]]) -> None:
    variant = images((3, 17), (25, 40))
    result = prefixkit.generate(patched(plain, variant), None, prompts, prefill_chunk=chunk, **GREEDY)
    check(plain, prompts, result, variant)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("how", "name"), list(zip(itertools.cycle(("swap", "recompute")), VARIANTS)))
def test_samples_that_are_preempted(how: str, name: str, plain: Any, prompts: list[list[int]]) -> None:
    """What comes back are prompts, whose tokens see no sampled ones, and samples."""
    variant, longer = VARIANTS[name], OPTIONS | {"max_new_tokens": 24}
    policy = MemoryPolicy(headroom=1, preemption=how)
    with Session(patched(plain, variant), kv_budget="72KiB", memory=policy) as session:
        result = session.generate(prompts[:2], n=6, seed=1, **longer)
    assert result.report.preempted_swapped + result.report.preempted_recomputed
    check(plain, prompts, [*result][::2], variant)


@pytest.mark.parametrize("name", ["none", "prefix-LM"])
def test_beams(name: str, plain: Any, prompts: list[list[int]]) -> None:
    variant = VARIANTS[name]
    beams = prefixkit.beam_search(
        patched(plain, variant), None, prompts, num_beams=3, max_new_tokens=6, length_penalty=0.0
    )
    for beam in beams:
        want = logprobs(plain, prompts[beam.prompt_index], beam.tokens, variant).sum()
        assert abs(beam.score - want) < 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_of_continuations_that_no_prompt_sees(name: str, plain: Any, prompts: list[list[int]]) -> None:
    variant, continuations = VARIANTS[name], [[5, 6, 7], [5, 9], prompts[0][40:47]]
    model = patched(plain, variant)
    for chunk in (None, 60):
        found = prefixkit.score(model, None, prompts, continuations, prefill_chunk=chunk)
        for prompt, scores in zip(prompts, found, strict=True):
            for tokens, score in zip(continuations, scores, strict=True):
                want = logprobs(plain, prompt, tokens, variant)
                assert torch.allclose(torch.tensor(score.logprobs), want, atol=2e-4)


def test_values_of_tokens_inside_of_spans(plain: Any, prompts: list[list[int]]) -> None:
    with Session(patched(plain, NONE)) as session:
        for _ in range(2):  # the second time they run on KV that there is
            found = session.values(prompts, lambda hidden: hidden @ plain.lm_head.weight.T, at="all")
            for prompt, rows in zip(prompts, found, strict=True):
                assert torch.allclose(rows, whole_pass(plain, prompt, NONE), atol=2e-3)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("options", [{"num_return_sequences": 3}, {"num_beams": 3}], ids=str)
def test_the_models_own_generate(
    options: dict[str, Any], name: str, plain: Any, prompts: list[list[int]], rng: np.random.Generator
) -> None:
    """Rows behind padding, of which two begin alike."""
    variant, model = VARIANTS[name], patched(plain, VARIANTS[name])
    rows = [prompts[0], prompts[1], prompts[3][:20]]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    how = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": "num_beams" not in options}
    out = model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, temperature=1.0, **how, **options
    )
    assert isinstance(out.past_key_values, TreeCache)
    for number, sequence in enumerate(out.sequences.tolist()):
        row = rows[number // (out.sequences.shape[0] // 3)]
        want = whole_pass(plain, sequence[length - len(row) :], variant, len(row))
        for step in (0,) if "num_beams" in options else range(6):
            at = number if "num_beams" not in options else 3 * number
            assert torch.allclose(out.logits[step][at], want[len(row) - 1 + step], atol=2e-3)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v2"])
def test_layers_with_windows_caps_sinks_and_latents(family: str, rng: np.random.Generator) -> None:
    """A window limits what is before a token alone."""
    plain = make_model(family, **(LATENT if family == "deepseek_v2" else {}))
    head = rng.integers(3, 128, 20).tolist()
    prompts = [[*head, *rng.integers(3, 128, n).tolist()] for n in (4, 9)]
    variant = images((2, 14), (16, 20))
    model = patched(plain, variant)
    for _ in range(2):
        check(plain, prompts, prefixkit.generate(model, None, prompts, prefill_chunk=17, **GREEDY), variant)


# -- what is shared ----------------------------------------------------------------------------------------------------


def test_a_span_is_found_again_as_a_whole_and_not_in_part(plain: Any, prompts: list[list[int]]) -> None:
    variant = prefix_lm(30)
    with Session(patched(plain, variant), page_size=4) as session:
        first = session.generate(prompts[:1], **GREEDY)
        again = session.generate(prompts[1:2], **GREEDY)
        assert again.report.prompt_tokens_found == 40, "the span and the tokens after it"
        longer = [*prompts[0], *first[0].tokens, 7]
        on = session.generate([longer], **GREEDY)
        assert on.report.prompt_tokens_found >= len(prompts[0]), "of the sample too"
        check(plain, [longer], on, variant)
        other = [*prompts[0][:29], 251, *prompts[0][30:]]
        result = session.generate([other], **GREEDY)
        assert result.report.prompt_tokens_found == 0, "of 29 equal tokens none: they have seen the last"
        check(plain, [other], result, variant)
        short = prompts[0][:20]
        result = session.generate([short], **GREEDY)
        assert result.report.prompt_tokens_found == 0, "a shorter prefix"
        check(plain, [short], result, variant)


def test_texts_under_no_mask_share_nothing_but_themselves(plain: Any, prompts: list[list[int]]) -> None:
    with Session(patched(plain, NONE)) as session:
        session.generate(prompts, **GREEDY)
        for n, prompt in enumerate(prompts):
            result = session.generate([prompt], n=2, seed=n, **OPTIONS)
            assert result.report.prompt_tokens_found == len(prompt)
            check(plain, [prompt], result, NONE)
        longer = [*prompts[0], 7]
        result = session.generate([longer], **GREEDY)
        assert not result.report.prompt_tokens_found
        check(plain, [longer], result, NONE)


def test_what_is_evicted_of_a_span_is_computed_again_as_a_whole(plain: Any, prompts: list[list[int]]) -> None:
    variant = prefix_lm(30)
    with Session(patched(plain, variant), kv_budget="40KiB", page_size=4) as session:
        for number in (0, 2, 1, 0, 3):
            result = session.generate(prompts[number : number + 1], **GREEDY)
            check(plain, prompts[number : number + 1], result, variant)
            other = [5 + token % 200 for token in prompts[number]]
            values = session.values(other[:25], lambda hidden: hidden @ plain.lm_head.weight.T, at="all")
            assert torch.allclose(values, whole_pass(plain, other[:25], variant), atol=2e-3)


def test_pinned_prompts_are_spans_too(plain: Any, prompts: list[list[int]]) -> None:
    with Session(patched(plain, NONE), kv_budget="100KiB") as session:
        with_pin = session.pin(prompts[0])
        result = session.generate(prompts, n=2, seed=1, **OPTIONS)
        check(plain, prompts, result, NONE)
        assert session.generate(prompts[:1], **GREEDY).report.prompt_tokens_found == len(prompts[0])
        with_pin.release()


def test_search_nodes_are_texts_as_they_grow(plain: Any, prompts: list[list[int]]) -> None:
    with Session(patched(plain, NONE)) as session:
        node, text = session.prompt(prompts[0]), prompts[0]
        for _ in range(2):
            (score,) = session.score(node, [[5, 9]])
            assert torch.allclose(torch.tensor(score.logprobs), logprobs(plain, text, [5, 9], NONE), atol=2e-4)
            node, text = node.extend([5, 9]), [*text, 5, 9]


def test_layers_may_look_ahead_alone(plain: Any, prompts: list[list[int]]) -> None:
    by_layer = {1: prefix_lm(30)}
    for sample in prefixkit.generate(patched(plain, by_layer), None, prompts, **GREEDY):
        prompt = prompts[sample.prompt_index]
        rows = whole_pass(plain, [*prompt, *sample.tokens], by_layer, len(prompt)).log_softmax(-1)
        want = rows[len(prompt) - 1 : -1].gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), want, atol=2e-4)


def test_a_mask_that_changes_in_place_has_other_spans(plain: Any, prompts: list[list[int]]) -> None:
    end = torch.tensor(30)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) | (kv_idx < end)

    variant = prefixkit.variant(mask_mod=mask_mod)
    with Session(patched(plain, variant)) as session:
        for stop in (30, 12, 36):
            end.fill_(stop)
            check(plain, prompts, session.generate(prompts, **GREEDY), variant)


@pytest.mark.parametrize("attempt", range(4))
def test_random_calls_of_a_session(attempt: int, plain: Any, rng: np.random.Generator) -> None:
    """Prompts that share heads, and go on from samples, in a small pool: sampled and scored in any order."""
    bounds = sorted(rng.choice(70, 4, replace=False).tolist())
    variant = [prefix_lm(int(rng.integers(2, 60))), images(tuple(bounds[:2]), tuple(bounds[2:])), NONE][attempt % 3]
    heads = [rng.integers(5, 250, 70).tolist() for _ in range(2)]
    prompts = [
        [
            *heads[int(rng.integers(2))][: int(rng.integers(1, 70))],
            *rng.integers(5, 250, int(rng.integers(1, 12))).tolist(),
        ]
        for _ in range(5)
    ]
    policy = MemoryPolicy(headroom=int(rng.integers(1, 8)), preemption=["swap", "recompute"][attempt % 2])
    sizes: dict[str, Any] = {"page_size": int(rng.choice([1, 3, 16])), "prefill_chunk": int(rng.integers(82, 120))}
    with Session(patched(plain, variant), kv_budget=f"{rng.integers(80, 200)}KiB", memory=policy, **sizes) as session:
        for _ in range(2):
            chosen = [prompts[i] for i in rng.integers(0, len(prompts), 3)]
            samples = session.generate(chosen, n=3, seed=attempt, max_new_tokens=12, stop_token_ids=())
            check(plain, chosen, samples, variant)
            prompts.append([*chosen[0], *samples[0].tokens][:80])
            tokens = rng.integers(5, 250, 4).tolist()
            for prompt, (score,) in zip(chosen, session.score(chosen, [tokens]), strict=True):
                want = logprobs(plain, prompt, tokens, variant)
                assert torch.allclose(torch.tensor(score.logprobs), want, atol=2e-4)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_span_longer_than_a_step_is_refused_by_both_numbers(plain: Any, prompts: list[list[int]]) -> None:
    model = patched(plain, prefix_lm(30))
    message = "prompt 0 has a span of 30 tokens .* a step takes 29 prompt tokens at most; raise prefill_chunk to 30"
    with pytest.raises(SpanTooLong, match=message):
        prefixkit.generate(model, None, prompts, prefill_chunk=29, **GREEDY)
    with pytest.raises(SpanTooLong, match=message):
        prefixkit.score(model, None, prompts, [[5]], prefill_chunk=29)


def test_the_models_own_generate_has_no_longest_step(plain: Any, rng: np.random.Generator) -> None:
    long = rng.integers(5, 250, 1100).tolist()
    how: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = patched(plain, NONE).generate(torch.tensor([long]), output_logits=True, return_dict_in_generate=True, **how)
    want = whole_pass(plain, out.sequences[0].tolist(), NONE, 1100)[1099:-1]
    assert torch.allclose(torch.cat(out.logits), want, atol=5e-3)


def test_a_text_in_a_cache_is_not_extended_where_it_would_be_seen(plain: Any, prompts: list[list[int]]) -> None:
    ids = torch.tensor([prompts[0]])
    for variant, goes in ((prefix_lm(30), True), (prefix_lm(60), False), (NONE, False)):
        model = patched(plain, variant)
        cache = TreeCache(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            if not goes:
                with pytest.raises(UnsupportedVariant, match=r"2 tokens follow 49 in a TreeCache, .* the whole text"):
                    model(ids[:, :2], past_key_values=cache)
                continue
            logits = model(ids[:, :2], past_key_values=cache).logits[0]
        text = [*prompts[0], *prompts[0][:2]]
        assert torch.allclose(logits, whole_pass(plain, text, variant)[-2:], atol=2e-3)
        with pytest.raises(UnsupportedVariant, match=r"crop: token 21 of a row has seen tokens after it"):
            cache.crop(-30)
        cache.crop(-21)
        assert cache.get_seq_length() == 30


def test_a_copied_cache_knows_what_was_its_text(plain: Any, prompts: list[list[int]]) -> None:
    model, ids = patched(plain, NONE), torch.tensor([prompts[0]])
    cache = TreeCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        other = copy.deepcopy(cache)
        cache.reset()
        logits = model(ids[:, 1:2], past_key_values=other).logits[0, -1]
        text = [*prompts[0], *prompts[0][:2]]
        assert torch.allclose(logits, whole_pass(plain, text, NONE, len(prompts[0]))[-1], atol=2e-3)
        other.reset()
        whole = model(torch.tensor([text]), past_key_values=TreeCache(model)).logits[0]
    assert torch.allclose(whole, whole_pass(plain, text, NONE), atol=2e-3), "the same tokens as one text"


def test_prefixes_are_not_saved(plain: Any, prompts: list[list[int]], tmp_path: Any) -> None:
    with Session(patched(plain, NONE)) as session:
        with pytest.raises(UnsupportedVariant, match="cannot be saved or loaded under none"):
            session.save(tmp_path / "prefixes.safetensors", prompts)
        with pytest.raises(UnsupportedVariant, match="cannot be saved or loaded"):
            session.load(tmp_path / "prefixes.safetensors")


def test_layers_that_keep_states_are_refused() -> None:
    with pytest.raises(UnsupportedVariant, match="keep states, which go from token to token"):
        prefixkit.patch(make_hybrid("lfm2"), variant=NONE)
