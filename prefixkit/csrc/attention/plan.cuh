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
// Head size of queries and keys; of values and outputs.
constexpr int D = PREFIXKIT_HEAD_DIM, V_DIM = PREFIXKIT_VALUE_DIM;
constexpr int ROW_VECTORS = D / 8;  // 16-byte vectors in one query head
#ifndef PREFIXKIT_KV_FP8
#define PREFIXKIT_KV_FP8 0
#endif
// Pages in e4m3 are loaded as rows of half as many 16-bit words; their strides are counted in these words too.  The
// kernel widens the numbers where it makes operands of products.
constexpr bool FP8 = PREFIXKIT_KV_FP8;
constexpr int WORDS = FP8 ? D / 2 : D;  // 16-bit words in one head's row of a page
constexpr int STORED_VECTORS = WORDS / 8;
static_assert(D % 16 == 0 && V_DIM % 16 == 0, "head sizes are multiples of 16");
#ifndef PREFIXKIT_LATENT
#define PREFIXKIT_LATENT 0
#endif
// Latents (multi-head latent attention): the first V_DIM elements of a key are also its value, and all query heads read
// the same latents.  `kv_heads` counts only the groups into which the query heads are divided.
constexpr bool LATENT = PREFIXKIT_LATENT;
// Where keys are APART, `k` holds only their first OWN_DIM elements.  The other elements are the rotary part, which all
// heads share; a separate tensor with one head holds them.
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
// The tile path runs both tile items and decode items.
constexpr bool TILES_ONLY = D != V_DIM || APART;

// Outputs have the storage type.  Where a launch attends to only some of the keys, its outputs are float32: they are
// rounded once, when they are merged with the outputs for the other keys.
#ifndef PREFIXKIT_PART
#define PREFIXKIT_PART 0
#endif
#if PREFIXKIT_PART
using Out = float;
#else
using Out = u16;
#endif
DEVICE Out* outputs(const Attention& a) { return (Out*)a.out; }

// Loads the parameter into the constant cache, one line at a time, before it is needed.
DEVICE void hold_parameters(const Attention& a) {
    asm volatile("" ::"l"(a.q), "l"(a.partial_lse), "l"(a.merge_indptr), "l"(a.first_slot));
    asm volatile("" ::"r"(a.heads), "r"(a.tma_groups));
}

// Run by `thread` of `threads` in each block: sets rows that pad a batch to 0 with lse -inf, as in rows that see no
// key.
DEVICE void clear_padding(const Attention& a, int thread, int threads) {
#pragma unroll 1
    for (int row = a.counts[2] + blockIdx.x; row < a.rows; row += gridDim.x) {
        uint2* out = (uint2*)(outputs(a) + (long long)row * a.heads * V_DIM);
#pragma unroll 1
        for (int i = thread; i < a.heads * (V_DIM / 8) * int(sizeof(Out)); i += threads) out[i] = make_uint2(0, 0);
        for (int i = thread; i < a.heads; i += threads) a.lse[(long long)row * a.heads + i] = MINUS_INFINITY;
    }
}

// The number of query heads for each KV head.
DEVICE int group_of(const Attention& a) { return divide_small(a.heads, a.kv_heads); }

// The query of a tile row, counted from the item's first query, and its query head.
struct TileRow {
    int query, head;

    DEVICE TileRow(const Attention& a, int kv_head, int row) {
        const int group = group_of(a);
        query = divide_small(row, group), head = kv_head * group + row - query * group;
    }
    // The row's index in [rows, heads]; `first` is the row of the item's first query.
    DEVICE long long index(const Attention& a, int first) const { return (long long)(first + query) * a.heads + head; }
};

// What the queries of an item see of its KV list (MaskKind of attention/bsr.py).  ALL: every token.  OWN: tokens up to
// the query's own position, or up to its reach where the variant looks ahead.  LIMIT: tokens up to a limit for each
// query; limits ascend in the order of the queries.
enum MaskKind { ALL, OWN, LIMIT };
constexpr int NO_END = 1 << 30;  // its difference from any position fits an int

// Queries [q_begin, q_end) read segments [seg_begin, seg_end); `node`, `begin` and `end` repeat the first segment.
struct Item {
    int q_begin, q_end, partial, seg_begin, seg_end, node, begin, end, kind, head;
};

// The entry of the tile list that a walk takes as its entry number `entry`.  Where the plan says so, the walk goes head
// by head, so that the KV of fewer heads competes for the L2.  Groups of heads that read the same latents stay together.
DEVICE int walk_entry(const Attention& a, int entry) {
    const int items = a.counts[0];
    return !LATENT && a.counts[4] ? u32(entry) % u32(items) * a.kv_heads + u32(entry) / u32(items) : entry;
}

// Loads entry `entry` of a work list, which holds each item once for every KV head.  Entries past `capacity` items are
// zero.
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

// Each worker takes one entry per round.  The direction alternates from round to round, because lists run from the
// longest item to the shortest.
DEVICE int entry_of(int round, int worker, int workers) {
    return round * workers + ((round & 1) ? workers - 1 - worker : worker);
}

// A slice of a node as slots of its pages.
struct Span {
    int pages;     // index of the node's first page in `pages`
    int slot, end; // slots [slot, end), counted from the node's first page
    int position;  // position of slot 0
};

// One past the last position that query `query` of an item sees.  `query` counts from the item's first query; the
// result ascends with it.
DEVICE int end_seen(const Attention& a, int kind, int q_begin, int partial, int query) {
    if (kind == LIMIT) return min(a.limits[partial + query], NO_END - 1) + 1;
    if (Variant::LOOKS_AHEAD) return kind == OWN && a.q_reach ? int(a.q_reach[q_begin + query]) + 1 : NO_END;
    return kind == OWN ? int(a.q_positions[q_begin + query]) + 1 : NO_END;
}

// Positions [low, high) that an item's queries can see.
struct VisibleRange {
    int low, high;
};

// The smallest and the largest position among an item's queries, computed only where the variant has a window or
// decides about whole blocks.
struct QueryRange {
    int low, high;
};
DEVICE bool ranges_matter(const Attention& a) { return a.window > 0 || (Variant::DECIDES && a.class_words == 0); }

// `first`: the smallest position among the item's queries, where the variant has a window.
DEVICE VisibleRange visible_range(const Attention& a, const Item& item, int first) {
    const int last = item.q_end - item.q_begin - 1;
    return {a.window > 0 ? first - a.window + 1 : 0, end_seen(a, item.kind, item.q_begin, item.partial, last)};
}

// Computed by all lanes of a warp together.
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

// Advances from an empty span to the first of segments [seg, seg_end) that is not empty.
DEVICE void skip_empty(const Attention& a, Span& span, int& seg, const int& seg_end, const VisibleRange& range) {
    for (; span.slot >= span.end && seg < seg_end; ++seg) span = load_segment(a, seg, range);
}

// The offset of a slot's row, in 16-byte vectors: 32 bits address 64 GB.
DEVICE u32 row_of(const Attention& a, int page, int slot_in_page, int head) {
    return u32(page) * u32(a.page_stride >> 3) + u32(head) * u32(a.head_stride >> 3) +
           u32(slot_in_page) * u32(a.slot_stride >> 3);
}

// The maximum, or the sum, of x over the lanes whose numbers differ in the bits FROM, 2 FROM, ..., TO / 2.
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
