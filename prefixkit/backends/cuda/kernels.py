"""Every kernel: how its source is compiled, at a call or ahead of time, and how its work is tiled."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import product

from prefixkit.attention.sharing import DECODE_ROWS
from prefixkit.attention.variants import CAUSAL, Variant, alibi, attention_sinks, compose, sliding_window, soft_cap
from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.layouts import FLOATS, Maps
from prefixkit.backends.cuda.states.state_units import (
    CONV_STEP,
    KEY_SIZES,
    RMS_NORM,
    STATE_SIZES,
    delta_unit,
    mamba2_unit,
)
from prefixkit.backends.cuda.variants import variant_header
from prefixkit.cuda.nvrtc import Unit
from prefixkit.threads import once

VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short"}  # bytes: type


def append_e4m3_name(dtype: str, each: int) -> str:
    """The kernel that appends rows of a dtype to pages in e4m3, 1 element or 16 bytes of elements at a time."""
    return f"prefixkit::kv_append_e4m3<{FLOATS[dtype]}, {each}>"


def rotary_name(dtype: str, e4m3: bool = False) -> str:
    """The kernel that rotates and appends rows of a dtype, to pages in that dtype or in e4m3."""
    return f"prefixkit::rotary_append<{FLOATS[dtype]}, {str(e4m3).lower()}>"


APPEND = Unit(
    "kv/append.cu",
    (
        *(f"prefixkit::kv_append<{vector}>" for vector in VECTORS.values()),
        *(append_e4m3_name(*of) for of in product(("bfloat16", "float16"), (8, 1))),
        *(append_e4m3_name("float32", each) for each in (4, 1)),
    ),
    headers=(layouts.MOVE.header,),
)
_ROTARY_NAMES = tuple(rotary_name(*of) for of in product(FLOATS, (False, True)))
ROTARY = Unit("kv/rotary_append.cu", _ROTARY_NAMES, headers=(layouts.ROTARY.header,))
ADVANCE = Unit("kv/advance.cu", ("prefixkit::advance",), headers=(layouts.ADVANCE.header,))
PLAN_NODES = 2304  # the most nodes whose arrays all fit in shared memory


def plan_unit(large: bool, paths: bool) -> Unit:
    """The planner for trees of up to PLAN_NODES nodes, or ``large`` ones; node by node, or by heavy ``paths`` too."""
    defines = ("PREFIXKIT_PLAN_NODES", "0" if large else str(PLAN_NODES)), ("PREFIXKIT_PLAN_PATHS", str(int(paths)))
    return Unit("planner/plan_tree.cu", ("prefixkit::plan_tree",), defines, (layouts.PLAN_TREE.header,))


PLANNERS = tuple(plan_unit(large, paths) for large in (False, True) for paths in (False, True))


def sample_name(dtype: str, cached: bool) -> str:
    """The sampling kernel for logits of a dtype: it keeps rows in shared memory (``cached``), or reads them again."""
    return f"prefixkit::sample<{FLOATS[dtype]}, {str(cached).lower()}>"


SAMPLE = Unit(
    "sampling/sample.cu",
    tuple(sample_name(dtype, cached) for dtype in FLOATS for cached in (True, False)),
    headers=(layouts.SAMPLING_RECORD.header, layouts.SAMPLE.header),
)

EXPERT_STAGES = (4, 3)  # steps along k in flight at once; the most with which two blocks fit


def expert_name(along_n: bool, stages: int) -> str:
    """The kernel of products with expert matrices whose elements are adjacent along n, or along k."""
    return f"prefixkit::expert_product<{str(along_n).lower()}, {stages}>"


def expert_unit(half: bool) -> Unit:
    """Products with experts in float16 or bfloat16."""
    names = tuple(expert_name(along_n, stages) for along_n in (False, True) for stages in EXPERT_STAGES)
    defines = (("PREFIXKIT_HALF", str(int(half))),)
    return Unit("experts/expert_product.cu", names, defines, (layouts.EXPERT_PRODUCT.header,))


def sum_name(dtype: str) -> str:
    """The kernel that sums the parts of two processes."""
    return f"prefixkit::sum_parts<{FLOATS[dtype]}>"


def digest_name(word: int) -> str:
    """The kernel that makes a digest of words of this many bytes."""
    return f"prefixkit::digest<{'prefixkit::u64' if word == 8 else 'unsigned char'}>"


DIGEST = Unit("memory/digest.cu", tuple(map(digest_name, (8, 1))), headers=(layouts.DIGEST.header,))
GATHER_PARTS = "prefixkit::gather_parts"
SHARED_PARTS = Unit("parallel/shared_parts.cu", (*map(sum_name, FLOATS), GATHER_PARTS), headers=layouts.SHARED_PARTS)

WARPS = 8  # of a block of the sampling kernel
_WARP_STEP = 128  # tokens that a warp processes at a time
# Bytes of struct Shared of csrc/sampling/sample_block.cuh; the cached row follows it.
SAMPLE_HEAD_BYTES = 64 * (8 + 8 + 4 + 3 * 4 + 4) + 48 + 2048 * 4


@dataclass(frozen=True)
class SampleTiling:
    """How the blocks of the sampling kernel share a row of logits."""

    blocks: int  # in the cluster of a row
    segment: int  # tokens of each warp
    cached: bool  # the blocks keep the row in shared memory, so that logits are read once

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return SAMPLE_HEAD_BYTES + (4 * WARPS * self.segment if self.cached else 0)


def sample_tiling(vocab: int, max_shared: int, clusters: bool, at_once: int = 3) -> SampleTiling:
    """The fewest blocks per row such that ``at_once`` fit on a multiprocessor, so that some read while others compute.

    If none fit, the most blocks.  ``max_shared``: bytes of a block; ``clusters``: compute capability 9.0 and later.
    """
    for blocks in (1, 2, 4, 8) if clusters else (1,):
        segment = -(-vocab // (blocks * WARPS * _WARP_STEP)) * _WARP_STEP
        tiling = SampleTiling(blocks, segment, True)
        if tiling.shared <= max_shared // at_once:
            return tiling
    # If the row does not fit, every pass reads it again; more blocks per row would not change that.
    return SampleTiling(blocks, segment, tiling.shared <= max_shared)


ATTENTION, LATENT_ATTENTION = "prefixkit::tree_attention", "prefixkit::latent_attention"
MERGE_STATES, CLASSIFY_BLOCKS = "prefixkit::merge_states", "prefixkit::classify_blocks"
# ``PREFIXKIT_KERNEL=portable``: the portable kernel even on GPUs that have their own; for tests and comparisons.
# ``=racecheck``: kernels in which every lane of a warp arrives at barriers, as compute-sanitizer's racecheck needs.
KERNEL_VARIABLE, RACECHECK = "PREFIXKIT_KERNEL", "racecheck"


class KernelChanged(ValueError):
    """``PREFIXKIT_KERNEL`` has changed since kernels were chosen by it: plans are valid for one kernel only."""


def named_kernel() -> str:
    """The present value of the variable."""
    return os.environ.get(KERNEL_VARIABLE, "")


first_named = once(named_kernel)  # its value when the first kernel was chosen


def _wants_portable() -> bool:
    now, first = named_kernel(), first_named()
    if now != first:
        raise KernelChanged(
            f"{KERNEL_VARIABLE} is {now!r}, and was {first!r} when this process chose its first kernel, for which "
            "plans may have been made; set it before the process begins"
        )
    return now == "portable"


# Head sizes of K and V that the Hopper kernel supports.
HOPPER_HEADS = (*((size, size) for size in (64, 80, 96, 112, 128, 256)), (192, 128))
# Head sizes of common models; the portable kernel supports every multiple of 16 up to 256.
COMMON_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
# Elements of a latent in the absorbed part, and the most elements of its rotary key.
LATENT_DIMS, MOST_ROTARY = (256, 512), 64
LATENT_ROWS = 64  # query heads of a tile of latents
# KB of shared memory of a multiprocessor; a block takes 1 KB more than it asks for.  Other GPUs have at least 100.
_SHARED_KB = {"sm_80": 164, "sm_87": 164, "sm_90a": 228, "sm_100": 228, "sm_103": 228, "sm_110": 228}


@dataclass(frozen=True)
class Kernel:
    """The tree-attention kernel for a head shape on a GPU, with what its launches and plans depend on."""

    file: str
    name: str
    tile_rows: int  # query heads of a tile
    threads: int  # of a block
    blocks_per_sm: int
    shared: int | None  # bytes of a block's dynamic shared memory; None for all that it can have
    maps: Maps = Maps.NONE
    own_dim: int | None = None  # elements of a key in its first tensor; None: all
    decode_rows: int = DECODE_ROWS  # query heads of a decode item
    decode_kv_tile: int = 16  # tokens of a KV tile of decode items, if no mask hides keys
    e4m3: bool = False  # whether pages hold e4m3
    low_tile_rows: int = 0  # query heads of a tile for one of two warpgroups alone, in half the time; 0: no such tiles

    def kv_tile(self, head_dim: int) -> int:
        """Tokens of a KV tile of tile items."""
        if self.shared is None:  # as in sm90/tile_shared.cuh
            return 32 if self.name == ATTENTION and self.tile_rows == 64 else 64
        # As in sm80/tile_queue.cuh: 64 if three KV tiles of 64 tokens fit with the queries.
        columns = -(-head_dim // 64)
        return 64 if (self.tile_rows + 3 * 64) * columns * 128 + 1024 <= self.shared else 32

    @property
    def uses_tma(self) -> bool:
        """Whether the kernel reads pages by TMA."""
        return self.maps is not Maps.NONE


def kernel_for(arch: str, head_dim: int, gqa_group: int, v_dim: int | None = None, e4m3: bool = False) -> Kernel | None:
    """The kernel for a head size and a number of query heads per KV head; None if no kernel supports them.

    ``v_dim``: the size of V's heads, if it differs; ``e4m3``: whether pages hold e4m3.
    """
    v_dim = v_dim or head_dim
    if e4m3 and v_dim != head_dim:
        return None
    # As in sm90/tile_shared.cuh: one warpgroup holds tiles of large heads.  A tile holds all heads of a query; the code
    # that widens e4m3 takes head sizes of up to 128.
    tile_rows, threads = (64, 384) if v_dim > 128 else (128, 512)
    hopper = arch == "sm_90a" and (head_dim, v_dim) in HOPPER_HEADS and gqa_group <= tile_rows
    hopper = hopper and not (e4m3 and head_dim > 128)
    if hopper and not _wants_portable():
        # Two warps process an item of the decode path together if it then holds all rows of a query.
        wide = head_dim == v_dim and DECODE_ROWS < gqa_group <= 2 * DECODE_ROWS
        rows = 2 * DECODE_ROWS if wide else DECODE_ROWS
        row = head_dim * (1 if e4m3 else 2)  # bytes
        decode_kv_tile = 64 if row <= 64 else 32 if row <= 128 else 16  # as in decode.cuh
        file = "attention/sm90/tree_attention.cu"
        # With smaller heads one warpgroup takes more than half the time, and loads of e4m3 take as long as for two.
        low = 64 if 64 < head_dim == v_dim <= 128 and not e4m3 else 0
        return Kernel(file, ATTENTION, tile_rows, threads, 1, None, Maps.KV, None, rows, decode_kv_tile, e4m3, low)
    if head_dim % 16 or not 0 < head_dim <= 256 or v_dim != head_dim:
        return None
    total = _SHARED_KB.get(arch, 100)
    # With two blocks tensor cores are busy while one block waits; with little memory, only small heads let two fit.
    blocks = 2 if total >= 164 or head_dim <= 64 else 1
    tile_rows, shared = 128 if head_dim <= 128 else 64, (total // blocks - 1) * 1024
    return Kernel("attention/sm80/tree_attention.cu", ATTENTION, tile_rows, 128, blocks, shared, e4m3=e4m3)


def latent_kernel_for(arch: str, latent: int, rotary: int) -> Kernel | None:
    """The kernel for latents and rotary keys of these sizes; None if no kernel supports them."""
    hopper = arch == "sm_90a" and not _wants_portable()
    if not hopper or latent not in LATENT_DIMS or rotary % 16 or not 0 < rotary <= MOST_ROTARY:
        return None
    file = "attention/sm90/latent_attention.cu"
    return Kernel(file, LATENT_ATTENTION, LATENT_ROWS, 512, 1, None, Maps.ROTARY, latent)


def expanded_kernel_for(arch: str, own: int, rotary: int, v_dim: int) -> Kernel | None:
    """The kernel for K expanded from latents, with the rotary part in its own tensor; None if no kernel supports it."""
    kernel = kernel_for(arch, own + rotary, 1, v_dim)
    if kernel is None or not kernel.uses_tma or kernel.tile_rows == 64 or own % 64 or rotary % 64:
        return None
    return replace(kernel, maps=Maps.ROTARY, own_dim=own)


def merge_unit(half: bool, of_float32: bool) -> Unit:
    """The kernel that merges two states, in float32 or the result's dtype, to float16 or bfloat16."""
    defines = ("PREFIXKIT_HALF", str(int(half))), ("PREFIXKIT_PART", str(int(of_float32)))
    return Unit("attention/merge_states.cu", (MERGE_STATES,), defines, (layouts.MERGE_STATES.header,))


def latent_groups(heads: int) -> int | None:
    """The fewest equal groups of heads that each fit a tile of latents; None if only groups of a few heads fit."""
    groups = next(count for count in range(1, heads + 1) if heads % count == 0 and heads // count <= LATENT_ROWS)
    return groups if heads // groups > LATENT_ROWS // 4 or groups == 1 else None


def attention_unit(kernel: Kernel, head_dim: int, half: bool, variant: Variant, v_dim: int | None = None) -> Unit:
    """The unit of a tree-attention kernel for one head size, float16 or bfloat16, and the functions of one variant.

    ``v_dim``: V's head size, if it differs; for latents the size of a latent, while ``head_dim`` adds the rotary key.
    """
    defines: tuple[tuple[str, str], ...] = (("PREFIXKIT_HEAD_DIM", str(head_dim)), ("PREFIXKIT_HALF", str(int(half))))
    if v_dim is not None and v_dim != head_dim:
        defines += (("PREFIXKIT_VALUE_DIM", str(v_dim)),)
    if kernel.e4m3:
        defines += (("PREFIXKIT_KV_FP8", "1"),)
    if kernel.own_dim is not None:
        defines += (("PREFIXKIT_OWN_DIM", str(kernel.own_dim)),)
    if kernel.name == LATENT_ATTENTION:
        defines += (("PREFIXKIT_LATENT", "1"),)
    if kernel.decode_rows > DECODE_ROWS:
        defines += (("PREFIXKIT_ROW_PARTS", str(kernel.decode_rows // DECODE_ROWS)),)
    if kernel.shared is not None:
        defines += (("PREFIXKIT_BLOCKS", str(kernel.blocks_per_sm)), ("PREFIXKIT_SHARED", str(kernel.shared)))
    if variant.is_part:
        defines += (("PREFIXKIT_PART", "1"),)
    if named_kernel() == RACECHECK:
        defines += (("PREFIXKIT_EVERY_LANE", "1"),)
    layout = layouts.ATTENTION[kernel.maps].header
    text = variant_header.header(variant)
    if text is None:
        return Unit(kernel.file, (kernel.name,), defines, (layout,))
    name = variant_header.HEADER
    return Unit(kernel.file, (kernel.name,), (*defines, ("PREFIXKIT_VARIANT", f'"{name}"')), (layout, (name, text)))


def classify_unit(kernel: Kernel, head_dim: int, variant: Variant) -> Unit:
    """The kernel that classifies the KV tiles of a plan for an attention kernel."""
    text = variant_header.header(variant)
    assert text is not None, "only masks classify"
    defines = (
        ("PREFIXKIT_HEAD_DIM", str(head_dim)),
        ("PREFIXKIT_KV_TILE", str(kernel.kv_tile(head_dim))),
        ("PREFIXKIT_VARIANT", f'"{variant_header.HEADER}"'),
    )
    headers = layouts.ATTENTION[Maps.NONE].header, (variant_header.HEADER, text)
    return Unit("attention/classify_blocks.cu", (CLASSIFY_BLOCKS,), defines, headers)


def compiled_ahead(arch: str) -> tuple[Unit, ...]:
    """The units compiled ahead: plain attention in every common head size and dtype, every variant in two sizes."""
    kernels = {head_dim: kernel for head_dim in COMMON_HEAD_DIMS if (kernel := kernel_for(arch, head_dim, 1))}
    plain = [attention_unit(kernels[dim], dim, half, CAUSAL) for dim, half in product(kernels, (False, True))]
    for head_dim in (64, 128, 256):
        if head_dim <= 128 and (e4m3 := kernel_for(arch, head_dim, 1, e4m3=True)):
            plain += [attention_unit(e4m3, head_dim, half, CAUSAL) for half in (False, True)]
        wide = kernel_for(arch, head_dim, 16)
        if wide is not None and wide.decode_rows > DECODE_ROWS:
            plain += [attention_unit(wide, head_dim, half, CAUSAL) for half in (False, True)]
    apart = kernel_for(arch, 192, 1, 128)
    if apart is not None and apart.uses_tma:
        plain += [attention_unit(apart, 192, half, CAUSAL, 128) for half in (False, True)]
    if latent := latent_kernel_for(arch, 512, 64):
        plain += [attention_unit(latent, 576, half, CAUSAL, 512) for half in (False, True)]
        plain.append(attention_unit(latent_kernel_for(arch, 256, 32) or latent, 288, False, CAUSAL, 256))
    if expanded := expanded_kernel_for(arch, 128, 64, 128):
        plain += [attention_unit(expanded, 192, half, CAUSAL, 128) for half in (False, True)]
    every = compose(sliding_window(128), soft_cap(30.0), alibi([1.0, 0.5]), attention_sinks())
    varied = [attention_unit(kernels[head_dim], head_dim, False, every) for head_dim in (128, 256)]
    varied.append(classify_unit(kernels[128], 128, every))
    experts = map(expert_unit, (False, True))
    merges = (merge_unit(*of) for of in product((False, True), repeat=2))
    states = CONV_STEP, RMS_NORM, *map(mamba2_unit, STATE_SIZES), *map(delta_unit, KEY_SIZES)
    return APPEND, ROTARY, ADVANCE, DIGEST, *PLANNERS, SAMPLE, *experts, *merges, *states, SHARED_PARTS, *plain, *varied
