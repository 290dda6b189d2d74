// From nodes to rows to tiles: prefix sums over the tree, the decision what is shared, and the rows' segments.
//
// decide_sharing and decompose of attention/sharing.py and formats.py, and _tile of gpu_plan.py, on a block of 1,024 threads.
#pragma once
#include "planner/plan_state.cuh"

namespace prefixkit {

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
    return p.queries <= p.a.row_capacity;
}

// decide_sharing of attention/sharing.py; the same operations in the same order.
CALLED bool gains(int most, int spared, int n) {
    const double gain = __dmul_rn(double((long long)(most - spared - 1) * at(LENGTH)[n]), p.a.gain_per_token);
    const int rows = below(n);
    const double tiled = __dmul_rn(double(full_tiles(rows + p.a.many - 1)), p.a.price_tile);
    const double item = __dadd_rn(p.a.item, is_thin(rows) ? p.a.price_decode : tiled);
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
        if (to < p.a.segment_capacity) {
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
        if (p.tiles <= p.a.tile_capacity + p.a.decode_capacity) take(TILE_OF, FIRST_ITEM, p.tiles + 1), take(QUERY_NODE, QUERY_NODE, p.queries);
    }
    __syncthreads();
    return p.row_segments <= p.a.segment_capacity && p.tiles <= p.a.tile_capacity + p.a.decode_capacity;
}

DEVICE bool make_tiles() {
#pragma unroll 1
    for (int base = 0; base < p.tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const bool there = number < p.tiles;
        int kv_tiles = 0, decode = 0, seen = 0;
        if (there) {
            const int node = find(at(TILE_BASE), p.nodes, number);
            at(TILE_OF)[number] = 2 * node + (number - at(TILE_BASE)[node] >= dense_tiles(node));
            const Tile x = tile(number);
            decode = is_thin(x.end - x.begin);
            seen = x.tokens, kv_tiles = max(1, ceil_div(x.tokens, p.a.cost[decode].kv_tile));
            at(TILE_KV_TILES)[number] = kv_tiles | decode << 31;
        }
#pragma unroll 1
        for (int role = 0; role < 2; ++role) {
            const bool mine = there && decode == role;
            const u32 count = __popc(__ballot_sync(~0u, mine));
            if (!count) continue;
            const u32 most = __reduce_max_sync(~0u, mine ? kv_tiles : 0);
            const u64 sum = warp_sums(mine ? seen : 0);
            if (lane_of() == 31) atomicMax(p.longest + role, int(most)), atomicAdd(p.of + role, int(count)), atomicAdd(p.tokens + role, sum);
        }
    }
    __syncthreads();
    return p.of[0] <= p.a.tile_capacity && p.of[1] <= p.a.decode_capacity;
}

}  // namespace prefixkit
