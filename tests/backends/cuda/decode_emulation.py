"""Attention by kernels that run on the CPU thread by thread: their maps, their work, and the end of a launch."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prefixkit.attention.bsr import MaskKind, decompose
from prefixkit.attention.gpu.gpu_cost import H200, with_tiles
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.plan import Plan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.reference import reference_attention, visible_tokens
from prefixkit.attention.variants import CAUSAL, Variant
from prefixkit.attention.visible import ALL
from prefixkit.backends.cuda.kernels import kernel_for
from prefixkit.backends.cuda.layouts import ATTENTION
from prefixkit.backends.cuda.variants.variant_words import words_on_device
from prefixkit.cuda.tensor_maps import in_words
from prefixkit.ops.arguments import FP8
from prefixkit.testing.forests import SHARE_ALL, Case
from prefixkit.testing.random_plans import narrowed
from prefixkit.testing.row_limits import with_row_limits

HOLDING = (
    """    asm volatile("" ::"l"(a.q), "l"(a.partial_lse), "l"(a.merge_indptr), "l"(a.first_slot));
    asm volatile("" ::"r"(a.heads), "r"(a.tma_groups));
""",
    "",
)
MAP = struct.Struct("@P5q5q5i")


def fake_map(pages: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> bytes:
    """struct FakeMap of emulation/decode/common/ptx.cuh."""
    more = 5 - len(sizes)
    return MAP.pack(pages.data_ptr(), *sizes, *[1] * more, 1, *strides, *[0] * more, *box, *[1] * more).ljust(
        128, b"\0"
    )


def fake_maps(k: Tensor, v: Tensor, boxes: bool) -> list[bytes]:
    """As tensor_maps describes them: groups of 16 slots, single slots, groups of all columns, few slots of V."""
    count, slots, heads, dim = k.shape
    page, slot, head, _ = k.stride()
    plain = [dim, slots, heads, count], [slot, head, page]
    groups = [64, slots, dim // 64, heads, count], [slot, 64, head, page]
    kinds = ((*plain, [64, 16, 1, 1]), (*plain, [64, 1, 1, 1]), (*groups, [64, 16, dim // 64, 1, 1]))
    maps = [[fake_map(x, *kind) for x in (k, v)] for kind in kinds[: 2 if dim % 64 else 3]]
    maps += [[bytes(128)] * 2] * (3 - len(maps))
    none = [bytes(128)] * 2
    few = fake_map(v, *plain, [64, 4, 1, 1])
    return [*chain(*maps), few] if boxes else [*none, *maps[1], *none, none[0]]


def merge(plan: Plan, out: Tensor, lse: Tensor, partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the launch's end does: merges partials, in float64."""
    out, lse = out.double(), lse.double()
    for row in range(len(plan.merge_indptr) - 1):
        parts = plan.merge_indices[plan.merge_indptr[row] : plan.merge_indptr[row + 1]].tolist()
        if parts:
            states, sums = partial_out[parts].double(), partial_lse[parts].double()
            lse[row] = torch.logsumexp(sums, 0)
            share = torch.exp(sums - lse[row]).nan_to_num(0)
            out[row] = (states.nan_to_num(0) * share[..., None]).sum(0)
    return out, lse


def random_case(rng, snapshot, num_pages, queries, heads, kv_heads, dim, spread, dtype=torch.bfloat16) -> Case:
    """Random queries, and KV for every token; NaN everywhere else."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    pages = [torch.full((num_pages, kv_heads, snapshot.page_size, dim), torch.nan).to(dtype) for _ in "kv"]
    k, v = (x.transpose(1, 2) for x in pages)
    for node, length in enumerate(snapshot.length.tolist()):
        slots = snapshot.slots(np.full(length, node), np.arange(length))
        for x in (k, v):
            numbers = torch.randn(length, kv_heads, dim, generator=generator)
            x[slots // snapshot.page_size, slots % snapshot.page_size] = numbers.to(dtype)
    q = torch.randn(queries.num_rows, heads, dim, generator=generator) * spread
    return Case(snapshot, queries, q.bfloat16(), k, v, dim**-0.5)


def spans_of(case: Case, plan: Plan, item: np.ndarray, variant: Variant, length: np.ndarray) -> list[range]:
    """The positions of an item's segments that its queries can see, and of each span's first slot its slot."""
    snapshot, (q_begin, q_end, _, seg_begin, count, node, begin, end) = case.snapshot, item.tolist()
    positions = case.positions[q_begin:q_end]
    high = int(positions[-1]) + 1 if count & 3 == MaskKind.OWN else 2**30
    low = int(positions.min()) - variant.window + 1 if variant.window else 0
    segments = [(node, begin, end), *plan.segments.reshape(-1, 3)[seg_begin + 1 : seg_begin + (count >> 2)].tolist()]
    spans = []
    for node, begin, end in segments:
        start = int(snapshot.start[node])
        span = range(start + max(begin, low - start), min(start + min(end, int(length[node])), high))
        if len(span):
            spans.append((span, int(snapshot.first_slot[node]) - start))
    return spans


def classes_of(case: Case, plan: Plan, variant: Variant, length: np.ndarray) -> np.ndarray:
    """``[items + 1, words]`` as classify_blocks writes them, by the meaning of the mask; the rest is never read."""
    words = np.full((len(plan.tile_items) + len(plan.decode_items) + 1, 40), 0xDEADBEEF, dtype=np.uint32)
    items_of_row = np.zeros(len(case.positions), dtype=np.int64)
    tiles, decodes = (
        plan.tile_items.reshape(-1, 8)[: plan.counts[0]],
        plan.decode_items.reshape(-1, 8)[: plan.counts[1]],
    )
    items = [(number, item, 64) for number, item in enumerate(tiles)]
    items += [(len(plan.tile_items) + number, item, 16) for number, item in enumerate(decodes)]
    for number, item, kv_tile in items:
        q_begin, q_end, causal = int(item[0]), int(item[1]), int(item[4]) & 3 == MaskKind.OWN
        q, found = case.positions[q_begin:q_end, None].long(), []
        for span, to_slot in spans_of(case, plan, item, variant, length):
            kv, none = torch.arange(span.start, span.stop), torch.zeros(1, 1).long()
            shown, concerned = variant.shows(none, none, q, kv).expand(len(q), len(kv)), (kv <= q) | (not causal)
            some, whole = (shown & concerned).any(0), (shown | ~concerned).all(0)
            begins = range((span.start + to_slot) // 16 * 16 - to_slot, span.stop, kv_tile)
            sizes = np.diff(np.clip([*begins, span.stop], span.start, None)).tolist()
            for any_, all_ in zip(some.split(sizes), whole.split(sizes), strict=True):
                found.append(0 if not any_.any() else 2 if all_.all() else 1)
        words[number, -1] = 0 if any(found) else 0xFFFFFFFF
        if any(found):
            items_of_row[q_begin:q_end] += 1 if int(item[4]) & 3 != MaskKind.LIMIT else 2
        else:
            found = [1, *found[1:]]
        for word in range(len(found) // 16 + 1):
            words[number, word] = sum(kind << 2 * i for i, kind in enumerate(found[16 * word : 16 * word + 16]))
    again = int((items_of_row - 1).clip(0).sum())
    words[-1, :3] = 0, int((items_of_row > 0).sum()), again
    return words


def each_alone(case: Case, kinds: np.ndarray) -> bool:
    """Whether the classes leave every row the tokens of one item."""
    return bool(kinds.size) and kinds[-1, 1:3].tolist() == [len(case.positions), 0]


def attend(
    kernel,
    case: Case,
    stages: int,
    blocks: int,
    padding: int = 0,
    variant: Variant = CAUSAL,
    classes: bool = False,
    limits: np.random.Generator | None = None,
    paths: bool = False,
    tiles: bool = False,
    arch: str = "sm_90a",
    trims: bool = True,
) -> tuple[Tensor, ...]:
    """Outputs and log-sum-exps, in float64 where rows were merged, with ``padding`` rows more than the plan has.

    ``tiles``: plans have items of any number of rows, not of decode items alone.  ``trims``: plans leave out what no
    query sees.

    ``limits`` draws a limit for each query, and the mask that means the same is returned too.
    """
    snapshot, q, k, v = case.snapshot, case.q, case.k_pages, case.v_pages
    if e4m3 := k.dtype == FP8:
        k, v = in_words(k), in_words(v)
    rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    positions = case.positions.long()
    length = StepTree(snapshot, case.queries).length
    shared = None if limits is None else np.ones(snapshot.num_nodes, dtype=bool)
    tree = StepTree(snapshot, case.queries)
    rows_of = decompose(tree, case.shape, SHARE_ALL, shared, visible=variant.visible if trims else ALL, paths=paths)
    of = kernel_for(arch, dim, case.shape.gqa_group, e4m3=e4m3)
    formats = [rows_of if tiles else narrowed(rows_of, case.shape.gqa_group, of.decode_rows)]
    words = words_on_device(variant, torch.device("cpu")).tensor
    cost = with_tiles(H200, of.tile_rows, of.decode_rows, of.decode_kv_tile, of.low_tile_rows)
    plan = make_gpu_plan(formats, length, rows, case.shape, blocks, cost)
    mask: tuple[Variant, ...] = ()
    if limits is not None:
        case, plan, *mask = with_row_limits(limits, case, plan)
    work = [np.ascontiguousarray(x) for x in plan.arrays()]
    nodes = [np.ascontiguousarray(x, dtype=np.int32) for x in with_runs(tree.arrays(), plan.runs)]
    out = torch.full((rows + padding, heads, dim), torch.nan, dtype=torch.float32 if variant.is_part else q.dtype)
    lse = torch.full((rows + padding, heads), torch.nan)
    partial_out = torch.full((max(1, int(plan.counts[3])), heads, dim), torch.nan)
    partial_lse = torch.full(partial_out.shape[:2], torch.nan)
    page, slot, head, _ = k.stride()
    boxes = snapshot.page_size % 16 == 0
    kinds = classes_of(case, plan, variant, length) if classes else np.zeros((1, 0), dtype=np.uint32)
    given = ATTENTION[of.maps].packer.pack(
        *(fake_maps(k, v, boxes) if of.uses_tma else ()),
        *(x.data_ptr() for x in (q, k, v, positions, out, lse, partial_out, partial_lse)),
        0,
        *(x.ctypes.data for x in (*work, *nodes)),
        *(page, head, slot, heads, kv_heads, snapshot.page_size, case.scale, case.scale * np.log2(np.e)),
        *(
            words.data_ptr(),
            0,
            0,
            kinds.ctypes.data,
            kinds.shape[1],
            0,
            0 if case.sinks is None else case.sinks.data_ptr(),
            variant.window or 0,
        ),
        *(len(plan.tile_items), len(plan.decode_items), int(boxes), rows + padding),
    )
    assert kernel(given, blocks, stages) == len(given)
    if each_alone(case, kinds):
        return out.double(), lse.double(), *mask
    return *merge(plan, out, lse, partial_out, partial_lse), *mask


def torch_attention(case: Case) -> Tensor:
    """Each row by torch's own kernel, in the same dtype."""
    rows = []
    for q, node, position in zip(case.q, case.row_node.tolist(), case.positions.tolist(), strict=True):
        slots, _ = visible_tokens(case.snapshot, node, position)
        k, v = (x.flatten(0, 1)[torch.from_numpy(slots)].transpose(0, 1)[None] for x in (case.k_pages, case.v_pages))
        attended = scaled_dot_product_attention(q[None, :, None], k, v, scale=case.scale, enable_gqa=True)
        rows.append(attended[0, :, 0])
    return torch.stack(rows)


def check(kernel, case: Case, stages: int = 3, blocks: int = 3) -> None:
    """Outputs err at most 1.5 times as much as torch's, log-sum-exps by what float32 owes them."""
    out, lse = attend(kernel, case, stages, blocks)
    case = replace(case, k_pages=case.k_pages.to(case.q.dtype), v_pages=case.v_pages.to(case.q.dtype))
    exact = reference_attention(
        case.snapshot, case.row_node, case.positions.numpy(), case.q, case.k_pages, case.v_pages, case.scale
    )
    ours, theirs = out - exact.out, torch_attention(case).double() - exact.out
    assert ours.norm() <= 1.5 * theirs.norm(), (float(ours.norm()), float(theirs.norm()))
    off = (lse - exact.lse).abs() / (1e-4 + 1e-5 * exact.lse.abs())
    assert float(off.max()) <= 1.0
