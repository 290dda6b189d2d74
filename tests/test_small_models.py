"""Trained models on text: a hybrid of gated delta nets and attention, and one with latents, against themselves
unpatched.  Random weights attend to all alike, and their probabilities are flat; these are peaked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import Session, variants
from tests.models.generate.generating import compared
from tests.small_models import ENDINGS, HEAD, PROMPTS, SMALL, TOKENIZER, small_model, tokens_of

NEW = 10
SOURCES = Path(prefixkit.__file__).parent / "tree"


@pytest.fixture(scope="module", params=SMALL)
def loaded(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    yield prefixkit.patch(loaded)
    prefixkit.unpatch(loaded)


def stock(model: Any, text: str, **options: Any) -> tuple[Any, int]:
    """What transformers generates after one text, without the tree; and the text's length."""
    ids = torch.tensor([tokens_of(text)])
    model = prefixkit.patch(model, tree_cache="never")
    return model.generate(ids, do_sample=False, return_dict_in_generate=True, **options), ids.shape[1]


def greedy(model: Any, text: str) -> list[int]:
    out, length = stock(model, text, max_new_tokens=NEW)
    return out.sequences[0, length:].tolist()


def losses(model: Any, tokens: list[int]) -> Tensor:
    """Nats of each token after the first, in one pass without a cache."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none")


def test_the_models_have_learnt_to_use_what_stands_before(loaded: Any) -> None:
    """Bytes of Python alone have 3.1 nats.  They have fewer after a whole text than after its last 8 bytes."""
    text = tokens_of(HEAD)
    windows = torch.tensor([text[end - 8 : end + 1] for end in range(100, len(text))])
    with torch.no_grad():
        logits = loaded(windows[:, :-1], use_cache=False).logits[:, -1]
    after_8_bytes = torch.nn.functional.cross_entropy(logits, windows[:, -1])
    whole = losses(loaded, text)[99:].mean()
    assert whole < 1.2
    assert whole < after_8_bytes - 0.1


def test_greedy_tokens_of_prompts_sampled_together_are_the_unpatched_models(model: Any) -> None:
    result = prefixkit.generate(model, TOKENIZER, PROMPTS, temperature=0, max_new_tokens=NEW)
    own = sum(len(ending.encode()) for ending in ENDINGS)
    assert result.report.tokens_computed <= len(HEAD) + own + len(ENDINGS) * NEW
    for sample, prompt in zip(result, PROMPTS, strict=True):
        assert sample.tokens == greedy(model, prompt)


def test_seeded_samples_do_not_depend_on_company_order_or_pages(model: Any) -> None:
    options = {"n": 3, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": NEW, "seed": 5}
    together = prefixkit.generate(model, TOKENIZER, PROMPTS, **options)
    backward = prefixkit.generate(model, TOKENIZER, PROMPTS[::-1], page_size=1, prefill_chunk=100, **options)
    alone = prefixkit.generate(model, TOKENIZER, PROMPTS[1:2], page_size=128, **options)
    for index in range(len(PROMPTS)):
        expected = [sample.tokens for sample in together.of_prompt(index)]
        assert [sample.tokens for sample in backward.of_prompt(len(PROMPTS) - 1 - index)] == expected
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in together.of_prompt(1)]
    assert len({tuple(sample.tokens) for sample in together}) > len(PROMPTS), "samples of a prompt differ"


def test_beams_are_those_of_transformers(model: Any) -> None:
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12}
    result = prefixkit.beam_search(model, TOKENIZER, PROMPTS[:2], **options)
    for index in range(2):
        out, length = stock(model, PROMPTS[index], output_scores=True, **options)
        for sample, sequence, score in zip(result.of_prompt(index), out.sequences, out.sequences_scores, strict=True):
            assert sample.tokens == sequence[length:].tolist()
            assert sample.score == pytest.approx(score.item(), abs=1e-4)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "options", [{"num_beams": 1}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
)
def test_generate_gives_the_tokens_of_padded_rows_without_the_tree(options: dict[str, Any], model: Any) -> None:
    rows = [tokens_of(prompt) for prompt in PROMPTS]
    width = max(map(len, rows))
    ids = torch.tensor([[257] * (width - len(row)) + row for row in rows])
    given = {"input_ids": ids, "attention_mask": (ids != 257).long()}
    ends = {"pad_token_id": 257, "eos_token_id": 256}
    want, got, cache = compared(model, given, **{"do_sample": False, "max_new_tokens": NEW // 2, **ends, **options})
    assert isinstance(cache, prefixkit.TreeCache)
    assert torch.equal(got, want)


def test_a_call_goes_on_from_texts_that_it_knows(model: Any) -> None:
    """From the end of a sample, from its middle, and from the shared head, whose KV and states are there."""
    with Session(model, TOKENIZER) as session:
        first = session.generate(PROMPTS, temperature=0, max_new_tokens=NEW)
        said = [prompt + sample.text for prompt, sample in zip(PROMPTS, first, strict=True)]
        texts = [said[0], said[1][: -NEW // 2], said[2] + "\n\ndef ", HEAD + "def rename(old, new"]
        before, found = session.report.tokens_computed, session.report.prompt_tokens_found
        again = session.generate(texts, temperature=0, max_new_tokens=NEW)
        assert session.report.prompt_tokens_found - found >= 3 * len(HEAD)
        assert session.report.tokens_computed - before <= len(HEAD) + len(texts) * NEW
    for sample, text in zip(again, texts, strict=True):
        assert sample.tokens == greedy(model, text)


def test_scores_are_those_of_one_forward_pass(model: Any) -> None:
    options = ["separator):\n", "mode=", "None):\n"]
    found = prefixkit.score(model, TOKENIZER, PROMPTS, [options] * len(PROMPTS))
    for prompt, scores in zip(PROMPTS, found, strict=True):
        for option, score in zip(options, scores, strict=True):
            want = -losses(model, tokens_of(prompt + option))[-len(option) :]
            assert torch.from_numpy(score.logprobs).sub(want).abs().max() <= 1e-4


def test_in_bfloat16_it_errs_no_more_than_the_unpatched_model(loaded: Any) -> None:
    """Log-probabilities of what it samples, against float64; the unpatched model's are by one pass over each text."""
    exact, narrow = copy.deepcopy(loaded).double(), copy.deepcopy(loaded).bfloat16()
    ours, theirs = list[Tensor](), list[Tensor]()
    with prefixkit.patched(narrow):
        result = prefixkit.generate(narrow, TOKENIZER, PROMPTS, n=2, temperature=0.8, max_new_tokens=NEW)
    for sample in result:
        text = tokens_of(PROMPTS[sample.prompt_index]) + sample.tokens
        right, plain = (-losses(model, text)[-len(sample.tokens) :] for model in (exact, narrow))
        ours.append(torch.tensor(sample.logprobs) - right)
        theirs.append(plain - right)
    assert torch.cat(ours).norm() <= 1.5 * torch.cat(theirs).norm()


def test_at_positions_in_the_cache_a_text_goes_on_far_behind_what_was_learnt() -> None:
    """The hybrid has learnt texts of 384 bytes.  Its attention sees 4 sinks and 252 bytes here, 1,800 bytes on."""
    model = small_model("hybrid")
    tokens = tokens_of("".join(path.read_text() for path in sorted(SOURCES.glob("*.py"))))[:1800]
    whole = losses(model, tokens)
    prefixkit.patch(model, variant=variants.streaming_llm(4, 252))
    (score,) = prefixkit.score(model, None, tokens[:1], [tokens[1:]])
    streamed = -torch.tensor(score.logprobs)
    assert streamed[1200:].mean() < whole[1200:].mean() - 0.05
    assert streamed[1200:].mean() < streamed[:500].mean()
    (sample,) = prefixkit.generate(
        model, TOKENIZER, PROMPTS[:1], max_new_tokens=280, temperature=0.5, seed=1, stop_token_ids=()
    )
    assert -np.mean(sample.logprobs[256:]) < 1.3, "it goes on with what it finds likely"
