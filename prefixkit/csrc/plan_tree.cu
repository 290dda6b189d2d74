// A plan for tree_attention, made where it is used: what attention/gpu_plan.py specifies, bit by bit, in one launch.
//
// shapes   a tree of `nodes` in depth-first order with `own` query rows in each; six arrays of fixed capacity come out.
// tiling   one block of 1,024 threads, for the work is small and its steps depend on each other: a thread per node, tile, query or
//          item, some twenty prefix sums in between.  Sharing climbs from the lowest candidates, the last child taking its parent up.
//          One warp reckons one way to cut the tiles.  Items are sorted by counting.
// cost     latency: reads of shared memory, meetings of the block.  Deep chains climb one node at a time.
// limits   what does not fit sets counts[7], with no items.  Numbers: tiles below 2^23, queries below 2^25, tokens of a row and sums below 2^31.
#include "plan_block.cuh"

namespace prefixkit {

constexpr int CUTS = 32, LEVELS = 128, LEVEL_BITS = 7, ORDER_LEVELS = 128, POINT = 64, EXTRA = 4, NARROW_ROWS = 8;
constexpr int BINS = 1024;  // lengths that are counted instead of looked at one by one
constexpr int COUNTER_INTS = (WARPS + 1) * 2 * ORDER_LEVELS;
constexpr int OPEN_END = 0x7fffffff;
static_assert(CUTS == WARPS, "a warp per cut");
static_assert(COUNTER_INTS >= WARPS * (LEVELS + 1) + 2 * BINS, "room to count");

__constant__ int CUT[CUTS] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                              18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 48, 56, 64, 80, 96, 132};

struct RoleCost {
    int unit, workers, start, leave, fold, least;  // as Role.points()
};

struct PlanTree {
    const int* sizes;        // [1] nodes
    const int* parent;       // [nodes]
    const int* subtree_end;
    const int* length;       // visible tokens
    const int* own;          // query rows
    int* counts;             // the plan: see Attention
    int4* wide;
    int4* narrow;
    int* segments;
    int* merge_indptr;
    int* merge_indices;
    int* scratch;
    double gain_per_token, item, price_wide, price_narrow, price_per_row;  // of sharing
    double wide_rate, narrow_rate;
    u64 magic;               // ceil(2^32 / many)
    int node_room, wide_room, narrow_room, segment_room, row_room, partial_room;
    int group, kv_heads, num_sms, many, shared_ints;  // many: queries of a full tile
    RoleCost cost[2];        // wide, narrow
};

// Arrays of nodes in the making of a plan.
enum NodeArray {
    PARENT, SUBTREE_END, LENGTH,
    FIRST_ROW,               // [nodes + 1] the first query of each node
    SHARED,                  // 1: a dense row
    UP, INHERITED, TOKENS,   // of nodes with rows: nearest shared ancestor; folded ancestors below it; tokens with those
    SEGMENT_BASE, TILE_BASE,
    NODE_ARRAYS,
    MOST = INHERITED, NEAR = TOKENS, PENDING = SEGMENT_BASE, SPARED = TILE_BASE  // while sharing is decided
};
// Arrays of tiles, queries and items.
enum Array {
    TILE_OF,                 // 2 * node + causal
    TILE_UNITS,              // and the top bit: narrow
    PIECES, FIRST_ITEM,
    QUERY_NODE,
    ITEM_PIECE,              // tile << 8 | piece
    ITEM_SEGMENT, ITEM_COUNT, ITEM_UNITS, ITEM_PARTIAL,
    PART_OF,                 // the same by tile and piece
    ARRAYS
};

struct State {
    PlanTree a;
    Scan sums;
    int* array[ARRAYS];      // in shared memory, or in `scratch` once that is full; both are addressed alike
    int* shared;
    int* global;
    int shared_left;
    int nodes, queries, tiles, items, row_segments;
    u64 tokens[2];           // wide, narrow
    int longest[2], of[2], units[2], chunk[2], item_count[2];
    u64 time[2][CUTS];
    int extra[2][CUTS];
};

__shared__ State p;
__shared__ int counters[COUNTER_INTS];  // levels of each warp and bins, then keys of each warp
extern __shared__ int dynamic_shared[];

DEVICE int* at(Array which) { return p.array[which]; }
// PREFIXKIT_PLAN_NODES: most nodes, all in shared memory; 0: any number, in `scratch`.
#ifndef PREFIXKIT_PLAN_NODES
#define PREFIXKIT_PLAN_NODES 2304
#endif
constexpr int NODES = PREFIXKIT_PLAN_NODES;
DEVICE int* at(NodeArray which) { return NODES ? dynamic_shared + which * (NODES + 4) : p.a.scratch + which * (p.a.node_room + 4); }

// Room for some arrays of `count` ints; one thread does it, before the block meets.
DEVICE void take(int from, int to, int count) {
    count = (count + 3) & ~3;
#pragma unroll 1
    for (int which = from; which <= to; ++which) {
        if (count <= p.shared_left) p.array[which] = p.shared, p.shared += count, p.shared_left -= count;
        else p.array[which] = p.global, p.global += count;
    }
}

// ---- rows of a node ----
DEVICE int below(int n) { return at(FIRST_ROW)[at(SUBTREE_END)[n]] - at(FIRST_ROW)[n + 1]; }
DEVICE int own(int n) { return at(FIRST_ROW)[n + 1] - at(FIRST_ROW)[n]; }
DEVICE int full_tiles(int queries) { return int(u64(queries) * p.a.magic >> 32); }  // queries / many
DEVICE bool is_thin(int queries) { return queries * p.a.group <= NARROW_ROWS; }
DEVICE int tiles_of(int queries) { return is_thin(queries) ? queries > 0 : full_tiles(queries + p.a.many - 1); }
DEVICE int dense_tiles(int n) { return at(SHARED)[n] ? tiles_of(below(n)) : 0; }

struct Tile {
    int node, causal, begin, end, tokens;
};
DEVICE Tile tile(int number) {
    const int key = at(TILE_OF)[number], node = key >> 1, causal = key & 1;
    const int begin = at(FIRST_ROW)[node + 1 - causal], queries = causal ? own(node) : below(node);
    const int place = number - at(TILE_BASE)[node] - (causal ? dense_tiles(node) : 0);
    Tile x = {node, causal, begin + place * p.a.many, begin + queries, at(TOKENS)[node]};
    if (!is_thin(queries)) x.end = min(x.begin + p.a.many, x.end);
    if (causal) x.tokens = max(x.tokens - (begin + queries - x.end), 0);
    return x;
}
// The tile of a query among those of a node's dense row, or its causal one.
CALLED int tile_with(int query, int node, bool causal) {
    const int first = at(TILE_BASE)[node] + (causal ? dense_tiles(node) : 0);
    const int begin = at(FIRST_ROW)[node + 1 - causal], queries = causal ? own(node) : below(node);
    return first + (is_thin(queries) ? 0 : full_tiles(query - begin));
}

// Where the queries of each node begin.
DEVICE bool count_rows() {
    int turn = 0;
    u64 total = 0;
#pragma unroll 1
    for (int base = 0; base < p.nodes; base += THREADS) {
        const int n = base + threadIdx.x;
        int rows = 0, parent = 0, end = 0, length = 0;
        if (n < p.nodes) rows = p.a.own[n], parent = p.a.parent[n], end = p.a.subtree_end[n], length = p.a.length[n];
        const u64 before = scan(p.sums, turn, total, join(rows, rows > 0));
        if (n >= p.nodes) continue;
        at(FIRST_ROW)[n] = high_of(before), at(UP)[n] = low_of(before);  // nodes with queries before each, for now
        at(PARENT)[n] = parent, at(SUBTREE_END)[n] = end, at(LENGTH)[n] = length;
    }
    if (threadIdx.x == 0) at(FIRST_ROW)[p.nodes] = p.queries = high_of(total), at(UP)[p.nodes] = low_of(total);
    __syncthreads();
    return p.queries <= p.a.row_room;
}

// decide_sharing of attention/cost.py; the same operations in the same order.
CALLED bool gains(int most, int spared, int n) {
    const double gain = __dmul_rn(double((long long)(most - spared - 1) * at(LENGTH)[n]), p.a.gain_per_token);
    const int rows = below(n);
    const double wide = __dmul_rn(double(full_tiles(rows + p.a.many - 1)), p.a.price_wide);
    const double item = __dadd_rn(p.a.item, is_thin(rows) ? p.a.price_narrow : wide);
    return gain > __dadd_rn(item, __dmul_rn(double(rows), p.a.price_per_row));
}

// From a candidate with no others below it up to where others still are.
DEVICE void climb(int node) {
    while (true) {
        const int most = at(MOST)[node], less = *(volatile int*)(at(SPARED) + node), above = at(NEAR)[node];
        const bool take = gains(most, less, node);
        at(SHARED)[node] = take;
        if (above < 0) return;
        atomicAdd(at(SPARED) + above, take ? most - 1 : less);
        __threadfence_block();
        if (atomicSub(at(PENDING) + above, 1) != 1) return;
        __threadfence_block();
        node = above;
    }
}

DEVICE void share() {
#pragma unroll 1
    for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        const int most = at(UP)[at(SUBTREE_END)[n]] - at(UP)[n + 1];
        at(MOST)[n] = most;
        at(SHARED)[n] = most > 1 && gains(most, 0, n) ? 2 : 0;  // 2: a candidate
        at(PENDING)[n] = at(SPARED)[n] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        if (at(SHARED)[n] != 2) continue;
        int above = at(PARENT)[n];
#pragma unroll 1
        while (above >= 0) {
            const int mark = at(SHARED)[above], next = at(PARENT)[above];
            if (mark == 2) break;
            above = next;
        }
        at(NEAR)[n] = above;
        if (above >= 0) atomicAdd(at(PENDING) + above, 1);
    }
    __syncthreads();
#pragma unroll 1
    for (int n = threadIdx.x; n < p.nodes; n += THREADS) at(UP)[n] = at(SHARED)[n] == 2 && at(PENDING)[n] == 0;
    __syncthreads();
#pragma unroll 1
    for (int n = threadIdx.x; n < p.nodes; n += THREADS)
        if (at(UP)[n]) climb(n);
    __syncthreads();
}

// A row's segments: folded ancestors, root first, then the node.
CALLED void write_row(int base, int node, int folded, bool causal) {
    int n = node;
#pragma unroll 1
    for (int to = base + folded, next; to >= base; n = next) {
        const int length = at(LENGTH)[n];
        next = at(PARENT)[n];
        if (n != node && !length) continue;
        if (to < p.a.segment_room) {
            int* s = p.a.segments + 3 * to;
            s[0] = n, s[1] = 0, s[2] = n == node && causal ? OPEN_END : length;
        }
        --to;
    }
}

DEVICE bool make_rows() {
    int turn = 0;
    u64 total = 0;
#pragma unroll 1
    for (int base = 0; base < p.nodes; base += THREADS) {
        const int n = base + threadIdx.x;
        const bool dense = n < p.nodes && at(SHARED)[n], causal = n < p.nodes && own(n) > 0;
        const int kinds = dense + causal;
        int folded = 0, seen = 0, above = -1;
        if (kinds) {
            above = at(PARENT)[n];
#pragma unroll 1
            while (above >= 0) {
                const int is_shared = at(SHARED)[above], length = at(LENGTH)[above], next = at(PARENT)[above];
                if (is_shared) break;
                folded += length > 0, seen += length;
                above = next;
            }
            seen += at(LENGTH)[n];
        }
        const int tiles = kinds ? dense_tiles(n) + tiles_of(own(n)) : 0;
        const u64 before = scan(p.sums, turn, total, join(kinds * (folded + 1), tiles));
        if (n >= p.nodes) continue;
        at(UP)[n] = above, at(INHERITED)[n] = folded, at(TOKENS)[n] = seen;
        at(SEGMENT_BASE)[n] = high_of(before), at(TILE_BASE)[n] = low_of(before);
#pragma unroll 1
        for (int kind = !dense; kind < 1 + causal; ++kind)
            write_row(high_of(before) + (dense && kind ? folded + 1 : 0), n, folded, kind);
    }
    if (threadIdx.x == 0) {
        p.row_segments = high_of(total), at(TILE_BASE)[p.nodes] = p.tiles = low_of(total);
        if (p.tiles <= p.a.wide_room + p.a.narrow_room) take(TILE_OF, FIRST_ITEM, p.tiles + 1), take(QUERY_NODE, QUERY_NODE, p.queries);
    }
    __syncthreads();
    return p.row_segments <= p.a.segment_room && p.tiles <= p.a.wide_room + p.a.narrow_room;
}

DEVICE bool make_tiles() {
#pragma unroll 1
    for (int base = 0; base < p.tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const bool there = number < p.tiles;
        int units = 0, narrow = 0, seen = 0;
        if (there) {
            const int node = find(at(TILE_BASE), p.nodes, number);
            at(TILE_OF)[number] = 2 * node + (number - at(TILE_BASE)[node] >= dense_tiles(node));
            const Tile x = tile(number);
            narrow = is_thin(x.end - x.begin);
            seen = x.tokens, units = max(1, ceil_div(x.tokens, p.a.cost[narrow].unit));
            at(TILE_UNITS)[number] = units | narrow << 31;
        }
#pragma unroll 1
        for (int role = 0; role < 2; ++role) {
            const bool mine = there && narrow == role;
            const u32 count = __popc(__ballot_sync(~0u, mine));
            if (!count) continue;
            const u32 most = __reduce_max_sync(~0u, mine ? units : 0);
            const u64 sum = warp_sums(mine ? seen : 0);
            if (lane_of() == 31) atomicMax(p.longest + role, int(most)), atomicAdd(p.of + role, int(count)), atomicAdd(p.tokens + role, sum);
        }
    }
    __syncthreads();
    return p.of[0] <= p.a.wide_room && p.of[1] <= p.a.narrow_room;
}

// ---- cutting: choose_pieces and busiest of attention/gpu_split.py ----

// How many tiles of each length a role has, if none is too long; else nothing, and tiles are looked at one by one.
DEVICE int* bins_of(int role) { return p.longest[role] <= BINS ? counters + WARPS * (LEVELS + 1) + role * BINS : nullptr; }

DEVICE void count_lengths() {
#pragma unroll 1
    for (int base = 0; base < p.tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const int packed = number < p.tiles ? at(TILE_UNITS)[number] : 0;
        const u32 alike = __match_any_sync(~0u, packed);
        if (!packed || lane_of() != __ffs(alike) - 1) continue;
        int* bins = bins_of(packed < 0);
        if (bins) atomicAdd(bins + (packed & 0x7fffffff) - 1, __popc(alike));
    }
}

// This warp's cut: when the busiest worker would end, times workers.
CALLED void try_cut(int role) {
    const RoleCost& cost = p.a.cost[role];
    const int* bins = bins_of(role);
    int* levels = counters + warp_of() * (LEVELS + 1);
    const int cut = warp_of(), longest = p.longest[role], workers = cost.workers * p.a.num_sms;
    const int chunk = max(cost.least, ceil_div(longest, CUT[cut]));
    const int shift = max(0, 32 - __clz(min(chunk, longest) * POINT + cost.start + cost.leave) - LEVEL_BITS);
#pragma unroll 1
    for (int i = lane_of(); i <= LEVELS; i += 32) levels[i] = 0;
    __syncwarp();
    int extra = 0, left = 0;
    const int count = bins ? longest : p.tiles;
#pragma unroll 1
    for (int i = lane_of(); i < count; i += 32) {
        const int packed = bins ? i + 1 : at(TILE_UNITS)[i], units = packed & 0x7fffffff;
        const int alike = bins ? bins[i] : (packed < 0) == role;
        if (!alike) continue;
        const int pieces = ceil_div(units, chunk);
        const int size = ceil_div(units, pieces) * POINT + cost.start + (pieces > 1 ? cost.leave : 0);
        atomicAdd(levels + ((size + (1 << shift) - 1) >> shift), pieces * alike);
        extra += (pieces - 1) * alike, left += pieces > 1 ? pieces * alike : 0;
    }
    __syncwarp();
    // Entries of each level and above: a lane has 8 levels, the highest lanes first.
    constexpr int MINE = LEVELS / 32;
    const int* top = levels + LEVELS - MINE * lane_of();
    int reach = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i) reach += top[-i];
    int above = int(warp_sums(reach)) - reach;
    int rounds = 0;
#pragma unroll 1
    for (int i = 0; i < MINE; ++i) {
        above += top[-i];
        rounds += ceil_div(above * p.a.kv_heads, workers);
    }
    rounds = __reduce_add_sync(~0u, rounds), extra = __reduce_add_sync(~0u, extra), left = __reduce_add_sync(~0u, left);
    if (lane_of() == 0) {
        p.time[role][cut] = (u64(rounds) << shift) * u64(workers) + u64(cost.fold) * u64(left) * u64(p.a.kv_heads);
        p.extra[role][cut] = extra;
    }
}

// The fewest pieces that end within 2% of the soonest.  One warp per role.
DEVICE void choose_cut() {
    const int role = warp_of();
    if (role > 1 || !p.of[role]) return;
    const RoleCost& cost = p.a.cost[role];
    // What is not tried stays zero: no cut is possible then, and the first one is as good as any.
    const int extra = p.extra[role][lane_of()];
    const bool fits = !lane_of() || extra * p.a.kv_heads <= EXTRA * cost.workers * p.a.num_sms;
    const u64 time = fits ? p.time[role][lane_of()] : ~0ull >> 8;
    u64 least = time;
#pragma unroll 1
    for (int step = 16; step; step /= 2) {
        const u64 other = __shfl_xor_sync(~0u, least, step);
        least = other < least ? other : least;
    }
    const u32 good = __ballot_sync(~0u, 50 * time <= 51 * least);
    if (lane_of() != __ffs(good) - 1) return;
    p.chunk[role] = max(cost.least, ceil_div(p.longest[role], CUT[lane_of()]));
    p.item_count[role] = p.of[role] + extra;
}

DEVICE bool choose_pieces() {
    int* bins = counters + WARPS * (LEVELS + 1);
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    count_lengths();
    __syncthreads();
#pragma unroll 1
    for (int role = 0; role < 2; ++role)
        if (p.longest[role] > p.a.cost[role].least) try_cut(role);
    __syncthreads();
    choose_cut();
    __syncthreads();
    const int items = p.item_count[0] + p.item_count[1];
    if (threadIdx.x == 0) {
        p.items = items;
        if (p.item_count[0] <= p.a.wide_room && p.item_count[1] <= p.a.narrow_room) take(ITEM_PIECE, PART_OF, items);
    }
    int turn = 0;
    u64 total = 0;
#pragma unroll 1
    for (int base = 0; base < p.tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        int pieces = 0;
        if (number < p.tiles) {
            const int packed = at(TILE_UNITS)[number];
            pieces = at(PIECES)[number] = ceil_div(packed & 0x7fffffff, p.chunk[packed < 0]);
        }
        const u64 before = scan(p.sums, turn, total, pieces);
        if (number < p.tiles) at(FIRST_ITEM)[number] = low_of(before);
    }
    if (threadIdx.x == 0) at(FIRST_ITEM)[p.tiles] = items;
    __syncthreads();
    return p.item_count[0] <= p.a.wide_room && p.item_count[1] <= p.a.narrow_room;
}

// ---- partial states ----

// Who sees a shared ancestor's tile has a tile of its own too, so dense tiles always leave partial states.
DEVICE bool leaves(int number) { return !(at(TILE_OF)[number] & 1) || at(PIECES)[number] > 1 || at(UP)[at(TILE_OF)[number] >> 1] >= 0; }

// Pieces of all tiles that a query is in.
DEVICE int pieces_of(int query, int node) {
    int sum = 0;
#pragma unroll 1
    for (bool causal = true; node >= 0; causal = false) {
        const int next = at(UP)[node];
        sum += at(PIECES)[tile_with(query, node, causal)];
        node = next;
    }
    return sum;
}

// How many partial states each query has.
DEVICE bool number_merges() {
    int turn = 0;
    u64 total = 0;
#pragma unroll 1
    for (int base = 0; base < p.queries; base += THREADS) {
        const int q = base + threadIdx.x;
        int pieces = 0;
        if (q < p.queries) {
            const int node = at(QUERY_NODE)[q] = find(at(FIRST_ROW), p.nodes, q);
            pieces = pieces_of(q, node);
        }
        const u64 before = scan(p.sums, turn, total, pieces > 1 ? pieces : 0);
        if (q < p.queries) p.a.merge_indptr[q] = low_of(before);
    }
    if (threadIdx.x == 0) p.a.merge_indptr[p.queries] = low_of(total);
    __syncthreads();
    return total <= u64(p.a.partial_room);
}

// Items of a dense row go by piece, then by tile; all its tiles but the last have the same pieces.
DEVICE int place_of(int number, int piece) {
    const int key = at(TILE_OF)[number], node = key >> 1;
    if (key & 1) return at(FIRST_ITEM)[number] + piece;
    const int first = at(TILE_BASE)[node], others = dense_tiles(node) - 1, mine = number - first;
    const int full = at(PIECES)[first], last = at(PIECES)[first + others];
    if (mine == others) return at(FIRST_ITEM)[first] + min(piece + 1, full) * others + piece;
    return at(FIRST_ITEM)[first] + piece * others + mine + min(piece, last);
}

DEVICE void order_items() {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.items; i += THREADS) {
        const int number = find(at(FIRST_ITEM), p.tiles, i), piece = i - at(FIRST_ITEM)[number];
        at(ITEM_PIECE)[place_of(number, piece)] = number << 8 | piece;
    }
    __syncthreads();
}

struct Cut {
    int low, high;           // tokens of the row
    int row;                 // its first segment
    int first, last, token;  // segments taken, counted in the row; tokens before the first
    bool open;               // to the row's end, as far as it grows
};

// Which of its row's segments an item takes.
DEVICE Cut cut_of(const Tile& x, int piece, int pieces, int units, int unit) {
    Cut c;
    c.low = int(divide(units * piece, pieces)) * unit;
    c.high = piece + 1 == pieces ? x.tokens : int(divide(units * (piece + 1), pieces)) * unit;
    c.row = at(SEGMENT_BASE)[x.node] + (x.causal && at(SHARED)[x.node] ? at(INHERITED)[x.node] + 1 : 0);
    c.first = 0, c.last = at(INHERITED)[x.node], c.token = 0;
    c.open = x.causal && piece + 1 == pieces;
    if (pieces == 1 || !c.last) return c;
    const int end = c.last;
    int before = 0;
#pragma unroll 1
    for (int s = 0; s <= end && (before < c.high || c.open); ++s) {
        if (before <= c.low) c.first = s, c.token = before;
        c.last = s;
        before += s < end ? at(LENGTH)[p.a.segments[3 * (c.row + s)]] : 0;
    }
    return c;
}

DEVICE void write_cut(const Cut& c, int node, int to) {
    int token = c.token;
    const int end = at(INHERITED)[node];
#pragma unroll 1
    for (int s = c.first; s <= c.last; ++s) {
        const int n = s == end ? node : p.a.segments[3 * (c.row + s)], length = at(LENGTH)[n];
        int* out = p.a.segments + 3 * (to + s - c.first);
        out[0] = n, out[1] = max(c.low - token, 0);
        out[2] = c.open && s == end ? OPEN_END : min(length, c.high - token);
        token += length;
    }
}

// Partial rows, and the segments of what is cut.
DEVICE bool make_items() {
    int turn = 0;
    u64 total = 0;
#pragma unroll 1
    for (int base = 0; base < p.items; base += THREADS) {
        const int i = base + threadIdx.x;
        const bool there = i < p.items;
        Tile x = {};
        Cut c = {};
        int number = 0, piece = 0, pieces = 1, narrow = 0, rows = 0, units = 0;
        if (there) {
            number = at(ITEM_PIECE)[i] >> 8, piece = at(ITEM_PIECE)[i] & 255;
            x = tile(number);
            pieces = at(PIECES)[number], narrow = u32(at(TILE_UNITS)[number]) >> 31;
            const int unit = p.a.cost[narrow].unit;
            c = cut_of(x, piece, pieces, at(TILE_UNITS)[number] & 0x7fffffff, unit);
            rows = leaves(number) ? x.end - x.begin : 0;
            units = max(1, ceil_div(c.high - c.low, unit));
        }
        const int segments = c.last - c.first + 1;
        const u64 before = scan(p.sums, turn, total, join(rows, pieces > 1 ? segments : 0));
        if (there) {
            const int to = p.row_segments + low_of(before);
            at(ITEM_PARTIAL)[i] = at(PART_OF)[at(FIRST_ITEM)[number] + piece] = rows ? high_of(before) : -1;
            at(ITEM_SEGMENT)[i] = pieces > 1 ? to : c.row, at(ITEM_COUNT)[i] = segments;
            at(ITEM_UNITS)[i] = units | narrow << 31;
            if (pieces > 1 && to + segments <= p.a.segment_room) write_cut(c, x.node, to);
        }
#pragma unroll 1
        for (int role = 0; role < 2; ++role) {
            const u32 longest = __reduce_max_sync(~0u, there && narrow == role ? units : 0);
            if (lane_of() == 0 && longest) atomicMax(p.units + role, int(longest));
        }
    }
    __syncthreads();
    return p.row_segments + low_of(total) <= p.a.segment_room;
}

// From the end: the own node's pieces, then those of the shared ancestors.
DEVICE void fill_merges() {
#pragma unroll 1
    for (int q = threadIdx.x; q < p.queries; q += THREADS) {
        int to = p.a.merge_indptr[q + 1], node = at(QUERY_NODE)[q];
        if (to == p.a.merge_indptr[q]) continue;
#pragma unroll 1
        for (bool causal = true; node >= 0; causal = false) {
            const int number = tile_with(q, node, causal), offset = q - tile(number).begin;
            const int* parts = at(PART_OF) + at(FIRST_ITEM)[number];
#pragma unroll 4
            for (int piece = at(PIECES)[number] - 1; piece >= 0; --piece) p.a.merge_indices[--to] = parts[piece] + offset;
            node = at(UP)[node];
        }
    }
}

// ---- order: by counting, each warp a range of items ----

DEVICE void write_item(int item, int place) {
    const Tile x = tile(at(ITEM_PIECE)[item] >> 8);
    const int segment = at(ITEM_SEGMENT)[item];
    const int* first = p.a.segments + 3 * segment;
    int4* to = place < p.item_count[0] ? p.a.wide + 2 * place : p.a.narrow + 2 * (place - p.item_count[0]);
    to[0] = make_int4(x.begin, x.end, at(ITEM_PARTIAL)[item], segment);
    to[1] = make_int4(2 * at(ITEM_COUNT)[item] + x.causal, first[0], first[1], first[2]);
}

DEVICE void sort_items() {
    constexpr int KEYS = 2 * ORDER_LEVELS;
    int *mine = counters + warp_of() * KEYS, *key_begin = counters + WARPS * KEYS;
#pragma unroll 1
    for (int i = lane_of(); i < KEYS; i += 32) mine[i] = 0;
    __syncwarp();
    const int range = (p.items + WARPS - 1) / WARPS, begin = warp_of() * range, end = min(p.items, begin + range);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
        for (int base = begin; base < end; base += 32) {
            const int i = base + lane_of();
            int key = -1;
            if (i < end) {
                const int packed = at(ITEM_UNITS)[i], narrow = packed < 0, units = packed & 0x7fffffff;
                key = (narrow + 1) * ORDER_LEVELS - 1 - int(divide(u32(units) * (ORDER_LEVELS - 1), p.units[narrow]));
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
        int turn = 0;
        u64 total = 0;
        const int place = low_of(scan(p.sums, turn, total, u64(sum)));
        if (threadIdx.x < KEYS) key_begin[threadIdx.x] = place;
        __syncthreads();
    }
}

DEVICE void finish(bool fits) {
    if (threadIdx.x) return;
    const bool bound = __dmul_rn(double(p.tokens[0]), p.a.narrow_rate) > __dmul_rn(double(2 * p.tokens[1]), p.a.wide_rate);
    int4* counts = (int4*)p.a.counts;
    counts[0] = fits ? make_int4(p.item_count[0], p.item_count[1], p.queries, p.a.merge_indptr[p.queries]) : make_int4(0, 0, p.queries, 0);
    counts[1] = make_int4(fits && bound, 0, 0, !fits);
}

DEVICE bool begin(const PlanTree& a) {
    static_assert(sizeof(PlanTree) % 4 == 0 && sizeof(State) / 4 < THREADS, "a thread per int");
    const int i = threadIdx.x;
    const int nodes = a.sizes[0];
    if (i < int(sizeof(PlanTree) / 4)) ((int*)&p)[i] = ((const int*)&a)[i];
    else if (i < int(sizeof(State) / 4)) ((int*)&p)[i] = 0;
    __syncthreads();
    if (i == 0) {
        const int taken = NODE_ARRAYS * (NODES ? NODES + 4 : 0);
        p.nodes = nodes;
        p.shared = dynamic_shared + taken, p.shared_left = a.shared_ints - taken;
        p.global = a.scratch + (NODES ? 0 : NODE_ARRAYS * (a.node_room + 4));
    }
    __syncthreads();
    return nodes <= a.node_room;
}

__global__ void __launch_bounds__(THREADS, 1) plan_tree(const __grid_constant__ PlanTree a) {
    bool fits = begin(a) && count_rows();
    if (fits) {
        share();
        fits = make_rows() && make_tiles() && choose_pieces() && number_merges();
    }
    if (fits) {
        order_items();
        fits = make_items();
    }
    if (fits) {
        fill_merges();
        sort_items();
    }
    finish(fits);
}

}  // namespace prefixkit
