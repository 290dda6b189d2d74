"""Sampling on the GPU: the CPU's tokens for all parameters, dtypes and sizes; graphs; state that stays on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixkit.ops.sampling_records import mask
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import SamplingBatch, sample_tokens
from prefixkit.testing.sampling_cases import (
    FLAT,
    NASTY,
    flat_case,
    logprob_bound,
    masked_case,
    random_params,
    rows_of,
)
from tests.gpu.cases import GPU
from tests.grammars import Residues
from tests.ops.test_sample import arguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (17, 1000, 32_000, 49_152, 128_256)


@pytest.fixture(params=["", "portable"], ids=["cluster", "one block"])
def way(request, monkeypatch):
    """Rows spread over clusters and kept, and rows of one block that reads them again where they are long."""
    monkeypatch.setenv("PREFIXKIT_KERNEL", request.param)


def poisoned(rows, vocab):
    sampler = Sampler(rows, vocab, "cuda")
    sampler.tokens.fill_(-12345)
    sampler.logprobs.fill_(torch.nan)
    sampler.seen.fill_(-1)  # rows without a penalty do not read it
    return sampler


def case(seed, rows, vocab, dtype):
    rng = np.random.default_rng(seed)
    logits, params = rows_of(rng, rows, vocab, dtype), random_params(rng, rows, vocab)
    histories = [rng.integers(0, vocab + 9, int(rng.integers(0, 300))) for _ in range(rows)]
    keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 2**20, rows)
    return logits, params, keys, steps, histories


def on_gpu(logits):
    """Among NaN: reading beyond the rows shows."""
    rows, vocab = logits.shape
    around = torch.full((rows + 2, vocab), torch.nan, dtype=logits.dtype, device=GPU)
    around[1:-1] = logits
    return around[1:-1]


def none(rows):
    """A history for each row, where nothing is penalised."""
    return [np.zeros(0, dtype=np.int64)] * len(rows)


def assert_drawn(drawn, logits, params, keys, steps, histories):
    expected = np.zeros((len(params), 2), np.float32)
    sample_tokens(logits.float(), params, uniforms(keys, steps), histories, expected)
    np.testing.assert_allclose(drawn.cpu().numpy(), expected, rtol=1e-6, atol=1e-6)


def assert_sampled(tokens, logprobs, logits, params, keys, steps, histories):
    expected, _ = sample_tokens(logits.float(), params, uniforms(keys, steps), histories)
    wrong = [(row, params[row]) for row in (tokens.cpu() != expected).nonzero()[:, 0].tolist()]
    assert not wrong, wrong[:3]
    exact = torch.log_softmax(logits.double(), -1).gather(1, expected[:, None])[:, 0].numpy()
    error = np.abs(logprobs.cpu().numpy() - exact)
    assert (error <= logprob_bound(exact, logits.shape[1])).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_those_of_the_cpu(way, vocab, dtype):
    rows = 400 if vocab <= 1000 else 120
    logits, params, keys, steps, histories = case(vocab, rows, vocab, dtype)
    sampler = poisoned(rows, vocab)
    sampler.upload_params(slice(0, rows), SamplingBatch(params, keys, steps, histories))
    tokens, logprobs = sampler.sample(on_gpu(logits), drawn=True)
    assert_sampled(tokens, logprobs, logits, params, keys, steps, histories)
    assert_drawn(sampler.drawn, logits, params, keys, steps, histories)
    assert sampler.steps.tolist() == (steps + 1).tolist()
    for row, each in enumerate(params):
        if each.repetition_penalty != 1:
            held = mask(np.append(histories[row], int(tokens[row])), vocab)
            assert np.array_equal(sampler.seen[row].cpu().numpy(), held)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 8191, 8193, 50_257, 151_936, 262_144, 500_000])
def test_other_sizes_and_rows_apart(way, vocab):
    rows = 24
    logits, params, keys, steps, histories = case(vocab, rows, vocab, torch.float32)
    sampler = poisoned(rows, vocab)
    sampler.upload_params(range(rows), SamplingBatch(params, keys, steps, histories))
    wide = torch.full((rows, vocab + 3), torch.nan, device=GPU)  # as a head padded to some multiple gives
    wide[:, 1 : vocab + 1] = logits.to(GPU)
    tokens, logprobs = sampler.sample(wide[:, 1 : vocab + 1])
    assert_sampled(tokens, logprobs, logits, params, keys, steps, histories)


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("vocab", [1000, 128_256])
def test_extreme_rows(way, name, vocab):
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=1),
        SamplingParams(top_k=vocab - 1, top_p=1e-9),
        SamplingParams(top_p=0.5, min_p=0.99),
        SamplingParams(top_p=1 - 2**-53),
        SamplingParams(min_p=0.99),
        SamplingParams(temperature=1e30, top_p=0.7),
    ]
    logits = NASTY[name](vocab).repeat(len(params), 1)
    keys, steps = np.arange(len(params), dtype=np.uint64), np.zeros(len(params), dtype=np.int64)
    sampler = poisoned(len(params), vocab)
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, none(params)))
    tokens, _ = sampler.sample(on_gpu(logits))
    assert tokens.tolist() == sample_tokens(logits, params, uniforms(keys, steps))[0].tolist()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("vocab", [1000, 49_152, 128_256])
@pytest.mark.parametrize("name", FLAT)
def test_nuclei_that_end_among_many_tokens(way, name, vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits, params = flat_case(rng, name, vocab, dtype)
    keys, steps = rng.integers(0, 2**64, len(params), dtype=np.uint64), np.arange(len(params))
    sampler = poisoned(len(params), vocab)
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, none(params)))
    tokens, logprobs = sampler.sample(on_gpu(logits))
    assert_sampled(tokens, logprobs, logits, params, keys, steps, None)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1003, torch.float32), (32_000, torch.bfloat16), (128_256, torch.float16)]
)
def test_tokens_that_a_grammar_allows(way, vocab, dtype):
    rows = 60
    logits, params, allowed = masked_case(np.random.default_rng(vocab), rows, vocab, dtype)
    params = [
        own if may is None else replace(own, grammar=Residues(1)) for own, may in zip(params, allowed, strict=True)
    ]
    histories = [np.arange(row, vocab, 7) for row in range(rows)]
    keys, steps = np.arange(rows, dtype=np.uint64), np.arange(rows)
    sampler = poisoned(rows, vocab)
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, histories))
    bits = np.stack([mask(np.zeros(0, int) if may is None else may, vocab) for may in allowed])
    tokens, logprobs = sampler.sample(on_gpu(logits), drawn=True, allowed=torch.from_numpy(bits).to(GPU))
    nothing = [row for row, may in enumerate(allowed) if may is not None and not len(may)]
    assert tokens[nothing].tolist() == [-1] * len(nothing)
    assert logprobs[nothing].isneginf().all()
    whole = [row for row in range(rows) if row not in nothing]
    own = [logits[whole].float(), [params[row] for row in whole], uniforms(keys[whole], steps[whole])]
    how = np.zeros((len(whole), 2), np.float32)
    expected, _ = sample_tokens(*own, [histories[row] for row in whole], how, [allowed[row] for row in whole])
    assert tokens[whole].tolist() == expected.tolist()
    np.testing.assert_allclose(sampler.drawn[whole].cpu().numpy(), how, rtol=1e-6, atol=1e-6)
    exact = torch.log_softmax(logits[whole].double(), -1).gather(1, expected[:, None])[:, 0].numpy()
    error = np.abs(logprobs[whole].cpu().numpy() - exact)
    assert (error <= logprob_bound(exact, vocab)).all(), "the model's own"


def test_a_captured_graph_goes_on_with_what_it_sampled(way):
    rows, vocab, count = 60, 32_000, 5
    logits, params, keys, steps, histories = case(3, rows, vocab, torch.bfloat16)
    sampler = poisoned(rows, vocab)
    there = on_gpu(logits)
    sampler.sample(there)  # no row is active
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = sampler.sample(there)
    addresses = tokens.data_ptr(), logprobs.data_ptr(), sampler.seen.data_ptr()
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, histories))
    for step in range(count):
        logits = rows_of(np.random.default_rng(100 + step), rows, vocab, torch.bfloat16)
        there.copy_(logits)
        graph.replay()
        assert_sampled(tokens, logprobs, logits, params, keys, steps + step, histories)
        histories = [np.append(held, token) for held, token in zip(histories, tokens.tolist(), strict=True)]
    assert addresses == (sampler.tokens.data_ptr(), sampler.logprobs.data_ptr(), sampler.seen.data_ptr())


def test_inactive_rows_are_left_alone_and_broken_ones_say_so(way):
    rows, vocab = 12, 5000
    logits, _, keys, steps, _ = case(0, rows, vocab, torch.float32)
    params = [SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=5)] * 3
    broken = {0: torch.nan, 5: torch.inf, 6: -torch.inf, 11: torch.nan}
    for row, value in broken.items():
        logits[row, 4321] = value
    logits[6] = -torch.inf
    sampler = poisoned(rows, vocab)
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, none(params)))
    sampler.active[2] = 0
    seen = sampler.seen.clone()
    tokens, logprobs = sampler.sample(on_gpu(logits))
    whole = [row for row in range(rows) if row not in broken and row != 2]
    for row in broken:
        assert int(tokens[row]) == -1
        assert logprobs[row].isnan()
    assert int(tokens[2]) == -12345
    assert logprobs[2].isnan()
    assert sampler.steps.tolist() == [step + (row != 2) for row, step in enumerate(steps.tolist())]
    assert torch.equal(sampler.seen, seen), "all bits were set before"
    assert_sampled(
        tokens[whole], logprobs[whole], logits[whole], [params[row] for row in whole], keys[whole], steps[whole], None
    )


def test_rows_leave_the_batch_on_the_device(way):
    rows, vocab = 40, 9001
    logits, params, keys, steps, histories = case(5, rows, vocab, torch.float32)
    sampler = poisoned(rows + 7, vocab)
    sampler.upload_params(slice(0, rows), SamplingBatch(params, keys, steps, histories))
    tokens = sampler.sample(logits.to(GPU))[0].tolist()
    histories = [np.append(held, token) for held, token in zip(histories, tokens, strict=True)]
    index = np.random.default_rng(1).permutation(rows)[:23]
    sampler.select_rows(torch.from_numpy(index).to(GPU))
    assert sampler.tokens[:23].tolist() == [tokens[row] for row in index]
    assert sampler.active.tolist() == [1] * 23 + [0] * (rows + 7 - 23)
    sampler.tokens[23:] = -5
    sampler.sample(logits.to(GPU))
    some, found = [params[row] for row in index], sampler.tokens[:23]
    held = [histories[row] for row in index]
    assert_sampled(found, sampler.logprobs[:23], logits[:23], some, keys[index], steps[index] + 1, held)
    assert sampler.tokens[23:].tolist() == [-5] * (rows + 7 - 23)
    # Newcomers take the rows that are free.
    sampler.upload_params([25, 24], SamplingBatch(params[:2], keys[:2], steps[:2], histories[:2]))
    sampler.sample(logits.to(GPU))
    expected = sample_tokens(logits[[25, 24]], params[:2], uniforms(keys[:2], steps[:2]), histories[:2])[0]
    assert sampler.tokens[[25, 24]].tolist() == expected.tolist()


def test_the_same_bits_in_every_run_and_any_batch(way):
    rows, vocab = 64, 128_256
    logits, params, keys, steps, histories = case(9, rows, vocab, torch.bfloat16)
    there, found = logits.to(GPU), []
    for order in (np.arange(rows), np.arange(rows), np.random.default_rng(0).permutation(rows)):
        sampler = poisoned(rows, vocab)
        sampler.upload_params(order, SamplingBatch(params, keys, steps, histories))
        moved = torch.empty_like(there)
        moved[torch.from_numpy(order)] = there
        tokens, logprobs = sampler.sample(moved)
        found.append((tokens[torch.from_numpy(order)], logprobs[torch.from_numpy(order)]))
    for tokens, logprobs in found[1:]:
        assert torch.equal(tokens, found[0][0])
        assert torch.equal(logprobs, found[0][1])


def test_rows_sampled_in_two_parts_get_the_same_bits(way):
    rows, vocab = 64, 49_155  # bits of seen tokens begin at any word
    logits, params, keys, steps, histories = case(11, rows, vocab, torch.bfloat16)
    whole, parted = poisoned(rows, vocab), poisoned(rows, vocab)
    for sampler in (whole, parted):
        sampler.upload_params(slice(0, rows), SamplingBatch(params, keys, steps, histories))
        sampler.drawn.fill_(torch.nan)
    whole.sample(on_gpu(logits), drawn=True)
    for first in (0, 31):
        part = logits[first : 31 if first == 0 else rows]
        tokens, _ = parted.sample(on_gpu(part), drawn=True, first=first)
        assert tokens.data_ptr() == parted.tokens[first:].data_ptr() and len(tokens) == len(part)
        assert bool((parted.tokens[first + len(part) :] == -12345).all())
    for one, other in zip(
        (*whole.sampled(rows, True), *whole.state(rows)),
        (*parted.sampled(rows, True), *parted.state(rows)),
        strict=True,
    ):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    with pytest.raises(ValueError, match=r"at most 33, 49155"):
        parted.sample(logits.to(GPU), first=31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(way, dtype):
    args = [part.to(GPU) for part in arguments(5, 50, dtype)]
    torch.library.opcheck(torch.ops.prefixkit.sample.default, tuple(args))


def test_arguments_that_do_not_fit_say_so():
    with pytest.raises(ValueError, match="at least 1 row"):
        Sampler(0, 5, "cuda")
    sampler = Sampler(4, 50, "cuda")
    zero, keys = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint64)
    with pytest.raises(ValueError, match="rows must be different and from 0 to 3"):
        sampler.upload_params([4], SamplingBatch([SamplingParams()], keys, zero, [zero]))
    with pytest.raises(ValueError, match="a batch of 1 rows cannot be loaded into 2"):
        sampler.upload_params([1, 2], SamplingBatch([SamplingParams()], keys, zero, [zero]))
    with pytest.raises(ValueError, match=r"\[at most 4, 50\], got \[4, 51\]"):
        sampler.sample(torch.zeros(4, 51, device=GPU))
    with pytest.raises(TypeError, match=r"torch\.float16, got torch\.float64"):
        sampler.sample(torch.zeros(4, 50, device=GPU, dtype=torch.float64))
    with pytest.raises(ValueError, match="stride 1 over the vocabulary"):
        sampler.sample(torch.zeros(50, 4, device=GPU).T)
    with pytest.raises(ValueError, match="int64 row numbers"):
        sampler.select_rows(torch.zeros(2, dtype=torch.int32, device=GPU))
