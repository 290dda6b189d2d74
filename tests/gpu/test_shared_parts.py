"""``sum_parts`` and ``gather_parts``: two processes write to each other's memory.  Here both are streams of one GPU."""

from __future__ import annotations

import pytest
import torch

import prefixkit.backends
import prefixkit.ops.library  # noqa: F401  (registers them)
from prefixkit.ops.shared_parts import BLOCKS, SHARED_BYTES, addresses_of
from tests.ops.sent_parts import sum_of

DEVICE = torch.device("cuda")


@pytest.fixture
def two():
    """What each of two processes passes as addresses, a stream for each, and what the addresses are of."""
    memory = [torch.zeros(SHARED_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    epochs = [torch.zeros(BLOCKS, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    addresses = [addresses_of(memory[own], memory[1 - own], epochs[own]) for own in range(2)]
    torch.cuda.synchronize()
    return addresses, [torch.cuda.Stream() for _ in range(2)], memory, epochs


def both_of(op, arguments, streams):
    """What both get: each launches on a stream of its own, for one waits for the other on the GPU."""
    got = []
    for given, stream in zip(arguments, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got.append(op(*given))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return got


def sums_of(parts, addresses, streams, dtype, residuals=((), ())):
    given = [(*both, dtype, *own) for *both, own in zip(parts, addresses, residuals, strict=True)]
    return both_of(torch.ops.prefixkit.sum_parts, given, streams)


def gathers_of(parts, addresses, streams, sent=(None, None)):
    return both_of(torch.ops.prefixkit.gather_parts, zip(parts, addresses, (0, 1), sent, strict=True), streams)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_part_of_a_product_errs_as_torchs_float32_does(dtype):
    x, weight = torch.randn(3, 50, 4096, device=DEVICE).to(dtype), torch.randn(64, 4096, device=DEVICE).to(dtype)
    part, exact = torch.ops.prefixkit.part_of_product(x, weight), x.double() @ weight.double().t()
    assert part.dtype == torch.float32 and part.is_contiguous()
    theirs = ((x.float() @ weight.float().t()) - exact).abs().max()
    rounded = ((x @ weight.t()).double() - exact).abs().max()
    assert (part - exact).abs().max() <= max(1.5 * float(theirs), 0.01 * float(rounded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_get_the_sum_rounded_once_round_after_round(two, dtype):
    addresses, streams, *_ = two
    for rows, width in ((1, 64), (64, 4096), (3, 40), (1024, 4096), (2, 8), (1500, 5120), (64, 4096), (0, 64)):
        parts = [torch.randn(rows, width, device=DEVICE) for _ in range(2)]
        for count in range(3):
            residuals = [[torch.randn_like(part).to(dtype) for _ in range(count)] for part in parts]
            for got, own in zip(sums_of(parts, addresses, streams, dtype, residuals), residuals, strict=True):
                assert torch.equal(got, sum_of(parts, dtype, *own)), (rows, width, count)


def test_parts_of_many_times_the_memory_are_summed(two):
    """47 chunks a block, of 8 that there is memory for; again and again.  Whole numbers cross the link as they are."""
    addresses, streams, *_ = two
    parts = [torch.randint(-9, 9, (12_000, 4096), device=DEVICE).float() for _ in range(2)]
    residuals = [[torch.randint(-9, 9, (12_000, 4096), device=DEVICE).bfloat16()] for _ in range(2)]
    for _ in range(20):
        got = sums_of(parts, addresses, streams, torch.bfloat16, residuals)
        for total, (residual,) in zip(got, residuals, strict=True):
            assert torch.equal(total, (parts[0] + parts[1] + residual).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_get_the_columns_of_both_between_sums(two, dtype):
    addresses, streams, *_ = two
    for *rows, width in ((1, 64), (64, 64128), (3, 40), (1, 300, 64128), (2, 8), (1500, 5120), (1, 128_000), (0, 64)):
        parts = [torch.randn(*rows, width, device=DEVICE).to(dtype) for _ in range(2)]
        expected = torch.cat(parts, -1)
        for got in gathers_of(parts, addresses, streams):
            assert torch.equal(got, expected), (rows, width)
        sent = [torch.randn_like(part) for part in parts]
        first, second = gathers_of(parts, addresses, streams, sent)
        assert torch.equal(first, torch.cat((parts[0], sent[1]), -1)), (rows, width)
        assert torch.equal(second, torch.cat((sent[0], parts[1]), -1)), (rows, width)
        numbers = [part.float() for part in parts]
        for got in sums_of(numbers, addresses, streams, dtype):
            assert torch.equal(got, sum_of(numbers, dtype)), (rows, width)


def test_graphs_that_hold_it_go_on_where_others_have_ended(two):
    addresses, streams, *_ = two
    parts = [torch.randn(64, 512, device=DEVICE) for _ in range(2)]
    columns = [torch.randn(64, 512, device=DEVICE).bfloat16() for _ in range(2)]
    sums_of(parts, addresses, streams, torch.bfloat16)
    gathers_of(columns, addresses, streams)
    graphs, totals, wholes = [torch.cuda.CUDAGraph() for _ in range(2)], [], []
    for own, stream in enumerate(streams):
        with torch.cuda.graph(graphs[own], stream=stream):
            once = torch.ops.prefixkit.sum_parts(parts[own], addresses[own], torch.float32)
            wholes.append(torch.ops.prefixkit.gather_parts(columns[own], addresses[own], own))
            totals.append(torch.ops.prefixkit.sum_parts(once, addresses[own], torch.bfloat16))
    for _ in range(5):
        for part in (*parts, *columns):
            part.copy_(torch.randn(64, 512, device=DEVICE))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        once = parts[0] + parts[1]
        for total in totals:
            assert torch.equal(total, sum_of([once, once], torch.bfloat16))
        for whole in wholes:
            assert torch.equal(whole, torch.cat(columns, -1))
        sums_of(parts, addresses, streams, torch.bfloat16)
