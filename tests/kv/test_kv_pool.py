"""The pool: what is written to a slot is found there, in any layout, and nothing else changes."""

from __future__ import annotations

import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit.backends  # noqa: F401 - registers them
from prefixkit.kv.kv_pool import KVPool, KVSpec
from prefixkit.kv.layer_kinds import CachedTensor
from prefixkit.testing.kv_specs import spec_of_alike
from tests.two_devices import FIRST, SECOND, TwoDevices


def filled(pool: KVPool) -> KVPool:
    for layer in range(len(pool.spec.layers)):
        for pages in pool.pages(layer):
            pages.copy_(torch.randn(pages.shape))
    return pool


def append(pool: KVPool, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    torch.ops.prefixkit.kv_append(key, value, *pool.pages(layer), slots)


def rows(pages: torch.Tensor) -> torch.Tensor:
    """``[slots, kv_heads, head_dim]`` a copy."""
    return pages.reshape(-1, *pages.shape[2:]).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_append_writes_these_slots_of_this_layer_only(dtype: torch.dtype, page_size: int) -> None:
    pool = filled(KVPool(spec_of_alike(2, 3, 32, dtype), 9, page_size))
    before = [rows(pages) for layer in (0, 1) for pages in pool.pages(layer)]
    slots = torch.randperm(9 * page_size)[:5]
    key, value = torch.randn(2, 5, 3, 32).to(dtype)
    append(pool, 1, key, value, slots)
    before[2][slots], before[3][slots] = key, value
    after = [rows(pages) for layer in (0, 1) for pages in pool.pages(layer)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("spec", [spec_of_alike(3, 2, 16), spec_of_alike(32, 32, 256)], ids=["at once", "in parts"])
def test_copy_moves_kv_between_slots_of_all_layers_in_the_order_given(spec: KVSpec) -> None:
    """Of the large spec, 32 slots are copied at a time.  A target may be a source of those before it."""
    pool = filled(KVPool(spec, 6, 16))
    before = [rows(pages) for layer in range(len(spec.layers)) for pages in pool.pages(layer)]
    places = torch.randperm(96)
    source, target = places[:48], torch.cat((places[48:88], places[:8]))
    pool.copy(source.numpy(), target.numpy())
    after = [rows(pages) for layer in range(len(spec.layers)) for pages in pool.pages(layer)]
    # By numbers of slots, in the order given: the KV of which slot ends up in each.
    origin = list(range(96))
    for begin, end in zip(source.tolist(), target.tolist(), strict=True):
        origin[end] = origin[begin]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[origin])
    pool.copy(source[:0].numpy(), target[:0].numpy())


def test_append_takes_transposed_keys() -> None:
    pool = filled(KVPool(spec_of_alike(1, 3, 32), 4, 16))
    key, value = (torch.randn(3, 6, 32).transpose(0, 1) for _ in "kv")
    slots = torch.tensor([3, 60, 2, 9, 40, 41])
    append(pool, 0, key, value, slots)
    assert torch.equal(rows(pool.pages(0)[0])[slots], key)
    assert torch.equal(rows(pool.pages(0)[1])[slots], value)


def test_head_major_pages_as_on_a_gpu_append_alike() -> None:
    k, v = (torch.randn(4, 2, 8, 16).transpose(1, 2) for _ in "kv")
    expected_k, expected_v = rows(k), rows(v)
    key, value, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([31, 0, 9])
    torch.ops.prefixkit.kv_append(key, value, k, v, slots)
    for expected, tokens in ((expected_k, key), (expected_v, value)):
        expected[slots] = tokens
    assert torch.equal(rows(k), expected_k)
    assert torch.equal(rows(v), expected_v)


def test_consecutive_slots_are_one_matrix_on_the_cpu() -> None:
    pages = KVPool(spec_of_alike(3, 3, 64), 5, 16).pages(1)[0]
    assert pages.shape == (5, 16, 3, 64)
    assert pages.is_contiguous()


def test_a_pool_made_in_inference_mode_works_outside_it_and_the_other_way_round() -> None:
    token, slot = torch.ones(1, 2, 16), torch.tensor([3])
    with torch.inference_mode():
        inside = KVPool(spec_of_alike(1, 2, 16), 2, 8)
    append(inside, 0, token, token, slot)
    outside = KVPool(spec_of_alike(1, 2, 16), 2, 8)
    with torch.inference_mode():
        append(outside, 0, token, token, slot)
    append(outside, 0, token, token, slot + 2)
    for pool, written in ((inside, [3]), (outside, [3, 5])):
        assert (rows(pool.pages(0)[0])[written] == 1).all() and (rows(pool.pages(0)[1])[written] == 1).all()


def test_bytes() -> None:
    spec = spec_of_alike(30, 3, 64, torch.bfloat16)
    assert spec.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert KVPool(spec, 7, 16).bytes == 7 * 16 * spec.bytes_per_token


def test_a_pool_takes_no_memory_until_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = KVPool(spec_of_alike(30, 3, 64), 2048, 128)
    assert pool.bytes > 10 * 2**30
    append(pool, 0, torch.ones(1, 3, 64), torch.ones(1, 3, 64), torch.tensor([200_000]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10  # in KB


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec_of_alike(0, 3, 64), "layers must each cache"),
        (lambda: spec_of_alike(2, 3, 0), "layers must each cache"),
        (lambda: spec_of_alike(2, 3, -1), "head_dim must be at least 0"),
        (lambda: spec_of_alike(2, 3, 64, torch.float64), "dtype must be one of"),
        (lambda: KVPool(spec_of_alike(2, 3, 64), 0), "num_pages must be at least 1"),
        (lambda: KVPool(spec_of_alike(2, 3, 64), 5, 129), "page_size must be 1 to 128"),
    ],
)
def test_impossible_pools_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bad_slot_is_refused_before_anything_is_written() -> None:
    pool = filled(KVPool(spec_of_alike(1, 2, 16), 2, 8))
    before = rows(pool.pages(0)[0])
    with pytest.raises(IndexError):
        append(pool, 0, torch.ones(2, 2, 16), torch.ones(2, 2, 16), torch.tensor([3, 16]))
    assert torch.equal(before, rows(pool.pages(0)[0]))


def test_slots_and_layers_that_do_not_exist_are_refused() -> None:
    pool = KVPool(spec_of_alike(2, 3, 64), 5, 16)
    one = torch.zeros(1, 3, 64)
    for slot in (80, -2):
        with pytest.raises(IndexError, match=r"slots 0\.\.79"):
            append(pool, 0, one, one, torch.tensor([slot]))
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=r"layers 0\.\.1"):
            pool.pages(layer)[0]


@pytest.mark.parametrize("page_size", [4, 16])
def test_kv_that_was_read_is_written_where_it_is_wanted(page_size: int) -> None:
    """More of it than is copied at once: 24 MB of 48 KiB a token for keys, and as much for values."""
    pool = filled(KVPool(spec_of_alike(num_layers=3, kv_heads=32, head_dim=128), 1024 // page_size, page_size))
    slots = np.random.default_rng(0).permutation(1024)[:500].astype(np.int64)
    pages, offsets = np.divmod(slots, page_size)
    parts = pool.read(slots)
    assert len(parts) == 2 and all(part.nbytes <= 2**25 for part in parts)
    kv = torch.cat(parts)
    for layer in range(3):
        for part, tensor in zip(pool.split(kv), pool.pages(layer), strict=True):
            torch.testing.assert_close(part[:, layer], tensor[pages, offsets], rtol=0, atol=0)
    for places in (np.arange(100, 500), np.random.default_rng(1).permutation(500)):
        there = slots[: len(places)][::-1].copy()
        for given in (parts, [kv]):
            for layer in range(3):
                pool.pages(layer)[0].fill_(torch.nan)
                pool.pages(layer)[1].fill_(torch.nan)
            pool.write(there, given, places)
            torch.testing.assert_close(torch.cat(pool.read(there)), kv[places], rtol=0, atol=0)


def test_layers_on_other_devices_have_tensors_of_their_own_and_the_same_rows_on_the_host() -> None:
    """Runs of layers on one device share a tensor; what one pool has read another writes, wherever its layers lie."""
    k, latent = CachedTensor(2, 4), CachedTensor(1, 6)
    layers = ((k, k), (latent,), (k, k), (k, k), (latent,), (k, k))
    one = filled(KVPool(KVSpec(layers), 4, 4))
    with TwoDevices() as two:
        devices = FIRST, SECOND, SECOND, SECOND, FIRST, FIRST
        spread = KVPool(replace(one.spec, layer_devices=devices), 4, 4)
        assert [spread.pages(layer)[0].device for layer in range(6)] == [*devices]
        addresses = [spread.pages(layer)[0].untyped_storage().data_ptr() for layer in range(6)]
        assert [addresses.index(address) for address in addresses] == [0, 1, 2, 2, 4, 5]
        slots, there = np.array([3, 4, 9, 15]), np.array([1, 0, 7, 14])
        parts = one.read(slots)
        spread.write(there, parts, np.arange(4))
        assert torch.equal(torch.cat(spread.read(there)), torch.cat(parts))
        grown = spread.grown(5)
        grown.copy(there, slots, spread)
        assert torch.equal(torch.cat(grown.read(slots)), torch.cat(parts))
        assert two.moved[SECOND] and str(spread.spec).endswith("on cpu and cpu:1")


def test_devices_that_are_one_make_a_spec_of_one_device() -> None:
    spec = spec_of_alike(3, 2, 16)
    assert replace(spec, layer_devices=(FIRST,) * 3) == spec
    with pytest.raises(ValueError, match="layer_devices must be 3 devices or none, got 2"):
        replace(spec, layer_devices=(FIRST, SECOND))


@pytest.mark.parametrize("dims", [(6, 4, 5), (6, 0), (6, 0, 5)], ids=str)
def test_any_number_of_tensors_of_any_size_is_read_written_and_copied(dims: tuple[int, ...]) -> None:
    """A latent, rotary keys, of which there may be none, and index keys."""
    spec = KVSpec((tuple(CachedTensor(1, dim) for dim in dims),) * 2)
    pool, other = KVPool(spec, 4, 4), KVPool(spec, 3, 4)
    rng = torch.Generator().manual_seed(0)
    for layer in range(2):
        for pages in pool.pages(layer):
            pages.copy_(torch.randn(pages.shape, generator=rng))
    slots, there = np.array([3, 4, 9]), np.array([1, 0, 7])
    parts = pool.read(slots)
    assert [part.shape for part in parts] == [(3, 2 * sum(dims))]
    other.write(there, parts, np.arange(3))
    copied = KVPool(spec, 3, 4)
    copied.copy(slots, there, pool)
    for layer in range(2):
        for mine, others, copies in zip(*(of.pages(layer) for of in (pool, other, copied)), strict=True):
            for found in (others, copies):
                assert torch.equal(found.flatten(0, 1)[there], mine.flatten(0, 1)[slots])
