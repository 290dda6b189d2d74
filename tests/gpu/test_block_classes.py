"""Classes of KV tiles under masks: with them attention is as exact as without, and reads less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.queries import Queries
from prefixkit.attention.variants import Variant, compose, register, sliding_window, soft_cap, variant
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, Case, fill, make_snapshot
from prefixkit.testing.gpu_forests import draw
from tests.gpu.cases import GPU, on_gpu, planned, poison
from tests.gpu.oracle import Errors, dense
from tests.gpu.test_tree_attention import make

LONGEST = 1 << 20  # positions: more than any forest has


def masks(rng: np.random.Generator) -> dict[str, Variant]:
    documents = torch.from_numpy(np.repeat(np.arange(12_000), rng.integers(1, 200, 12_000))[:LONGEST]).to(GPU)
    size, period, table = int(rng.integers(1, 300)), int(rng.integers(2, 90)), torch.rand(64, 64, device=GPU) < 0.2

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (documents[q] == documents[kv]) & (kv <= q)

    made: dict[str, tuple[Callable[..., Tensor] | None, Callable[..., Tensor]]] = {
        "window": (None, lambda b, h, q, kv: (q - kv < size) & (kv <= q)),
        "documents": (None, within),
        "blocks": (None, lambda b, h, q, kv: table[q // 64 % 64, kv // 64 % 64] & (kv <= q)),
        "dilated": (None, lambda b, h, q, kv: ((q - kv) // period % 2 == 0) & (kv <= q)),
        "by head": (None, lambda b, h, q, kv: ((kv // 100 + h) % 3 == 0) & (kv <= q)),
        "by sequence": (None, lambda b, h, q, kv: ((kv // 100 + b) % 3 == 0) & (kv <= q)),
        "nothing": (None, lambda b, h, q, kv: (kv < 0) & (kv <= q)),
        "everything": (None, lambda b, h, q, kv: (kv >= 0) & (kv <= q)),
        "scored": (lambda s, b, h, q, kv: s * 0.5 + (kv - q) * 0.01, within),
    }
    found = {name: variant(*functions, name=name) for name, functions in made.items()}
    return found | {"composed": compose(found["documents"], sliding_window(size), soft_cap(3.0))}


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """To the tests that run beside these: the dense reference takes gigabytes."""
    yield
    torch.cuda.empty_cache()


NAMES = list(masks(np.random.default_rng(0))) if torch.cuda.is_available() else ["window"]


def numbered(case: Case, rng: np.random.Generator) -> Case:
    """With a number for the sequence of each run of queries."""
    sequence = rng.integers(0, 5, len(case.queries.node)).astype(np.int32)
    return replace(case, queries=replace(case.queries, sequence=sequence))


def attend(case: Case, of: Variant, cost, options, classes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Out, log-sum-exp and the classes."""
    key, call = register(of), on_gpu(case, planned(case, cost, **options))
    given = list(call.arguments(key))
    heads, head_dim = case.q.shape[1:]
    numbers = torch.from_numpy(_sequences(case)).to(GPU)
    plan = [*given[4], numbers]
    found = torch.ops.prefixkit.classify_blocks(
        given[3], plan, [heads, case.k_pages.shape[2], head_dim, head_dim], case.k_pages.shape[1], key
    )
    given[4] = [*plan, found] if classes else plan
    poison(1 << 18)
    return *torch.ops.prefixkit.tree_attention(*given), found


def _sequences(case: Case) -> np.ndarray:
    queries = case.queries
    return np.repeat(queries.sequence.astype(np.int64), queries.end - queries.begin)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_forests_err_no_more_than_torch(name: str, dtype: torch.dtype) -> None:
    errors, seed = Errors(), int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    for number in range(12):
        rng = np.random.default_rng([seed, number])
        case, options = make(int(rng.integers(2**31)), dtype)
        case, of = numbered(case, rng), masks(rng)[name]
        out, lse, _ = attend(case, of, SHARE_ALL if number % 2 else SHARE_NONE, options, True)
        exact, exact_lse = dense(case, of)
        errors.add(number, case, float((out.double() - exact).abs().max()), _allowed(case, of, exact, dtype))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


def _allowed(case: Case, of: Variant, exact: Tensor, dtype: torch.dtype) -> float:
    plain, _ = dense(case, of, dtype)
    half_ulp = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]
    return max(float((plain.double() - exact).abs().max()), half_ulp * float(exact.abs().max()), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_large_forests_err_no_more_than_torch(name: str) -> None:
    errors, first = Errors(), int(np.random.SeedSequence().generate_state(1)[0]) % 2**30
    print("seed", first)
    for seed in range(first, first + 4):
        forest = draw(seed, GPU)
        rng = np.random.default_rng(seed)
        case, of = numbered(forest.case, rng), masks(rng)[name]
        out, lse, _ = attend(case, of, forest.cost, {"num_sms": 132}, True)
        without, lse_without, _ = attend(case, of, forest.cost, {"num_sms": 132}, False)
        torch.testing.assert_close(lse, lse_without, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out, without, rtol=2e-2, atol=2e-2)
        exact, exact_lse = dense(case, of)
        errors.add(seed, case, float((out.double() - exact).abs().max()), _allowed(case, of, exact, case.q.dtype))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3)
    errors.check()


def test_a_mask_that_shows_all_or_nothing_says_so_of_every_block() -> None:
    """Shown blocks evaluate no mask; of an item of which nothing is visible one block is read, perhaps by its bits."""
    case, options = make(3, torch.bfloat16)
    case, made = numbered(case, np.random.default_rng(3)), masks(np.random.default_rng(3))
    for name, allowed in (("everything", {0, 2}), ("nothing", {0, 1, 3})):
        *_, classes = attend(case, made[name], SHARE_ALL, options, True)
        counts, tile_items = on_gpu(case, planned(case, SHARE_ALL, **options)).plan[:2]
        (tile, decode), capacity = counts[:2].tolist(), tile_items.shape[0]
        rows = torch.cat((classes[:tile], classes[capacity : capacity + decode]))
        first = {int(word) & 3 for word in rows[:, 0]}
        assert first <= allowed and first != {0}


@pytest.mark.parametrize("name", ["documents", "rows of a table", "by head"])
def test_compared_blocks_of_prompts_have_bits_where_no_mask_reads_heads(name: str) -> None:
    errors, seed = Errors(), int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng = np.random.default_rng(seed)
    shown = torch.rand(257, 311, device=GPU) < 0.5
    table = variant(mask_mod=lambda b, h, q, kv: shown[q % 257, kv % 311] & (kv <= q))
    of = masks(rng) | {"rows of a table": table}
    snapshot, pages = make_snapshot(rng, [-1, 0, 0], rng.integers(300, 900, 3).tolist(), int(rng.choice([16, 64])))
    queries = Queries(*(np.array(x, np.int32) for x in ([0, 1, 2], [0, 0, 0], snapshot.length)))
    case = numbered(fill(rng, snapshot, pages, queries, (8, 2, 128), torch.bfloat16, 1.0), rng)
    found = {bits: attend(case, of[name], SHARE_ALL, {}, bits) for bits in (True, False)}
    plan, classes = on_gpu(case, planned(case, SHARE_ALL)).plan, found[True][2]
    assert (int(classes[plan[1].shape[0] + plan[2].shape[0], 0]) > 0) == (name != "by head")
    exact, exact_lse = dense(case, of[name])
    for number, (out, lse, _) in enumerate(found.values()):
        off = float((out.double() - exact).abs().max())
        errors.add(number, case, off, _allowed(case, of[name], exact, torch.bfloat16))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()


@pytest.mark.parametrize("size", [50, 60])
def test_rows_that_see_the_tokens_of_one_item_are_not_merged(size: int) -> None:
    """Sequences of which all splits are hidden but for one; what is left out writes nothing."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng, errors, count, length = np.random.default_rng(seed), Errors(), 16, 1024
    snapshot, pages = make_snapshot(rng, [-1] * count, [length - size * (i % 2) for i in range(count)], 16)
    ends = snapshot.length.astype(np.int32)
    queries = Queries(np.arange(count, dtype=np.int32), ends - 1, ends)
    case = numbered(fill(rng, snapshot, pages, queries, (32, 8, 128), torch.bfloat16, 1.0), rng)
    of = variant(mask_mod=lambda b, h, q, kv: (q // size == kv // size) & (kv <= q))
    found = {classes: attend(case, of, SHARE_NONE, {"num_sms": 132}, classes) for classes in (True, False)}
    plan, classes = on_gpu(case, planned(case, SHARE_NONE, num_sms=132)).plan, found[True][2]
    assert int(plan[0][3]) > 0, "sequences are split"
    assert int(classes[plan[1].shape[0] + plan[2].shape[0], 1]) == count
    exact, exact_lse = dense(case, of)
    for number, (out, lse, _) in enumerate(found.values()):
        off = float((out.double() - exact).abs().max())
        errors.add(number, case, off, _allowed(case, of, exact, torch.bfloat16))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    errors.check()
