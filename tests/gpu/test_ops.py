"""The ops on a GPU against those on the CPU, which have their own tests; errors; graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkit.cuda.launch import CudaError
from prefixkit.ops import library as ops
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.library import NoBackward
from prefixkit.runners.decode_tree import DecodeTree, TreeCapacity
from tests.attention.rotations import bits, check_bound, fresh_rng, nan_pages, random_rows, random_slots
from tests.attention.slots import OPS, SLOTS, WRONG, Appended, rotations
from tests.gpu.cases import GPU, head_major, poison
from tests.runners.test_decode_tree import make_batch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_pages(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def layouts(pages: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"head-major": head_major(pages), "token-major": pages.to(GPU)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 3, 20, 64, 80, 128, 256])
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
def test_append_writes_the_same_bits_as_on_the_cpu(implementation, dtype, head_dim, layout):
    generator = torch.Generator().manual_seed(head_dim)
    for tokens, kv_heads, page_size in ((1, 1, 1), (7, 3, 16), (300, 8, 64), (0, 2, 4)):
        num_pages = -(-max(tokens, 1) // page_size) + 2
        k_pages, v_pages = (random_pages(generator, (num_pages, page_size, kv_heads, head_dim), dtype) for _ in "kv")
        # Rows as a projection of all heads at once gives them: a slice of something wider.
        wide = random_pages(generator, (tokens, 3 * kv_heads, head_dim), dtype)
        key, value = wide[:, :kv_heads], wide[:, kv_heads : 2 * kv_heads]
        slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens]
        gpu_k, gpu_v = layouts(k_pages)[layout], layouts(v_pages)[layout]
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)
        on_gpu = wide.to(GPU)
        torch.ops.prefixkit.kv_append(
            on_gpu[:, :kv_heads], on_gpu[:, kv_heads : 2 * kv_heads], gpu_k, gpu_v, slots.to(GPU)
        )
        assert torch.equal(gpu_k.cpu(), k_pages)
        assert torch.equal(gpu_v.cpu(), v_pages)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 128, 129, 1000])
def test_a_pair_of_products_errs_no_more_than_two_products(dtype, rows):
    generator = torch.Generator(GPU).manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator, device=GPU).to(dtype) for shape in ((rows, 256), (768, 256)))
    truth = x.double() @ weight.double().T
    ours = torch.ops.prefixkit.linear_pair(x[None], weight)[0]
    theirs = torch.cat([torch.nn.functional.linear(x, half) for half in weight.chunk(2)], -1)
    assert ours.is_contiguous()
    error = [(found.double() - truth).norm() for found in (ours, theirs)]
    assert error[0] <= 1.5 * error[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
def test_rotary_append_leaves_the_same_bits_as_on_the_cpu(implementation, dtype, layout):
    """Of 16-bit numbers, whose products are exact in float32; a float32 product may be fused with the sum."""
    rng = fresh_rng()
    for tokens, heads, kv_heads, head_dim, page_size in (
        (1, 1, 1, 16, 1),
        (7, 6, 2, 80, 3),
        (300, 32, 8, 128, 16),
        (65, 4, 4, 256, 16),
        (33, 8, 1, 64, 64),
        (0, 4, 2, 64, 16),
        (9, 3, 1, 6, 4),  # too short for vectors
    ):
        rows = random_rows(rng, dtype, tokens, heads, kv_heads, head_dim, GPU)
        shape = (-(-tokens // page_size) + 2, page_size, kv_heads, head_dim)
        slots = random_slots(rng, tokens, shape[0] * page_size)
        k_pages, v_pages, _ = nan_pages(shape, dtype)
        gpu_k, gpu_v = layouts(k_pages)[layout], layouts(v_pages)[layout]
        poison(1 << 20)
        found = torch.ops.prefixkit.rotary_append(*rows, gpu_k, gpu_v, slots.to(GPU))
        assert found.is_contiguous()
        q, key, value, cos, sin = (x.cpu() for x in rows)
        rotated = torch.ops.prefixkit.rotary_append(q, key, value, cos, sin, k_pages, v_pages, slots)
        assert torch.equal(bits(gpu_v.cpu()), bits(v_pages))
        if dtype == torch.float32:
            check_bound(found.cpu(), q, cos, sin)
            check_bound(gpu_k.cpu().flatten(0, 1)[slots], key, cos, sin)
            assert torch.equal(gpu_k.cpu().isnan(), k_pages.isnan())
        else:
            assert torch.equal(bits(found.cpu()), bits(rotated))
            assert torch.equal(bits(gpu_k.cpu()), bits(k_pages))


@pytest.mark.parametrize("layout", ["head-major", "token-major"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [*SLOTS.values(), *WRONG.values()], ids=[*SLOTS, *WRONG])
@pytest.mark.parametrize("name", OPS)
def test_rows_write_to_their_slots_and_without_one_nowhere(implementation, name, slots, dtype, layout):
    """The table of tests/attention/slots.py; in 16 bits, so that rotations have the CPU's bits."""
    appended = Appended(slots, dtype, "cuda", layout == "head-major")
    appended.by(name, getattr(torch.ops.prefixkit, name))
    appended.check(*rotations(appended))


@pytest.mark.parametrize("name", OPS)
def test_slots_are_read_where_a_graph_is_replayed(implementation, name):
    appended = Appended(SLOTS["rows that pad a batch come last"], device="cuda", head_major=True)
    graph = torch.cuda.CUDAGraph()
    appended.by(name, getattr(torch.ops.prefixkit, name))
    with torch.cuda.graph(graph):
        appended.by(name, getattr(torch.ops.prefixkit, name))
    for slots in ([-1, 30, -1, 2, -1], [-1] * 5, [4, 3, 2, 1, 0], [32, -2, 5, 2**62, -1]):
        appended.slots.copy_(torch.tensor(slots))
        appended.k.fill_(torch.nan), appended.v.fill_(torch.nan)
        graph.replay()
        appended.check(*rotations(appended))


@pytest.mark.parametrize("slots", WRONG)
@pytest.mark.parametrize("name", OPS)
def test_slots_of_no_page_are_refused_in_checked_mode(implementation, checked, name, slots):
    appended = Appended(WRONG[slots], device="cuda")
    with pytest.raises(IndexError, match=rf"{name}: slots must be 0\.\.31"):
        appended.by(name, getattr(torch.ops.prefixkit, name))
    assert appended.nothing_written()


def test_tokens_without_a_slot_are_rotated_and_not_appended():
    for head_dim in (64, 6):  # by the kernel, and by torch and kv_append
        rows = random_rows(fresh_rng(), torch.bfloat16, 5, 4, 2, head_dim, GPU)
        k_pages, v_pages, _ = nan_pages((3, 4, 2, head_dim), torch.bfloat16)
        gpu_k, gpu_v = head_major(k_pages), head_major(v_pages)
        found = torch.ops.prefixkit.rotary_append(*rows, gpu_k, gpu_v, torch.tensor([5, -1, 12, 2, -1], device=GPU))
        there = [0, 3]
        on_cpu = [x.cpu() for x in rows]
        expected = torch.ops.prefixkit.rotary_append(
            *(x[there] for x in on_cpu), k_pages, v_pages, torch.tensor([5, 2])
        )
        assert torch.equal(bits(found[there].cpu()), bits(expected))
        assert torch.equal(bits(gpu_k.cpu()), bits(k_pages)) and torch.equal(bits(gpu_v.cpu()), bits(v_pages))
        assert not found.isnan().any()


def test_rotary_append_waits_for_what_is_ahead_and_replays_in_a_graph():
    """It may be started early: what the kernel ahead writes must be there, and what the one behind writes must not."""
    rng = fresh_rng()
    inputs = [random_rows(rng, torch.bfloat16, 256, 32, 8, 128, GPU) for _ in range(8)]
    given = [x.clone() for x in inputs[0]]
    pages = [head_major(pages) for pages in nan_pages((16, 16, 8, 128), torch.bfloat16)[:2]]
    slots = random_slots(rng, 256, 256).to(GPU)

    def run(rows):
        for x, new in zip(given, rows, strict=True):
            x.copy_(new)
        rotated = torch.ops.prefixkit.rotary_append(*given, *pages, slots)
        results = [bits(x).clone() for x in (rotated, *pages)]
        for x in (*given, *pages):
            x.zero_()
        return results

    expected = []
    for rows in inputs:
        expected.append(run(rows))
        torch.cuda.synchronize()
    found = [run(rows) for rows in inputs]
    static, graph = [x.clone() for x in inputs[0]], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(static)
    for rows, eager, launched in zip(inputs, expected, found, strict=True):
        for x, new in zip(static, rows, strict=True):
            x.copy_(new)
        graph.replay()
        for results in (launched, replayed):
            assert all(torch.equal(one, other) for one, other in zip(results, eager, strict=True))


def small() -> tuple[torch.Tensor, ...]:
    key, value = (torch.randn(4, 2, 64, device=GPU) for _ in "kv")
    k_pages, v_pages = (torch.zeros(3, 4, 2, 64, device=GPU) for _ in "kv")
    return key, value, k_pages, v_pages, torch.arange(4, device=GPU)


def test_bad_arguments_are_named_before_anything_is_launched(implementation):
    key, value, k_pages, v_pages, slots = small()
    append = torch.ops.prefixkit.kv_append
    with pytest.raises(BadDtype, match=r"kv_append: key must be torch.float32 like the pages, got torch.float16"):
        append(key.half(), value, k_pages, v_pages, slots)
    with pytest.raises(BadDevice, match="kv_append: value is on cpu"):
        append(key, value.cpu(), k_pages, v_pages, slots)
    with pytest.raises(BadShape, match=r"value must have shape \[4, 2, 64\]"):
        append(key, value[:, :1], k_pages, v_pages, slots)
    with pytest.raises(BadShape, match="stride 1 over head_dim"):
        append(key, value, k_pages.transpose(2, 3).contiguous().transpose(2, 3), v_pages, slots)
    with pytest.raises(BadDtype, match=r"slots must be torch.int64"):
        append(key, value, k_pages, v_pages, slots.int())
    assert not k_pages.any()


def test_bad_arguments_of_rotary_append_are_named(implementation):
    key, value, k_pages, v_pages, slots = small()
    q, angle, rotary = torch.cat((key, value), dim=1), key[:, 0], torch.ops.prefixkit.rotary_append
    with pytest.raises(BadDevice, match="rotary_append: q is on cpu"):
        rotary(q.cpu(), key, value, angle, angle, k_pages, v_pages, slots)
    with pytest.raises(BadDtype, match=r"rotary_append: sin must be torch.float32 like the pages, got torch.float16"):
        rotary(q, key, value, angle, angle.half(), k_pages, v_pages, slots)
    with pytest.raises(BadShape, match=r"rotary_append: cos must have shape \[4, 64\]"):
        rotary(q, key, value, angle[:1], angle, k_pages, v_pages, slots)
    with pytest.raises(NoBackward, match="inference_mode"):
        rotary(q.requires_grad_(), key, value, angle, angle, k_pages, v_pages, slots)
    assert not k_pages.any()


def test_slots_that_do_not_exist_are_refused_in_checked_mode(checked):
    key, value, k_pages, v_pages, slots = small()
    with pytest.raises(IndexError, match=r"kv_append: slots must be 0..11, got 1..12"):
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, torch.tensor([1, 2, 3, 12], device=GPU))
    with pytest.raises(ValueError, match="distinct"):
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, torch.tensor([1, 2, 3, 3], device=GPU))
    q, wrong = key[:, :1], torch.tensor([1, 2, 3, 12], device=GPU)
    with pytest.raises(IndexError, match=r"rotary_append: slots must be 0..11, got 1..12"):
        torch.ops.prefixkit.rotary_append(q, key, value, q[:, 0], q[:, 0], k_pages, v_pages, wrong)


def test_a_token_without_a_slot_is_skipped():
    key, value, k_pages, v_pages, _ = small()
    torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, torch.tensor([5, -1, 100, 2], device=GPU))
    assert torch.equal(k_pages.view(12, 2, 64)[[5, 2]], key[[0, 3]])
    assert int((k_pages != 0).any(dim=3).sum()) == 4


def test_a_cuda_error_names_the_op_and_the_shapes():
    from prefixkit.backends.cuda.kernels import APPEND
    from prefixkit.backends.cuda.kv import describe
    from prefixkit.backends.cuda.layouts import MOVE
    from prefixkit.cuda import jit
    from prefixkit.cuda.launch import launch

    function = jit.load(APPEND, 0)["prefixkit::kv_append<uint4>"]
    key, value, k_pages, v_pages, _ = small()
    with pytest.raises(
        CudaError, match=r"kv_append<uint4>.*CUDA_ERROR_INVALID_VALUE.*kv_append on cuda:0: \[4, 2, 64\]"
    ):
        launch(function, MOVE, (0,) * 20, (1, 1, 1), 4096, 0, describe("kv_append", key, k_pages))


def test_ops_replay_in_a_graph_on_changed_inputs():
    key, value, k_pages, v_pages, slots = small()

    def run():
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for tensor in (key, value):
        tensor.normal_()
    slots.copy_(torch.tensor([3, 1, 0, 2], device=GPU))
    k_pages.zero_(), v_pages.zero_()
    graph.replay()
    expected = [k_pages.clone(), v_pages.clone()]
    k_pages.zero_(), v_pages.zero_()
    run()
    assert all(torch.equal(a, b) for a, b in zip(expected, [k_pages, v_pages], strict=True))


def test_the_first_call_may_be_inside_a_capture():
    from prefixkit.backends.cuda.kv import Append
    from prefixkit.cuda import jit

    key, value, k_pages, v_pages, slots = small()
    jit.load.clear()
    append = Append()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append.kv_append(key, value, k_pages, v_pages, slots)
    graph.replay()
    assert torch.equal(k_pages.view(12, 2, 64)[:4], key)


def test_ops_run_on_the_current_stream():
    key, value, k_pages, v_pages, slots = small()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)
        copy = k_pages.clone()
    stream.synchronize()
    assert torch.equal(copy.view(12, 2, 64)[:4], key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(implementation, dtype):
    key, value, k_pages, v_pages, slots = small()
    key, value, k_pages, v_pages = (t.to(dtype) for t in (key, value, k_pages, v_pages))
    torch.library.opcheck(torch.ops.prefixkit.kv_append.default, (key, value, k_pages, v_pages, slots))
    angle = key[:, 0]
    for q in (key, key.transpose(0, 1).contiguous().transpose(0, 1)):
        args = (q, key, value, angle, angle, k_pages, v_pages, slots)
        torch.library.opcheck(torch.ops.prefixkit.rotary_append.default, args)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_advance_begins_the_steps_that_it_does_on_the_cpu(implementation, page_size):
    """To the last pages and past them; rows that pad the batch stand still."""
    rng = np.random.default_rng(page_size)
    _, _, batch = make_batch(rng, page_size, 5)
    space = TreeCapacity(200, 128, 2048)
    here, there = DecodeTree(space, page_size, "cpu"), DecodeTree(space, page_size, GPU)
    here.upload(batch), there.upload(batch)
    for _ in range(8):
        here.sampled = torch.from_numpy(rng.integers(-1, 50, 200))
        there.sampled = here.sampled.to(GPU)
        rows = int(rng.integers(batch.queries.num_rows, 201))
        here.advance(rows), there.advance(rows)
        for name in ("tokens", "positions", "slots"):
            assert torch.equal(getattr(there, name)[:rows].cpu(), getattr(here, name)[:rows]), name
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there.nodes, here.nodes, strict=True))


def test_opcheck_of_advance(implementation):
    _, _, batch = make_batch(np.random.default_rng(4), 4, 3)
    tree = DecodeTree(TreeCapacity.of(batch), 4, GPU)
    tree.upload(batch)
    tensors = (tree.leaf, *tree.nodes, tree.sampled, tree.tokens, tree.positions, tree.slots)
    args = (*(tensor.clone() for tensor in tensors), batch.queries.num_rows, 4)
    torch.library.opcheck(torch.ops.prefixkit.advance.default, args)


def test_the_fakes_and_the_gpu_agree_on_every_op():
    for schema in ops.SCHEMAS:
        name = schema.partition("(")[0]
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"prefixkit::{name}", "CUDA")
