"""The kernel that rotates and appends, its own source run on the CPU thread by thread with its launch: equal bits."""

from __future__ import annotations

import ctypes
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")


from prefixkit.backends.cuda import kv
from prefixkit.backends.cuda.kernels import APPEND, ROTARY, rotary_name
from prefixkit.checking import checked_mode
from prefixkit.ops.arguments import BadShape
from tests.attention.rotations import DTYPES, bits, fresh_rng, nan_pages, random_rows, random_slots
from tests.attention.slots import SLOTS, WRONG, Appended, rotations
from tests.emulation.build import build
from tests.fake_gpu import pretend, pretend_to_launch

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("rotary"), "rotary", {}, ROTARY.headers + APPEND.headers)


class Gpu:
    """A GPU that has nothing but this kernel; remembers what it was asked to launch."""

    append = kv.Append()  # the ops, new in each test

    def __init__(self, library):
        self.library, self.loaded, self.launched = library, 0, []

    def load(self, unit, device):
        self.loaded += 1
        assert unit is ROTARY
        size = self.library.rotary_bytes()
        names = {rotary_name(str(dtype).removeprefix("torch.")): str(dtype).removeprefix("torch.") for dtype in DTYPES}
        return {name: SimpleNamespace(name=dtype, parameter_bytes=size) for name, dtype in names.items()}

    def launch(self, function, layout, values, grid, block, shared, describe, pdl):
        assert block == 256 and shared == 0 and grid[1:] == (1, 1)
        self.launched.append(pdl)
        tokens, heads, _, half, _ = values[-5:]
        ctypes.memset(values[5], 0xFF, tokens * heads * 2 * half * 16)  # rotated: NaN
        struct = ctypes.create_string_buffer(layout.packer.pack(*values), self.library.rotary_bytes())
        getattr(self.library, f"rotary_{function.name}")(struct, grid[0], block)


@pytest.fixture
def gpu(library, monkeypatch):
    gpu = Gpu(library)
    Gpu.append = kv.Append()
    pretend(monkeypatch, (9, 0))
    pretend_to_launch(monkeypatch, kv, gpu.load, lambda *args, **options: gpu.launch(*args, **options))
    return gpu


def compare(rows, shape, slots, head_major=True):
    """Kernel and op on the same rows, each with pages of its own: bits of all that they return and write."""
    before = [bits(x) for x in rows]
    (k, v, pool), (op_k, op_v, op_pool) = (nan_pages(shape, rows[0].dtype, head_major) for _ in range(2))
    rotated = Gpu.append.rotary_append(*rows, k, v, slots)
    there = (slots >= 0) & (slots < shape[0] * shape[1])
    torch.ops.prefixkit.rotary_append(*(x[there] for x in rows), op_k, op_v, slots[there])
    # Whose slot does not exist is rotated all the same.
    somewhere = nan_pages((len(slots) + 1, 1, *shape[2:]), rows[0].dtype)[:2]
    expected = torch.ops.prefixkit.rotary_append(*rows, *somewhere, torch.arange(len(slots)))
    assert rotated.is_contiguous() and rotated.shape == rows[0].shape
    assert torch.equal(bits(rotated), bits(expected))
    assert torch.equal(bits(pool), bits(op_pool)), "pages, and those of the layers on both sides"
    assert all(torch.equal(bits(x), old) for x, old in zip(rows, before, strict=True))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("head_major", [True, False], ids=["head-major", "token-major"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_leaves_the_bits_of_the_op(dtype, page_size, head_major, gpu):
    """In float32 without contraction; products of 16-bit numbers are exact."""
    rng = fresh_rng()
    sizes = ((1, 1, 16), (4, 4, 64), (6, 2, 80), (7, 1, 128), (3, 3, 256), (32, 8, 64))
    for tokens in (0, 1, 7, 300):
        for heads, kv_heads, head_dim in sizes:
            num_pages = -(-tokens // page_size) + 2
            slots = random_slots(rng, tokens, num_pages * page_size)
            rows = random_rows(rng, dtype, tokens, heads, kv_heads, head_dim)
            compare(rows, (num_pages, page_size, kv_heads, head_dim), slots, head_major)
    assert gpu.launched == [True] * 4 * len(sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_without_a_slot_write_nothing(dtype, gpu):
    rng = fresh_rng()
    for page_size in (1, 3, 16):
        count = 4 * page_size
        slots = torch.full((40,), -1)
        real = random_slots(rng, min(20, count), count)
        slots[torch.from_numpy(rng.permutation(40))[: len(real)]] = real
        bad = [count, count + 1, -(2**62), 2**62, 2**32, -count]
        nowhere = (slots == -1).nonzero()[: len(bad), 0]
        slots[nowhere] = torch.tensor(bad)
        compare(random_rows(rng, dtype, 40, 4, 2, 64), (4, page_size, 2, 64), slots)
    assert len(gpu.launched) == 3


@pytest.mark.parametrize("slots", [*SLOTS.values(), *WRONG.values()], ids=[*SLOTS, *WRONG])
def test_the_kernel_keeps_the_contract_of_slots(slots, gpu):
    appended = Appended(slots, head_major=True)
    appended.by("rotary_append", Gpu.append.rotary_append)
    appended.check(*rotations(appended))
    assert len(gpu.launched) == 1


def test_no_slot_at_all(gpu):
    rng = fresh_rng()
    compare(random_rows(rng, torch.bfloat16, 9, 4, 2, 64), (4, 16, 2, 64), torch.full((9,), -1))
    compare(random_rows(rng, torch.bfloat16, 9, 4, 2, 64), (0, 16, 2, 64), torch.arange(9))
    assert len(gpu.launched) == 2


def test_numbers_that_no_model_should_have(gpu):
    """Infinities, zeros of both signs, the largest and the smallest, ties: as the op rounds them."""
    rng = fresh_rng()
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        nasty = [0.0, -0.0, 1.0, -1.0, 1 + info.eps, 1 - info.eps / 2, 3 * info.eps, info.max, -info.max, info.tiny]
        nasty = torch.tensor([*nasty, info.max / 2, 1.5, 0.5, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
        rows = random_rows(rng, dtype, 200, 4, 2, 64)
        for x in rows:
            x.copy_(nasty[torch.from_numpy(rng.integers(0, len(nasty), x.shape))])
        slots = random_slots(rng, 200, 208)
        k, v, _ = nan_pages((13, 16, 2, 64), dtype, True)
        op_k, op_v, _ = nan_pages((13, 16, 2, 64), dtype)
        found = [Gpu.append.rotary_append(*rows, k, v, slots), k]
        expected = [torch.ops.prefixkit.rotary_append(*rows, op_k, op_v, slots), op_k]
        for one, other in zip(found, expected, strict=True):
            # Which NaN is made is not the op's to say; whether -0 is, is.
            nan = other.isnan()
            assert torch.equal(one.isnan(), nan)
            assert torch.equal(bits(one)[~nan], bits(other)[~nan])
        assert torch.equal(bits(v), bits(op_v))
    assert len(gpu.launched) == 3


def test_rows_of_any_strides(gpu):
    rng = fresh_rng()
    slots, shape = random_slots(rng, 7, 48), (3, 16, 2, 64)

    def rows():
        return random_rows(rng, torch.bfloat16, 7, 4, 2, 64)

    q, key, value, cos, sin = rows()
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, key, value)]
    compare([*heads_first, cos, sin], shape, slots)
    # One head's values for all, one row's angles for all.
    compare([q, key, value[:, :1].expand(-1, 2, -1), cos[:1].expand(7, -1), sin[3:4].expand(7, -1)], shape, slots)
    every_other = [x[::2] for x in rows()]
    compare(every_other, shape, slots[:4])
    compare([further_apart(x, 1 + at) for at, x in enumerate(rows())], shape, slots)
    # The step of an axis of one element means nothing.
    one = random_rows(rng, torch.bfloat16, 1, 1, 1, 64)
    odd = [x.as_strided(x.shape, (5, 3, 1)[-x.ndim :], x.storage_offset()) for x in one]
    compare(odd, (3, 16, 1, 64), slots[:1])
    assert len(gpu.launched) == 5


def further_apart(x, vectors):
    """The same rows with so many vectors of NaN behind each head, and heads of NaN behind each row."""
    space = torch.full((*(length + vectors for length in x.shape[:-1]), x.shape[-1] + 8 * vectors), torch.nan).to(x)
    return space[tuple(map(slice, x.shape))].copy_(x)


@pytest.mark.parametrize("keys_head_major", [True, False], ids=["keys head-major", "values head-major"])
def test_pages_of_keys_and_of_values_have_layouts_of_their_own(keys_head_major, gpu):
    rng = fresh_rng()
    for dtype in DTYPES:
        rows, slots = random_rows(rng, dtype, 30, 4, 2, 64), random_slots(rng, 30, 64)
        k, _, k_pool = nan_pages((4, 16, 2, 64), dtype, keys_head_major)
        _, v, v_pool = nan_pages((8, 16, 2, 64), dtype, not keys_head_major)
        v = v[::2]
        op_k, op_v, _ = nan_pages((4, 16, 2, 64), dtype)
        rotated = Gpu.append.rotary_append(*rows, k, v, slots)
        expected = torch.ops.prefixkit.rotary_append(*rows, op_k, op_v, slots)
        for one, other in ((rotated, expected), (k, op_k), (v, op_v)):
            assert torch.equal(bits(one), bits(other))
        assert [int((~pool.isnan()).sum()) for pool in (k_pool, v_pool)] == [30 * 2 * 64] * 2, "nothing elsewhere"
    assert len(gpu.launched) == 3


def test_a_form_is_prepared_once(gpu, caplog):
    rng = fresh_rng()
    with caplog.at_level(logging.INFO, "prefixkit"):
        for _ in range(3):
            compare(random_rows(rng, torch.bfloat16, 7, 4, 2, 64), (3, 16, 2, 64), random_slots(rng, 7, 48))
        assert gpu.loaded == 1
        compare(random_rows(rng, torch.bfloat16, 8, 4, 2, 64), (3, 16, 2, 64), random_slots(rng, 8, 48))
        compare(random_rows(rng, torch.float16, 8, 4, 2, 64), (3, 16, 2, 64), random_slots(rng, 8, 48))
    assert gpu.loaded == 3 and len(gpu.launched) == 5
    assert not caplog.records


def test_it_is_launched_ahead_of_time_where_gpus_can(gpu, monkeypatch):
    rng = fresh_rng()
    pretend(monkeypatch, (8, 9))
    compare(random_rows(rng, torch.bfloat16, 7, 4, 2, 64), (3, 16, 2, 64), random_slots(rng, 7, 48))
    assert gpu.launched == [False]


def at_two_bytes(x):
    """The same numbers one element further in memory."""
    space = torch.full((x.numel() + 8,), torch.nan, dtype=x.dtype)
    moved = space[1 : 1 + x.numel()].view(x.shape)
    assert moved.data_ptr() % 16 == 2
    return moved.copy_(x)


def at_odd_steps(x):
    """Rows of one element more."""
    space = torch.full((*x.shape[:-1], x.shape[-1] + 1), torch.nan, dtype=x.dtype)
    return space[..., :-1].copy_(x)


def scattered(x):
    return x.repeat_interleave(2, dim=-1)[..., ::2]


# Which argument, and what becomes of it.
FORMS = {
    f"{name} {how.__name__.replace('_', ' ')}": (at, how)
    for at, name in enumerate(("q", "key", "value", "cos", "sin"))
    for how in (at_two_bytes, at_odd_steps, scattered)
}
FORMS |= {"slots scattered": (7, scattered)}
FORMS |= {
    f"{name} {how.__name__.replace('_', ' ')}": (at, how)
    for at, name in ((5, "K pages"), (6, "V pages"))
    for how in (at_two_bytes, at_odd_steps)
}


@pytest.fixture
def appended(gpu):
    """Of each ``kv_append`` on this GPU how many tokens it appended."""
    calls = []

    class Counting(kv.Append):
        def kv_append(self, key, value, k_pages, v_pages, slots):
            calls.append(len(slots))
            torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)

    Gpu.append = Counting()
    return calls


SAID = "rotary_append on cpu runs as torch and kv_append: not all of it lies at 16 bytes"


@pytest.mark.parametrize("form", FORMS)
def test_what_vectors_do_not_fit_is_left_to_torch_with_one_line(form, gpu, appended, caplog):
    rng = fresh_rng()
    at, how = FORMS[form]
    with caplog.at_level(logging.INFO, "prefixkit"):
        for _ in range(2):
            rows, slots = random_rows(rng, torch.bfloat16, 7, 4, 2, 64), random_slots(rng, 7, 48)
            k, v, _ = nan_pages((3, 16, 2, 64), torch.bfloat16, True)
            op_k, op_v = k.clone(), v.clone()
            expected = torch.ops.prefixkit.rotary_append(*rows, op_k, op_v, slots)
            args = [*rows, k, v, slots]
            args[at] = how(args[at])
            rotated = Gpu.append.rotary_append(*args)
            found = (rotated, args[5], args[6])
            assert all(torch.equal(bits(x), bits(y)) for x, y in zip(found, (expected, op_k, op_v), strict=True))
            assert rotated.is_contiguous()
    assert not gpu.launched and appended == [7, 7]
    assert [record.getMessage() for record in caplog.records] == [SAID]


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 24), (torch.float16, 2), (torch.float32, 4)], ids=str)
def test_heads_whose_halves_are_not_whole_vectors_are_left_to_torch(dtype, head_dim, gpu, appended):
    rng = fresh_rng()
    for tokens in (0, 1, 7):
        compare(random_rows(rng, dtype, tokens, 4, 2, head_dim), (3, 16, 2, head_dim), random_slots(rng, tokens, 48))
    assert not gpu.launched and appended == [0, 1, 7]


def test_memory_of_the_same_form_may_begin_elsewhere(gpu, appended):
    """What is cached for a signature is cached with whether it begins at 16 bytes."""
    rng = fresh_rng()
    shape = (3, 16, 2, 64)
    for _ in range(2):
        rows = [x.contiguous() for x in random_rows(rng, torch.bfloat16, 7, 4, 2, 64)]
        compare(rows, shape, random_slots(rng, 7, 48))
        compare([at_two_bytes(rows[0]), *rows[1:]], shape, random_slots(rng, 7, 48))
    assert len(gpu.launched) == 2 and appended == [7, 7]


@pytest.mark.parametrize(("tokens", "fits"), [(2**31 - 129, True), (2**31 - 128, False)])
def test_more_threads_than_32_bits_number_are_left_to_torch(tokens, fits, gpu, appended):
    """Two for each token, in blocks of 256; tensors without memory."""
    launched = []
    gpu.launch = lambda *args, **options: launched.append(args[3])
    x, pages = (torch.empty(shape, device="meta").half() for shape in ((tokens, 1, 16), (2**27, 16, 1, 16)))
    slots = torch.empty(tokens, device="meta").long()
    assert Gpu.append.rotary_append(x, x, x, x[:, 0], x[:, 0], pages, pages, slots).shape == x.shape
    assert (launched, appended) == (([(2**24 - 1, 1, 1)], []) if fits else ([], [tokens]))


def test_bad_arguments_are_named_before_anything_is_launched(gpu):
    rng = fresh_rng()
    k, v, pool = nan_pages((3, 16, 2, 64), torch.bfloat16)
    q, *rest = random_rows(rng, torch.bfloat16, 7, 4, 2, 64)
    with pytest.raises(BadShape, match="rotary_append: q must have shape"):
        Gpu.append.rotary_append(q[:6], *rest, k, v, torch.arange(7))
    assert not gpu.launched and not gpu.loaded and pool.isnan().all()


def test_slots_that_do_not_exist_are_refused_in_checked_mode(gpu):
    rng = fresh_rng()
    k, v, pool = nan_pages((3, 16, 2, 64), torch.bfloat16)
    rows = random_rows(rng, torch.bfloat16, 4, 4, 2, 64)
    with checked_mode(), pytest.raises(IndexError, match=r"rotary_append: slots must be 0..47, got 1..48"):
        Gpu.append.rotary_append(*rows, k, v, torch.tensor([1, 2, 3, 48]))
    with checked_mode(), pytest.raises(ValueError, match="distinct"):
        Gpu.append.rotary_append(*rows, k, v, torch.tensor([1, 2, -1, 1]))
    assert not gpu.launched and pool.isnan().all()
    with checked_mode():
        compare(rows, (3, 16, 2, 64), torch.tensor([-1, 5, -1, 47]))
    assert len(gpu.launched) == 1


def test_a_signature_may_be_dropped_by_another_thread_before_its_call_has_used_it(gpu, appended, monkeypatch):
    """Prefills have many lengths, and what is prepared for them is dropped when it is too much."""
    monkeypatch.setattr(kv.LaunchCache, "SIZE", 1)
    k, v, _ = nan_pages((3, 16, 2, 64), torch.bfloat16)

    def call(tokens, how):
        q, *others = random_rows(fresh_rng(), torch.bfloat16, tokens, 4, 2, 64)
        return Gpu.append.rotary_append(how(q), *others, k, v, torch.full((tokens,), -1))

    class Meanwhile(logging.Handler):
        """Another thread gets its turn where this one says what it has prepared."""

        def emit(self, record):
            with ThreadPoolExecutor(1) as other:
                other.submit(call, 8, torch.clone).result()

    logger, handler = logging.getLogger("prefixkit"), Meanwhile(logging.INFO)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert call(7, at_two_bytes).shape == (7, 4, 64)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert appended == [7] and len(gpu.launched) == 1
