"""Beam search finds the sequences, with the scores, that transformers' own search finds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prefixkit.engine.request import BeamParams
from prefixkit.engine.runs import beam
from prefixkit.engine.runs.beam import BeamSearch, finished, num_candidates
from prefixkit.runners.sampler import top_tokens
from tests.covering import pairwise_cover

VOCAB = 60


@pytest.fixture(scope="module")
def model():
    """A tiny model whose continuations differ much, so that beams overtake each other and end at different times."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Biased:
    """Adds a bias to some tokens' logits, in both searches alike, so that stop tokens come early and often."""

    def __init__(self, model, boost):
        self.head = model.lm_head
        self.boost = torch.zeros(VOCAB)
        for token, bias in boost.items():
            self.boost[token] = bias

    def __enter__(self):
        self.handle = self.head.register_forward_hook(lambda module, args, logits: logits + self.boost)

    def __exit__(self, *error):
        self.handle.remove()


def advance(state, tokens, logprobs):
    """A step of one search, and its move: the parent and the token of each beam."""
    ((state, parents),) = beam.advance([state], tokens, logprobs)
    return state, (parents, tuple(one.token for one in state.beams))


def likeliest(logits, params):
    """What a step of the search takes."""
    return (part.numpy() for part in top_tokens(logits, num_candidates(params), logits.log_softmax(-1).amax(-1)))


def ours(model, prompt, params):
    """Run the search with the model as it is, over whole sequences; check each move against the beams it leads to."""
    state, rows = BeamSearch(params), [[]]
    while not state.done:
        logits = model(torch.tensor([[*prompt, *row] for row in rows])).logits[:, -1].float()
        state, move = advance(state, *likeliest(logits, params))
        rows = [[*rows[parent], token] for parent, token in zip(*move, strict=True)]
        assert rows == [list(beam.tokens) for beam in state.beams]
        assert sorted(state.beams, key=lambda beam: -beam.score) == list(state.beams)
    return finished(state)


def theirs(model, prompts, params):
    """What ``generate`` returns for prompts of equal length: for each prompt its sequences and scores."""
    stop = list(params.stop_token_ids) or None
    filler = VOCAB - 1
    out = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.num_return_sequences,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_new_tokens,
        eos_token_id=stop,
        pad_token_id=filler,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for row in out.sequences[:, len(prompts[0]) :].tolist():
        ends = [at for at, token in enumerate(row) if token in params.stop_token_ids]
        length = ends[0] + 1 if ends else len(row)
        assert set(row[length:]) <= {filler, *params.stop_token_ids}
        sequences.append(tuple(row[:length]))
    pairs = list(zip(sequences, out.sequences_scores.tolist(), strict=True))
    each = params.num_return_sequences
    return [pairs[begin : begin + each] for begin in range(0, len(pairs), each)]


def random_prompts(seed, count=1, length=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB - 1, (count, length), generator=generator).tolist()


def assert_equal(found, expected):
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-6)


BEAMS_AND_BOOSTS = ((2, 2.0), (3, 5.0), (4, 4.0), (8, 3.0))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("beams_and_boost", "length_penalty", "early_stopping"),
    pairwise_cover(product(BEAMS_AND_BOOSTS, (-1.0, 0.0, 0.5, 1.0, 2.5), (False, True, "never"))),
    ids=str,
)
def test_sequences_and_scores_are_those_of_transformers(model, beams_and_boost, length_penalty, early_stopping):
    num_beams, boost = beams_and_boost
    for seed in range(2):
        params = BeamParams(num_beams, num_beams, length_penalty, early_stopping, 14, stop_token_ids=(7,))
        prompts = random_prompts(100 * num_beams + seed)
        with Biased(model, {7: boost}):
            (expected,) = theirs(model, prompts, params)
            assert_equal(ours(model, prompts[0], params), expected)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("num_return_sequences", [1, 2, 5])
def test_several_stop_tokens(model, num_return_sequences, early_stopping):
    params = BeamParams(5, num_return_sequences, 0.8, early_stopping, 12, stop_token_ids=(3, 30, 45))
    for seed in range(2):
        prompts = random_prompts(seed)
        with Biased(model, {3: 3.0, 30: 2.5, 45: 3.5}):
            (expected,) = theirs(model, prompts, params)
            assert_equal(ours(model, prompts[0], params), expected)


@pytest.mark.parametrize("stop_token_ids", [(), (7,)])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 10])
def test_sequences_that_end_by_length(model, max_new_tokens, stop_token_ids):
    for seed in range(4):
        params = BeamParams(4, 4, 1.0, False, max_new_tokens, stop_token_ids)
        prompts = random_prompts(seed)
        (expected,) = theirs(model, prompts, params)
        found = ours(model, prompts[0], params)
        assert_equal(found, expected)
        if not stop_token_ids:
            assert {len(beam.tokens) for beam in found} == {max_new_tokens}


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_prompts_searched_apart_are_as_those_searched_together(model, early_stopping):
    """Transformers' batch runs on until its last prompt is done; the others' sequences must not change meanwhile."""
    params = BeamParams(3, 3, 1.0, early_stopping, 14, stop_token_ids=(7,))
    prompts = random_prompts(11, count=4)
    with Biased(model, {7: 4.0}):
        for prompt, expected in zip(prompts, theirs(model, prompts, params), strict=True):
            assert_equal(ours(model, prompt, params), expected)


def test_one_beam_is_greedy(model):
    (prompt,) = random_prompts(5)
    (beam,) = ours(model, prompt, BeamParams(1, max_new_tokens=8))
    tokens = list(prompt)
    for token in beam.tokens:
        assert token == model(torch.tensor([tokens])).logits[0, -1].argmax()
        tokens.append(token)


def test_log_probabilities_add_up_to_the_score(model):
    (prompt,) = random_prompts(6)
    with Biased(model, {7: 3.0}):
        for beam in ours(model, prompt, BeamParams(4, 4, 0.7, max_new_tokens=10, stop_token_ids=(7,))):
            assert len(beam.logprobs) == len(beam.tokens)
            assert sum(beam.logprobs) / len(beam.tokens) ** 0.7 == pytest.approx(beam.score, rel=1e-5)


# -- by hand: a vocabulary of a, b, c and the stop token

A, B, C, STOP = range(4)


def log_probs(*rows):
    """What a step takes where each beam's next tokens have these probabilities."""
    best, tokens = torch.tensor(rows).log().sort(descending=True, stable=True)
    return tokens.numpy(), best.numpy()


def test_the_first_step_starts_from_the_prompt_alone():
    state, move = advance(BeamSearch(BeamParams(2, stop_token_ids=(STOP,))), *log_probs([0.5, 0.3, 0.1, 0.1]))
    assert move == ((0, 0), (A, B))
    assert [beam.tokens for beam in state.beams] == [(A,), (B,)]
    state, move = advance(state, *log_probs([0.12, 0.1, 0.08, 0.7], [0.8, 0.1, 0.06, 0.04]))
    # a-stop 0.35, b-a 0.24, a-a 0.06, ...: the best ends, the next two go on.
    assert move == ((1, 0), (A, A))
    assert [beam.tokens for beam in state.hypotheses] == [(A, STOP)]


@pytest.mark.parametrize("seed", range(20))
def test_equal_candidates_rank_in_the_order_of_their_beams_and_tokens(seed):
    """All beams have one score, and most next tokens have the log-probability of others, or are forbidden."""
    state, _ = advance(BeamSearch(BeamParams(4, stop_token_ids=())), *log_probs([0.25] * 4))
    drawn = np.random.default_rng(seed).choice(np.float32([-np.inf, -2, -1]), (4, 30), p=[0.6, 0.35, 0.05])
    _, (parents, tokens) = advance(state, np.tile(np.arange(30), (4, 1)), drawn)
    best = np.argsort(-drawn, axis=None, kind="stable")[:4]
    assert (parents, tokens) == (tuple(best // 30), tuple(best % 30))


def test_only_one_of_the_best_num_beams_candidates_may_end():
    state, _ = advance(BeamSearch(BeamParams(2, stop_token_ids=(STOP,))), *log_probs([0.4, 0.3, 0.2, 0.1]))
    assert state.hypotheses == ()  # the stop token ranked fourth
    state, _ = advance(BeamSearch(BeamParams(2, stop_token_ids=(STOP,))), *log_probs([0.4, 0.1, 0.2, 0.3]))
    assert [beam.tokens for beam in state.hypotheses] == [(STOP,)]


def test_early_stopping_stops_at_num_beams_hypotheses_and_otherwise_goes_on_while_a_beam_may_win():
    first, second = log_probs([0.6, 0.05, 0.05, 0.3]), log_probs([0.7, 0.0, 0.0, 0.3], [0.05, 0.05, 0.0, 0.9])
    done = {}
    for early_stopping in (True, False):
        state, _ = advance(BeamSearch(BeamParams(2, 1, 0.0, early_stopping, stop_token_ids=(STOP,))), *first)
        state, move = advance(state, *second)
        assert len(state.hypotheses) == 2
        done[early_stopping] = state.done
        assert state.done == (move == ((), ()))
    assert done == {True: True, False: False}  # a-a holds 0.42, more than the 0.3 and 0.18 that have ended


def test_never_judges_a_beam_by_the_length_that_flatters_it_most():
    first, second = log_probs([0.6, 0.03, 0.02, 0.35]), log_probs([0.8, 0.0, 0.0, 0.2], [0.5, 0.3, 0.1, 0.1])
    for length_penalty in (-1.0, 2.0):
        params = BeamParams(2, 2, length_penalty, "never", 10, (STOP,))
        state, _ = advance(BeamSearch(params), *first)
        state, _ = advance(state, *second)
        # a-a holds ln 0.48; the worse hypothesis is a-stop, ln 0.12: not out of reach at length 2, nor at length 10.
        assert len(state.hypotheses) == 2
        assert not state.done


def test_a_model_that_allows_less_than_num_beams_leaves_fewer_beams(caplog):
    state, move = advance(BeamSearch(BeamParams(3, 3, stop_token_ids=(STOP,))), *log_probs([0.5, 0.0, 0.0, 0.5]))
    assert move == ((0,), (A,))
    assert len(state.hypotheses) == 1
    state, move = advance(state, *log_probs([0.0, 0.0, 0.0, 1.0]))
    assert state.done
    assert move == ((), ())
    assert [beam.tokens for beam in finished(state)] == [(A, STOP), (STOP,)]  # ln(1/2) over 2 tokens, and over 1
    assert "2 of 3 sequences found" in caplog.text


def test_states_are_values(model):
    state = BeamSearch(BeamParams(2, stop_token_ids=(STOP,)))
    step = log_probs([0.5, 0.3, 0.1, 0.1])
    once = repr(beam.advance([state], *step)[0])
    assert repr(beam.advance([state], *step)[0]) == once
    twice = beam.advance([state, state], *(np.concatenate((part, part)) for part in step))
    assert list(map(repr, twice)) == [once] * 2
    assert repr(state) == repr(BeamSearch(BeamParams(2, stop_token_ids=(STOP,))))


def test_the_log_probabilities_are_left_alone():
    step = log_probs([0.5, 0.3, 0.1, 0.1])
    before = [part.copy() for part in step]
    advance(BeamSearch(BeamParams(2)), *step)
    assert all(np.array_equal(part, old) for part, old in zip(step, before, strict=True))


def test_what_does_not_fit_says_so():
    state = BeamSearch(BeamParams(2, max_new_tokens=1))
    tokens = np.arange(4)[None]
    with pytest.raises(ValueError, match=r"\[1 \* 1 beams, k\], got \[2, 4\] and float32 \[2, 4\]"):
        advance(state, tokens.repeat(2, 0), np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="float32"):
        advance(state, tokens, np.zeros((1, 4)))
    with pytest.raises(ValueError, match="of beam 0 hold NaN"):
        advance(state, tokens[:, :2], np.array([[np.nan, 0]], np.float32))
    with pytest.raises(ValueError, match="still runs 1 beams"):
        finished(state)
    state, _ = advance(state, *log_probs([0.5, 0.3, 0.1, 0.1]))
    with pytest.raises(ValueError, match="the search is over"):
        advance(state, *log_probs([0.5, 0.3, 0.1, 0.1]))
