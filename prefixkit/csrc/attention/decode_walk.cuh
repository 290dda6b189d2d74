// How a warp walks over the items of the decode list and over their KV tiles, before it loads them.
//
// shapes     the decode list, and classes of KV tiles under masks.
// tiling     a warp, or half a warp, has a walk of its own: its lanes hold the same state.  They resolve BATCH items at
//            once, a lane each.
// cost       a chain of dependent reads for each batch: the item, arrays of its node, pages.
// limits     any page size and stride.
#pragma once
#include "attention/block_classes.cuh"
#include "attention/gather.cuh"

namespace prefixkit {

// Groups of 16 tokens in a KV tile.  There are two where they take no more memory than one group with rows of 256
// bytes, and four where rows have 64 bytes, so that what a KV tile costs besides its products is spread over as many
// bytes.  Masks hide groups one by one, so under masks there is one.
constexpr int DECODE_GROUPS = !PREFIXKIT_MAPS || Variant::HAS_MASK ? 1 : WORDS <= 32 ? 4 : WORDS <= 64 ? 2 : 1;
constexpr int DECODE_KV_TILE = DECODE_GROUPS * GROUP;
constexpr int DECODE_KV_TILE_BYTES = DECODE_KV_TILE * STORED_COLUMNS * 128;  // of K, and of V
constexpr int STAGE_BYTES = 2 * DECODE_KV_TILE_BYTES;

struct DecodeKVTile {  // what a consumer must know of a KV tile; 32 bytes
    int q_begin, rows, partial, head;
    int flags;     // FIRST, LAST of its item; CLIPPED: rows end at different tokens; LIMITED: kind LIMIT; STOP: no
                   // more work
    int low, high; // tokens [low, high) count
    int position;  // of token 0
};
enum { FIRST = 1, LAST = 2, CLIPPED = 4, STOP = 8, LIMITED = 64, LEFT_OUT = 128 };  // LEFT_OUT: a flag of items

#ifndef PREFIXKIT_ROW_PARTS
#define PREFIXKIT_ROW_PARTS 1
#endif
constexpr int ROW_PARTS = PREFIXKIT_ROW_PARTS;  // warps that take an item together
constexpr int BATCH = 8, DECODE_WARPS = 4, RINGS = DECODE_WARPS / ROW_PARTS;
constexpr int ROW_BITS = ROW_PARTS == 1 ? 4 : 5;
// The first of this warp's 8 rows.
DEVICE int first_of_part() { return ROW_PARTS == 1 ? 0 : 8 * ((threadIdx.x >> 5) % ROW_PARTS); }

struct Resolved {  // an item and its first segment
    int q_begin, partial;
    u32 packed;         // rows, flags << ROW_BITS, KV head << ROW_BITS + 8
    int seg, seg_end;   // segments after the first
    int high;           // one past the last position that its queries see
    QueryRange queries;
    Span span;
    int page[DECODE_GROUPS];  // pages of the segment's first groups, where pages hold groups

    DEVICE int rows() const { return packed & ((1 << ROW_BITS) - 1); }
    DEVICE int flags() const { return packed >> ROW_BITS & 255; }
    DEVICE int head() const { return packed >> (ROW_BITS + 8); }
    DEVICE VisibleRange range(const Attention& a) const {
        return {a.window > 0 ? queries.low - a.window + 1 : 0, high};
    }
};

// Looks up the pages of a KV tile's groups, starting with the group of the span's first slot.
DEVICE void look_up_groups(const Attention& a, const Span& span, int (&page)[DECODE_GROUPS]) {
    if (!holds_groups(a)) return;
#pragma unroll
    for (int g = 0; g < DECODE_GROUPS; ++g) {
        const int slot = g ? first_slot_of(span) + g * GROUP : span.slot;
        if (slot < span.end) page[g] = a.pages[span.pages + page_index(a, slot)];
    }
}

// Resolves entry `entry` of the decode list; STOP past its end.
DEVICE Resolved resolve_item(const Attention& a, int entry) {
    Resolved r = {};
    r.packed = STOP << ROW_BITS;
    const LoneItem lone(a, a.tile_capacity + max(0, min(entry / a.kv_heads, a.decode_capacity - 1)));
    const Item item = load_item(a.decode_items, entry, a.kv_heads, a.decode_capacity);  // does not wait for counts
    if (entry >= a.counts[1] * a.kv_heads) return r;
    if (lone.left_out) {
        r.packed = LEFT_OUT << ROW_BITS;
        return r;
    }
    r.q_begin = item.q_begin, r.partial = lone.alone ? -1 : item.partial;
    r.queries = {0x7fffffff, 0};
    if (ranges_matter(a)) {
#pragma unroll 1
        for (int i = item.q_begin; i < item.q_end; ++i) {
            const int position = int(a.q_positions[i]);
            r.queries.low = min(r.queries.low, position), r.queries.high = max(r.queries.high, position);
        }
    }
    const VisibleRange range = visible_range(a, item, r.queries.low);
    r.high = range.high;
    // For a single query, the visible range alone is the mask.
    const int queries = item.q_end - item.q_begin;
    const int flags = FIRST | (item.kind != ALL && queries > 1 ? CLIPPED : 0) | (item.kind == LIMIT ? LIMITED : 0);
    r.packed = u32(queries * group_of(a)) | u32(flags) << ROW_BITS | u32(item.head) << (ROW_BITS + 8);
    r.seg = item.seg_begin + 1, r.seg_end = item.seg_end;
    r.span = load_span(a, item.node, item.begin, item.end, range);
    look_up_groups(a, r.span, r.page);
    return r;
}

// A worker's walk over the decode list, by LANES lanes of a warp that hold the same state.  The lanes resolve BATCH
// items at once, a lane each, because each item is a chain of dependent reads.
template <int LANES> struct DecodeWalk {
    const Attention& a;
    Resolved* batch;
    int worker;
    int taken = 0;       // items begun
    int seg, flags;      // of the current item
    Span span;           // what is left of its segment
    int page[DECODE_GROUPS] = {};  // pages of the next KV tile's groups
    BlockClasses<DECODE_KV_TILE> classes;

    DEVICE DecodeWalk(const Attention& a, Resolved* batch, int worker) : a(a), batch(batch), worker(worker) {
        begin_item();
    }

    DEVICE int lane() const { return lane_anew() & (LANES - 1); }
    DEVICE void sync() const { __syncwarp(LANES == 32 ? ~0u : 0xffffu << (lane_anew() & 16)); }
    DEVICE const Resolved& current() const { return batch[(taken - 1) % BATCH]; }

    DEVICE void begin_item() {
        do {
            if (taken % BATCH == 0) {
                sync();
                const int mine = lane();
                if (mine < BATCH) batch[mine] = resolve_item(a, entry_of(taken + mine, worker, RINGS * gridDim.x));
                sync();
            }
            flags = batch[taken++ % BATCH].flags();
        } while (Variant::HAS_MASK && (flags & LEFT_OUT));
        const Resolved& r = current();
        seg = r.seg, span = r.span;
        if (flags & STOP) return;
#pragma unroll
        for (int g = 0; g < DECODE_GROUPS; ++g) page[g] = r.page[g];
        const int entry = entry_of(taken - 1, worker, RINGS * gridDim.x);
        classes.begin(a, a.tile_capacity + entry / a.kv_heads);
        const int first = span.slot;
        if (Variant::HAS_MASK || span.slot >= span.end) {
            classes.skip(a, span, seg, r.seg_end, r.range(a), [&] { return current().queries; }, true);
            if (first != span.slot || seg != r.seg) look_up();  // slots of another node may have the same number
        }
    }

    DEVICE void look_up() { look_up_groups(a, span, page); }

    // Advances to the next visible KV tile at or after `slot`; returns whether this item has none.
    DEVICE bool advance(int slot) {
        span.slot = slot;
        classes.step();
        classes.skip(a, span, seg, current().seg_end, current().range(a), [&] { return current().queries; }, false);
        return span.slot >= span.end;
    }

    // Describes a KV tile to its consumer; `position` is that of token 0.
    DEVICE void describe(DecodeKVTile* kv_tile, int low, int high, int position, bool masked, bool last) const {
        const Resolved& item = current();
        int4* to = (int4*)kv_tile;
        to[0] = make_int4(item.q_begin, item.rows(), item.partial, item.head());
        const int of_item = flags & (FIRST | CLIPPED | LIMITED);
        to[1] = make_int4(of_item | (masked ? MASKED : 0) | (last ? LAST : 0), low, high, position);
    }
};

}  // namespace prefixkit
