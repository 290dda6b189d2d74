// Loading for the matrix path on Hopper: KV tiles of K and of V into rings in shared memory, ahead of the warps that multiply.
//
// shapes     a KV tile is KV_TILE tokens of one KV head, in groups of 16 that begin at a multiple of 16 slots.
// tiling     one warp loads K, one V.  A complete group inside a page is one TMA box for every 64 columns, all of a KV tile
//            asked for by one lane; groups that a segment cuts, and pages that hold no groups, come row by row, zeros where there
//            is no token.
// cost       one instruction per 2 KB; the ring holds at most TILE_STAGES KV tiles of K and as many of V.
#pragma once
#include "attention/sm90/tma.cuh"
#include "attention/decode.cuh"

namespace prefixkit {

constexpr int KV_TILE = 64;                         // tokens
constexpr int KV_TILE_BYTES = KV_TILE * COLUMNS * 128;
constexpr int KV_TILE_GROUPS = KV_TILE / GROUP;
constexpr int TILE_STAGES = 4;                   // at most
constexpr int MULTIPLIERS = 8;                   // warps that multiply; each frees a stage by itself

struct KVTileInfo {  // what the multiplying side must know of a KV tile; 16 bytes
    int flags;     // LAST of its item; CAUSAL: compare positions; COMPARE: compare something
    int low, high; // tokens [low, high) count
    int position;  // of token 0
};
enum { COMPARE = 16 };

struct TileShared {
    u32 k, v;                                    // rings
    u32 stages;                                  // of each
    u32 full, k_empty, v_empty;                  // barriers of the stages, 8 bytes apart; a KV tile is there with both K and V
    u32 item_full, item_empty;                   // of the two places for items
    u32 items;                                   // int4 for each place: q_begin, rows (0: no more work), partial, head
    u32 kv_tiles;                                   // KVTileInfo for each stage of K
    u32 ones;                                    // descriptor of 8 rows of 8 ones
};
constexpr int TILE_BARRIERS = 3 * TILE_STAGES + 4;

DEVICE void tile_barriers(const TileShared& s) {
    for (int i = 0; i < TILE_STAGES; ++i) {
        barrier_init(s.full + 8 * i, 2), barrier_init(s.k_empty + 8 * i, MULTIPLIERS), barrier_init(s.v_empty + 8 * i, MULTIPLIERS);
    }
    for (int i = 0; i < 2; ++i) barrier_init(s.item_full + 8 * i, 1), barrier_init(s.item_empty + 8 * i, MULTIPLIERS);
}

// The next item, or the end (no rows), to the multiplying side.
DEVICE void hand_over(const TileShared& s, int items, int q_begin, int rows, int partial, int head) {
    const int place = items & 1;
    barrier_wait(s.item_empty + 8 * place, (items >> 1 & 1) ^ 1);
    if (lane_anew() == 0) {
        store_shared16(s.items + 16 * place, make_int4(q_begin, rows, partial, head));
        barrier_arrive(s.item_full + 8 * place);
    }
}

// Pages of a segment's groups of 16, 32 groups at a time and the next 32 on their way: lane i knows the page of group i.
struct Pages {
    const int* from;  // the page of slot 0
    int slot, end;    // where `now` begins; where the segment ends
    int now, next;

    DEVICE void begin(const Attention& a, const Span& span) {
        from = a.pages + span.pages, slot = span.slot & ~15, end = span.end;
        now = look_up(a, slot), next = look_up(a, slot + 32 * GROUP);
    }
    DEVICE void advance(const Attention& a) {
        slot += 32 * GROUP;
        now = next, next = look_up(a, slot + 32 * GROUP);
    }
    DEVICE int look_up(const Attention& a, int first) const {
        const int mine = first + lane_anew() * GROUP;
        return a.tma_groups && mine < end ? from[page_index(a, mine)] : 0;
    }
};

// One ring, filled by one warp.
struct Ring {
    u32 data, full, empty;
    int stages, stage = 0, phase = 1;
    DEVICE void next() { if (++stage == stages) stage = 0, phase ^= 1; }
};

// Where a KV tile's boxes lie: found before a stage is free for them, and known to be the same in all lanes, so that one lane can ask for
// box after box; were each lane to ask for one, the compiler would walk through the lanes, 80 cycles a box.
struct Boxes {
    u32 to, full;
    int place, page[KV_TILE_GROUPS];

    DEVICE Boxes(const Attention& a, const Ring& ring, const Pages& pages, int slot) {
        to = uniform(ring.data + ring.stage * KV_TILE_BYTES), full = uniform(ring.full + 8 * ring.stage), place = uniform(slot);
#pragma unroll
        for (int i = 0; i < KV_TILE_GROUPS; ++i) page[i] = __shfl_sync(~0u, pages.now, (slot - pages.slot) / GROUP + i & 31);
    }
    // Those for complete groups, where `left` tokens of the segment are left.
    DEVICE void copy(const Attention& a, const void* map, int low, int left, int head, u64 policy) const {
        if (!elected()) return;
#pragma unroll
        for (int i = 0; i < KV_TILE_GROUPS; ++i) {
            if (GROUP * i < low || GROUP * (i + 1) > left) continue;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                tma_copy(to + j * (KV_TILE * 128) + i * (GROUP * 128), map, j * 64, place_in_page(a, place + GROUP * i), head, page[i], full, policy);
        }
    }
};

// A KV tile's other groups, row by row.
DEVICE void row_groups(const Attention& a, const TensorMap* map, const Ring& ring, const Span& span, int slot, int low, int high, int head) {
#pragma unroll 1
    for (int first = 0; first < KV_TILE; first += GROUP) {
        if (a.tma_groups && first >= low && first + GROUP <= high) continue;
#pragma unroll 1
        for (int i = lane_anew(); i < GROUP * COLUMNS; i += 32) {
            const int row = first + i % GROUP, column = i / GROUP;
            copy_row(a, map, ring.data + ring.stage * KV_TILE_BYTES + column * (KV_TILE * 128) + row * 128, span, slot + row, row >= low && row < high, head,
                     column, ring.full + 8 * ring.stage, policy_keep());
        }
    }
}

// A loading warp, of K (and of what the multiplying side must know) or of V: every KV tile of this block's items.
DEVICE void tile_load(const Attention& a, const TileShared& s, bool is_v) {
    const int entries = a.counts[0] * a.kv_heads;
    Ring ring;
    ring.stages = s.stages, ring.data = is_v ? s.v : s.k, ring.full = s.full, ring.empty = s.k_empty + is_v * (8 * TILE_STAGES);
    const u64 policy = policy_keep();
    int items = 0;
    for (int round = 0; round == 0 || round * int(gridDim.x) < entries; ++round) {  // the first item comes while counts do
        const int entry = entry_of(round, blockIdx.x, gridDim.x);
        Item item = load_item(a.tile_items, entry, a.kv_heads, a.tile_capacity);
        if (entry >= entries) continue;
        const int walked = walk_entry(a, entry);
        if (walked != entry) item = load_item(a.tile_items, walked, a.kv_heads, a.tile_capacity);
        const VisibleRange range = visible_range(a, item.causal, first_position(a, item), item.causal ? int(a.q_positions[item.q_end - 1]) : 0);
        const int all_see = item.causal ? int(a.q_positions[item.q_begin]) : 0x7fffffff;  // up to this position
        Span span = load_span(a, item.node, item.begin, item.end, range);
        int seg = item.seg_begin + 1;
        if (!is_v) hand_over(s, items, item.q_begin, (item.q_end - item.q_begin) * group_of(a), item.partial, item.head);
        ++items;
        const int seg_end = item.seg_end, head = uniform(item.head);
        for (bool more = true; more;) {
            // The segments to come: LAST must be right for its reader, so empty ones are passed over before the KV tile that they follow.
            Span coming = span;
            do {
                more = seg < seg_end;
                if (more) coming = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], range), ++seg;
            } while (more && coming.slot >= coming.end);
            if (more && span.slot >= span.end) {  // only the first can be empty
                span = coming;
                continue;
            }
            Pages pages;
            pages.begin(a, span);
            int slot = span.slot & ~15, low = span.slot & 15;
            do {
                const int left = span.end - slot, high = max(0, min(KV_TILE, left));
                const bool whole = low == 0 && left >= KV_TILE;  // NVRTC 13.0 gets "clamped to 64, is 64" wrong
                if (slot - pages.slot == 32 * GROUP) pages.advance(a);
                const Boxes boxes(a, ring, pages, slot);
                const bool last = !more && slot + KV_TILE >= span.end;
                const int position = span.position + slot;
                const bool causal = position + high - 1 > all_see, compare = causal || !whole;
                const int flags = (last ? LAST : 0) | (causal ? CAUSAL : 0) | (compare ? COMPARE : 0);
                barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
                if (lane_anew() == 0) {
                    if (!is_v) store_shared16(s.kv_tiles + 16 * ring.stage, make_int4(flags, low, high, position));
                    barrier_arrive_expect(boxes.full, KV_TILE_BYTES);  // before they can land: else a phase may never end
                }
                __syncwarp();
                if (a.tma_groups) boxes.copy(a, &a.k_map + is_v, low, left, head, policy);
                if (!a.tma_groups || !whole) row_groups(a, &a.k_row + is_v, ring, span, slot, low, high, head);
                ring.next();
                slot += KV_TILE, low = 0;
            } while (slot < span.end);
            span = coming;
        }
    }
    if (!is_v) hand_over(s, items, 0, 0, 0, 0);
}

}  // namespace prefixkit
