"""The structs that kernels take, and the records that they read: defined here, for Python and for CUDA.

A kernel's source includes the header of each struct, such as ``layouts/plan_tree.h``; its unit contains that header.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import torch

from prefixkit.cuda.struct_layout import TENSOR_MAP, define
from prefixkit.ops.sampling_records import RECORD

# C++ types of dtypes.
FLOATS = {"float32": "float", "bfloat16": "prefixkit::BFloat", "float16": "prefixkit::Half"}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as the keys of :data:`FLOATS`."""
    return str(dtype).removeprefix("torch.")


# ---- attention ----

_ATTENTION = define(
    "Attention",
    ("const unsigned short*", "q", "[rows, heads, D]"),
    (
        "const unsigned short*",
        "k v",
        "pages: head h of slot s of page p begins at p * page_stride + h * head_stride + s * slot_stride",
    ),
    ("const long long*", "q_positions", "[rows]"),
    ("void*", "out", "[rows, heads, D]; see Out"),
    ("float*", "lse", "[rows, heads], natural logarithm"),
    ("float*", "partial_out", "[partial rows, heads, D]"),
    ("float*", "partial_lse", "[partial rows, heads]"),
    ("unsigned int*", "sync", "[1] zero before the first launch; launches that may overlap need one each"),
    (
        "const int*",
        "counts",
        "[8] tile items, decode items, rows, partial rows (0: nothing to merge), 1: tile items head by head, "
        "1: decode items are by far the longer part",
    ),
    ("const int4*", "tile_items decode_items", "[2 * items] see Item"),
    ("const int*", "segments", "[segments, 3] node, begin, end"),
    ("const int*", "merge_indptr", "[rows + 1]"),
    ("const int*", "merge_indices"),
    ("const int*", "limits", "[partial rows] of items of kind LIMIT: the position of the last token that a query sees"),
    ("const int*", "node_start node_length page_indptr pages first_slot", "the tree"),
    ("long long", "page_stride head_stride slot_stride", "elements, multiples of 8; the same for k and v"),
    ("int", "heads kv_heads page_size"),
    ("float", "scale"),
    ("float", "scale_log2", "times log2(e)"),
    ("const int*", "words", "of the variant: its values"),
    ("const long long*", "q_sequences", "[rows] numbers of sequences; read where the variant reads them"),
    (
        "const long long*",
        "q_reach",
        "[rows] the last position that each sees; read where the variant looks ahead; 0: all",
    ),
    (
        "const unsigned int*",
        "block_classes",
        "[tile_capacity + decode_capacity, class_words], a counter, bits: see block_classes.cuh; read under masks",
    ),
    ("int", "class_words", "of an item's row; 0: KV tiles have no classes"),
    ("int", "bits_capacity", "words for bits of KV tiles; where classes are made"),
    ("const unsigned short*", "sinks", "[heads] logits; read where the variant has sinks"),
    ("int", "window", "a query at position p sees no key before p - window + 1; 0: it sees all"),
    (
        "int",
        "tile_capacity decode_capacity",
        "items that the lists can hold: those may be read before counts are known",
    ),
    ("int", "tma_groups", "1: pages have 16, 32, 64... slots, so that TMA boxes of 16 rows lie inside them"),
    ("int", "rows", "of q and out; those behind the plan's pad a captured graph's batch"),
)
# The tensor maps of K and of V, as ``tensor_maps`` makes them.
_MAPS = define(
    "Maps",
    (TENSOR_MAP, "k_map v_map", "dimensions (D, slots, KV heads, pages), boxes of (64, 16, 1, 1), 128-byte swizzle"),
    (TENSOR_MAP, "k_row v_row", "the same with boxes of (64, 1, 1, 1)"),
    (TENSOR_MAP, "k_group v_group", "dimensions (64, slots, D / 64, KV heads, pages), boxes of (64, 16, D / 64, 1, 1)"),
    (TENSOR_MAP, "v_few", "as v_map, with boxes of (64, 4, 1, 1)"),
)
_ROTARY_MAPS = define(
    "RotaryMaps", (TENSOR_MAP, "r_map r_row", "of keys' rotary part where it lies apart: as k_map, and as k_row")
)


class Maps(Enum):
    """The tensor maps (PREFIXKIT_MAPS) by which a kernel reads pages; they come first in its parameter."""

    NONE = ()
    KV = _MAPS.fields
    ROTARY = _MAPS.fields + _ROTARY_MAPS.fields  # and the maps of the keys' rotary part


ATTENTION = {maps: replace(_ATTENTION, fields=maps.value + _ATTENTION.fields) for maps in Maps}

MERGE_STATES = define(
    "MergeStates",
    ("const void*", "first second", "[their rows, heads, V]; see Part"),
    ("const float*", "first_lse second_lse", "[their rows, heads], natural logarithm"),
    ("const int*", "first_place second_place", "[rows] of each row of out its row in a state, or -1"),
    ("unsigned short*", "out", "[rows, heads, V]"),
    ("int", "rows heads"),
    ("int", "vectors", "of 8 elements, of all heads of a row"),
)

# ---- planner ----

# The costs of a role; ``start write merge`` are its ``points()``.
_ROLE_COST = define("RoleCost", ("int", "kv_tile workers start write merge least"))
PLAN_TREE = define(
    "PlanTree",
    ("const int*", "sizes", "[2] nodes; 1: by heavy paths"),
    ("const int*", "parent subtree_end", "[nodes]"),
    ("const int*", "length", "visible tokens"),
    ("const int*", "own", "query rows"),
    ("const int*", "start run", "[nodes] first position; the run that each is a part of, or -1; read by paths alone"),
    ("int*", "counts", "the plan: see Attention"),
    ("int4*", "tile_items decode_items"),
    ("int*", "segments merge_indptr merge_indices limits"),
    ("int*", "scratch"),
    ("double", "gain_per_token item price_tile price_decode price_per_row tile_path", "of sharing"),
    ("double", "tile_rate decode_rate"),
    ("unsigned long long", "magic low_magic", "ceil(2^32 / many), and of low tiles"),
    ("int", "node_capacity tile_capacity decode_capacity segment_capacity row_capacity partial_capacity"),
    ("int", "group kv_heads num_sms"),
    ("int", "many low_many", "queries of a full tile, and of a low one"),
    ("int", "few_tokens", "of all tiles and heads on each multiprocessor, up to which tiles are low; -1: never"),
    ("int", "decode_rows", "query heads of a decode item at most"),
    ("int", "read_by_tiles", "see CostModel"),
    ("int", "window chunk first", "of Visible, 0: none; by paths tiles begin where one of their queries sees"),
    ("int", "shared_ints"),
    (_ROLE_COST, "cost[2]", "tile path, decode path"),
)

# ---- keys and values ----

_ROWS = define("Rows", ("long long", "token head"))
_PAGES = define("Pages", ("long long", "page slot head"))
MOVE = define(
    "Move",
    ("void*", "k_rows v_rows k_pages v_pages"),
    ("const long long*", "slots"),
    (_ROWS, "k_row v_row", "strides of one tensor, in vectors"),
    (_PAGES, "k_page v_page"),
    ("long long", "num_slots"),
    ("int", "tokens kv_heads vectors page_size"),
)
ROTARY = define(
    "Rotary",
    ("const void*", "q key value cos sin"),
    ("void*", "rotated k_pages v_pages"),
    ("const long long*", "slots"),
    ("long long", "q_token q_head k_token k_head v_token v_head cos_token sin_token", "strides in vectors"),
    ("long long", "k_page k_slot k_page_head v_page v_slot v_page_head"),
    ("long long", "num_slots"),
    ("unsigned int", "tokens heads kv_heads"),
    ("unsigned int", "half", "vectors of half a head"),
    ("unsigned int", "page_size"),
)
ADVANCE = define(
    "Advance",
    ("const int*", "leaf start"),
    ("int*", "length"),
    ("const int*", "page_indptr pages first_slot"),
    ("const long long*", "sampled"),
    ("long long*", "tokens positions slots"),
    ("int", "rows page_size"),
)

# ---- processes that share a model ----

# The memory that both processes see.
_EXCHANGE = (
    ("int4*", "theirs", "[blocks, 2 AHEAD, PLACE, THREADS] memory of the other process"),
    ("const int4*", "own", "the same of this process"),
    ("unsigned int*", "their_flags", "[blocks] of the other process: places that this one has written"),
    ("const unsigned int*", "own_flags", "[blocks] places that the other one has written"),
    ("unsigned int*", "epochs", "[blocks] places that this process has read"),
)
SUM_PARTS = define(
    "SumParts",
    ("const int4*", "part", "float32: [vectors] of 16 bytes, or [vectors, 2] for a sum in 16 bits"),
    ("const int4*", "residual other", "[vectors] of 16 bytes; both or other null"),
    ("int4*", "sum", "[vectors]"),
    *_EXCHANGE,
    ("int", "vectors"),
)
GATHER_PARTS = define(
    "GatherParts",
    ("const int4*", "part sent", "[rows, width] vectors of 16 bytes; sent: what the other process gets"),
    ("int4*", "whole", "[rows, 2, width]"),
    *_EXCHANGE,
    ("int", "vectors"),
    ("unsigned int", "width rank", "vectors of a row of part; of this process, whose columns come first with 0"),
)
SHARED_PARTS = SUM_PARTS.header, GATHER_PARTS.header

# ---- experts ----

EXPERT_PRODUCT = define(
    "ExpertProduct",
    ("const unsigned short*", "x weight bias", "[pairs / per, k], [experts, k, n], [experts, n] or null"),
    ("const long long*", "index", "[pairs] the expert of each"),
    ("unsigned short*", "out", "[pairs, n]"),
    ("long long", "row_stride expert_stride weight_stride", "of x, and of the weights: an expert, the other axis"),
    ("int", "pairs per experts k n"),
)

# ---- states ----

CONV_STEP = define(
    "ConvStep",
    ("const void*", "x weight bias", "[rows, channels], [channels, W], [channels] or null"),
    ("void*", "states", "[slots, channels, W]"),
    ("const long long*", "source target", "[rows] slots"),
    ("void*", "out", "[rows, channels]"),
    ("long long", "x_row", "stride of a row"),
    ("long long", "slots"),
    ("int", "channels"),
    ("int", "silu", "1: y * sigmoid(y)"),
)
MAMBA2_STEP = define(
    "Mamba2Step",
    ("const void*", "x dt", "[rows, heads, P], [rows, heads]"),
    ("const float*", "rate", "[heads]"),
    ("const void*", "inward outward", "[rows, groups, N]"),
    ("const void*", "skip bias", "[heads] or null"),
    ("const void*", "gate", "[rows, heads, P] or null"),
    ("float*", "states", "[slots, heads, P, N]"),
    ("const long long*", "source target", "[rows] slots"),
    ("void*", "out", "[rows, heads, P]"),
    ("long long", "x_row dt_row inward_row outward_row gate_row", "strides of a row, whose numbers are adjacent"),
    ("long long", "slots"),
    ("int", "heads heads_per_group"),
    ("int", "dim", "P"),
    ("int", "dt_kind skip_kind bias_kind", "see Kind in numbers.cuh"),
)
DELTA_RULE = define(
    "DeltaRule",
    ("const void*", "query key value", "[rows, tokens, key heads, K] twice, [rows, tokens, heads, V]"),
    ("const float*", "decay", "[rows, tokens, heads], logarithms"),
    ("const void*", "beta", "[rows, tokens, heads]"),
    ("float*", "states", "[slots, heads, K, V]"),
    ("const long long*", "source target", "[rows] slots"),
    ("void*", "out", "[rows, tokens, heads, V]"),
    ("long long", "query_row query_token query_head query_step", "strides"),
    ("long long", "key_row key_token key_head key_step"),
    ("long long", "value_row value_token value_head value_step"),
    ("long long", "slots"),
    ("int", "tokens heads heads_per_key"),
    ("int", "size dim", "K and V"),
    ("int", "normalize", "1: query and key by their lengths"),
    ("int", "beta_kind", "see Kind in numbers.cuh"),
)

RMS_NORM = define(
    "RmsNorm",
    ("const void*", "x weight gate", "[rows, D], [D], [rows, D] or null"),
    ("void*", "out", "[rows, D]"),
    ("long long", "rows x_row gate_row", "their number, and strides of a row"),
    ("int", "dim", "D"),
    ("int", "weight_kind", "see Kind in numbers.cuh"),
    ("float", "eps offset"),
)

# ---- memory ----

DIGEST = define(
    "Digest",
    ("const void*", "words", "[count]"),
    ("unsigned long long*", "total", "[1]"),
    ("long long", "start count"),
    ("int", "blocks", "of the launch"),
)

# ---- sampling ----

# The sampling parameters of a row, as the op takes them.
_C_TYPES = {"f8": "double", "u8": "unsigned long long", "f4": "float", "i4": "int"}
SAMPLING_RECORD = define("SamplingRecord", *((_C_TYPES[RECORD[name].str[1:]], name) for name in RECORD.names or ()))
SAMPLE = define(
    "Sample",
    ("const void*", "logits", "[rows, vocab]"),
    ("SamplingRecord*", "records", "[rows]"),
    ("unsigned int*", "seen", "[rows, words], bit t % 32 of word t / 32: the sequence holds token t"),
    ("long long*", "tokens", "[rows]"),
    ("float*", "logprobs", "[rows]"),
    ("const unsigned int*", "allowed", "[rows, words], likewise: token t may be sampled; read in masked rows, or null"),
    ("long long", "stride", "of a row of logits, in elements"),
    ("int", "vocab words"),
    ("int", "segment", "tokens of a warp, a multiple of 128"),
    ("int", "aligned", "four logits can be loaded at once"),
)
