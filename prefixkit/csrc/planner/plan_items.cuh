// From tiles to items: partial rows, the segments of KV splits, the order of merging, and the order of the lists.
//
// _order_items, _split and _sort of attention/gpu/gpu_plan.py, _number_partials of attention/plan.py.
#pragma once
#include "planner/plan_state.cuh"

namespace prefixkit {

// Each query below a shared ancestor has an own-node tile too, so shared-prefix tiles always write partial states.
DEVICE bool writes_partial(int number) {
    const int key = at(TILE_OF)[number];
    return !(key & 1) || at(SPLITS)[number] > 1 || at(UP)[key >> 1] >= 0;
}

// The number of KV splits over all tiles that hold a query.
DEVICE int splits_of(int query, int node) {
    int sum = 0;
    ROLLED for (bool own = true; node >= 0; own = false) {
        const int next = at(UP)[node];
        sum += at(SPLITS)[tile_with(query, node, own)];
        node = next;
    }
    return sum;
}

// Counts the partial states of each query; returns whether they fit.
DEVICE bool number_merges() {
    const auto partials = [](int q) {
        const int splits = splits_of(q, at(QUERY_NODE)[q] = find(at(FIRST_ROW), p.nodes, q));
        return u64(splits > 1 ? splits : 0);
    };
    const u64 total = scan_each(p.queries, partials, [](int q, u64 before) { p.a.merge_indptr[q] = low_of(before); });
    if (threadIdx.x == 0) p.a.merge_indptr[p.queries] = low_of(total);
    __syncthreads();
    return total <= u64(p.a.partial_capacity);
}

// The place of an item in the order.  Items of a node's shared-prefix tiles go by split, then by tile; all its tiles
// but the last have the same number of splits.
DEVICE int place_of(int number, int split) {
    const int key = at(TILE_OF)[number], node = key >> 1;
    if (key & 1 || is_limited(node)) return at(FIRST_ITEM)[number] + split;  // tiles of kind LIMIT differ in length
    const int first = at(TILE_BASE)[node], others = shared_tiles(node) - 1, mine = number - first;
    const int full = at(SPLITS)[first], last = at(SPLITS)[first + others];
    if (mine == others) return at(FIRST_ITEM)[first] + min(split + 1, full) * others + split;
    return at(FIRST_ITEM)[first] + split * others + mine + min(split, last);
}

DEVICE void order_items() {
    ROLLED for (int i = threadIdx.x; i < p.items; i += THREADS) {
        const int number = find(at(FIRST_ITEM), p.tiles, i), split = i - at(FIRST_ITEM)[number];
        at(ITEM_SPLIT)[place_of(number, split)] = number << SPLIT_BITS | split;
    }
    __syncthreads();
}

struct Split {
    int low, high;           // tokens of the BSR row
    int row;                 // its first segment
    int first, last, token;  // first and last segment read, counted in the row; tokens before the first
    bool open;               // reads up to the row's end, which may grow
    bool anew;               // by paths: its segments are its own, not the row's
};

constexpr int FEW_SEGMENTS = 8;  // a warp writes more than this

// Finds which segments of its BSR row an item reads, by the tokens before each.
DEVICE void find_segments(Split& c, const Tile& x, int split, int splits) {
    const int base = at(SEGMENT_BASE)[x.node], all = at(SEGMENT_BASE)[x.node + 1] - base;
    const int of_own = own_queries(x.node) ? at(INHERITED)[x.node] + 1 : 0, count = x.own ? of_own : all - of_own;
    c.row = base + (x.own ? all - of_own : 0);
    c.first = 0, c.last = count - 1, c.open = x.own && split + 1 == splits;
    const bool limited = !x.own && is_limited(x.node);
    if (!c.anew && !limited) return;
    const int* before = at(SEGMENT_BEFORE) + c.row;
    if (c.anew) c.first = find(before, count, c.low);
    if (!c.open) c.last = max(c.first, find(before, count, c.high - 1));
    const int* last = p.a.segments + 3 * (c.row + c.last);
    if (limited) c.anew |= before[c.last] + last[2] - last[1] > c.high;  // it ends within a run
}

DEVICE void write_segment(const Split& c, int s, int to) {
    const int *from = p.a.segments + 3 * (c.row + s), before = at(SEGMENT_BEFORE)[c.row + s];
    const int node = from[0], begin = from[1], end = from[2];
    const int size = (end == OPEN_END ? at(LENGTH)[node] : end) - begin;
    int* out = p.a.segments + 3 * (to + s - c.first);
    out[0] = node, out[1] = begin + max(c.low - before, 0);
    out[2] = c.open && end == OPEN_END ? OPEN_END : begin + min(size, c.high - before);
}

// Which segments of its BSR row an item reads.
DEVICE Split split_of(int number, const Tile& x, int split, int splits, int kv_tiles, int kv_tile) {
    Split c;
    c.low = int(divide(kv_tiles * split, splits)) * kv_tile;
    c.high = split + 1 == splits ? x.tokens : int(divide(kv_tiles * (split + 1), splits)) * kv_tile;
    if (by_paths()) {
        const int skipped = at(TILE_SKIPPED)[number];
        c.low += skipped, c.high += skipped, c.anew = splits > 1 || skipped;
        find_segments(c, x, split, splits);
        return c;
    }
    c.row = at(SEGMENT_BASE)[x.node] + (x.own && at(SHARED)[x.node] ? at(INHERITED)[x.node] + 1 : 0);
    c.first = 0, c.last = at(INHERITED)[x.node], c.token = 0;
    c.open = x.own && split + 1 == splits;
    if (splits == 1 || !c.last) return c;
    const int end = c.last;
    int before = 0;
    ROLLED for (int s = 0; s <= end && (before < c.high || c.open); ++s) {
        if (before <= c.low) c.first = s, c.token = before;
        c.last = s;
        before += s < end ? at(LENGTH)[p.a.segments[3 * (c.row + s)]] : 0;
    }
    return c;
}

DEVICE void write_split(const Split& c, int node, int to) {
    if (by_paths()) {
        ROLLED for (int s = c.first; s <= c.last && c.last - c.first < FEW_SEGMENTS; ++s) write_segment(c, s, to);
        return;
    }
    int token = c.token;
    const int end = at(INHERITED)[node];
    ROLLED for (int s = c.first; s <= c.last; ++s) {
        const int n = s == end ? node : p.a.segments[3 * (c.row + s)], length = at(LENGTH)[n];
        int* out = p.a.segments + 3 * (to + s - c.first);
        out[0] = n, out[1] = max(c.low - token, 0);
        out[2] = c.open && s == end ? OPEN_END : min(length, c.high - token);
        token += length;
    }
}

struct Item {
    Tile tile;
    Split part;
    int number, split, splits, decode;
};
DEVICE Item item(int i) {
    Item x;
    x.number = at(ITEM_SPLIT)[i] >> SPLIT_BITS, x.split = at(ITEM_SPLIT)[i] & ((1 << SPLIT_BITS) - 1);
    x.tile = tile(x.number);
    if (by_paths()) x.tile.tokens = at(TILE_TOKENS)[x.number];
    x.splits = at(SPLITS)[x.number], x.decode = u32(at(TILE_KV_TILES)[x.number]) >> 31;
    const int kv_tiles = at(TILE_KV_TILES)[x.number] & 0x7fffffff;
    x.part = split_of(x.number, x.tile, x.split, x.splits, kv_tiles, p.a.cost[x.decode].kv_tile);
    return x;
}

// Writes the segments of items that have many segments of their own, a warp for each item.
DEVICE void write_long_splits() {
    ROLLED for (int i = warp_of(); i < p.items; i += WARPS) {
        const int to = at(ITEM_SEGMENT)[i], count = at(ITEM_COUNT)[i];
        if (count <= FEW_SEGMENTS || to < p.row_segments || to + count > p.a.segment_capacity) continue;
        const Split c = item(i).part;
        ROLLED for (int s = c.first + lane_of(); s <= c.last; s += 32) write_segment(c, s, to);
    }
}

// Assigns partial rows and writes the segments of KV splits; returns whether they fit.
DEVICE bool make_items() {
    int turn = 0;
    u64 total = 0;
    ROLLED for (int base = 0; base < p.items; base += THREADS) {
        const int i = base + threadIdx.x;
        const bool there = i < p.items;
        Item x = {};
        const Split& c = x.part;
        int rows = 0, kv_tiles = 0;
        if (there) {
            x = item(i);
            rows = writes_partial(x.number) ? x.tile.end - x.tile.begin : 0;
            kv_tiles = max(1, ceil_div(c.high - c.low, p.a.cost[x.decode].kv_tile));
        }
        const int segments = c.last - c.first + 1;
        const bool anew = by_paths() ? c.anew : x.splits > 1;
        const u64 before = scan(turn, total, join(rows, anew ? segments : 0));
        if (there) {
            const int to = p.row_segments + low_of(before);
            at(ITEM_PARTIAL)[i] = at(PARTIAL_OF)[at(FIRST_ITEM)[x.number] + x.split] = rows ? high_of(before) : -1;
            at(ITEM_SEGMENT)[i] = anew ? to : c.row, at(ITEM_COUNT)[i] = segments;
            at(ITEM_KV_TILES)[i] = kv_tiles | x.decode << 31;
            if (anew && to + segments <= p.a.segment_capacity) write_split(c, x.tile.node, to);
        }
        ROLLED for (int role = 0; role < 2; ++role) {
            const u32 longest = __reduce_max_sync(~0u, there && x.decode == role ? kv_tiles : 0);
            if (lane_of() == 0 && longest) atomicMax(p.kv_tiles + role, int(longest));
        }
    }
    __syncthreads();
    if (by_paths()) {
        write_long_splits();
        __syncthreads();
    }
    return p.row_segments + low_of(total) <= p.a.segment_capacity;
}

// Fills each query's list from its end: the own node's splits, then those of the shared ancestors.
DEVICE void fill_merges() {
    ROLLED for (int q = threadIdx.x; q < p.queries; q += THREADS) {
        int to = p.a.merge_indptr[q + 1], node = at(QUERY_NODE)[q];
        if (to == p.a.merge_indptr[q]) continue;
        int limit = 0;
        ROLLED for (bool own = true; node >= 0; own = false) {
            const int number = tile_with(q, node, own), offset = q - tile(number).begin;
            const int* partials = at(PARTIAL_OF) + at(FIRST_ITEM)[number];
#pragma unroll 4
            for (int split = at(SPLITS)[number]; split-- > 0;) {
                const int partial = partials[split] + offset;
                p.a.merge_indices[--to] = partial;
                if (by_paths()) p.a.limits[partial] = !own && is_limited(node) ? limit : 0;
            }
            if (by_paths()) limit = at(LIMIT)[node];
            node = at(UP)[node];
        }
    }
}

// ---- order: a counting sort, each warp a range of items ----

DEVICE void write_item(int item, int place) {
    const Tile x = tile(at(ITEM_SPLIT)[item] >> SPLIT_BITS);
    const int segment = at(ITEM_SEGMENT)[item];
    const int* first = p.a.segments + 3 * segment;
    int4* to = place < p.item_count[0] ? p.a.tile_items + 2 * place : p.a.decode_items + 2 * (place - p.item_count[0]);
    to[0] = make_int4(x.begin, x.end, at(ITEM_PARTIAL)[item], segment);
    const int kind = is_limited(x.node) && !x.own ? 2 : x.own;
    to[1] = make_int4(4 * at(ITEM_COUNT)[item] + kind, first[0], first[1], first[2]);
}

DEVICE void sort_items() {
    constexpr int KEYS = 2 * ORDER_LEVELS;
    int *mine = counters + warp_of() * KEYS, *key_begin = counters + WARPS * KEYS;
    ROLLED for (int i = lane_of(); i < KEYS; i += 32) mine[i] = 0;
    __syncwarp();
    const int range = (p.items + WARPS - 1) / WARPS, begin = warp_of() * range, end = min(p.items, begin + range);
    ROLLED for (int pass = 0; pass < 2; ++pass) {
        ROLLED for (int base = begin; base < end; base += 32) {
            const int i = base + lane_of();
            int key = -1;
            if (i < end) {
                const int packed = at(ITEM_KV_TILES)[i], decode = packed < 0, kv_tiles = packed & 0x7fffffff;
                const u32 level = divide(u32(kv_tiles) * (ORDER_LEVELS - 1), p.kv_tiles[decode]);
                key = (decode + 1) * ORDER_LEVELS - 1 - int(level);
            }
            const u32 alike = __match_any_sync(~0u, key);
            const int rank = __popc(alike & ((1u << lane_of()) - 1));
            const int place = key >= 0 ? mine[key] + rank : 0;
            __syncwarp();
            if (key >= 0 && rank == 0) mine[key] = place + __popc(alike);
            __syncwarp();
            if (pass && i < end) write_item(i, key_begin[key] + place);
        }
        if (pass) return;
        __syncthreads();
        int* column = counters + threadIdx.x;
        int sum = 0;
        if (threadIdx.x < KEYS)
#pragma unroll 8
            for (int w = 0; w < WARPS; ++w) {
                const int count = column[w * KEYS];
                column[w * KEYS] = sum;
                sum += count;
            }
        scan_each(THREADS, [=](int) { return u64(sum); }, [=](int key, u64 before) {
            if (key < KEYS) key_begin[key] = low_of(before);
        });
        __syncthreads();
    }
}

}  // namespace prefixkit
