// From nodes to tiles: prefix sums over the tree, the decision which nodes are shared, and the segments of each BSR
// row.
//
// decide_sharing of attention/sharing.py, decompose of attention/bsr.py, and _tile of attention/gpu/gpu_plan.py.
#pragma once
#include "planner/plan_path_rows.cuh"

namespace prefixkit {

// Counts where the queries of each node begin; returns whether all queries fit.
DEVICE bool count_rows() {
    const auto load = [](int n) {
        const int rows = p.a.own[n], parent = p.a.parent[n], end = p.a.subtree_end[n], length = p.a.length[n];
        at(PARENT)[n] = parent, at(SUBTREE_END)[n] = end, at(LENGTH)[n] = length;
        if (!by_decode(rows)) p.pays = 1;
        return join(rows, p.a.read_by_tiles && !by_paths() ? tiles_of(rows) : rows > 0);
    };
    const u64 total = scan_each(p.nodes, load, [](int n, u64 before) {
        at(FIRST_ROW)[n] = high_of(before), at(UP)[n] = low_of(before);  // UP, for now: reads by earlier own queries
    });
    if (threadIdx.x == 0) at(FIRST_ROW)[p.nodes] = p.queries = high_of(total), at(UP)[p.nodes] = low_of(total);
    __syncthreads();
    return p.queries <= p.a.row_capacity;
}

// How often a shared node is read.
DEVICE int reads_once(int n) { return p.a.read_by_tiles ? tiles_of(queries_below(n)) : 1; }

CALLED bool gains(int most, int spared, int n) {
    const long long saved = (long long)(most - spared - reads_once(n)) * at(LENGTH)[n];
    return __dmul_rn(double(saved), p.a.gain_per_token) > price_of(n);
}

// Decides candidates upwards, from one without candidates below it to the first that still waits for others.
DEVICE void climb(int node) {
    while (true) {
        const int most = at(MOST)[node], less = *(volatile int*)(at(SPARED) + node), above = at(NEAR)[node];
        const bool take = gains(most, less, node);
        at(SHARED)[node] = take;
        if (above < 0) return;
        atomicAdd(at(SPARED) + above, take ? most - reads_once(node) : less);
        __threadfence_block();
        if (atomicSub(at(PENDING) + above, 1) != 1) return;
        __threadfence_block();
        node = above;
    }
}

DEVICE void share_node_by_node() {
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        const int most = at(UP)[at(SUBTREE_END)[n]] - at(UP)[n + 1];
        at(MOST)[n] = most;
        at(SHARED)[n] = most > 1 && gains(most, 0, n) ? 2 : 0;  // 2: a candidate
        at(PENDING)[n] = at(SPARED)[n] = 0;
    }
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        if (at(SHARED)[n] != 2) continue;
        int above = at(PARENT)[n];
        ROLLED while (above >= 0) {
            const int mark = at(SHARED)[above], next = at(PARENT)[above];
            if (mark == 2) break;
            above = next;
        }
        at(NEAR)[n] = above;
        if (above >= 0) atomicAdd(at(PENDING) + above, 1);
    }
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) at(UP)[n] = at(SHARED)[n] == 2 && at(PENDING)[n] == 0;
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS)
        if (at(UP)[n]) climb(n);
    __syncthreads();
    if (p.pays) return;
    const auto in_tiles = [](int n) { return at(SHARED)[n] && !by_decode(queries_below(n)); };
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        if (!in_tiles(n)) continue;
        const int times = at(MOST)[n] - reads_once(n);
        count_spared((long long)times * at(LENGTH)[n]);
        count_above(n, times, [](int above) { return at(SHARED)[above] != 0; });
    }
    __syncthreads();
    if (is_enough((long long)p.tokens_spared)) return;
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS)
        if (in_tiles(n)) at(SHARED)[n] = 0;
    __syncthreads();
}

DEVICE void share() {
    if (by_paths()) {
        take_path_arrays();
        order_paths();
        return share_by_paths();
    }
    share_node_by_node();
}

// Writes a BSR row's segments: `inherited` ancestors, root first, then the node.
CALLED void write_row(int base, int node, int inherited, bool own) {
    int n = node;
    ROLLED for (int to = base + inherited, next; to >= base; n = next) {
        const int length = at(LENGTH)[n];
        next = at(PARENT)[n];
        if (n != node && !length) continue;
        if (to < p.a.segment_capacity) {
            int* s = p.a.segments + 3 * to;
            s[0] = n, s[1] = 0, s[2] = n == node && own ? OPEN_END : length;
        }
        --to;
    }
}

DEVICE bool make_rows() {
    if (by_paths()) return rows_by_paths();
    int inherited;
    bool shared, own;
    const auto read = [&](int n) {
        shared = at(SHARED)[n], own = own_queries(n) > 0, inherited = 0;
        int tokens = 0, above = -1;
        if (shared || own) {
            above = at(PARENT)[n];
            ROLLED while (above >= 0) {
                const int is_shared = at(SHARED)[above], length = at(LENGTH)[above], next = at(PARENT)[above];
                if (is_shared) break;
                inherited += length > 0, tokens += length;
                above = next;
            }
            tokens += at(LENGTH)[n];
        }
        at(UP)[n] = above, at(INHERITED)[n] = inherited, at(TOKENS)[n] = tokens;
        return join((shared + own) * (inherited + 1), shared_tiles(n) + tiles_of(own_queries(n)));
    };
    const u64 total = scan_each(p.nodes, read, [&](int n, u64 before) {
        at(SEGMENT_BASE)[n] = high_of(before), at(TILE_BASE)[n] = low_of(before);
        ROLLED for (int kind = !shared; kind < 1 + own; ++kind)
            write_row(high_of(before) + (shared && kind ? inherited + 1 : 0), n, inherited, kind);
    });
    return keep_rows(total);
}

DEVICE bool make_tiles() {
    ROLLED for (int base = 0; base < p.tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const bool there = number < p.tiles;
        int kv_tiles = 0, decode = 0, seen = 0;
        if (there) {
            const int node = find(at(TILE_BASE), p.nodes, number);
            at(TILE_OF)[number] = 2 * node + (number >= first_tile(node, true));
            Tile x = tile(number);
            if (by_paths()) {
                at(TILE_SKIPPED)[number] = measure(x);
                at(TILE_TOKENS)[number] = x.tokens;
            }
            decode = by_decode(x.end - x.begin);
            seen = x.tokens, kv_tiles = max(1, ceil_div(x.tokens, p.a.cost[decode].kv_tile));
            at(TILE_KV_TILES)[number] = kv_tiles | decode << 31;
        }
        ROLLED for (int role = 0; role < 2; ++role) {
            const bool mine = there && decode == role;
            const u32 count = __popc(__ballot_sync(~0u, mine));
            if (!count) continue;
            const u32 most = __reduce_max_sync(~0u, mine ? kv_tiles : 0);
            const u64 sum = warp_sums(mine ? seen : 0);
            if (lane_of() != 31) continue;
            atomicMax(p.longest + role, int(most)), atomicAdd(p.of + role, int(count)), atomicAdd(p.tokens + role, sum);
        }
    }
    __syncthreads();
    return p.of[0] <= p.a.tile_capacity && p.of[1] <= p.a.decode_capacity;
}

// Replaces tiles by low tiles where there are few: FEW_KV_TILES of attention/gpu/gpu_plan.py.
DEVICE bool lower_tiles() {
    if (!p.of[0] || p.a.few_tokens < 0 || p.tokens[0] * p.a.kv_heads > u64(p.a.few_tokens) * p.a.num_sms) return true;
    __syncthreads();  // all threads have read these values
    if (threadIdx.x == 0) {
        p.low = 1, p.a.many = p.a.low_many, p.a.magic = p.a.low_magic;
        p.shared = p.before_tiles[0], p.global = p.before_tiles[1], p.shared_left = p.before_left;
        p.longest[0] = p.longest[1] = p.of[0] = p.of[1] = 0, p.tokens[0] = p.tokens[1] = 0;
    }
    __syncthreads();
    const auto tiles = [](int n) { return u64(shared_tiles(n) + tiles_of(own_queries(n))); };
    const u64 total = scan_each(p.nodes, tiles, [](int n, u64 before) { at(TILE_BASE)[n] = low_of(before); });
    return keep_tiles(low_of(total)) && make_tiles();
}

}  // namespace prefixkit
