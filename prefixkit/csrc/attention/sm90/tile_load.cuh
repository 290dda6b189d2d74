// The tensor-core tile path's loads on Hopper: one producer warp fills a ring of K in shared memory, one a ring of V.
//
// shapes     a KV tile is KV_TILE tokens of one KV head, in groups of 16 that begin at a multiple of 16 slots.
// tiling     a group inside a page takes one TMA load for every 64 columns; one lane issues all loads of a KV tile.
//            Where the segment has only some rows of a group, all rows of K are loaded, because scores of the others
//            are replaced.  Of V only the segment's rows are loaded, four at a time and the rest one by one, and the
//            producer clears the others: 0 * NaN is NaN.  Latents are both K and V: the consumers clear the rows
//            without a token.
// cost       one instruction per 2 KB; a ring holds at most TILE_STAGES KV tiles.
#pragma once
#include "attention/block_classes.cuh"
#include "attention/sm90/widen_tile.cuh"

namespace prefixkit {

// The barrier for which item `items` waits, and the parity of its phase.
DEVICE u32 item_empty(const TileShared& s, int items) { return s.item_empty + 8 * (items & 1); }
DEVICE u32 item_parity(int items) { return (items >> 1 & 1) ^ 1; }

// Publishes item `items` to the consumers; an item without rows is the end.
DEVICE void publish_item(const TileShared& s, int items, int q_begin, int rows, int partial, int head) {
    const int place = items & 1;
    barrier_wait(item_empty(s, items), item_parity(items));
    if (lane_anew() == 0) {
        store_shared16(s.items + 16 * place, make_int4(q_begin, rows, partial, head));
        barrier_arrive(s.item_full + 8 * place);
    }
}

// What variants add to scores often rises with the position, as ALiBi's biases do.  Items are then read from their last
// KV tile to their first, so that the base of exponentials is found early and seldom rises.  (Items read from the first
// to the last share more of the L2: with a cap on scores, a prompt of 16K takes 2 to 5% longer from the end.)
constexpr bool FROM_END = Variant::ADDS && !Variant::HAS_MASK;
constexpr int LOOKED_UP = 32 * GROUP;  // slots
constexpr int FEW = 4;                 // rows of V in a box of v_few

// Pages of a segment's groups of 16 slots: lane i knows the page of group i among 32 groups; the next 32 are in flight.
struct Pages {
    const int* from;  // the page of slot 0
    int begin, end;   // of the segment; begin: the first slot of its first group
    int slot;         // the first slot of the groups whose pages `now` holds
    int now, next;

    DEVICE Pages(const Attention& a, const Span& span)
        : from(a.pages + span.pages), begin(span.slot & ~15), end(span.end) {
        slot = begin + (FROM_END ? max(0, end - begin - 1) / LOOKED_UP * LOOKED_UP : 0);
        now = look_up(a, slot), next = look_up(a, slot + STEP);
    }
    // Makes the pages of the groups from slot `at` on known.
    DEVICE void seek(const Attention& a, int at) {
        if (FROM_END ? at >= slot : at - slot < LOOKED_UP) return;
        const bool near = !Variant::HAS_MASK || at - slot < 2 * LOOKED_UP;
        slot = near ? slot + STEP : at;
        now = near ? next : look_up(a, slot);
        next = look_up(a, slot + STEP);
    }
    DEVICE int look_up(const Attention& a, int first) const {
        const int mine = first + lane_anew() * GROUP;
        return a.tma_groups && mine < end && (!FROM_END || mine >= begin) ? from[page_index(a, mine)] : 0;
    }
    static constexpr int STEP = FROM_END ? -LOOKED_UP : LOOKED_UP;
};

// An item's segments, one after the other, in the order in which the item is read, without empty ones.
struct Segments {
    int seg, seg_end;  // the next one, and where they end

    // The first span, which may be empty.
    DEVICE Span begin(const Attention& a, const Item& item, const VisibleRange& range) {
        const Span first = load_span(a, item.node, item.begin, item.end, range);
        seg = FROM_END ? item.seg_end - 1 : item.seg_begin + 1, seg_end = FROM_END ? item.seg_begin : item.seg_end;
        if (!FROM_END || seg == seg_end) return first;
        Span span = load_segment(a, seg, range);
        back(a, span, range);
        return span;
    }
    // Replaces an empty span by the next segment with tokens, if there is one.
    DEVICE void back(const Attention& a, Span& span, const VisibleRange& range) {
        while (span.slot >= span.end && seg > seg_end) span = load_segment(a, --seg, range);
    }
};

// Where a KV tile's groups lie, found before a stage is free for them.  The values are uniform, because one lane issues
// all loads; if each lane issued one, the compiler would serialise the lanes, 80 cycles a load.
struct TileGroups {
    u32 to, full;
    int columns, own, place, page[KV_TILE_GROUPS];  // column blocks; how many of these lie in the first tensor

    DEVICE TileGroups(u32 data, u32 full, const Pages& pages, int slot, int columns, int own)
        : to(uniform(data)), full(uniform(full)), columns(columns), own(own), place(uniform(slot)) {
#pragma unroll
        for (int i = 0; i < KV_TILE_GROUPS; ++i)
            page[i] = __shfl_sync(~0u, pages.now, (slot - pages.slot) / GROUP + i & 31);
    }
    // Loads the complete groups of tokens [low, high).
    DEVICE void copy(const Attention& a, const TensorMap* map, int low, int high, int head, u64 policy) const {
        if (!elected()) return;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int i = 0; i < KV_TILE_GROUPS; ++i) {
                if (GROUP * i < low || GROUP * (i + 1) > high) continue;
                const int slot = place_in_page(a, place + GROUP * i);
#pragma unroll
                for (int j = part * PART_COLUMNS; j < COLUMNS && j < (part + 1) * PART_COLUMNS; ++j)
                    if (j < columns)
                        tma_copy(to + j * COLUMN_BYTES + i * (GROUP * 128), apart(j) ? rotary_map(a) : map,
                                 column_of(j) * 64, slot, apart(j) ? 0 : head, page[i], full + 8 * part, policy);
            }
        }
    }
    DEVICE bool apart(int j) const { return APART && j >= own; }
    DEVICE int column_of(int j) const { return apart(j) ? j - own : j; }
    // Clears the rows before `low` and from `high` on.  The producer warp does so before it arrives at the full
    // barrier.
    DEVICE void clear_rows(int low, int high) const {
        const int absent = (low + KV_TILE - high) * 8;  // vectors of a column block
#pragma unroll 1
        for (int i = lane_anew(); i < absent; i += 32) {
            const int at = i + (i >= 8 * low ? (high - low) * 8 : 0);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (j < columns) store_zeros(to + j * COLUMN_BYTES + at * 16);
        }
        async_fence();  // wgmma reads them
    }
    // Loads tokens [low, high) of V's incomplete groups: FEW rows at a time, and what is left of a group by single
    // rows.
    DEVICE void copy_few(const Attention& a, int low, int high, int head, u64 policy) const {
#pragma unroll 1
        for (int i = 0; i < KV_TILE_GROUPS; ++i) {
            int in = page[0];
#pragma unroll
            for (int g = 1; g < KV_TILE_GROUPS; ++g) in = i == g ? page[g] : in;
            const int end = min(high, GROUP * (i + 1));
            int row = max(low, GROUP * i);
            if (end - row >= GROUP) continue;
#pragma unroll 1
            for (int rows; row < end; row += rows) {
                rows = row + FEW <= end ? FEW : 1;
                const TensorMap* map = rows == FEW ? &a.v_few : &a.v_row;
                const u32 box = uniform(to + row * 128), slot = uniform(place_in_page(a, place + row));
                if (!elected()) continue;
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (j < columns) tma_copy(box + j * COLUMN_BYTES, map, j * 64, slot, head, in, full, policy);
            }
        }
    }
    // Loads single rows, where pages hold no groups; of latents also the rows without a token, as zeros.
    DEVICE void copy_rows(const Attention& a, const TensorMap* map, int pages, int slot, int low, int high, int head,
                          u64 policy) const {
#pragma unroll 1
        for (int first = 0; first < KV_TILE; first += GROUP) {
#pragma unroll 1
            for (int i = lane_anew(); i < GROUP * columns; i += 32) {
                const int row = first + i % GROUP, j = i / GROUP;
                if (!LATENT && (row < low || row >= high)) continue;
                copy_row(a, apart(j) ? rotary_row(a) : map, to + j * COLUMN_BYTES + row * 128, pages, slot + row,
                         row >= low && row < high, apart(j) ? 0 : head, column_of(j), full + 8 * (j / PART_COLUMNS),
                         policy);
            }
        }
    }
};

// Prefetches the description of a block's next item to the L2.
DEVICE void prefetch_next(const Attention& a, int round, int entries) {
    const int entry = entry_of(round + 1, blockIdx.x, gridDim.x);
    if (TILES_ONLY || entry >= entries || !elected()) return;
    const int index = walk_entry(a, entry) / a.kv_heads;
    prefetch_l2(a.tile_items + 2 * index, 32);
    if (a.class_words) prefetch_classes(a, index * a.class_words, min(a.class_words, WORDS_AT_ONCE));
}

// A producer warp of V, or of K and of what the consumers must know, loads every KV tile of this block's items.  `item`
// is entry blockIdx.x of the tile list; its read overlaps that of counts.
DEVICE void tile_load(const Attention& a, const TileShared& s, bool is_v, Item item) {
    const int tiled = a.counts[0] * a.kv_heads, entries = tiled + (TILES_ONLY ? a.counts[1] * a.kv_heads : 0);
    const int columns = V_COLUMNS == COLUMNS ? STORED_COLUMNS : is_v ? V_COLUMNS : COLUMNS;
    const int own = !APART || is_v ? columns : OWN_DIM / 64;
    Ring ring{is_v ? s.v : s.k, s.full, s.k_empty + is_v * (8 * TILE_STAGES), int(s.stages), 1};
    const Slices slices{s, is_v};
    u32 loaded = 0;  // number of KV tiles loaded, where they are widened
    const u64 policy = policy_keep();
    const bool lone = each_alone(a);
    int items = 0;
    for (int round = 0; round * int(gridDim.x) < entries; ++round, item = {}) {  // {}: takes no registers till then
        const int entry = entry_of(round, blockIdx.x, gridDim.x);
        if (entry >= entries) continue;
        const int walked = walk_entry(a, entry);
        const bool decodes = TILES_ONLY && entry >= tiled;
        const int index = decodes ? a.tile_capacity + (entry - tiled) / a.kv_heads : walked / a.kv_heads;
        if (decodes)
            item = load_item(a.decode_items, entry - tiled, a.kv_heads, a.decode_capacity);
        else if (round > 0 || walked != entry) item = load_item(a.tile_items, walked, a.kv_heads, a.tile_capacity);
        if (lone) {
            if (LoneItem(a, index).left_out) continue;
            item.partial = -1;
        }
        const QueryRange queries = query_range(a, item);
        const VisibleRange range = visible_range(a, item, queries.low);
        const int all_see = end_seen(a, item.kind, item.q_begin, item.partial, 0);  // up to this position
        const int limited = item.kind == LIMIT ? LIMITED : 0;
        Segments segments;
        Span span = segments.begin(a, item, range);
        BlockClasses<KV_TILE> classes;
        classes.begin(a, index);
        const auto ranges = [&] { return queries; };
        const int rows = (item.q_end - item.q_begin) * group_of(a);
        if (FP8 && !is_v) slices.widen_until(loaded, item_empty(s, items), item_parity(items));
        if (!is_v) publish_item(s, items, item.q_begin, rows, item.partial, item.head);
        ++items;
        const int head = LATENT ? 0 : uniform(item.head);
        int bits = classes.first_bits(a);
        const int bit_words = 2 * bit_rows(a);
        if (!FROM_END) classes.skip(a, span, segments.seg, segments.seg_end, range, ranges, true);
        for (bool more = true; more;) {
            // Finds the next segment first, so that the flag LAST is right.  Under masks it does so only at this
            // segment's last KV tile, because classes are read in order.
            Span following = {};
            const auto find_following = [&] {
                if (FROM_END) segments.back(a, following, range);
                else classes.skip(a, following, segments.seg, segments.seg_end, range, ranges, true);
                more = following.slot < following.end;
            };
            if (!Variant::HAS_MASK) find_following();
            Pages pages(a, span);
            int slot = pages.begin + (FROM_END ? max(0, span.end - pages.begin - 1) / KV_TILE * KV_TILE : 0);
            for (bool ended = false; !ended;) {
                if constexpr (FP8) slices.make_room(loaded);  // where the fewest registers are in use
                const bool masked = classes.current() & COMPARED;
                const int mine = classes.current() == BITS ? bits : -1;
                if (mine >= 0) {
                    if (!is_v && elected()) prefetch_classes(a, mine, bit_words);
                    bits += bit_words;
                }
                classes.step();
                const int low = max(0, span.slot - slot);
                const int next = FROM_END ? slot - KV_TILE : classes.next(a, span, slot + KV_TILE, ranges);
                ended = FROM_END ? next < pages.begin : next >= span.end;
                if (Variant::HAS_MASK && ended) find_following();
                const int left = span.end - slot, high = max(0, min(KV_TILE, left));
                const bool whole = low == 0 && left >= KV_TILE;  // NVRTC 13.0 gets "clamped to 64, is 64" wrong
                if (!Variant::HAS_MASK) pages.seek(a, slot);
                const u32 data = FP8 ? slices.data(loaded) : ring.data + ring.stage * columns * COLUMN_BYTES;
                const u32 full = FP8 ? slices.full(loaded) : ring.full + 8 * PARTS * ring.stage;
                const TileGroups groups(data, full, pages, slot, columns, own);
                const bool last = !more && ended;
                if (Variant::HAS_MASK && !is_v && last) prefetch_next(a, round, entries);
                const int position = span.position + slot;
                const bool clipped = position + high > all_see;
                const bool compare = clipped || !whole;
                const int flags = (last ? LAST : 0) | (clipped ? CLIPPED | limited : 0) | (compare ? COMPARE : 0) |
                                  (masked ? MASKED : 0);
                // The rows that are loaded: of K whole groups, where pages hold groups.
                const bool by_group = a.tma_groups && !is_v;
                const int first = by_group ? low & -GROUP : low, end = by_group ? high + GROUP - 1 & -GROUP : high;
                if constexpr (!FP8) barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
                if (!LATENT && is_v && !whole) groups.clear_rows(low, max(low, high)), __syncwarp();
                if (lane_anew() == 0) {
                    const u32 info = FP8 ? slices.kv_tile_info(loaded) : s.kv_tiles + 16 * ring.stage;
                    if (!is_v) store_shared16(info, make_int4(flags, low | high << 8, mine, position));
                    // Announced before any load lands; otherwise a phase may never end.
                    const int rows = whole || (LATENT && !a.tma_groups) ? KV_TILE : max(0, end - first);
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        barrier_arrive_expect(groups.full + 8 * part,
                                              min(PART_COLUMNS, columns - part * PART_COLUMNS) * rows * 128);
                } else if (WARP_ARRIVALS == 32) {
                    for (int part = 0; part < PARTS; ++part) barrier_arrive(groups.full + 8 * part);
                }
                __syncwarp();
                if (!a.tma_groups) groups.copy_rows(a, &a.k_row + is_v, span.pages, slot, low, high, head, policy);
                else {
                    groups.copy(a, &a.k_map + is_v, first, end, head, policy);
                    if (is_v && !whole) groups.copy_few(a, low, high, head, policy);
                }
                if constexpr (FP8) slices.publish(loaded++);
                else ring.next();
                slot = next;
                // May skip many groups, and then waits for its look-up.
                if (Variant::HAS_MASK && !ended) pages.seek(a, slot);
            }
            span = following;
        }
    }
    if constexpr (FP8) slices.end(loaded);
    if (!is_v) publish_item(s, items, 0, 0, 0, 0);
}

}  // namespace prefixkit
