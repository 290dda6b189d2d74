"""Logits processors and stop functions see their own sample, step by step, whatever runs beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

import prefixkit
from prefixkit import BeamParams, Request, SamplingParams, Session
from tests.api.cases import PROMPTS, TOKENIZER


class Follows:
    """Keeps what it was called with; allows one token that depends on how often it was called."""

    made: list[Follows] = []

    def __init__(self):
        self.lengths, self.rows = [], []
        Follows.made.append(self)

    def __call__(self, ids, logits):
        assert ids.shape[0] == logits.shape[0] == 1 and ids.dtype == torch.int64 and logits.dtype == torch.float32
        self.lengths.append(ids.shape[1])
        self.rows.append(ids[0].tolist())
        only = torch.full_like(logits, -torch.inf)
        only[0, 40 + len(self.lengths)] = 0.0
        return only


def ids_of(prompt):
    return TOKENIZER(prompt)["input_ids"]


@pytest.fixture
def session(model):
    with Session(model, TOKENIZER, kv_budget="4MiB") as opened:
        yield opened


def test_each_sample_has_a_processor_of_its_own_that_sees_its_tokens_in_order(session):
    Follows.made = []
    result = session.generate(PROMPTS[:2], n=3, max_new_tokens=4, logits_processors=Follows, stop_token_ids=())
    assert [sample.tokens for sample in result] == [[41, 42, 43, 44]] * 6
    assert len(Follows.made) == 6
    for one in Follows.made:
        assert one.lengths == list(range(one.lengths[0], one.lengths[0] + 4))
        assert all(later[: len(row)] == row for row, later in zip(one.rows, one.rows[1:], strict=False))
    assert result.report.unpipelined == {"logits processors": result.report.decode_steps}


def test_log_probabilities_stay_the_models_own(session):
    free = session.generate(PROMPTS[:1], max_new_tokens=1, temperature=0.0)[0]

    def forbid_it():
        def processor(ids, logits):
            logits[0, free.tokens[0]] = -torch.inf
            return logits

        return processor

    other = session.generate(PROMPTS[:1], max_new_tokens=1, temperature=0.0, logits_processors=forbid_it)[0]
    assert other.tokens != free.tokens
    assert other.logprobs[0] <= free.logprobs[0], "not the largest any more, and by the same log-softmax"
    again = session.generate(PROMPTS[:1], n=200, max_new_tokens=1)
    same = [sample.logprobs[0] for sample in again if sample.tokens == other.tokens]
    assert not same or same == pytest.approx([other.logprobs[0]] * len(same), abs=1e-5)


def test_those_of_transformers_work_as_they_are(model, session):
    made = lambda: LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])  # noqa: E731
    (ours,) = session.generate(PROMPTS[:1], temperature=0.0, max_new_tokens=30, logits_processors=made)
    ids = torch.tensor([ids_of(PROMPTS[0])])
    with torch.no_grad():
        theirs = model.generate(ids, max_new_tokens=30, do_sample=False, no_repeat_ngram_size=2)
    assert ours.tokens == theirs[0, ids.shape[1] :].tolist()
    pairs = list(zip(ours.tokens, ours.tokens[1:], strict=False))
    assert len(pairs) == len(set(pairs))


def test_samples_beside_them_stay_as_they_are_and_so_do_beams(session):
    ids = [np.array(ids_of(prompt)) for prompt in PROMPTS[:3]]
    plain, beams = SamplingParams(n=4, seed=3, max_new_tokens=9), BeamParams(3, 3, max_new_tokens=7)
    odd = SamplingParams(n=2, seed=1, max_new_tokens=12, logits_processors=Follows)
    together = session.run(
        Request(i, tokens, own) for i, (tokens, own) in enumerate(zip(ids, (plain, odd, beams), strict=True))
    )
    for i, own in enumerate((plain, odd, beams)):
        apart = session.run([Request(i, ids[i], own)])
        assert [s.tokens for s in together.of_prompt(i)] == [s.tokens for s in apart]
    assert set(together.report.unpipelined) == {"logits processors", "beam search"}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (lambda ids, logits: None, TypeError, "must return the logits, got NoneType"),
        (lambda ids, logits: logits[:, :5], ValueError, r"logits of shape \[1, \d+\], got \[1, 5\]"),
        (lambda ids, logits: logits * torch.nan, ValueError, "sample 0 of prompt 0 hold NaN"),
        ([], TypeError, "must make a function of token ids and logits, it made list; .*LogitsProcessorList"),
    ],
)
def test_a_processor_that_gives_something_else_is_named_and_the_session_goes_on(session, given, error, says):
    expected = session.generate(PROMPTS[:1], max_new_tokens=3)
    with pytest.raises(error, match=says):
        session.generate(PROMPTS[:1], max_new_tokens=3, logits_processors=lambda: given)
    assert [one.tokens for one in session.generate(PROMPTS[:1], max_new_tokens=3)] == [one.tokens for one in expected]


@pytest.mark.parametrize("after", [0, 2])
def test_a_processor_that_excludes_all_tokens_ends_its_sample_alone(session, after):
    """After some tokens, or before the first."""

    def excludes():
        return lambda ids, logits: logits - torch.inf if ids.shape[1] >= len(ids_of(PROMPTS[0])) + after else logits

    fine = SamplingParams(n=2, seed=3, max_new_tokens=6, stop_token_ids=())
    alone = session.generate(PROMPTS[1:2], fine)
    odd = SamplingParams(n=2, max_new_tokens=6, logits_processors=excludes, stop_token_ids=())
    result = session.generate(PROMPTS[:2], [odd, fine])
    assert [(len(s.tokens), len(s.logprobs), s.finish_reason) for s in result.of_prompt(0)] == [
        (after, after, "dead_end")
    ] * 2
    assert [s.tokens for s in result.of_prompt(1)] == [s.tokens for s in alone]


def test_something_that_makes_none_is_refused():
    with pytest.raises(TypeError, match="a function that makes one for each sample, got list"):
        SamplingParams(logits_processors=[])  # type: ignore[arg-type]


def test_a_stop_function_ends_the_sample_for_which_it_says_so(session):
    seen = []

    def third(tokens, text):
        seen.append((tuple(tokens), text))
        return len(tokens) == 3

    result = session.generate(PROMPTS[:2], n=2, max_new_tokens=9, stop=third, stop_token_ids=())
    assert [(len(sample.tokens), sample.finish_reason) for sample in result] == [(3, "stop")] * 4
    assert len(seen) == 12
    for tokens, text in seen:
        whole = session.tokenizer.decode(tokens, skip_special_tokens=True)
        assert whole.startswith(text) and len(whole) - len(text) <= 1
    assert result.report.unpipelined == {"stop functions": result.report.decode_steps}
    free = session.generate(PROMPTS[:2], n=2, max_new_tokens=9, stop_token_ids=())
    assert [one.tokens for one in result] == [one.tokens[:3] for one in free]
    assert [one.text for one in result] == [
        session.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in result
    ]


def test_stop_strings_and_functions_go_together_and_functions_need_no_tokenizer(session, model):
    text = session.generate(PROMPTS[:1], max_new_tokens=12, temperature=0.0, stop_token_ids=())[0].text
    ends = session.generate(
        PROMPTS[:1], max_new_tokens=12, temperature=0.0, stop=(text[4:6], lambda t, s: len(t) == 11), stop_token_ids=()
    )[0]
    assert ends.text == text[: text.index(text[4:6])]
    ids = [ids_of(PROMPTS[0])]
    with Session(model, None, kv_budget="1MiB") as bare:
        (sample,) = bare.generate(ids, max_new_tokens=9, stop=lambda tokens, text: text == "" and len(tokens) == 2)
        assert len(sample.tokens) == 2 or sample.finish_reason == "stop"


def test_requests_are_checked_as_prompts_are(session, model):
    with pytest.raises(ValueError, match="requests is empty"):
        session.run([])
    with pytest.raises(TypeError, match=r"must be prefixkit\.Request, got str"):
        session.run(["text"])
    for wrong in (None, Request(0, [1], SamplingParams())):
        with pytest.raises(
            TypeError, match=r"requests must be a list of prefixkit\.Request, got .*; put a single one in"
        ):
            session.run(wrong)
    with pytest.raises(TypeError, match="indices must be a list of integers, got int 3"):
        Request(0, [1], SamplingParams(), indices=3)
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        session.run([Request(0, np.array([10**6]), SamplingParams())])
    with Session(model, None, kv_budget="1MiB") as bare, pytest.raises(ValueError, match="tokenizer is None"):
        bare.run([Request(0, np.array([1]), SamplingParams(stop=("x",)))])
    assert prefixkit.Request is Request
