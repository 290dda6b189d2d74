"""The C++ of variants does what their Python functions do: compiled for the CPU, at every place of a block."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from prefixkit.attention.variants import (
    Variant,
    alibi,
    chunked,
    compose,
    rounded_alibi,
    sliding_window,
    soft_cap,
    variant,
)
from prefixkit.attention.variants.evaluate import pointwise
from prefixkit.attention.variants.gallery import prefix_lm, streaming
from prefixkit.attention.variants.operations import OPERATIONS
from prefixkit.backends.cuda.variants.variant_header import header
from prefixkit.backends.cuda.variants.variant_words import words_on_device
from prefixkit.testing.random_variants import random_variant
from tests.emulation.build import build

CPU = torch.device("cpu")
SIZES = (2, 3, 17, 19)  # sequences, heads, queries, keys

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


class Compiled:
    """Headers of variants, compiled together for the CPU: most of the time goes into what they all include."""

    def __init__(self, folder: Path, *variants: Variant) -> None:
        texts = [header(of) for of in variants]
        names = dict.fromkeys(text for text in texts if text is not None)
        assert names, "a variant without functions has no header"
        made = [(f"variant_{number}.cuh", text) for number, text in enumerate(names)]
        listed = "".join(
            f'#define Variant V{n}\n#include "{file}"\n#undef Variant\nAPPLY({n})\n' for n, (file, _) in enumerate(made)
        )
        self._library = build(folder, "variant", {}, (*made, ("variants.cuh", listed)))
        self._number: dict[str | None, int] = {text: number for number, text in enumerate(names)}

    def decide(self, of: Variant, q: Tensor, kv: Tensor) -> tuple[bool, bool]:
        """Whether some query of a range may see some key of one, and whether some may not."""
        given = q, kv, words_on_device(of, CPU).tensor
        decide = getattr(self._library, f"decide_{self._number[header(of)]}")
        found = decide(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in given))
        return bool(found & 1), bool(found & 2)

    def __call__(self, of: Variant, score: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """``score [b, h, q, kv]`` changed, and what is visible; ``of`` gives the values."""
        scores, shown = score.clone(), torch.empty(score.shape, dtype=torch.bool)
        sizes = torch.tensor(score.shape, dtype=torch.int32)
        given = sizes, q, kv, words_on_device(of, CPU).tensor, scores, shown
        text = header(of)
        assert text is not None
        pointers = (ctypes.c_void_p * len(given))(*(tensor.data_ptr() for tensor in given))
        getattr(self._library, f"apply_{self._number[text]}")(pointers)
        return scores, shown


def places(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    b, h = torch.arange(SIZES[0]), torch.arange(SIZES[1])
    return b[:, None, None, None], h[:, None, None], q[:, None], kv


def block(rng: np.random.Generator, longest: int = 5000) -> tuple[Tensor, Tensor, Tensor]:
    q, kv = (torch.from_numpy(rng.integers(0, longest, size)) for size in SIZES[2:])
    return torch.from_numpy(10 * rng.standard_normal(SIZES, dtype=np.float32)), q, kv


def check(of: Variant, run: Compiled, rng: np.random.Generator) -> None:
    """Scores to a few units of float32 of the largest, masks exactly."""
    score, q, kv = block(rng)
    got, shown = run(of, score, q, kv)
    want = score.double()
    for mod in of.score_mods:
        want = pointwise(mod.function, want, *places(q, kv))
    expected = torch.ones(SIZES, dtype=torch.bool)
    for mod in of.mask_mods:
        expected &= pointwise(mod.function, *places(q, kv))
    if not of.looks_ahead:  # attention sees to causality
        expected, shown = expected & (kv <= q[:, None]), shown & (kv <= q[:, None])
    assert torch.equal(shown, expected)
    vectorised = of.change(score, *places(q, kv)).expand(SIZES)
    for each in (got, vectorised):
        torch.testing.assert_close(each.double(), want.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
    for _ in range(20):
        check_block(of, run, rng)


def check_block(of: Variant, run: Compiled, rng: np.random.Generator) -> None:
    """What is said of a block holds."""
    sides = [torch.from_numpy(int(rng.integers(0, 400)) + np.array([0, rng.integers(0, 70)])) for _ in range(2)]
    q, kv = (torch.arange(int(side[0]), int(side[1]) + 1) for side in sides)
    some, not_all = run.decide(of, *sides)
    at = torch.arange(SIZES[0])[:, None, None, None], torch.arange(SIZES[1])[:, None, None], q[:, None], kv
    shown = of.shows(*at)
    assert some or not shown.any(), "a block that is said to be hidden"
    assert not_all or shown.all(), "a block that is said to be shown"


WRAPPING = {8: torch.int8, -8: torch.uint8, 16: torch.int16, 32: torch.int32}
PER_HEAD, TABLE = torch.tensor([0.5, -1.25, 3.0]), torch.randint(0, 4, (2, 5000))
HALVES = torch.randn(3, 64).bfloat16()
NARROW = {bits: torch.randint(-(2**30), 2**30, (5000,)).to(dtype) for bits, dtype in WRAPPING.items()}
# Every operation that an expression can hold, at least once; operands of both signs.
SCORE_MODS: dict[str, Callable[..., Tensor]] = {
    "arithmetic": lambda s, b, h, q, kv: (s * 2 - 1) / 3 + (q - kv) * 0.01 + -h,
    "floors": lambda s, b, h, q, kv: s + (q - kv) // 7 + (kv - q) % 5 + (q - kv) // -3 + (q - kv) % -4,
    "floors by values": lambda s, b, h, q, kv: s + (q - kv) // (h + 1) + (kv - q) % (b + 2),
    "floors of floats": lambda s, b, h, q, kv: s // 1.5 + s % 2.5 + torch.remainder(s, -1.25),
    "functions": lambda s, b, h, q, kv: torch.tanh(s / 20) + s.sigmoid() + torch.exp(-s.abs()) + torch.exp2(s / 9),
    "log-sigmoids": lambda s, b, h, q, kv: torch.nn.functional.logsigmoid(s) - torch.nn.functional.logsigmoid(-s),
    "roots": lambda s, b, h, q, kv: torch.sqrt(s.abs() + 1) + torch.rsqrt(s.abs() + 1) + (s.abs() + 1) ** 0.3 + s**2,
    "logs": lambda s, b, h, q, kv: torch.log(s.abs() + 1) + torch.log2(s.abs() + 2) + torch.log1p(s.abs()),
    "waves": lambda s, b, h, q, kv: torch.sin(s) + torch.cos(s) + s.floor() - s.ceil() + s.trunc() * s.round(),
    "rounding": lambda s, b, h, q, kv: s.to(torch.bfloat16).float() + s.half().float() + s.to(torch.int64),
    "choices": lambda s, b, h, q, kv: torch.where(
        (q >= kv) & (h != 1), torch.minimum(s, s.new_ones(())), torch.maximum(-s, s.new_full((), 2.0))
    ),
    "clamps": lambda s, b, h, q, kv: s.clamp(-3, 4) + (q - kv).clamp(min=-5) + s.masked_fill(kv < 7, -math.inf),
    "captured": lambda s, b, h, q, kv: s + PER_HEAD[h] * TABLE[b, q] + HALVES[h][kv % 64] + PER_HEAD[-1],
    "large log-sigmoids": lambda s, b, h, q, kv: torch.nn.functional.logsigmoid(s * 50),
    "no numbers": lambda s, b, h, q, kv: torch.where(
        h == 0, torch.log(s).clamp(-1, 1), torch.minimum(torch.sqrt(s), s) + torch.maximum(s, torch.log(s))
    ),
    "methods": lambda s, b, h, q, kv: s.where(q - kv < 3, s - 50) + s.pow(exponent=2).masked_fill(mask=kv < 9, value=1),
    "truths": lambda s, b, h, q, kv: s + ((q > kv) + (q > 5)) * 2 - ((q > kv) * (h > 0)).float(),
    "small integers": lambda s, b, h, q, kv: (
        s + NARROW[8][q] * NARROW[-8][kv] * 3 + (NARROW[16][q] - NARROW[16][kv]) * 1e-3 + (NARROW[32][q] * 3 < kv)
    ),
    "a line": lambda s, b, h, q, kv: s + PER_HEAD[h] * (kv - q) * 0.01 - b,
    "a line that falls": lambda s, b, h, q, kv: s - torch.tanh(PER_HEAD[h]) * 0.01 * (kv - q + 2).float(),
}
MASK_MODS: dict[str, Callable[..., Tensor]] = {
    "comparisons": lambda b, h, q, kv: ((q > kv) | (q <= kv - 9)) & (kv != 3) & ~(q == 5) | (h < b),
    "bits": lambda b, h, q, kv: ((q ^ kv) & 6 | (q << 1) >> 3) % 3 != h,
    "logic": lambda b, h, q, kv: torch.logical_or(q > kv, torch.logical_not(h == 1)) ^ torch.logical_and(q, kv),
    "documents": lambda b, h, q, kv: TABLE[b, q] == TABLE[b, kv],
    "large": lambda b, h, q, kv: (q * kv * 4000 < 2**40) & (q + 2**33 > kv),
    "quotients": lambda b, h, q, kv: ((q / 41).long() == (kv / 41).long()) | (q / 3 == (kv * 2 + 1) / 6),
    "powers": lambda b, h, q, kv: ((kv**5) % 7 == (q**3) % 7) & (kv**0 == 1) | (torch.pow(q, exponent=4) % 5 < 1),
    "one of two": lambda b, h, q, kv: torch.logical_xor(q > kv, torch.logical_xor(h, b)),
    "unsigned": lambda b, h, q, kv: (NARROW[-8][q] - NARROW[-8][kv] <= 5) | (-NARROW[-8][q] // 7 == 3),
    "signed": lambda b, h, q, kv: (NARROW[8][q] + NARROW[8][kv] + 100 > 5) ^ ((NARROW[-8][q] % -3 == 1) & (q < 99)),
    "wrapping casts": lambda b, h, q, kv: (q * 40).to(torch.int16) < (q * q * 500).int() + kv.to(torch.uint8).char(),
    "casts": lambda b, h, q, kv: (q.float() / 3 > kv.to(torch.float32) * 1.5) | (q % 3).bool(),
}


OPERATING = {name: variant(SCORE_MODS.get(name), MASK_MODS.get(name)) for name in (*SCORE_MODS, *MASK_MODS)}


@pytest.fixture(scope="module")
def operating(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("operating"), *OPERATING.values())


@pytest.mark.parametrize("name", OPERATING)
def test_each_operation_does_what_it_does_in_torch(name: str, operating: Compiled) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    check(OPERATING[name], operating, np.random.default_rng(seed))


def test_these_functions_hold_every_operation() -> None:
    used = {node.op for each in OPERATING.values() for mod in each.mods for node in mod.expression.nodes}  # type: ignore[union-attr]
    assert set(OPERATIONS) <= used


def test_lines_are_computed_as_such() -> None:
    lines = [name for name, of in OPERATING.items() if "LINEAR = true" in (header(of) or "")]
    assert lines == ["a line", "a line that falls"]


def test_random_compositions(tmp_path: Path) -> None:
    """Several values of each in what was compiled once."""
    seeds = [int(seed) for seed in np.random.SeedSequence().generate_state(4)]
    print("seeds", seeds)
    made = [
        [random_variant(seeds[0] + structure, seed, *SIZES[:2], sinks=False) for seed in seeds[1:]]
        for structure in range(20)
    ]
    assert all(len({header(of) for of in variants}) == 1 for variants in made)
    kept = [of for variants in made for of in variants if of.mods]  # not causal attention in other words
    run = Compiled(tmp_path, *kept)
    for of in kept:
        print(of.name)
        check(of, run, np.random.default_rng(seeds[0]))


def test_other_values_shapes_and_strides_run_in_the_kernel_that_there_is(tmp_path: Path) -> None:
    def make(size: int, table: Tensor) -> Variant:
        return variant(lambda s, b, h, q, kv: s + table[h, kv % size], lambda b, h, q, kv: q - kv < size)

    first, others = make(3, torch.randn(3, 9)), [make(40, torch.randn(40, 3).T), make(7, torch.randn(5, 7)[1:])]
    run = Compiled(tmp_path, first)
    for other in others:
        assert header(other) == header(first)
        check(other, run, np.random.default_rng(0))
    assert header(make(3, torch.randint(9, (3, 9)))) != header(first), "elements of another dtype"


def test_slots_before_the_first_token_and_behind_the_last_read_what_a_tensor_has(tmp_path: Path) -> None:
    """Kernels look at all slots of a KV tile, those that no token owns too, and use nothing of these."""
    memory = torch.full((900,), torch.inf)
    line = memory[300:600] = torch.randn(300)
    of = variant(lambda s, b, h, q, kv: s + memory[300:600][kv], lambda b, h, q, kv: line[kv] < 9)
    score, q = torch.zeros(SIZES), torch.arange(SIZES[2])
    kv = torch.cat((torch.arange(-15, 0), torch.tensor([0, 299, 300, 362])))
    got, _ = Compiled(tmp_path, of)(of, score, q, kv)
    torch.testing.assert_close(got[0, 0, 0], line[kv.clamp(0, 299)])


def test_a_number_of_64_bits_is_read_as_one(tmp_path: Path) -> None:
    """Kernels compute with 32 bits where they can."""
    narrow, wide = (variant(mask_mod=lambda b, h, q, kv, n=n: q - kv < n) for n in (2**20, 2**40))
    assert header(narrow) != header(wide)
    check(wide, Compiled(tmp_path, wide), np.random.default_rng(0))


def test_values_stay_where_they_are_and_follow_changes_in_place() -> None:
    """Captured graphs hold their address."""
    table = torch.randn(4)
    here = variant(lambda s, b, h, q, kv: s + table[h])
    moved = variant(lambda s, b, h, q, kv: s + table.to(s.device)[h])
    words = words_on_device(here, CPU)
    assert words_on_device(here, CPU) is words
    assert table.data_ptr() == int(words.tensor[:2].view(torch.int64)[0])
    before = moved.versions
    table.zero_()
    assert moved.versions != before and here.versions != before


@pytest.mark.parametrize("heads", [3, 8, 71])
def test_falcons_alibi_rounds_as_its_own_code_does(heads: int, tmp_path: Path) -> None:
    length = 3000
    bias = build_alibi_tensor(torch.ones(1, length, dtype=torch.int64), heads, torch.float32)[:, 0]
    of = rounded_alibi((bias[:, 1]).tolist(), 0.3)
    kv = torch.arange(length)
    got, _ = Compiled(tmp_path, of)(of, torch.full((1, heads, 1, length), 0.5), torch.tensor([length]), kv)
    torch.testing.assert_close(got[0, :, 0], bias * 0.3 + 0.5, rtol=1e-6, atol=0)


BY_RANGES: dict[str, Callable[[], Variant]] = {
    "window": lambda: sliding_window(60),
    "both ways": lambda: variant(mask_mod=lambda b, h, q, kv: (q - kv).abs() < 40),
    "chunks": lambda: chunked(64),
    "prefix": lambda: prefix_lm(100),
    "sinks and window": lambda: streaming(4, 70),
    "not these": lambda: variant(mask_mod=lambda b, h, q, kv: ~((kv >= 30) & (kv < 90)) & (kv <= q)),
}


@pytest.mark.parametrize("name", BY_RANGES)
def test_ranges_of_positions_tell_what_is_hidden_and_what_is_shown(name: str, tmp_path: Path) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    of, rng = BY_RANGES[name](), np.random.default_rng(seed)
    run, found = Compiled(tmp_path, of), set()
    check(of, run, rng)
    for first in rng.integers(0, 300, 200).tolist():
        sides = torch.tensor([first, first + 31]), torch.tensor([16, 31]) + 16 * int(rng.integers(20))
        q, kv = (torch.arange(int(side[0]), int(side[1]) + 1) for side in sides)
        zero = torch.zeros(1, dtype=torch.int64)
        shown, (some, not_all) = of.shows(zero, zero, q[:, None], kv), run.decide(of, *sides)
        assert (some, not_all) == (bool(shown.any()), not bool(shown.all()))
        found.add((some, not_all))
    assert {(True, False), (True, True)} <= found


def test_built_in_variants_compose(tmp_path: Path) -> None:
    of = compose(alibi([0.5, 0.25, 1.0]), soft_cap(7.0), sliding_window(300))
    check(of, Compiled(tmp_path, of), np.random.default_rng(1))
