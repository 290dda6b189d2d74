// The KV tiles of a block's tile items in the order in which they are computed, looked up ahead of their copies.
//
// shapes     an item has any number of rows, which are split into tiles of TILE; its KV tiles begin at multiples of 16
//            slots.
// tiling     an item of more than TILE rows is walked once for each slice of TILE rows, so plans do not depend on
//            TILE.  One warp refills a queue of QUEUE KV tiles in shared memory, a lane for each group of 16 tokens, so
//            that the pages of many KV tiles cost the latency of one read.
// cost       one refill for several KV tiles of a long segment, and one for every short segment.
// limits     GQA groups of at most 128 tiles, 65,536 KV heads.
#pragma once
#include "attention/block_classes.cuh"
#include "attention/gather.cuh"
#include "attention/sm80/merge_rows.cuh"
#include "attention/sm80/decode_copy.cuh"

namespace prefixkit {

constexpr int BLOCK_WARPS = 4;
constexpr int PLANNED_ROWS = 128;          // of an item, unless one query's group has more
constexpr int STRIPES = D <= 128 ? 2 : 1;  // stripes of 64 rows in a tile
constexpr int TILE = 64 * STRIPES;
// Tokens of a KV tile: 64 where three tiles of 64 fit next to the queries.
constexpr int KV_TILE = (TILE + 3 * 64) * COLUMNS * 128 + 1024 <= PREFIXKIT_SHARED ? 64 : 32;
constexpr int PARTS = KV_TILE / GROUP;  // groups of a KV tile, one for each warp that copies
constexpr int Q_BYTES = TILE * COLUMNS * 128, SLOT_BYTES = KV_TILE * STORED_COLUMNS * 128;

struct __align__(16) KVTile {
    u32 row[4];              // where each group begins, in 16-byte vectors; RAGGED: its rows must be looked up
    u32 bits;                // FIRST, LAST, CLIPPED, LIMITED, STOP; low << 8; high << 16: tokens [low, high) count
    int position;            // of token 0
    int q_begin, partial;    // of the item
    u32 tile;                // KV head, rows of this tile << 16, slice of the item << 24
    int pages, slot;         // the node's first page, and the slot of token 0 counted from it
    int pad;

    DEVICE int flags() const { return bits & 255; }
    DEVICE int low() const { return bits >> 8 & 255; }
    DEVICE int high() const { return bits >> 16; }
    DEVICE int head() const { return tile & 65535; }
    DEVICE int rows() const { return tile >> 16 & 255; }
    DEVICE int row0() const { return (tile >> 24) * TILE; }
};
constexpr u32 RAGGED = ~0u;

// Slices of the largest item that a plan may hold.  The walk takes the first slices of all items, then the second
// slices.
DEVICE int slices_of(const Attention& a) { return (max(group_of(a), PLANNED_ROWS) + TILE - 1) / TILE; }

// The position range of an item's queries, where classes follow from it.
template <bool> struct KeptRange {
    QueryRange of;

    DEVICE void keep(QueryRange range) { of = range; }
    DEVICE QueryRange range() const { return of; }
};
template <> struct KeptRange<false> {
    DEVICE void keep(QueryRange) {}
    DEVICE QueryRange range() const { return {}; }
};

// The state of a block's walk over its share of the tile list.
struct __align__(16) Walk {
    int round, filled;        // entries begun; KV tiles in the queue so far
    int flags, seg, seg_end;  // of the item
    int all_see;              // all queries see the tokens up to this position
    VisibleRange range;       // of its queries
    int q_begin, partial;
    u32 tile;
    Span span;                // what is left of its segment
    BlockClasses<KV_TILE> classes;
    KeptRange<Variant::DECIDES> queries;
};
constexpr int EXTRA_BYTES = TILE * 4 + int(sizeof(Walk));  // positions of the tile's rows, or their ends, and the walk
constexpr int KV_TILE_INFO = int(sizeof(KVTile));
constexpr int FITTING = (PREFIXKIT_SHARED - Q_BYTES - EXTRA_BYTES - 8 * KV_TILE_INFO) / SLOT_BYTES;
constexpr int SLOTS = FITTING >= 5 ? 5 : 3;  // odd, so that a step on keys always fetches keys
constexpr int AHEAD = SLOTS / 2;             // KV tiles fetched before they are computed
constexpr int INFOS_FIT = (PREFIXKIT_SHARED - Q_BYTES - EXTRA_BYTES - SLOTS * SLOT_BYTES) / KV_TILE_INFO;
constexpr int QUEUE = INFOS_FIT >= 32 ? 32 : INFOS_FIT >= 16 ? 16 : 8;
constexpr int TILE_BYTES = Q_BYTES + SLOTS * SLOT_BYTES + EXTRA_BYTES + QUEUE * KV_TILE_INFO;

struct TileShared {
    u32 q, ring;
    int* positions;  // of the tile's rows, where a variant reads them; else one past the last token that each row sees
    KVTile* kv_tiles;
    Walk* walk;
};

// Fills the queue; the lanes of one warp work together.
struct Refill {
    const Attention& a;
    KVTile* kv_tiles;
    Walk w;

    DEVICE Refill(const Attention& a, const TileShared& s) : a(a), kv_tiles(s.kv_tiles), w(*s.walk) {}

    DEVICE void next_item() {
        const int heads = a.counts[0] * a.kv_heads, entries = heads * slices_of(a);
        Item item = {};
        int slice = 0, rows = 0, index = 0;
        do {
            if (w.round * int(gridDim.x) >= entries) { w.flags = STOP; return; }
            const int entry = min(entry_of(w.round++, blockIdx.x, gridDim.x), entries);
            slice = entry / heads;
            rows = 0;  // beyond the last entry
            if (entry == entries) continue;
            const int walked = walk_entry(a, entry - slice * heads);
            index = walked / a.kv_heads;
            item = load_item(a.tile_items, walked, a.kv_heads, a.tile_capacity);
            const LoneItem lone(a, index);
            if (lone.alone) item.partial = -1;
            rows = lone.left_out ? 0 : (item.q_end - item.q_begin) * group_of(a) - slice * TILE;
        } while (rows <= 0);
        rows = min(TILE, rows);
        w.tile = u32(item.head) | u32(rows) << 16 | u32(slice) << 24;
        w.q_begin = item.q_begin, w.partial = item.partial;
        w.all_see = end_seen(a, item.kind, item.q_begin, item.partial, 0);
        const QueryRange queries = query_range(a, item);
        w.queries.keep(queries);
        w.range = visible_range(a, item, queries.low);
        w.flags = FIRST | (item.kind == LIMIT ? LIMITED : 0);
        w.seg = item.seg_begin + 1, w.seg_end = item.seg_end;
        w.span = load_span(a, item.node, item.begin, item.end, w.range);
        w.classes.begin(a, index);
        skip_hidden(true);
    }

    DEVICE void skip_hidden(bool entered) {
        w.classes.skip(a, w.span, w.seg, w.seg_end, w.range, [&] { return w.queries.range(); }, entered);
    }

    // Adds at most `most` KV tiles of one segment.  An item without tokens gives one empty KV tile.
    DEVICE void add(int most) {
        const int lane = lane_anew(), mine = lane / PARTS, part = lane % PARTS;
        const int begin = w.span.slot & ~15, left = (w.span.end - begin + KV_TILE - 1) / KV_TILE;
        int count = min(min(most, 32 / PARTS), (w.flags & STOP) ? most : max(1, left));
        if (!(w.flags & STOP) && left > 0) count = w.classes.run(count);
        const int slot = begin + mine * KV_TILE, at = slot + part * GROUP;
        const int low = mine == 0 ? w.span.slot - begin : 0, high = max(0, min(KV_TILE, w.span.end - slot));
        const bool inside = part * GROUP >= low && (part + 1) * GROUP <= high;
        const bool whole = pages_are_aligned(a) && mine < count && !(w.flags & STOP) && inside;
        const int page = whole ? a.pages[w.span.pages + page_index(a, at)] : 0;
        KVTile* to = kv_tiles + (w.filled + mine) % QUEUE;
        const Walk was = w;
        bool done = false;
        if (!(w.flags & STOP)) {
            w.span.slot = begin + count * KV_TILE;
            w.classes.step(count);
            skip_hidden(false);
            done = w.span.slot >= w.span.end;
            w.flags &= ~FIRST;
        }
        if (mine < count) {
            to->row[part] = whole ? row_of(a, page, place_in_page(a, at), was.tile & 65535) : RAGGED;
            if (part == 0) {
                const int position = was.span.position + slot;
                // Where the first query sees the whole KV tile, all queries do.
                const bool clipped = position > was.all_see - KV_TILE;
                const bool masked = was.classes.ahead(mine) & COMPARED;
                to->bits = (was.flags & STOP) | (mine == 0 ? was.flags & FIRST : 0) | (was.flags & LIMITED) |
                           (clipped ? CLIPPED : 0) | (masked ? MASKED : 0) |
                           (mine == count - 1 && done ? LAST : 0) | low << 8 | high << 16;
                to->position = position, to->q_begin = was.q_begin, to->partial = was.partial, to->tile = was.tile;
                to->pages = was.span.pages, to->slot = slot;
            }
        }
        w.filled += count;
        if (done) next_item();
    }

    // Adds KV tiles up to number `limit`, until the queue has number `need`.
    DEVICE void until(int need, int limit, Walk* keep) {
        do add(limit - w.filled); while (w.filled <= need);
        __syncwarp();
        if (lane_anew() == 0) *keep = w;
        __syncwarp();
    }
};

}  // namespace prefixkit
