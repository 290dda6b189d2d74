// A plan for tree_attention, made where it is used: what attention/gpu_plan.py specifies, bit by bit, in one launch.
//
// shapes   a tree of `nodes` in depth-first order with `own` query rows in each; six arrays of fixed capacity come out.
// tiling   one block of 1,024 threads, for the work is small and its steps depend on each other: a thread per node, tile, query or
//          item, some twenty prefix sums in between.  Sharing climbs from the lowest candidates, the last child taking its parent up.
//          One warp reckons one way to cut the tiles.  Items are sorted by counting.
// cost     latency: reads of shared memory, meetings of the block.  Deep chains climb one node at a time.
// limits   what does not fit sets counts[7], with no items.  Numbers: tiles below 2^23, tokens of a row and sums below 2^31.
#include "plan_block.cuh"

namespace prefixkit {

constexpr int CUTS = 32, LEVELS = 256, LEVEL_BITS = 8, ORDER_LEVELS = 256, POINT = 64, EXTRA = 4, NARROW_ROWS = 8;
constexpr int BINS = 2048;  // lengths that are counted instead of looked at one by one
constexpr int OPEN_END = 0x7fffffff;
static_assert(CUTS == WARPS, "a warp per cut");

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
    double gain_per_token, item, price_per_row;  // of sharing
    double wide_rate, narrow_rate;
    int node_room, wide_room, narrow_room, segment_room, row_room, partial_room;
    int group, kv_heads, num_sms, tile_rows, shared_ints;
    RoleCost cost[2];        // wide, narrow
};

struct Tally {               // in shared memory
    u64 cells[2][WARPS];
    u64 tokens[2];           // wide, narrow
    int longest[2], tiles[2], units[2];
    u64 time[2][CUTS];
    int extra[2][CUTS];
    int chunk[2], items[2];
};

struct Plan {
    const PlanTree& a;
    Tally& t;
    Arena arena;
    Scan scan;
    int nodes, queries, tiles, items, row_segments;
    int *parent, *subtree_end, *length;
    int *first_row;          // [nodes + 1] the first query of each node
    int *shared;             // [nodes] 1: a dense row
    int *up, *inherited, *tokens;  // [nodes] with rows: nearest shared ancestor; folded ancestors below it; tokens with those
    int *seg_base, *tile_base;
    int *tile_of;            // [tiles] 2 * node + causal
    int *tile_units;         // [tiles] and the top bit: narrow
    int *tile_pieces, *tile_first, *tile_leaves;
    int *query_node;
    int *item_piece;         // [items] tile << 8 | piece
    int *item_segment, *item_count, *item_units, *item_partial, *part_of;
    int* counters;           // [WARPS][2 * ORDER_LEVELS], for one purpose after another

    DEVICE Plan(const PlanTree& a, Tally& t, int* dynamic) : a(a), t(t), arena{dynamic, a.shared_ints, a.scratch}, scan{t.cells} {
        nodes = a.sizes[0];
    }
    DEVICE void new_sum() { scan.total = 0; }

    // ---- rows of a node ----
    DEVICE int below(int n) const { return first_row[subtree_end[n]] - first_row[n + 1]; }
    DEVICE int own(int n) const { return first_row[n + 1] - first_row[n]; }
    DEVICE int step(int queries) const { return queries * a.group <= NARROW_ROWS ? queries : max(1, a.tile_rows / a.group); }
    DEVICE int tiles_of(int queries) const { return queries ? ceil_div(queries, step(queries)) : 0; }
    DEVICE int dense_tiles(int n) const { return shared[n] ? tiles_of(below(n)) : 0; }

    struct Tile {
        int node, causal, begin, end, tokens;
    };
    DEVICE Tile tile(int number) const {
        const int node = tile_of[number] >> 1, causal = tile_of[number] & 1;
        const int begin = causal ? first_row[node] : first_row[node + 1], queries = causal ? own(node) : below(node);
        const int place = number - tile_base[node] - (causal ? dense_tiles(node) : 0);
        Tile x = {node, causal, begin + place * step(queries), 0, 0};
        x.end = min(x.begin + step(queries), begin + queries);
        x.tokens = max(tokens[node] - (causal ? begin + queries - x.end : 0), 0);
        return x;
    }
    // The tile of a query among those of a node's dense row, or its causal one.
    DEVICE int tile_with(int query, int node, bool causal) const {
        const int first = tile_base[node] + (causal ? dense_tiles(node) : 0);
        const int begin = causal ? first_row[node] : first_row[node + 1], queries = causal ? own(node) : below(node);
        return first + (queries * a.group <= NARROW_ROWS ? 0 : (query - begin) / step(queries));
    }

    DEVICE bool count_rows();
    DEVICE bool gains(int most, int spared, int n) const;
    DEVICE void share();
    DEVICE void climb(int node, const int* most, const int* near, int* pending, int* spared);
    DEVICE bool make_rows();
    DEVICE void write_row(int at, int node, bool causal) const;
    DEVICE bool make_tiles();
    DEVICE void count_lengths(int role, int* bins) const;
    DEVICE void try_cut(int role, const int* bins, int* levels) const;
    DEVICE bool choose_pieces();
    DEVICE bool number_merges();
    DEVICE void order_items();
    DEVICE int place_of(int number, int piece) const;
    DEVICE bool make_items();
    DEVICE void fill_merges();
    DEVICE void sort_items();
    DEVICE void write_item(int item, int place) const;
    DEVICE void finish(int partials) const;
};

// Where the queries of each node begin.
DEVICE bool Plan::count_rows() {
    if (nodes > a.node_room) return false;
    parent = arena.take(nodes), subtree_end = arena.take(nodes), length = arena.take(nodes);
    first_row = arena.take(nodes + 1), shared = arena.take(nodes);
    up = arena.take(nodes + 1);  // for now: nodes with queries before each
    for (int base = 0; base < nodes; base += THREADS) {
        const int n = base + threadIdx.x;
        const int rows = n < nodes ? a.own[n] : 0;
        const u64 before = scan(join(rows, rows > 0));
        if (n < nodes) {
            first_row[n] = high_of(before), up[n] = low_of(before);
            parent[n] = a.parent[n], subtree_end[n] = a.subtree_end[n], length[n] = a.length[n];
        }
    }
    if (threadIdx.x == 0) first_row[nodes] = high_of(scan.total), up[nodes] = low_of(scan.total);
    queries = high_of(scan.total);
    new_sum();
    __syncthreads();
    return queries <= a.row_room;
}

// decide_sharing of attention/cost.py; the same operations in the same order.
DEVICE bool Plan::gains(int most, int spared, int n) const {
    const double gain = __dmul_rn(double((long long)(most - spared - 1) * length[n]), a.gain_per_token);
    return gain > __dadd_rn(a.item, __dmul_rn(double(below(n)), a.price_per_row));
}

DEVICE void Plan::climb(int node, const int* most, const int* near, int* pending, int* spared) {
    while (true) {
        const int less = *(volatile int*)(spared + node);
        const bool take = gains(most[node], less, node);
        shared[node] = take;
        const int above = near[node];
        if (above < 0) return;
        atomicAdd(spared + above, take ? most[node] - 1 : less);
        __threadfence_block();
        if (atomicSub(pending + above, 1) != 1) return;  // others are still below
        __threadfence_block();
        node = above;
    }
}

DEVICE void Plan::share() {
    const Arena here = arena;
    int *most = arena.take(nodes), *near = arena.take(nodes), *pending = arena.take(nodes), *spared = arena.take(nodes);
    for (int n = threadIdx.x; n < nodes; n += THREADS) {
        most[n] = up[subtree_end[n]] - up[n + 1];
        shared[n] = below(n) > 0 && gains(most[n], 0, n) ? 2 : 0;  // 2: a candidate
        pending[n] = spared[n] = 0;
    }
    __syncthreads();
    for (int n = threadIdx.x; n < nodes; n += THREADS) {
        if (shared[n] != 2) continue;
        int above = parent[n];
        while (above >= 0 && shared[above] != 2) above = parent[above];
        near[n] = above;
        if (above >= 0) atomicAdd(pending + above, 1);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < nodes; n += THREADS) up[n] = shared[n] == 2 && pending[n] == 0;
    __syncthreads();
    for (int n = threadIdx.x; n < nodes; n += THREADS)
        if (up[n]) climb(n, most, near, pending, spared);
    __syncthreads();
    arena = here;
}

// A row's segments: folded ancestors, root first, then the node.
DEVICE void Plan::write_row(int at, int node, bool causal) const {
    int to = at + inherited[node], n = node;
    while (true) {
        if (n == node || length[n]) {
            if (to < a.segment_room) {
                int* s = a.segments + 3 * to;
                s[0] = n, s[1] = 0, s[2] = n == node && causal ? OPEN_END : length[n];
            }
            --to;
        }
        if (to < at) return;
        n = parent[n];
    }
}

DEVICE bool Plan::make_rows() {
    inherited = arena.take(nodes), tokens = arena.take(nodes);
    seg_base = arena.take(nodes), tile_base = arena.take(nodes + 1);
    for (int base = 0; base < nodes; base += THREADS) {
        const int n = base + threadIdx.x;
        const int kinds = n < nodes ? shared[n] + (own(n) > 0) : 0;
        int folded = 0, seen = 0, above = -1;
        if (kinds) {
            above = parent[n];
            while (above >= 0 && !shared[above]) {
                folded += length[above] > 0, seen += length[above];
                above = parent[above];
            }
            seen += length[n];
        }
        const u64 before = scan(join(kinds * (folded + 1), kinds ? dense_tiles(n) + tiles_of(own(n)) : 0));
        if (n >= nodes) continue;
        up[n] = above, inherited[n] = folded, tokens[n] = seen;
        seg_base[n] = high_of(before), tile_base[n] = low_of(before);
        if (shared[n]) write_row(seg_base[n], n, false);
        if (own(n)) write_row(seg_base[n] + (shared[n] ? folded + 1 : 0), n, true);
    }
    row_segments = high_of(scan.total), tiles = low_of(scan.total);
    if (threadIdx.x == 0) tile_base[nodes] = tiles;
    new_sum();
    __syncthreads();
    return row_segments <= a.segment_room && tiles <= a.wide_room + a.narrow_room;
}

DEVICE bool Plan::make_tiles() {
    tile_of = arena.take(tiles), tile_units = arena.take(tiles);
    tile_pieces = arena.take(tiles), tile_first = arena.take(tiles + 1), tile_leaves = arena.take(tiles);
    for (int base = 0; base < tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const bool there = number < tiles;
        int units = 0, narrow = 0, seen = 0;
        if (there) {
            const int node = find(tile_base, nodes, number);
            tile_of[number] = 2 * node + (number - tile_base[node] >= dense_tiles(node));
            const Tile x = tile(number);
            narrow = (x.end - x.begin) * a.group <= NARROW_ROWS;
            seen = x.tokens, units = max(1, ceil_div(x.tokens, a.cost[narrow].unit));
            tile_units[number] = units | narrow << 31;
            tile_leaves[number] = 0;
        }
#pragma unroll
        for (int role = 0; role < 2; ++role) {
            const bool mine = there && narrow == role;
            const u32 count = __popc(__ballot_sync(~0u, mine));
            if (!count) continue;
            const u32 most = __reduce_max_sync(~0u, mine ? units : 0);
            u64 sum = mine ? seen : 0;
#pragma unroll
            for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane_of() == 0) atomicMax(t.longest + role, int(most)), atomicAdd(t.tiles + role, int(count)), atomicAdd(t.tokens + role, sum);
        }
    }
    __syncthreads();
    return t.tiles[0] <= a.wide_room && t.tiles[1] <= a.narrow_room;
}

// ---- cutting: choose_pieces and busiest of attention/gpu_split.py ----

// How many tiles have each length.
DEVICE void Plan::count_lengths(int role, int* bins) const {
    for (int base = 0; base < tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const int packed = number < tiles ? tile_units[number] : 0;
        const bool mine = number < tiles && (packed < 0) == role;
        const int units = mine ? packed & 0x7fffffff : 0;
        const u32 alike = __match_any_sync(~0u, units);
        if (mine && lane_of() == __ffs(alike) - 1) atomicAdd(bins + units - 1, __popc(alike));
    }
}

// This warp's cut: when the busiest worker would end.
DEVICE void Plan::try_cut(int role, const int* bins, int* levels) const {
    const RoleCost& cost = a.cost[role];
    const int cut = warp_of(), longest = t.longest[role], workers = cost.workers * a.num_sms;
    const int chunk = max(cost.least, ceil_div(longest, CUT[cut]));
    const int most = min(chunk, longest) * POINT + cost.start + cost.leave;
    const int shift = max(0, 32 - __clz(most) - LEVEL_BITS);
    for (int i = lane_of(); i <= LEVELS; i += 32) levels[i] = 0;
    __syncwarp();
    int extra = 0, left = 0;
    for (int i = lane_of(); i < (bins ? longest : tiles); i += 32) {
        const int packed = bins ? i + 1 : tile_units[i], units = packed & 0x7fffffff;
        const int count = bins ? bins[i] : (packed < 0) == role;
        if (!count) continue;
        const int pieces = ceil_div(units, chunk);
        const int size = ceil_div(units, pieces) * POINT + cost.start + (pieces > 1 ? cost.leave : 0);
        atomicAdd(levels + ((size + (1 << shift) - 1) >> shift), pieces * count);
        extra += (pieces - 1) * count, left += pieces > 1 ? pieces * count : 0;
    }
    __syncwarp();
    // A lane has 8 levels, the highest lanes first.
    constexpr int MINE = LEVELS / 32;
    const int top = LEVELS - MINE * lane_of();
    int reach = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i) reach += levels[top - i];
    int above = reach;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, above, step);
        if (lane_of() >= step) above += other;
    }
    above -= reach;
    u64 rounds = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        above += levels[top - i];
        rounds += u32(above * a.kv_heads + workers - 1) / u32(workers);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) rounds += __shfl_xor_sync(~0u, rounds, step);
    extra = __reduce_add_sync(~0u, extra), left = __reduce_add_sync(~0u, left);
    if (lane_of() == 0) {
        t.time[role][cut] = (rounds << shift) + u64(cost.fold) * u64(left) * u64(a.kv_heads) / u64(workers);
        t.extra[role][cut] = extra;
    }
}

DEVICE bool Plan::choose_pieces() {
    counters = arena.take(WARPS * 2 * ORDER_LEVELS);
    static_assert(WARPS * (LEVELS + 1) + 2 * BINS <= WARPS * 2 * ORDER_LEVELS, "room for levels and bins");
    int* bins = counters + WARPS * (LEVELS + 1);
    for (int i = threadIdx.x; i < 2 * BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    for (int role = 0; role < 2; ++role)
        if (t.tiles[role] && t.longest[role] <= BINS) count_lengths(role, bins + role * BINS);
    __syncthreads();
    for (int role = 0; role < 2; ++role)
        if (t.tiles[role]) try_cut(role, t.longest[role] <= BINS ? bins + role * BINS : nullptr, counters + warp_of() * (LEVELS + 1));
    __syncthreads();
    if (threadIdx.x < 2 && t.tiles[threadIdx.x]) {
        const int role = threadIdx.x;
        const RoleCost& cost = a.cost[role];
        int best = 0;
        for (int cut = 1; cut < CUTS; ++cut)
            if (t.extra[role][cut] * a.kv_heads <= EXTRA * cost.workers * a.num_sms && 50 * t.time[role][cut] < 49 * t.time[role][best]) best = cut;
        t.chunk[role] = max(cost.least, ceil_div(t.longest[role], CUT[best]));
        t.items[role] = t.tiles[role] + t.extra[role][best];
    }
    __syncthreads();
    items = t.items[0] + t.items[1];
    if (t.items[0] > a.wide_room || t.items[1] > a.narrow_room) return false;
    for (int base = 0; base < tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        int pieces = 0;
        if (number < tiles) {
            const int packed = tile_units[number];
            pieces = tile_pieces[number] = ceil_div(packed & 0x7fffffff, t.chunk[packed < 0]);
        }
        const u64 before = scan(pieces);
        if (number < tiles) tile_first[number] = low_of(before);
    }
    if (threadIdx.x == 0) tile_first[tiles] = items;
    new_sum();
    __syncthreads();
    return true;
}

// ---- partial states ----

// Which tiles leave partial states: those with a query that two items take.  Then how many each query has.
DEVICE bool Plan::number_merges() {
    query_node = arena.take(queries);
    for (int q = threadIdx.x; q < queries; q += THREADS) {
        const int node = find(first_row, nodes, q);
        query_node[q] = node;
        const int mine = tile_with(q, node, true);
        int pieces = tile_pieces[mine];
        for (int n = up[node]; n >= 0; n = up[n]) pieces += tile_pieces[tile_with(q, n, false)];
        if (pieces == 1) continue;
        tile_leaves[mine] = 1;
        for (int n = up[node]; n >= 0; n = up[n]) tile_leaves[tile_with(q, n, false)] = 1;
    }
    __syncthreads();
    for (int base = 0; base < queries; base += THREADS) {
        const int q = base + threadIdx.x;
        int partials = 0;
        if (q < queries) {
            const int node = query_node[q], mine = tile_with(q, node, true);
            partials = tile_leaves[mine] ? tile_pieces[mine] : 0;
            for (int n = up[node]; n >= 0; n = up[n]) {
                const int other = tile_with(q, n, false);
                partials += tile_leaves[other] ? tile_pieces[other] : 0;
            }
        }
        const u64 before = scan(partials);
        if (q < queries) a.merge_indptr[q] = low_of(before);
    }
    if (threadIdx.x == 0) a.merge_indptr[queries] = low_of(scan.total);
    const bool fits = scan.total <= u64(a.partial_room);
    new_sum();
    __syncthreads();
    return fits;
}

// Items of a dense row go by piece, then by tile; all its tiles but the last have the same pieces.
DEVICE int Plan::place_of(int number, int piece) const {
    const int node = tile_of[number] >> 1;
    if (tile_of[number] & 1) return tile_first[number] + piece;
    const int first = tile_base[node], others = dense_tiles(node) - 1, mine = number - first;
    const int full = tile_pieces[first], last = tile_pieces[first + others];
    if (mine == others) return tile_first[first] + min(piece + 1, full) * others + piece;
    return tile_first[first] + piece * others + mine + min(piece, last);
}

DEVICE void Plan::order_items() {
    item_piece = arena.take(items), part_of = arena.take(items);
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const int number = find(tile_first, tiles, i), piece = i - tile_first[number];
        item_piece[place_of(number, piece)] = number << 8 | piece;
    }
    __syncthreads();
}

// Partial rows, and the segments of what is cut.
DEVICE bool Plan::make_items() {
    item_segment = arena.take(items), item_count = arena.take(items);
    item_units = arena.take(items), item_partial = arena.take(items);
    int most_wide = 0, most_narrow = 0;
    for (int base = 0; base < items; base += THREADS) {
        const int i = base + threadIdx.x;
        const bool there = i < items;
        Tile x = {};
        int number = 0, piece = 0, pieces = 1, narrow = 0, low = 0, high = 0, row = 0, rows = 0, first = 0, last = 0, first_token = 0;
        bool open = false;
        if (there) {
            number = item_piece[i] >> 8, piece = item_piece[i] & 255;
            x = tile(number);
            pieces = tile_pieces[number], narrow = u32(tile_units[number]) >> 31;
            const int unit = a.cost[narrow].unit, whole = tile_units[number] & 0x7fffffff;
            low = whole * piece / pieces * unit;
            high = piece + 1 == pieces ? x.tokens : whole * (piece + 1) / pieces * unit;
            rows = tile_leaves[number] ? x.end - x.begin : 0;
            row = seg_base[x.node] + (x.causal && shared[x.node] ? inherited[x.node] + 1 : 0);
            last = inherited[x.node];
            open = x.causal && piece + 1 == pieces;
            if (pieces > 1 && last) {
                const int end = last;
                int before = 0;
                for (int s = 0; s <= end; ++s) {
                    if (before <= low) first = s, first_token = before;
                    if (before < high || open) last = s;
                    if (before > low && before >= high && !open) break;
                    before += s < end ? length[a.segments[3 * (row + s)]] : 0;
                }
            }
        }
        const u64 before = scan(join(rows, pieces > 1 ? last - first + 1 : 0));
        if (!there) continue;
        const int to = row_segments + low_of(before);
        item_partial[i] = rows ? high_of(before) : -1;
        part_of[tile_first[number] + piece] = item_partial[i];
        item_segment[i] = pieces > 1 ? to : row, item_count[i] = last - first + 1;
        const int units = max(1, ceil_div(high - low, a.cost[narrow].unit));
        item_units[i] = units | narrow << 31;
        (narrow ? most_narrow : most_wide) = max(narrow ? most_narrow : most_wide, units);
        if (pieces == 1 || to + last - first >= a.segment_room) continue;
        int token = first_token;  // of the row, where the segment begins
        for (int s = first; s <= last; ++s) {
            const int node = s == inherited[x.node] ? x.node : a.segments[3 * (row + s)];
            int* out = a.segments + 3 * (to + s - first);
            out[0] = node, out[1] = max(low - token, 0);
            out[2] = open && s == inherited[x.node] ? OPEN_END : min(length[node], high - token);
            token += length[node];
        }
    }
#pragma unroll
    for (int role = 0; role < 2; ++role) {
        const u32 longest = __reduce_max_sync(~0u, role ? most_narrow : most_wide);
        if (lane_of() == 0 && longest) atomicMax(t.units + role, int(longest));
    }
    const bool fits = row_segments + low_of(scan.total) <= a.segment_room;
    new_sum();
    __syncthreads();
    return fits;
}

// From the end: the own node's pieces, then those of the shared ancestors.
DEVICE void Plan::fill_merges() {
    for (int q = threadIdx.x; q < queries; q += THREADS) {
        int node = query_node[q], to = a.merge_indptr[q + 1], number = tile_with(q, node, true);
        for (node = up[node];; node = up[node]) {
            if (tile_leaves[number]) {
                const int offset = q - tile(number).begin, first = tile_first[number];
                for (int piece = tile_pieces[number] - 1; piece >= 0; --piece) a.merge_indices[--to] = part_of[first + piece] + offset;
            }
            if (node < 0) break;
            number = tile_with(q, node, false);
        }
    }
}

// ---- order: by counting, each warp a range of items ----

DEVICE void Plan::write_item(int item, int place) const {
    const Tile x = tile(item_piece[item] >> 8);
    const int segment = item_segment[item];
    const int* first = a.segments + 3 * segment;
    int4* to = place < t.items[0] ? a.wide + 2 * place : a.narrow + 2 * (place - t.items[0]);
    to[0] = make_int4(x.begin, x.end, item_partial[item], segment);
    to[1] = make_int4(2 * item_count[item] + x.causal, first[0], first[1], first[2]);
}

DEVICE void Plan::sort_items() {
    constexpr int KEYS = 2 * ORDER_LEVELS;
    int* mine = counters + warp_of() * KEYS;
    for (int i = lane_of(); i < KEYS; i += 32) mine[i] = 0;
    __syncwarp();
    const int range = ceil_div(items, WARPS), begin = warp_of() * range, end = min(items, begin + range);
    for (int pass = 0; pass < 2; ++pass) {
        for (int base = begin; base < end; base += 32) {
            const int i = base + lane_of();
            int key = -1;
            if (i < end) {
                const int narrow = u32(item_units[i]) >> 31, units = item_units[i] & 0x7fffffff;
                key = (narrow + 1) * ORDER_LEVELS - 1 - int(u32(units) * (ORDER_LEVELS - 1) / u32(t.units[narrow]));
            }
            const u32 alike = __match_any_sync(~0u, key);
            const int rank = __popc(alike & ((1u << lane_of()) - 1));
            const int place = key >= 0 ? mine[key] + rank : 0;
            __syncwarp();
            if (key >= 0 && rank == 0) mine[key] = place + __popc(alike);
            __syncwarp();
            if (pass && i < end) write_item(i, place);
        }
        __syncthreads();
        if (pass) return;
        int sum = 0;
        if (threadIdx.x < KEYS)
            for (int w = 0; w < WARPS; ++w) sum += counters[w * KEYS + threadIdx.x];
        int place = low_of(scan(u64(sum)));
        if (threadIdx.x < KEYS)
            for (int w = 0; w < WARPS; ++w) {
                const int count = counters[w * KEYS + threadIdx.x];
                counters[w * KEYS + threadIdx.x] = place;
                place += count;
            }
        new_sum();
        __syncthreads();
    }
}

DEVICE void Plan::finish(int partials) const {
    if (threadIdx.x >= 8) return;
    const bool fits = partials >= 0;
    const bool bound = __dmul_rn(double(t.tokens[0]), a.narrow_rate) > __dmul_rn(double(2 * t.tokens[1]), a.wide_rate);
    const int counts[8] = {fits ? t.items[0] : 0, fits ? t.items[1] : 0, queries, fits ? partials : 0, fits && bound, 0, 0, !fits};
    int mine = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) mine = threadIdx.x == i ? counts[i] : mine;
    a.counts[threadIdx.x] = mine;
}

extern __shared__ int dynamic_shared[];

__global__ void __launch_bounds__(THREADS) plan_tree(const __grid_constant__ PlanTree a) {
    __shared__ Tally t;
    for (int i = threadIdx.x; i < int(sizeof(Tally) / 4); i += THREADS) ((int*)&t)[i] = 0;
    __syncthreads();
    Plan plan(a, t, dynamic_shared);
    plan.queries = 0;
    bool fits = plan.count_rows();
    if (fits) {
        plan.share();
        fits = plan.make_rows() && plan.make_tiles() && plan.choose_pieces() && plan.number_merges();
    }
    if (fits) {
        plan.order_items();
        fits = plan.make_items();
    }
    if (fits) {
        plan.fill_merges();
        plan.sort_items();
    }
    plan.finish(fits ? a.merge_indptr[plan.queries] : -1);
}

}  // namespace prefixkit
