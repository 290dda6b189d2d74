// The planner's state in shared memory: its arguments, and arrays of nodes, tiles and items.
#pragma once
#include "planner/plan_block.cuh"
#include "layouts/plan_tree.h"

namespace prefixkit {

// 1: plans by heavy paths too, where sizes[1] says so.
#ifndef PREFIXKIT_PLAN_PATHS
#define PREFIXKIT_PLAN_PATHS 0
#endif
constexpr bool PATHS = PREFIXKIT_PLAN_PATHS;

constexpr int CANDIDATES = 32, LEVELS = 128, LEVEL_BITS = 7, ORDER_LEVELS = 128, POINT = 64, EXTRA = 4, CHAIN = 8;
constexpr int BINS = 1024;  // tiles up to this long are counted by length, not visited one by one
constexpr int COUNTER_INTS = (WARPS + 1) * 2 * ORDER_LEVELS, LEVEL_INTS = WARPS * (LEVELS + 1);
constexpr int OPEN_END = 0x7fffffff;
static_assert(CANDIDATES == WARPS, "a warp per candidate");
static_assert(COUNTER_INTS >= LEVEL_INTS + 2 * BINS, "counters are too few");

// For roles with one worker on a multiprocessor, and with many: the CANDIDATES of attention/gpu/kv_split.py.
__constant__ int CANDIDATE_SPLITS[2][CANDIDATES] = {
    {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
     18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 48, 56, 64, 80, 96, 132},
    {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12,  13,  14,  15,  16,
     18, 20, 22, 25, 28, 33, 40, 48, 66, 88, 110, 132, 176, 264, 396, 528}};
constexpr int SPLIT_BITS = 10;  // of ITEM_SPLIT

// Arrays of nodes.
enum NodeArray {
    PARENT, SUBTREE_END, LENGTH,
    FIRST_ROW,               // [nodes + 1] the first query of each node
    SHARED,                  // 1: has shared-prefix tiles, 3: of kind LIMIT
    UP, INHERITED, TOKENS,   // of nodes with tiles. UP: nearest shared ancestor, or the head of its part of a path;
                             // INHERITED: pieces of the ancestors below UP; TOKENS: tokens of these and the node
    SEGMENT_BASE, TILE_BASE,
    NODE_ARRAYS,
    MOST = INHERITED, NEAR = TOKENS, PENDING = SEGMENT_BASE, SPARED = TILE_BASE  // while sharing is decided
};
// Arrays of tiles, queries and items; by paths, of nodes, places in their order, and segments.
enum Array {
    TILE_OF,                 // 2 * node, plus 1 for an own-node tile
    TILE_KV_TILES,           // KV tiles; the top bit: on the decode path
    SPLITS, FIRST_ITEM,
    QUERY_NODE,
    ITEM_SPLIT,              // tile << SPLIT_BITS | split
    ITEM_SEGMENT, ITEM_COUNT, ITEM_KV_TILES, ITEM_PARTIAL,
    PARTIAL_OF,              // ITEM_PARTIAL by tile and split
    // By paths alone.
    TILE_TOKENS,
    TILE_SKIPPED,            // tokens at the beginning of its row that none of its queries sees
    LIMIT,                   // [nodes] the last position that queries below a node see of the part above it
    SEGMENT_BEFORE,          // [segments of rows] tokens of the row before each
    ORDER, PLACE,            // nodes path after path; the place of each
    ENDED,                   // [nodes + 2] nodes whose subtrees end before each
    LOW, HIGH,               // by the leaf of a path: the first and the last place of its shared part
    TOKENS_TO, BEGINS,       // [nodes + 1] tokens, and beginnings of pieces, before each place
    BEGIN_PLACE,             // places of the beginnings
    HEADS, HEAD_PLACE,       // as BEGINS and BEGIN_PLACE, of parts
    RUN_START,               // [runs] the position where each begins
    ARRAYS
};

struct State {
    PlanTree a;
    u64 sums[2][WARPS];      // sums of warps, two sets in turn
    int* array[ARRAYS];      // in shared memory, or in `scratch` once that is full; both are addressed alike
    int* shared;
    int* global;
    int shared_left;
    int* kept[2];            // `shared` and `global` past the arrays that stay once paths are rows,
    int kept_left;           // and `shared_left`
    int* before_tiles[2];    // the same, before the arrays of tiles
    int before_left;
    u64 tokens_spared;       // tokens that sharing in tiles spares
    int pays;                // 1: an own-node row takes the tile path
    int low;                 // 1: tiles are low
    int by_paths;
    int nodes, queries, tiles, items, row_segments;
    u64 tokens[2];           // tile, decode
    int longest[2], of[2], kv_tiles[2], split_size[2], item_count[2];
    u64 time[2][CANDIDATES];
    int extra[2][CANDIDATES];
};

__shared__ State p;
__shared__ int counters[COUNTER_INTS];  // levels of each warp and bins, then keys of each warp
extern __shared__ int dynamic_shared[];

DEVICE int* at(Array which) { return p.array[which]; }
// PREFIXKIT_PLAN_NODES: the most nodes, with all their arrays in shared memory; 0: any number, with arrays in
// `scratch`.
#ifndef PREFIXKIT_PLAN_NODES
#define PREFIXKIT_PLAN_NODES 2304
#endif
constexpr int NODES = PREFIXKIT_PLAN_NODES;
DEVICE bool by_paths() { return PATHS && p.by_paths; }
DEVICE int* at(NodeArray which) {
    return NODES ? dynamic_shared + which * (NODES + 4) : p.a.scratch + which * (p.a.node_capacity + 4);
}

// Takes memory for the arrays `from` to `to`, of `count` ints each.  One thread calls it, before a barrier of the
// block.
DEVICE void take(int from, int to, int count) {
    count = (count + 3) & ~3;
    ROLLED for (int which = from; which <= to; ++which) {
        if (count <= p.shared_left) p.array[which] = p.shared, p.shared += count, p.shared_left -= count;
        else p.array[which] = p.global, p.global += count;
    }
}

// Prefix sums over the block: returns `total` plus the values of the threads before this one, and adds the block's sum
// to `total`.  `turn` alternates, so that a thread that runs ahead does not overwrite sums still being read.
CALLED u64 scan(int& turn, u64& total, u64 value) {
    const u64 sum = warp_sums(value);
    if (lane_of() == 31) p.sums[turn][warp_of()] = sum;
    __syncthreads();
    const u64 warps = warp_sums(p.sums[turn][lane_of()]);
    turn ^= 1;
    const u64 before = __shfl_sync(~0u, warps, max(warp_of() - 1, 0));
    const u64 result = total + sum - value + (warp_of() ? before : 0);
    total += __shfl_sync(~0u, warps, 31);
    return result;
}
// Calls store(i, the sum of value(j) over j < i) for each i < count; returns the sum of all values.
template <class V, class S> DEVICE u64 scan_each(int count, V value, S store) {
    int turn = 0;
    u64 total = 0;
    ROLLED for (int base = 0; base < count; base += THREADS) {
        const int i = base + threadIdx.x;
        const u64 before = scan(turn, total, i < count ? value(i) : 0);
        if (i < count) store(i, before);
    }
    return total;
}

// ---- tiles of a node: shared-prefix tiles of the queries below it, own-node tiles of its own ----
DEVICE int queries_below(int n) { return at(FIRST_ROW)[at(SUBTREE_END)[n]] - at(FIRST_ROW)[n + 1]; }
DEVICE int own_queries(int n) { return at(FIRST_ROW)[n + 1] - at(FIRST_ROW)[n]; }
DEVICE int full_tiles(int queries) { return int(u64(queries) * p.a.magic >> 32); }  // queries / many
DEVICE bool by_decode(int queries) { return queries * p.a.group <= p.a.decode_rows; }
DEVICE int tiles_of(int queries) { return by_decode(queries) ? queries > 0 : full_tiles(queries + p.a.many - 1); }
DEVICE int shared_tiles(int n) { return at(SHARED)[n] ? tiles_of(queries_below(n)) : 0; }
DEVICE bool is_limited(int n) { return PATHS && at(SHARED)[n] == 3; }
DEVICE int first_tile(int n, bool own) { return at(TILE_BASE)[n] + (own ? shared_tiles(n) : 0); }

// The price of sharing a node, apart from reading its tokens: decide_sharing of attention/sharing.py, with the same
// operations in the same order.
DEVICE double price_of(int n) {
    const int rows = queries_below(n);
    const double tiled = __dmul_rn(double(full_tiles(rows + p.a.many - 1)), p.a.price_tile);
    const double item = __dadd_rn(p.a.item, by_decode(rows) ? p.a.price_decode : tiled);
    return __dadd_rn(item, __dmul_rn(double(rows), p.a.price_per_row));
}

// Counts the tokens that a node spares if it is shared in tiles.
DEVICE void count_spared(long long tokens) {
    if (tokens > 0) atomicAdd(&p.tokens_spared, u64(tokens));
}
DEVICE bool is_enough(long long tokens) { return __dmul_rn(double(tokens), p.a.gain_per_token) > p.a.tile_path; }
// Counts the tokens above the head of a row that join its list, and that `times` rows would read.  The walk ends where
// `is_shared(n)`.
template <class S> DEVICE void count_above(int head, int times, S is_shared) {
    long long tokens = 0;
    ROLLED for (int n = at(PARENT)[head]; n >= 0 && !is_shared(n); n = at(PARENT)[n]) {
        tokens += (long long)times * at(LENGTH)[n];
        if (is_enough(tokens)) break;  // more changes nothing
    }
    count_spared(tokens);
}

struct Tile {
    int node, own, begin, end, tokens;
};
DEVICE Tile tile(int number) {
    const int key = at(TILE_OF)[number], node = key >> 1, own = key & 1;
    const int begin = at(FIRST_ROW)[node + 1 - own], queries = own ? own_queries(node) : queries_below(node);
    const int place = number - first_tile(node, own);
    Tile x = {node, own, begin + place * p.a.many, begin + queries, at(TOKENS)[node]};
    if (!by_decode(queries)) x.end = min(x.begin + p.a.many, x.end);
    if (own) x.tokens = max(x.tokens - (begin + queries - x.end), 0);
    return x;
}
// The tile that holds a query, among a node's shared-prefix tiles or its own-node tiles.
CALLED int tile_with(int query, int node, bool own) {
    const int begin = at(FIRST_ROW)[node + 1 - own], queries = own ? own_queries(node) : queries_below(node);
    return first_tile(node, own) + (by_decode(queries) ? 0 : full_tiles(query - begin));
}

// Takes memory for this number of tiles; returns whether they fit.
DEVICE bool keep_tiles(int tiles) {
    const bool fits = tiles <= p.a.tile_capacity + p.a.decode_capacity;
    if (threadIdx.x == 0) {
        at(TILE_BASE)[p.nodes] = p.tiles = tiles;
        p.before_tiles[0] = p.shared, p.before_tiles[1] = p.global, p.before_left = p.shared_left;
        if (fits) take(TILE_OF, FIRST_ITEM, p.tiles + 1), take(QUERY_NODE, QUERY_NODE, p.queries);
        if (fits && by_paths()) take(TILE_TOKENS, TILE_SKIPPED, p.tiles);
    }
    __syncthreads();
    return fits;
}
// Takes memory for rows; `total` joins their numbers of segments and tiles.
DEVICE bool keep_rows(u64 total) {
    if (threadIdx.x == 0) p.row_segments = high_of(total);
    return keep_tiles(low_of(total)) && p.row_segments <= p.a.segment_capacity;
}

}  // namespace prefixkit
