"""Rows are sampled from the distribution that transformers' processors leave, each row for itself."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.specification import kept_tokens, sample_tokens
from prefixkit.sampling.weights import weigh

ALMOST_1 = 1 - 2**-53
PROCESSED = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"top_p": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"min_p": 0.1, "repetition_penalty": 1.4},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
]


def normal(seed, rows, vocab, spread):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def label(value):
    """What differs from the defaults."""
    fields = dataclasses.fields(value) if isinstance(value, SamplingParams) else ()
    changed = [f"{f.name}={getattr(value, f.name)}" for f in fields if getattr(value, f.name) != f.default]
    return ",".join(changed) or None


def processed(logits, params, histories=None):
    """What transformers' sampling makes of the logits, in its order."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    rows = [
        steps(torch.as_tensor(np.array(history))[None], row[None].clone())
        for row, history in zip(logits, histories or [[0]] * len(logits), strict=True)
    ]
    return torch.cat(rows)


def probabilities(logits, params, histories=None):
    """``[rows, vocab]`` float64: the distribution of the specification's kept weights."""
    result = torch.zeros(logits.shape, dtype=torch.float64)
    for row, scores in enumerate(logits.clone().numpy()):
        if params.repetition_penalty != 1:
            ids, factor = np.unique(histories[row]), np.float32(params.repetition_penalty)
            scores[ids] = np.where(scores[ids] < 0, scores[ids] * factor, scores[ids] / factor)
        if params.greedy:
            result[row, int(scores.argmax())] = 1
            continue
        (weights,) = weigh(scores[None], [params.temperature])
        kept = kept_tokens(scores, weights, params)
        kept = slice(None) if kept is None else kept
        result[row, kept] = torch.from_numpy(weights[kept].astype(np.float64) / weights[kept].sum(dtype=np.float64))
    return result


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=50, temperature=0.8),
    SamplingParams(top_k=3000),
    SamplingParams(top_k=10**9),
    SamplingParams(top_p=0.95, temperature=0.8),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.99999),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=0.9),
    SamplingParams(top_k=40, top_p=0.9, temperature=0.8),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.1, temperature=1.3),
    SamplingParams(top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, temperature=0.9, top_k=20, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("params", FILTERS, ids=label)
@pytest.mark.parametrize(("vocab", "spread"), [(11, 1.0), (300, 3.0), (5003, 0.1), (5003, 3.0), (20_000, 8.0)])
def test_the_distribution_is_that_of_transformers(params, vocab, spread):
    logits = normal(vocab, 6, vocab, spread)
    histories = [np.random.default_rng(row).integers(0, vocab, 40) for row in range(6)]
    ours = probabilities(logits, params, histories)
    theirs = processed(logits, params, histories)
    exact = torch.softmax(theirs.double(), -1)
    most = exact.max(-1, keepdim=True).values
    # Weights are cut to multiples of 2**-39 of the largest: what is below that has none.
    weighty = exact >= 2**-38 * most
    assert torch.equal(ours[weighty] > 0, exact[weighty] > 0)
    assert (exact[ours > 0] > 0).all()
    # In units of 2**-24: their scores are rounded once more (half a unit of score and top each); of ours the
    # difference, the rate and the product, which the exponential makes relative errors; its polynomial has 2.8; so has
    # the sum, on average.
    top = theirs.max(-1, keepdim=True).values
    score = torch.where(theirs > -torch.inf, theirs, top)
    relative = (3.3 * (top - score) + score.abs() + top.abs() + 3).double() * 2**-24
    relative += (exact * relative).sum(-1, keepdim=True) + 2**-39 * vocab
    assert ((ours - exact).abs() <= exact * relative + 2**-39 * most).all()


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=3), SamplingParams(top_k=700), SamplingParams(min_p=0.2)], ids=label
)
def test_top_k_and_min_p_keep_all_tied_tokens_or_none_as_transformers_does(params):
    logits = normal(1, 20, 4000, 2.0).round()
    ours = probabilities(logits, params)
    assert torch.equal(ours > 0, torch.softmax(processed(logits, params), -1) > 0)


@pytest.mark.parametrize("top_p", [0.03, 0.3, 0.77])
def test_of_tied_tokens_at_its_border_top_p_keeps_as_many_as_transformers_and_the_higher_ids(top_p):
    levels = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits = levels[torch.randint(4, (20, 999), generator=torch.Generator().manual_seed(5))]
    params = SamplingParams(top_p=top_p)
    ours, theirs = probabilities(logits, params) > 0, processed(logits, params) > -torch.inf
    for row, our, their in zip(logits, ours, theirs, strict=True):
        # Which of the tied ones it keeps depends, there, on a sort that is free to order them in any way.
        assert torch.equal(row[our].sort().values, row[their].sort().values)
        border = our[row == row[our].min()]
        assert 0 < border.sum() < len(border), "the border should divide a level"
        assert torch.equal(border.int(), border.int().sort().values)


def test_top_p_holds_p_and_not_one_token_more():
    logits = normal(9, 4, 30_000, 2.5)
    weights = torch.softmax(logits.double(), -1)
    for p in (0.1, 0.6, 0.9, 0.999):
        kept = probabilities(logits, SamplingParams(top_p=p)) > 0
        held = (weights * kept).sum(-1)
        least = torch.where(kept, weights, 2.0).min(-1).values
        assert (held >= p - 1e-6).all()
        assert (held - least < p + 1e-6).all()


def test_a_kept_set_ignores_masked_tokens():
    logits = normal(2, 3, 1000, 1.0)
    logits[:, ::2] = -torch.inf
    for params in (SamplingParams(top_k=900), SamplingParams(top_p=0.999999), SamplingParams()):
        assert (probabilities(logits, params)[:, ::2] == 0).all()
        for u in (0.0, 0.5, ALMOST_1):
            assert (sample_tokens(logits, params, np.full(3, u))[0] % 2 == 1).all()


@pytest.mark.parametrize(
    ("params", "seed"), [(FILTERS[1], 0), (FILTERS[7], 1), (FILTERS[14], 0), (FILTERS[17], 1)], ids=label
)
def test_frequencies_are_the_distribution(params, seed):
    count, vocab = 3_000, 60
    logits = normal(seed, 1, vocab, 1.5)
    history = np.arange(0, vocab, 3)
    expected = probabilities(logits, params, [history])[0].numpy() * count
    u = np.random.default_rng(seed).random(count)
    tokens, _ = sample_tokens(logits.expand(count, -1), params, u, [history] * count)
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    likely = expected >= 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = max(1, likely.sum() - 1)
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=700)], ids=label)
@pytest.mark.parametrize("vocab", [7, 256, 1000, 5000])
def test_the_token_is_the_inverse_of_the_cumulative_distribution(params, vocab):
    logits = normal(vocab, 1, vocab, 2.0)
    cumulative = probabilities(logits, params)[0].cumsum(0).numpy()
    u = np.random.default_rng(vocab).random(400)
    tokens, _ = sample_tokens(logits.expand(400, -1), params, u)
    clear = np.abs(cumulative[:, None] - u).min(0) > 1e-6  # elsewhere float32 weights may decide either way
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(tokens.numpy()[clear], np.searchsorted(cumulative, u, side="right")[clear])


def test_a_row_is_the_same_bits_alone_and_in_any_batch():
    vocab = 30_011  # not a multiple of any vector or block
    logits = normal(3, 70, vocab, 3.0)
    each = list(itertools.islice(itertools.cycle([*FILTERS, SamplingParams(temperature=0)]), 70))
    histories = [np.random.default_rng(row).integers(0, vocab, 500) for row in range(70)]
    u = np.random.default_rng(0).random(70)
    tokens, logprobs = sample_tokens(logits, each, u, histories)
    shuffled = np.random.default_rng(1).permutation(70)
    again, logprobs_again = sample_tokens(
        logits[shuffled], [each[row] for row in shuffled], u[shuffled], [histories[row] for row in shuffled]
    )
    assert torch.equal(again, tokens[shuffled])
    assert torch.equal(logprobs_again, logprobs[shuffled])
    for row in range(70):
        token, logprob = sample_tokens(logits[row : row + 1], each[row], u[row : row + 1], histories[row : row + 1])
        assert (token.item(), logprob.item()) == (tokens[row].item(), logprobs[row].item())


def test_greedy_takes_the_lowest_of_equals_and_ignores_the_filters():
    logits = normal(4, 5, 5000, 1.0)
    logits[:, [77, 78, 4000]] = 9.0
    params = SamplingParams(temperature=0, top_k=5, top_p=0.1, min_p=0.5)
    tokens, logprobs = sample_tokens(logits, params, np.full(5, 0.999))
    assert tokens.tolist() == [77] * 5
    assert torch.equal(logprobs, torch.log_softmax(logits, -1)[:, 77])
    assert torch.equal(probabilities(logits, params).argmax(-1), tokens)


def test_greedy_with_a_penalty_avoids_what_was_said():
    logits = torch.tensor([[2.0, 1.9, -1.0], [-1.0, -1.05, -9.0]])
    params = SamplingParams(temperature=0, repetition_penalty=1.2)
    assert sample_tokens(logits, params, np.zeros(2), [[0, 0, 0], [0]])[0].tolist() == [1, 1]
    assert sample_tokens(logits, params, np.zeros(2), [[], [7]])[0].tolist() == [
        0,
        0,
    ]  # ids beyond the head do not count


@pytest.mark.parametrize("params", FILTERS, ids=label)
def test_log_probabilities_are_the_models_own(params):
    logits = normal(6, 4, 2000, 4.0)
    tokens, logprobs = sample_tokens(logits, params, np.array([0.1, 0.4, 0.7, 0.99]), [[1, 2, 3]] * 4)
    assert tokens.dtype == torch.int64
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_count_as_the_same_numbers_in_float32(dtype):
    logits, u = normal(6, 4, 2000, 4.0).to(dtype), np.array([0.1, 0.4, 0.7, 0.99])
    found, expected = (sample_tokens(of, SamplingParams(top_p=0.9), u) for of in (logits, logits.float()))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("params", FILTERS, ids=label)
def test_the_callers_logits_are_left_alone(params):
    logits = normal(7, 3, 500, 2.0)
    before = logits.clone()
    sample_tokens(logits, params, np.array([0.2, 0.5, 0.8]), [[1, 2, 3]] * 3)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params", [*FILTERS[:3], SamplingParams(top_k=2000), SamplingParams(top_p=0.9999999)], ids=label
)
@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, ALMOST_1])
def test_a_token_without_weight_is_never_sampled(params, u):
    logits = torch.full((1, 3001), -500.0)  # weight 0 in float32
    for places in ([0], [3000], [1234], [255, 256], [10, 2999]):
        row = logits.clone()
        row[0, places] = torch.tensor([1.0, 0.5])[: len(places)]
        assert sample_tokens(row, params, np.array([u]))[0].item() in places


def test_almost_1_samples_the_last_token_with_weight():
    logits = torch.zeros(1, 100_003)
    assert sample_tokens(logits, SamplingParams(), np.array([ALMOST_1]))[0].item() == 100_002
    assert sample_tokens(logits, SamplingParams(), np.array([0.0]))[0].item() == 0


def test_noise_of_1e_6_moves_only_tokens_that_lie_at_a_boundary():
    logits = normal(8, 200, 20_000, 3.0)
    noisy = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 1e-6
    u = np.random.default_rng(2).random(200)
    for params in (SamplingParams(temperature=0.8), SamplingParams(top_p=0.95, temperature=0.8)):
        same = sample_tokens(logits, params, u)[0] == sample_tokens(noisy, params, u)[0]
        assert same.float().mean() > 0.98


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "row 37 of the logits holds NaN"),
        (float("inf"), r"row 37 of the logits holds \+inf"),
        (-float("inf"), "row 37 of the logits holds no finite value"),
    ],
)
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9)], ids=label
)
def test_logits_that_cannot_be_sampled_from_name_their_row(value, message, params):
    logits = normal(0, 40, 20_000, 1.0)
    if value == -float("inf"):
        logits[37] = value
    else:
        logits[37, 11_111] = value
    with pytest.raises(ValueError, match=message):
        sample_tokens(logits, params, np.full(40, 0.5))


def test_arguments_that_do_not_fit_say_so():
    logits, u = torch.zeros(2, 5), np.zeros(2)
    with pytest.raises(TypeError, match=r"float32, bfloat16 or float16, got torch.float64; convert them with .float"):
        sample_tokens(logits.double(), SamplingParams(), u)
    with pytest.raises(ValueError, match=r"\[rows, vocab\], got \[5\]"):
        sample_tokens(logits[0], SamplingParams(), u)
    with pytest.raises(ValueError, match="uniforms must have one entry for each of the 2 rows of logits, got 3"):
        sample_tokens(logits, SamplingParams(), np.zeros(3))
    with pytest.raises(ValueError, match="params must have one entry for each of the 2 rows"):
        sample_tokens(logits, [SamplingParams()], u)
    with pytest.raises(ValueError, match="histories must have one entry for each of the 2 rows"):
        sample_tokens(logits, SamplingParams(), u, [[1]])
    with pytest.raises(ValueError, match=r"row 1 asks for repetition_penalty=1\.1, .* pass histories"):
        sample_tokens(logits, [SamplingParams(), SamplingParams(repetition_penalty=1.1)], u)
    with pytest.raises(ValueError, match="leave float32"):
        sample_tokens(logits + 1e35, SamplingParams(temperature=1e-6), u)


def test_no_rows_sample_nothing():
    tokens, logprobs = sample_tokens(torch.zeros(0, 50), SamplingParams(), np.zeros(0))
    assert tokens.shape == logprobs.shape == (0,)


@pytest.mark.parametrize("fields", PROCESSED, ids=str)
def test_a_token_is_drawn_with_the_probability_that_the_processors_of_transformers_leave_it(fields):
    logits, history = normal(5, 8, 50, 2.0), torch.arange(10).expand(8, 10)
    params, drawn = SamplingParams(**fields), np.zeros((8, 2), np.float32)
    u = np.random.default_rng(5).random(8)
    tokens, _ = sample_tokens(logits, params, u, [history[0].numpy()] * 8, drawn)
    warped = TemperatureLogitsWarper(params.temperature)(
        history, RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, logits)
    )
    filters = LogitsProcessorList()
    if params.top_k:
        filters.append(TopKLogitsWarper(params.top_k))
    filters += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    filters += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    left = filters(history, warped.clone())
    expected = left.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    np.testing.assert_allclose(drawn[:, 0], expected, atol=3e-6)
    masses = (warped.double().softmax(-1) * left.isfinite()).sum(-1)
    np.testing.assert_allclose(drawn[:, 1], masses, rtol=3e-6)


def test_a_greedy_token_is_drawn_for_certain():
    drawn = np.zeros((3, 2), np.float32)
    sample_tokens(normal(6, 3, 9, 1.0), SamplingParams(temperature=0), np.zeros(3), drawn=drawn)
    assert drawn.tolist() == [[0, 1]] * 3
