// The parameter of a launch (tensors, the packed plan, the tree), and how workers walk a work list.
#pragma once
#include "common/ptx.cuh"
#include "attention/variant.cuh"
#include "layouts/attention.h"

#ifndef PREFIXKIT_MAPS
#define PREFIXKIT_MAPS 0  // 1: TMA loads KV where pages allow it (Hopper); Attention begins with tensor maps
#endif

namespace prefixkit {

#ifndef PREFIXKIT_VALUE_DIM
#define PREFIXKIT_VALUE_DIM PREFIXKIT_HEAD_DIM
#endif
constexpr int D = PREFIXKIT_HEAD_DIM, V_DIM = PREFIXKIT_VALUE_DIM;  // of queries and keys; of values and outputs
constexpr int ROW_VECTORS = D / 8;  // 16-byte vectors of a query's head
#ifndef PREFIXKIT_KV_FP8
#define PREFIXKIT_KV_FP8 0
#endif
// Pages in e4m3: they are loaded as rows of half as many words of 16 bits, in which their strides are counted too, and
// become the storage type where operands of products are made.
constexpr bool FP8 = PREFIXKIT_KV_FP8;
constexpr int WORDS = FP8 ? D / 2 : D;  // of 16 bits, of a head's row in pages
constexpr int STORED_VECTORS = WORDS / 8;
static_assert(D % 16 == 0 && V_DIM % 16 == 0, "head sizes are multiples of 16");
#ifndef PREFIXKIT_LATENT
#define PREFIXKIT_LATENT 0
#endif
// Latents (multi-head latent attention): a key's first V_DIM elements are its value, and all heads read the same ones:
// `kv_heads` only says how many groups heads come in.
constexpr bool LATENT = PREFIXKIT_LATENT;
// Where keys are APART, only their first OWN_DIM elements lie in `k`.  The others are their rotary part, which all
// heads share; they lie in a tensor of their own, which has one head.
#ifdef PREFIXKIT_OWN_DIM
constexpr int OWN_DIM = PREFIXKIT_OWN_DIM;
DEVICE const TensorMap* rotary_map(const Attention& a) { return &a.r_map; }
DEVICE const TensorMap* rotary_row(const Attention& a) { return &a.r_row; }
#else
constexpr int OWN_DIM = D;
#if PREFIXKIT_MAPS
DEVICE const TensorMap* rotary_map(const Attention& a) { return nullptr; }
DEVICE const TensorMap* rotary_row(const Attention& a) { return nullptr; }
#endif
#endif
constexpr bool APART = OWN_DIM < D;
static_assert(!FP8 || (D == V_DIM && !APART && !LATENT), "pages in e4m3 hold K and V of one head size");
static_assert(!APART || OWN_DIM % 64 == 0, "column blocks lie in one tensor");
// Here tile items and decode items go through the tile path.
constexpr bool TILES_ONLY = D != V_DIM || APART;

// Outputs have the storage type, or float32 where they are attention to some of the keys: they are rounded once, when
// they are merged with those to other keys.
#ifndef PREFIXKIT_PART
#define PREFIXKIT_PART 0
#endif
#if PREFIXKIT_PART
using Out = float;
#else
using Out = u16;
#endif
DEVICE Out* outputs(const Attention& a) { return (Out*)a.out; }

// Brings the parameter into the constant cache, a line at a time, before it is needed.
DEVICE void hold_parameters(const Attention& a) {
    asm volatile("" ::"l"(a.q), "l"(a.partial_lse), "l"(a.merge_indptr), "l"(a.first_slot));
    asm volatile("" ::"r"(a.heads), "r"(a.tma_groups));
}

// `thread` of `threads` in each block: rows that pad a batch become 0 with lse -inf, like any row that sees no key.
DEVICE void clear_padding(const Attention& a, int thread, int threads) {
#pragma unroll 1
    for (int row = a.counts[2] + blockIdx.x; row < a.rows; row += gridDim.x) {
        uint2* out = (uint2*)(outputs(a) + (long long)row * a.heads * V_DIM);
#pragma unroll 1
        for (int i = thread; i < a.heads * (V_DIM / 8) * int(sizeof(Out)); i += threads) out[i] = make_uint2(0, 0);
        for (int i = thread; i < a.heads; i += threads) a.lse[(long long)row * a.heads + i] = MINUS_INFINITY;
    }
}

// Query heads of a KV head.
DEVICE int group_of(const Attention& a) { return divide_small(a.heads, a.kv_heads); }

// Of a tile row: its query, counted from the item's first, and its query head.
struct TileRow {
    int query, head;

    DEVICE TileRow(const Attention& a, int kv_head, int row) {
        const int group = group_of(a);
        query = divide_small(row, group), head = kv_head * group + row - query * group;
    }
    // Its index in [rows, heads], where the item's first query has row `first`.
    DEVICE long long index(const Attention& a, int first) const { return (long long)(first + query) * a.heads + head; }
};

// What queries see of their item's KV list: all of it; what is not behind themselves, or behind their reach where the
// variant looks ahead; up to a limit for each, in the order of the queries (MaskKind of attention/bsr.py).
enum MaskKind { ALL, OWN, LIMIT };
constexpr int NO_END = 1 << 30;  // differences to positions fit an int

// Queries [q_begin, q_end) read segments [seg_begin, seg_end); `node, begin, end` repeat the first one.
struct Item {
    int q_begin, q_end, partial, seg_begin, seg_end, node, begin, end, kind, head;
};

// What the walk over the tile list takes as its entry `entry`: where the plan says so it goes head by head, so that the
// KV of fewer heads competes for the L2.
DEVICE int walk_entry(const Attention& a, int entry) {
    const int items = a.counts[0];
    return a.counts[4] ? u32(entry) % u32(items) * a.kv_heads + u32(entry) / u32(items) : entry;
}

// Entry `entry` of a work list: each item for all KV heads.  Entries beyond `capacity` items are zero.
DEVICE Item load_item(const int4* items, int entry, int kv_heads, int capacity) {
    const int index = int(u32(entry) / u32(kv_heads));
    int4 a = {}, b = {};
    if (index < capacity) a = items[2 * index], b = items[2 * index + 1];
    Item item;
    item.head = entry - index * kv_heads;
    item.q_begin = a.x, item.q_end = a.y, item.partial = a.z, item.seg_begin = a.w;
    item.seg_end = item.seg_begin + (b.x >> 2), item.kind = b.x & 3;
    item.node = b.y, item.begin = b.z, item.end = b.w;
    return item;
}

// Worker `w` of `n` takes one entry per round, and rounds change direction: lists run from the longest to the shortest.
DEVICE int entry_of(int round, int worker, int workers) {
    return round * workers + ((round & 1) ? workers - 1 - worker : worker);
}

// A slice of a node as slots of its pages.
struct Span {
    int pages;     // index of the node's first page in `pages`
    int slot, end; // slots [slot, end), counted from the node's first page
    int position;  // position of slot 0
};

// The position behind the last one that query `query` of an item sees, counted from the item's first query; ascends
// with the queries.
DEVICE int end_seen(const Attention& a, int kind, int q_begin, int partial, int query) {
    if (kind == LIMIT) return min(a.limits[partial + query], NO_END - 1) + 1;
    if (Variant::LOOKS_AHEAD) return kind == OWN && a.q_reach ? int(a.q_reach[q_begin + query]) + 1 : NO_END;
    return kind == OWN ? int(a.q_positions[q_begin + query]) + 1 : NO_END;
}

// Positions [low, high) that an item's queries can see.
struct VisibleRange {
    int low, high;
};

// The smallest and the largest position among an item's queries, where the variant has a window or decides about
// blocks.
struct QueryRange {
    int low, high;
};
DEVICE bool ranges_matter(const Attention& a) { return a.window > 0 || (Variant::DECIDES && a.class_words == 0); }

// `first`: the smallest position among the item's queries, where the variant has a window.
DEVICE VisibleRange visible_range(const Attention& a, const Item& item, int first) {
    const int last = item.q_end - item.q_begin - 1;
    return {a.window > 0 ? first - a.window + 1 : 0, end_seen(a, item.kind, item.q_begin, item.partial, last)};
}

// By a warp together.
DEVICE QueryRange query_range(const Attention& a, const Item& item) {
    QueryRange r = {0x7fffffff, 0};
    if (!ranges_matter(a)) return r;
#pragma unroll 1
    for (int i = item.q_begin + lane_anew(); i < item.q_end; i += 32) {
        const int position = int(a.q_positions[i]);
        r.low = min(r.low, position), r.high = max(r.high, position);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        r.low = min(r.low, __shfl_xor_sync(~0u, r.low, d));
        if (Variant::DECIDES) r.high = max(r.high, __shfl_xor_sync(~0u, r.high, d));
    }
    return r;
}

DEVICE Span load_span(const Attention& a, int node, int begin, int end, const VisibleRange& range) {
    Span s;
    const int first = a.first_slot[node], start = a.node_start[node], length = a.node_length[node];
    s.pages = a.page_indptr[node];
    end = min(min(end, length), range.high - start);
    begin = max(begin, range.low - start);
    s.slot = first + begin;
    s.end = first + end;
    s.position = start - first;
    return s;
}
DEVICE Span load_segment(const Attention& a, int seg, const VisibleRange& range) {
    return load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], range);
}

// The number of a query's sequence, where the variant reads it.
DEVICE int sequence_of(const Attention& a, int query) {
    return Variant::READS_SEQUENCE ? int(a.q_sequences[query]) : 0;
}

// Advances from an empty span to the first of the segments [seg, seg_end) that is not.
DEVICE void skip_empty(const Attention& a, Span& span, int& seg, const int& seg_end, const VisibleRange& range) {
    for (; span.slot >= span.end && seg < seg_end; ++seg) span = load_segment(a, seg, range);
}

// Where a slot's row begins, in 16-byte vectors: 32 bits address 64 GB.
DEVICE u32 row_of(const Attention& a, int page, int slot_in_page, int head) {
    return u32(page) * u32(a.page_stride >> 3) + u32(head) * u32(a.head_stride >> 3) +
           u32(slot_in_page) * u32(a.slot_stride >> 3);
}

// The largest, or the sum, of x over lanes whose numbers differ in the bits FROM, 2 FROM, ..., TO / 2.
template <int FROM, int TO> DEVICE float lanes_max(float x) {
#pragma unroll
    for (int d = FROM; d < TO; d <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
template <int FROM, int TO> DEVICE float lanes_sum(float x) {
#pragma unroll
    for (int d = FROM; d < TO; d <<= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

}  // namespace prefixkit
