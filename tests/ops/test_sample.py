"""The op ``sample`` on the CPU: the specification's tokens from records and bits, its contract, and what it says to
wrong arguments; and the sampler that keeps records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit.backends  # noqa: F401  (registers them)
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.sampling_records import ACTIVE, RECORD, STEP, mask, params_of, records, tokens_of
from prefixkit.runners.sampler import Sampler
from prefixkit.sampling.params import SamplingParams
from prefixkit.sampling.rng import uniforms
from prefixkit.sampling.specification import SamplingBatch, sample_tokens
from prefixkit.testing.sampling_cases import NASTY, masked_case, random_params, rows_of
from tests.grammars import Residues

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ops = torch.ops.prefixkit


def case(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    logits, params = rows_of(rng, rows, vocab, dtype), random_params(rng, rows, vocab)
    histories = [rng.integers(0, vocab + 9, int(rng.integers(0, 100))) for _ in range(rows)]
    return logits, params, rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 2**20, rows), histories


def arguments(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of the op, for buffers with two more rows than the logits."""
    logits, params, keys, steps, histories = case(rows, rows + 2, vocab, dtype)
    seen = torch.from_numpy(np.stack([mask(history, vocab) for history in histories]))
    tokens, logprobs = torch.full((rows + 2,), -77), torch.full((rows + 2,), 77.0)
    return [logits[:rows], torch.from_numpy(records(params, keys, steps)), seen, tokens, logprobs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 1000])
def test_tokens_are_those_of_the_specification_step_after_step(vocab: int, dtype: torch.dtype) -> None:
    rows = 40
    _, params, keys, steps, histories = case(vocab, rows, vocab, dtype)
    sampler = Sampler(rows + 3, vocab, "cpu")
    sampler.seen.fill_(-1)  # rows without a penalty do not read it
    sampler.upload_params(range(rows), SamplingBatch(params, keys, steps, histories))
    for step in range(4):
        logits = rows_of(np.random.default_rng(step), rows, vocab, dtype)
        drawn = np.zeros((rows, 2), np.float32)
        tokens, logprobs = sampler.sample(logits, drawn=step % 2 == 1)
        how = drawn if step % 2 == 1 else None
        expected = sample_tokens(logits.float(), params, uniforms(keys, steps + step), histories, how)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(logprobs, expected[1])
        if how is not None:
            assert np.array_equal(sampler.drawn[:rows].numpy(), how)
        histories = [np.append(held, token) for held, token in zip(histories, tokens.tolist(), strict=True)]
        for row, each in enumerate(params):
            if each.repetition_penalty != 1:
                assert np.array_equal(sampler.seen[row].numpy(), mask(histories[row], vocab))
        assert sampler.steps.tolist() == [*(steps + step + 1), 0, 0, 0]
    assert sampler.tokens[rows:].tolist() == [-1] * 3, "rows that were never loaded"


@pytest.mark.parametrize("name", NASTY)
def test_extreme_rows_and_extreme_parameters(name: str) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-6),  # which float32 holds as a little less
        SamplingParams(temperature=1e300, top_p=0.7),  # infinite in float32
        SamplingParams(top_p=1 - 2**-53),
        SamplingParams(min_p=1 - 2**-53),
        SamplingParams(top_k=2**40),
    ]
    logits = NASTY[name](1000).repeat(len(params), 1)
    keys, steps = np.arange(len(params), dtype=np.uint64), np.zeros(len(params), dtype=np.int64)
    sampler = Sampler(len(params), 1000, "cpu")
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, [steps[:0]] * len(params)))
    expected = [_or_minus_1(logits[row], params[row], uniforms(keys, steps)[row]) for row in range(len(params))]
    assert sampler.sample(logits)[0].tolist() == expected


def _or_minus_1(row: Tensor, params: SamplingParams, uniform: float) -> int:
    try:
        return int(sample_tokens(row[None], params, np.array([uniform]))[0])
    except ValueError:
        return -1


def test_inactive_rows_are_left_alone_and_broken_ones_say_so() -> None:
    logits, table, seen, tokens, logprobs = args = arguments(9, 50)
    table[2, ACTIVE] = 0
    broken = {0: torch.nan, 5: torch.inf, 8: -torch.inf}
    for row, value in broken.items():
        logits[row, :: 1 if value == -torch.inf else 49] = value
    before = [part.clone() for part in args]
    ops.sample(*args)
    assert torch.equal(logits.nan_to_num(), before[0].nan_to_num()), "read only"
    for row in broken:
        assert tokens[row] == -1
        assert logprobs[row].isnan()
        assert torch.equal(seen[row], before[2][row])
    for row in (2, 9, 10):  # not active, and beyond the logits
        assert (tokens[row], logprobs[row]) == (-77, 77)
        assert torch.equal(table[row], before[1][row])
        assert torch.equal(seen[row], before[2][row])
    assert (table[:9, STEP] - before[1][:9, STEP]).tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1]
    whole = [row for row in range(9) if row not in broken and row != 2]
    found = before[1].numpy().view(RECORD)[whole, 0]
    histories = [tokens_of(bits) for bits in before[2][whole].numpy()]
    expected = sample_tokens(before[0][whole], params_of(found), uniforms(found["key"], found["step"]), histories)
    assert torch.equal(tokens[whole], expected[0])


def test_rows_with_a_grammar_sample_what_is_allowed_and_say_where_nothing_is() -> None:
    rows, vocab = 20, 77
    logits, params, allowed = masked_case(np.random.default_rng(4), rows, vocab, torch.float32)
    grammars = [None if may is None else Residues(1) for may in allowed]  # of which the masks are given here
    params = [replace(own, grammar=grammar) for own, grammar in zip(params, grammars, strict=True)]
    keys, steps, histories = np.arange(rows, dtype=np.uint64), np.arange(rows), [np.arange(9)] * rows
    sampler = Sampler(rows, vocab, "cpu")
    sampler.upload_params(slice(None), SamplingBatch(params, keys, steps, histories))
    bits = np.stack([mask(np.zeros(0, int) if may is None else may, vocab) for may in allowed])
    bits[:, -1] |= np.int32(-1 << vocab % 32)  # bits behind the vocabulary mean nothing
    tokens, logprobs = sampler.sample(logits, drawn=True, allowed=torch.from_numpy(bits))
    for row, may in enumerate(allowed):
        if may is not None and not len(may):
            assert (int(tokens[row]), float(logprobs[row])) == (-1, -np.inf)
            assert sampler.drawn[row].isnan().all()
            continue
        one, how = slice(row, row + 1), np.zeros((1, 2), np.float32)
        uniform = uniforms(keys[one], steps[one])
        expected = sample_tokens(logits[one], params[one], uniform, histories[one], how, [may])
        assert (tokens[one], logprobs[one]) == expected
        assert np.array_equal(sampler.drawn[one].numpy(), how)
    assert sampler.steps.tolist() == (steps + 1).tolist()


def test_rows_are_kept_and_newcomers_take_what_is_free() -> None:
    rows, vocab = 12, 300
    logits, params, keys, steps, histories = case(5, rows, vocab)
    sampler = Sampler(rows + 2, vocab, "cpu")
    sampler.upload_params(slice(0, rows), SamplingBatch(params, keys, steps, histories))
    first = sampler.sample(logits)[0].tolist()
    index = np.array([7, 3, 3, 11])
    sampler.select_rows(torch.from_numpy(index))
    assert sampler.tokens[:4].tolist() == [first[row] for row in index]
    assert sampler.active.tolist() == [1] * 4 + [0] * (rows - 2)
    sampler.upload_params([5], SamplingBatch(params[:1], keys[:1], steps[:1], histories[:1]))
    sampler.sample(logits)
    held = [np.append(histories[row], first[row]) for row in index]
    expected = sample_tokens(logits[:4], [params[row] for row in index], uniforms(keys[index], steps[index] + 1), held)[
        0
    ]
    assert sampler.tokens[:4].tolist() == expected.tolist()
    expected = sample_tokens(logits[5:6], params[:1], uniforms(keys[:1], steps[:1]), histories[:1])[0]
    assert sampler.tokens[5] == expected[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    for rows in (0, 5):
        torch.library.opcheck(ops.sample.default, tuple(arguments(rows, 50, dtype)))
    bits = torch.full((5, 2), -1, dtype=torch.int32)
    torch.library.opcheck(ops.sample.default, (*arguments(5, 50, dtype), None, bits))


WRONG = {
    "logits dtype": (0, lambda x: x.double(), BadDtype, "logits must be torch.float32 or .*, got torch.float64"),
    "logits dims": (0, lambda x: x[0], BadShape, r"logits must have shape \[n, vocab\] with 1 to 1048576 tokens"),
    "no tokens": (0, lambda x: x[:, :0], BadShape, "logits must have shape"),
    "many tokens": (0, lambda x: x[:, :1].expand(-1, 2**20 + 1), BadShape, "logits must have shape"),
    "logits strides": (0, lambda x: x.T.contiguous().T, BadShape, "logits must have stride 1 over the vocabulary"),
    "records rows": (1, lambda x: x[:3], BadShape, r"records must have shape \[at least 4, 12\], contiguous"),
    "records width": (1, lambda x: x[:, :11], BadShape, "records must have shape"),
    "records dtype": (1, lambda x: x.long(), BadDtype, "records must be torch.int32"),
    "seen": (2, lambda x: x[:, :1], BadShape, r"seen must have shape \[at least 4, 2\]"),
    "seen strides": (2, lambda x: x.T.contiguous().T, BadShape, "seen must have shape .*contiguous"),
    "tokens": (3, lambda x: x.int(), BadDtype, "tokens must be torch.int64"),
    "logprobs": (4, lambda x: x[:3], BadShape, r"logprobs must have shape \[at least 4\]"),
    "allowed": (6, lambda x: x[:, :1], BadShape, r"allowed must have shape \[at least 4, 2\]"),
    "allowed dtype": (6, lambda x: x.bool(), BadDtype, "allowed must be torch.int32"),
    "device": (4, lambda x: x.to("meta"), BadDevice, "logprobs is on meta"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_named(what: str) -> None:
    position, change, error, message = WRONG[what]
    args = [*arguments(4, 50), torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)]
    before = args[3].clone()
    changed = [change(arg) if number == position else arg for number, arg in enumerate(args)]
    with pytest.raises(error, match=f"sample: {message}"):
        ops.sample(*changed)
    assert torch.equal(args[3], before)


def test_a_sampler_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        Sampler(0, 5, "cpu")
    sampler = Sampler(4, 50, "cpu")
    zero, keys = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint64)
    with pytest.raises(ValueError, match="rows must be different and from 0 to 3"):
        sampler.upload_params([4], SamplingBatch([SamplingParams()], keys, zero, [zero]))
    with pytest.raises(ValueError, match="a batch of 1 rows cannot be loaded into 2"):
        sampler.upload_params([1, 2], SamplingBatch([SamplingParams()], keys, zero, [zero]))
    with pytest.raises(ValueError, match=r"\[at most 4, 50\], got \[4, 51\]"):
        sampler.sample(torch.zeros(4, 51))
    with pytest.raises(ValueError, match="int64 row numbers"):
        sampler.select_rows(torch.zeros(2, dtype=torch.int32))
