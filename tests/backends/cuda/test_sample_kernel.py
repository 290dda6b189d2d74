"""The sampling kernel's own source, run on the CPU thread by thread: the tokens of the specification, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
from itertools import product

import numpy as np
import pytest
import torch

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import SAMPLE, SAMPLE_HEAD_BYTES, WARPS, SampleTiling, sample_tiling
from prefixkit.cuda.nvrtc import CSRC
from prefixkit.ops.sampling_records import MOST_VOCAB, RECORD, mask, records, words
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import sample_tokens
from prefixkit.sampling.weights import EXP2, rate, weigh
from prefixkit.testing.sampling_cases import (
    FLAT,
    NASTY,
    flat_case,
    logprob_bound,
    masked_case,
    random_params,
    rows_of,
)
from tests.covering import pairwise_cover
from tests.emulation.build import build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The source with a CPU's instructions in place of the GPU's."""
    return build(tmp_path_factory.mktemp("kernel"), "sampling", {}, SAMPLE.headers)


def run(library, logits, params, keys, steps, histories, tiling, active=None, allowed=None):
    """Tokens, log-probabilities, steps and masks as the kernel leaves them."""
    rows, vocab = logits.shape
    table = records(params, keys, steps).view(RECORD).reshape(rows)
    if active is not None:
        table["active"] = active
    bits = None
    if allowed is not None:
        bits = np.stack([np.zeros(words(vocab), np.int32) if may is None else mask(may, vocab) for may in allowed])
        table["masked"] = [may is not None for may in allowed]
    seen = np.stack([mask(history, vocab) for history in histories])
    tokens, logprobs = np.full(rows, -77, dtype=np.int64), np.full(rows, 77, dtype=np.float32)
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 4 == 0
    pointers = (logits.data_ptr(), *(array.ctypes.data for array in (table, seen, tokens, logprobs)))
    pointers = (*pointers, 0 if bits is None else bits.ctypes.data)
    packed = layouts.SAMPLE.packer.pack(*pointers, logits.stride(0), vocab, words(vocab), tiling.segment, aligned)
    library.sample_on_cpu(packed, DTYPES.index(logits.dtype), int(tiling.cached), tiling.blocks, rows)
    return tokens, logprobs, table["step"], seen


TILINGS = {
    "one block": lambda vocab: sample_tiling(vocab, 10**9, False),
    "one block, read again": lambda vocab: SampleTiling(1, sample_tiling(vocab, 10**9, False).segment, False),
    "two": lambda vocab: SampleTiling(2, -(-vocab // 2048) * 128, True),
    "two, read again": lambda vocab: SampleTiling(2, -(-vocab // 2048) * 128, False),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("tiling", "dtype", "vocab"),
    pairwise_cover(product(TILINGS, DTYPES, (17, 1000, 5003)), product(TILINGS, DTYPES, (1000,))),
    ids=str,
)
def test_tokens_are_those_of_the_specification(library, tiling, dtype, vocab):
    rng = np.random.default_rng(vocab)
    rows = 24
    logits = rows_of(rng, rows, vocab, dtype)
    params = random_params(rng, rows, vocab)
    histories = [rng.integers(0, vocab + 5, int(rng.integers(0, 200))) for _ in range(rows)]
    keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 10**6, rows)
    tokens, logprobs, after, seen = run(library, logits, params, keys, steps, histories, TILINGS[tiling](vocab))
    expected, _ = sample_tokens(logits.float(), params, uniforms(keys, steps), histories)
    for row in range(rows):
        assert tokens[row] == expected[row], (row, params[row])
        assert np.array_equal(seen[row], mask(np.append(histories[row], tokens[row]), vocab))
    assert np.array_equal(after, steps + 1)
    exact = torch.log_softmax(logits.double(), -1).gather(1, expected[:, None])[:, 0].numpy()
    assert (np.abs(logprobs - exact) <= logprob_bound(exact, vocab)).all()


@pytest.mark.parametrize(("tiling", "dtype"), [*zip(TILINGS, (*DTYPES, torch.float32), strict=True)], ids=str)
def test_tokens_that_a_grammar_allows(library, tiling, dtype):
    vocab, rows = 1003, 48
    logits, params, allowed = masked_case(np.random.default_rng(3), rows, vocab, dtype)
    histories = [np.arange(row, vocab, 7) for row in range(rows)]
    keys, steps = np.arange(rows, dtype=np.uint64), np.arange(rows)
    how = TILINGS[tiling](vocab)
    tokens, logprobs, after, seen = run(library, logits, params, keys, steps, histories, how, allowed=allowed)
    for row, may in enumerate(allowed):
        one = slice(row, row + 1)
        if may is not None and not len(may):
            assert (tokens[row], logprobs[row]) == (-1, -np.inf), "nothing is allowed"
            assert np.array_equal(seen[row], mask(histories[row], vocab))
            continue
        uniform = uniforms(keys[one], steps[one])
        expected, _ = sample_tokens(logits[one].float(), params[one], uniform, histories[one], allowed=[may])
        assert tokens[row] == expected[0], (row, params[row])
        assert may is None or tokens[row] in may
    assert np.array_equal(after, steps + 1)
    drawn = tokens >= 0
    exact = torch.log_softmax(logits.double(), -1).numpy()[np.arange(rows), tokens][drawn]
    assert (np.abs(logprobs[drawn] - exact) <= logprob_bound(exact, vocab)).all(), "the model's own"


def test_broken_logits_of_tokens_that_are_not_allowed(library):
    """They are part of the log-softmax, so no token is sampled."""
    logits = torch.zeros(3, 300)
    logits[:, 123] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    params, keys, steps = [SamplingParams()] * 3, np.zeros(3, np.uint64), np.zeros(3, np.int64)
    allowed, histories = [np.array([7])] * 3, [np.array([1])] * 3
    tokens, logprobs, *_ = run(
        library, logits, params, keys, steps, histories, SampleTiling(1, 128, True), allowed=allowed
    )
    assert tokens.tolist() == [-1, -1, 7]
    assert np.isnan(logprobs[:2]).all()


@pytest.mark.parametrize("blocks", [4, 8])
def test_larger_clusters(library, blocks):
    rng, vocab, rows = np.random.default_rng(blocks), 9001, 6
    logits, params = rows_of(rng, rows, vocab, torch.float32), random_params(rng, rows, vocab)
    histories = [rng.integers(0, vocab, 50) for _ in range(rows)]
    keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), np.arange(rows)
    tiling = SampleTiling(blocks, -(-vocab // (1024 * blocks)) * 128, True)
    tokens, *_ = run(library, logits, params, keys, steps, histories, tiling)
    assert tokens.tolist() == sample_tokens(logits, params, uniforms(keys, steps), histories)[0].tolist()


@pytest.mark.parametrize(
    ("vocab", "max_shared", "clusters"),
    [
        (32_000, 227 * 1024, True),
        (128_256, 227 * 1024, True),
        (128_256, 99 * 1024, False),
        (262_144, 227 * 1024, True),
    ],
)
def test_vocabularies_of_models_as_gpus_deal_them_out(library, vocab, max_shared, clusters):
    rng, rows = np.random.default_rng(vocab), 9
    logits, params = rows_of(rng, rows, vocab, torch.float32), random_params(rng, rows, vocab)
    logits[0], params[0] = 0.0, SamplingParams(top_p=0.9)  # the heaviest row there is
    histories = [rng.integers(0, vocab, 500) for _ in range(rows)]
    keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 10**6, rows)
    tiling = sample_tiling(vocab, max_shared, clusters)
    tokens, logprobs, *_ = run(library, logits, params, keys, steps, histories, tiling)
    expected, _ = sample_tokens(logits, params, uniforms(keys, steps), histories)
    assert tokens.tolist() == expected.tolist()
    exact = torch.log_softmax(logits.double(), -1).gather(1, expected[:, None])[:, 0].numpy()
    assert (np.abs(logprobs - exact) <= logprob_bound(exact, vocab)).all()


@pytest.mark.parametrize("name", NASTY)
def test_extreme_rows(library, name):
    row = NASTY[name](1000)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=1),
        SamplingParams(top_k=999, top_p=1e-9),
        SamplingParams(top_p=0.5, min_p=0.99),
        SamplingParams(top_p=1 - 2**-53),
        SamplingParams(min_p=0.99),
        SamplingParams(temperature=1e30, top_p=0.7),
    ]
    logits = row.expand(len(params), -1)
    keys, steps = np.arange(len(params), dtype=np.uint64), np.zeros(len(params), dtype=np.int64)
    histories = [np.array([], dtype=np.int64)] * len(params)
    tokens, *_ = run(library, logits, params, keys, steps, histories, SampleTiling(1, 128, True))
    assert tokens.tolist() == sample_tokens(logits, params, uniforms(keys, steps))[0].tolist()


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("vocab", "blocks", "cached"), [(9001, 2, True), (3000, 1, False), (30_000, 4, True)])
@pytest.mark.parametrize("name", FLAT)
def test_nuclei_that_end_among_many_tokens(library, name, vocab, blocks, cached):
    rng = np.random.default_rng(vocab)
    logits, params = flat_case(rng, name, vocab, torch.bfloat16 if blocks == 2 else torch.float32)
    rows = len(params)
    keys, steps = rng.integers(0, 2**64, rows, dtype=np.uint64), np.arange(rows)
    tiling = SampleTiling(blocks, -(-vocab // (1024 * blocks)) * 128, cached)
    tokens, *_ = run(library, logits, params, keys, steps, [np.zeros(0, dtype=np.int64)] * rows, tiling)
    assert tokens.tolist() == sample_tokens(logits.float(), params, uniforms(keys, steps))[0].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_cannot_be_drawn_from_gets_minus_1(library, value):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[1] = value if value == -float("inf") else logits[1]
    logits[1, 123] = value
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0), SamplingParams()]
    keys, steps = np.zeros(4, dtype=np.uint64), np.arange(4)
    histories = [np.array([1])] * 4
    active = np.array([1, 1, 1, 0])
    tokens, logprobs, after, seen = run(
        library, logits, params, keys, steps, histories, SampleTiling(1, 128, True), active
    )
    assert tokens[1] == -1
    assert np.isnan(logprobs[1])
    assert np.array_equal(seen[1], mask(np.array([1]), 300))
    assert after.tolist() == [1, 2, 3, 3]
    assert (tokens[3], logprobs[3]) == (-77, 77), "an inactive row is left alone"


def test_weights_are_those_of_numpy_bit_by_bit(library):
    rng = np.random.default_rng(0)
    scores = np.concatenate(
        (rng.standard_normal(100_000) * 10, -np.geomspace(1e-42, 1e38, 10_000), [-np.inf, 0.0, -0.0])
    ).astype(np.float32)
    for temperature in (1.0, 0.7, 1e-6, 3.3, 1e30):
        found = np.empty_like(scores)
        pointer = ctypes.POINTER(ctypes.c_float)
        library.weigh_on_cpu(
            scores.ctypes.data_as(pointer),
            found.ctypes.data_as(pointer),
            len(scores),
            ctypes.c_float(scores.max()),
            ctypes.c_float(rate(temperature)),
        )
        assert np.array_equal(np.floor(found), weigh(scores[None], [temperature])[0]), temperature


def test_the_source_has_the_same_polynomial():
    text = (CSRC / "sampling" / "sample_weight.cuh").read_text()
    for factor in EXP2[:-1]:
        mantissa, exponent = float(factor).hex().split("p")
        assert f"TOP * {mantissa.rstrip('0')}p{exponent}f" in text


def test_the_cache_follows_what_blocks_share(library):
    assert library.head_bytes() == SAMPLE_HEAD_BYTES


def test_rows_are_dealt_out_whole():
    for vocab in (1, 17, 1000, 32_000, 49_152, 128_256, 262_144, MOST_VOCAB):
        for shared, clusters in ((99 * 1024, False), (163 * 1024, False), (227 * 1024, True)):
            tiling = sample_tiling(vocab, shared, clusters)
            assert tiling.blocks * WARPS * tiling.segment >= vocab
            assert tiling.shared <= shared
    assert sample_tiling(128_256, 227 * 1024, True) == SampleTiling(8, 2048, True)
    assert sample_tiling(32_000, 227 * 1024, True) == SampleTiling(2, 2048, True)
    assert not sample_tiling(128_256, 99 * 1024, False).cached
