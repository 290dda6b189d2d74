"""Scores of given continuations over a real model: exact, the same in any company, and for any form of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import Score, Session
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.models import NotPatched
from prefixkit.session.session import MemoryReleased, SessionBusy
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import EOS, ByteTokenizer, byte_tokenizer, tiny_llama
from tests.covering import pairwise_cover

HEAD = "Which of these is an animal? It has four legs and a tail, and it barks at strangers.\n"
PROMPTS = [HEAD + "Answer:", HEAD + "Answer: a", HEAD + "The answer is", "Q", HEAD + "Answer:"]
CONTINUATIONS = [" a dog.", " a door.", " a dog, or a cat", "n", " a dog."]


@pytest.fixture
def session(model: Any) -> Iterator[Session]:
    with Session(model, ByteTokenizer(), kv_budget="4MiB") as session:
        yield session


def encoded(text: str) -> list[int]:
    return list(text.encode())


def exact_of(model: Any, prompt: str, continuation: str) -> tuple[torch.Tensor, list[bool]]:
    """A plain model's log-probabilities of the continuation's tokens, in its own dtype, and which are greedy."""
    tokens, rows = encoded(continuation), slice(len(encoded(prompt)) - 1, -1)
    with torch.no_grad():
        logits = model(torch.tensor([encoded(prompt) + tokens])).logits[0, rows]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = logits.log_softmax(-1)[range(len(tokens)), tokens]
    return logprobs, (logits.argmax(-1) == torch.tensor(tokens)).tolist()


def logprobs_of(scores: list[list[Score]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([one.logprobs for each in scores for one in each]))


@pytest.fixture(scope="module")
def rounding() -> float:
    """By how much two float32 results may differ, each as far from float64 as 1.5 times torch's own."""
    exact, plain = tiny_llama().double(), tiny_llama()
    errors = [
        exact_of(plain, *pair)[0].double() - exact_of(exact, *pair)[0] for pair in product(PROMPTS, CONTINUATIONS)
    ]
    return 3 * float(torch.cat(errors).abs().max())


def assert_same(found: list[list[Score]], expected: list[list[Score]], rounding: float) -> None:
    for own, others in zip(found, expected, strict=True):
        for one, other in zip(own, others, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=rounding)


@cache
def exact_and_torchs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all continuations by weights of ``dtype``, in float64, and in ``dtype`` by torch."""
    pairs, plain = list(product(PROMPTS, CONTINUATIONS)), tiny_llama().to(dtype)
    torchs = torch.cat([exact_of(plain, *pair)[0] for pair in pairs]).double()
    exact = plain.double()
    return torch.cat([exact_of(exact, *pair)[0] for pair in pairs]), torchs


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("page_size", "chunk", "budget"), pairwise_cover(product((1, 16), (5, None), ("1MiB", "130KiB")))
)
def test_errors_against_float64_are_no_larger_than_torchs_own(
    dtype: torch.dtype, page_size: int, chunk: int | None, budget: str
) -> None:
    model, (exact, torchs) = tiny_llama().to(dtype), exact_and_torchs(dtype)
    with Session(
        prefixkit.patch(model), ByteTokenizer(), kv_budget=budget, page_size=page_size, prefill_chunk=chunk
    ) as session:
        first = logprobs_of(session.score(PROMPTS, CONTINUATIONS))
        again = logprobs_of(session.score(PROMPTS, CONTINUATIONS))
    for found in (first, again):
        assert (found.double() - exact).abs().max() <= 1.5 * (torchs - exact).abs().max()


def test_they_are_those_of_the_models_own_logits(session: Session, rounding: float) -> None:
    plain = tiny_llama()
    for prompt, own in zip(PROMPTS, session.score(PROMPTS, CONTINUATIONS), strict=True):
        for continuation, score in zip(CONTINUATIONS, own, strict=True):
            logprobs, greedy = exact_of(plain, prompt, continuation)
            np.testing.assert_allclose(score.logprobs, logprobs, rtol=0, atol=rounding)
            assert score.tokens.tolist() == encoded(continuation)
            assert score.greedy.tolist() == greedy and score.is_greedy == all(greedy)
            assert score.total == pytest.approx(float(logprobs.double().sum()), abs=1e-4)


def test_greedy_samples_are_greedy_and_have_the_log_probabilities_that_sampling_gave(
    session: Session, rounding: float
) -> None:
    for sample in session.generate(PROMPTS, temperature=0, max_new_tokens=12, stop_token_ids=()):
        (score,) = session.score(PROMPTS[sample.prompt_index], [sample.tokens])
        assert score.is_greedy
        np.testing.assert_allclose(score.logprobs, sample.logprobs, rtol=0, atol=rounding)


def test_tokens_shared_by_prompts_and_continuations_are_computed_once(session: Session) -> None:
    session.score(PROMPTS, CONTINUATIONS)
    texts = [encoded(prompt + one) for prompt, one in product(PROMPTS, CONTINUATIONS)]
    distinct = {tuple(text[:end]) for text in texts for end in range(1, len(text))}
    assert session.report.tokens_computed == len(distinct)
    assert session.report.tokens_plain_batch == sum(len(text) - 1 for text in texts)
    assert session.report.prompts == 5


def test_what_a_prompt_has_in_common_with_anothers_continuation_changes_neither(
    session: Session, rounding: float
) -> None:
    """A prompt that leaves another's continuation in its middle."""
    prompts, continuations = [[5], [5, 7, 8, 1]], [[[7, 8, 9, 4]], [[2, 3]]]
    together = session.score(prompts, continuations)
    alone = [session.score(prompt, own) for prompt, own in zip(prompts, continuations, strict=True)]
    assert_same(together, alone, rounding)


def test_one_call_and_a_session_give_the_same(model: Any, session: Session, rounding: float) -> None:
    for options in ({}, {"page_size": 1, "prefill_chunk": 3}, {"kv_budget": "130KiB"}):
        scores: Any = prefixkit.score(model, ByteTokenizer(), PROMPTS, CONTINUATIONS, **options)  # type: ignore[arg-type]
        assert_same(scores, session.score(PROMPTS, CONTINUATIONS), rounding)
    (one,) = prefixkit.score(model, None, [1, 2, 3], [[4, 5]])
    assert isinstance(one, Score)


CHAT = [{"role": "user", "content": "hi"}]
TEXT = "<user>hi<assistant>"


@pytest.mark.parametrize(
    "prompt",
    [TEXT, encoded(TEXT), np.array(encoded(TEXT)), torch.tensor(encoded(TEXT)), tuple(encoded(TEXT)), CHAT],
    ids=["text", "ids", "array", "tensor", "tuple", "chat"],
)
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_one_prompt_in_any_form_has_a_score_for_each_continuation(
    session: Session, rounding: float, prompt: Any, as_ids: bool
) -> None:
    given = [encoded(one) for one in CONTINUATIONS] if as_ids else CONTINUATIONS
    expected = session.score(TEXT, CONTINUATIONS)
    for scores in (
        session.score(prompt, given),
        session.score([prompt], given)[0],
        session.score([prompt], [given])[0],
    ):
        assert_same([scores], [expected], rounding)


def test_several_prompts_have_one_list_of_continuations_or_one_each(session: Session, rounding: float) -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    pairs = torch.tensor([[7, 8], [9, 10]])
    common = session.score(ids, pairs)
    assert [[one.tokens.tolist() for one in each] for each in common] == [[[7, 8], [9, 10]]] * 2
    for prompts, continuations in (
        (ids.tolist(), [[7, 8], [9, 10]]),
        (iter(ids.tolist()), iter([[7, 8], [9, 10]])),
        (ids, [[[7, 8], [9, 10]], [[7, 8], [9, 10]]]),
        (ids, [pairs, pairs]),
        (ids.numpy(), torch.stack([pairs, pairs])),
    ):
        assert_same(session.score(prompts, continuations), common, rounding)
    own = session.score([[1, 2, 3], [4, 5]], [["x"], ["y", [6]]])
    assert [[one.tokens.tolist() for one in each] for each in own] == [[[120]], [[121], [6]]]


def test_a_strings_own_tokens_without_special_ones_follow_the_prompt(model: Any, rounding: float) -> None:
    class WithMarks(ByteTokenizer):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [EOS, *encoded(text)] if add_special_tokens else encoded(text)}

    with Session(model, WithMarks(), kv_budget="1MiB") as session:
        scores = session.score("a b", [" c"])
        assert_same([scores], [session.score([EOS, *encoded("a b")], [encoded(" c")])], rounding)


@pytest.mark.parametrize(
    ("prompts", "continuations", "error", "message"),
    [
        ("a", {"x": 1}, TypeError, "continuations must be a list of strings or of lists of token ids, got dict"),
        ("a", b"x", TypeError, "continuations must be a list"),
        ("a", 5, TypeError, "continuations must be a list"),
        ("a", [5], ValueError, "continuation 0: pass token ids of one dimension"),
        ("a", [[]], ValueError, "continuation 0: pass at least one token"),
        ("a", [["x", "y"]], TypeError, "continuation 0: token ids must be integers"),
        ("a", [[-1]], ValueError, "continuation 0: token -1 is outside the model's vocabulary of 260"),
        ("a", torch.tensor([[1, 2], [3, EOS + 1]]), ValueError, "continuation 1 is padded on the right"),
        (torch.tensor([[EOS + 1, 2]]), ["x"], ValueError, "prompt 0 is padded on the left"),
        (["a", "b"], [["x"], []], ValueError, "prompt 1 has no continuations"),
        (["a", ""], ["x"], ValueError, "prompt 1 is an empty string"),
        ("a", ["x", "\udfff"], ValueError, "continuation 1 holds a lone surrogate, which UTF-8 cannot encode; replace"),
        ({"input_ids": [[1]]}, ["x"], TypeError, "prompts must be a list of prompts, got a dict"),
        (5, ["x"], TypeError, "prompts must be a list of prompts.*, got int 5; put a single one into a list"),
        ([[1, 260]], ["x"], ValueError, "prompt 0: token 260 is outside"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    model: Any, session: Session, prompts: Any, continuations: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        session.score(prompts, continuations)
    with pytest.raises(error, match=message):
        prefixkit.score(model, ByteTokenizer(), prompts, continuations)
    assert not session.report.steps


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), byte_tokenizer()], ids=["bytes", "transformers"])
def test_text_that_utf8_cannot_encode_is_refused_by_its_place(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1 holds a lone surrogate, which UTF-8 cannot encode; replace it"):
        prefixkit.generate(model, tokenizer, ["a", "b\ud800"])


def test_text_needs_a_tokenizer_a_model_its_patch_and_a_session_its_memory(model: Any) -> None:
    with Session(model, kv_budget="1MiB") as session:
        with pytest.raises(ValueError, match="continuation 0: 'x' is text, but tokenizer is None"):
            session.score([[1]], ["x"])
        session.release_memory()
        with pytest.raises(MemoryReleased, match="resume"):
            session.score([1], [[2]])
    with pytest.raises(NotPatched, match=r"call model = prefixkit\.patch"):
        prefixkit.score(tiny_llama(), None, [1], [[2]])


def test_what_does_not_fit_even_alone_is_refused_and_other_calls_go_on(model: Any) -> None:
    with pytest.raises(
        KVBudgetTooSmall, match=r"prompt 1 of 4000 tokens with its continuation 0 of 2 .*raise kv_budget"
    ):
        prefixkit.score(model, None, [[1], [2] * 4000], [[3, 4]], kv_budget="1MiB")
    with Session(model, ByteTokenizer(), kv_budget="130KiB") as session:
        with pytest.raises(KVBudgetTooSmall):
            session.score("a" * 4000, ["b"])
        samples = session.generate(PROMPTS[:2], n=2, max_new_tokens=4)
        session.score(PROMPTS, CONTINUATIONS)
        assert [one.tokens for one in session.generate(PROMPTS[:2], n=2, max_new_tokens=4)] == [
            one.tokens for one in samples
        ]


def test_a_call_beside_another_is_refused_and_one_that_fails_leaves_the_session_usable(
    session: Session, rounding: float
) -> None:
    def again(_: object) -> None:
        session.score("a", ["b"])

    with pytest.raises(SessionBusy):
        session.generate("x", max_new_tokens=2, on_sample=again)
    expected = session.score(PROMPTS, CONTINUATIONS)

    def fails(*_: object) -> None:
        raise KeyError("mine")

    handle = session.model.register_forward_hook(fails)
    with pytest.raises(KeyError, match="mine"):
        session.score(PROMPTS, CONTINUATIONS)
    handle.remove()
    assert_same(session.score(PROMPTS, CONTINUATIONS), expected, rounding)
    tree = session.store.tree  # type: ignore[union-attr]
    check_tree(tree)
    assert tree.pages_held() == 0


def test_sequences_beyond_the_models_positions_are_scored_with_a_warning(caplog: Any) -> None:
    model = prefixkit.patch(tiny_llama(max_position_embeddings=32))
    with caplog.at_level("WARNING", "prefixkit"):
        prefixkit.score(model, None, [1] * 30, [[2, 3, 4]])  # the KV of the last one is not computed
        assert not caplog.messages
        prefixkit.score(model, None, [1] * 30, [[2, 3, 4, 5]])
    assert "sequences may reach 34 tokens, but the model was made for 32 positions" in caplog.messages


def test_a_prompt_may_be_another_with_a_part_of_its_continuation(session: Session) -> None:
    """Whatever is scored beside it, a continuation's score is its own."""
    text = "a prompt that goes on and on and on"
    prompts, continuations = [text[:end] for end in (1, 9, 20, 14, 33)], [[text[1:], text[:7]], [text[9:30]]]
    each = [*continuations, [text[20:]], [text[14:25], text[14:]], ["no"]]
    together = session.score(prompts, each)
    for prompt, asked, found in zip(prompts, each, together, strict=True):
        for continuation, score in zip(asked, found, strict=True):
            (alone,) = session.score(prompt, [continuation])
            np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-4)


def test_a_prompt_that_lies_in_many_nodes_of_the_cache_fits_the_pool(model: Any) -> None:
    """Each of them takes a page of its own, of which it needs a part."""
    with Session(model, ByteTokenizer(), kv_budget="64KiB") as session:
        prompt = "abcdefghijklmnopq"
        for end in range(1, len(prompt)):
            session.generate([prompt[:end] + "!", prompt[:end] + "?"], max_new_tokens=1)
        (score,) = session.score(prompt, ["z" * 80])
    (alone,) = Session(model, ByteTokenizer(), kv_budget="4MiB").score(prompt, ["z" * 80])
    np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-4)
