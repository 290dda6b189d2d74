// Heavy paths: an order of the nodes, path after path, and which part of each path is shared.
//
// heavy_paths.py and path_sharing.py of attention/paths.
//
// A path follows last children, so the subtrees of all its nodes end at the same place.  A path is named by its leaf,
// the last node of these subtrees.
//
// order    a stable counting sort by subtree_end: ENDED[i] is the number of nodes whose subtrees end before i, a
//          histogram and one prefix sum.  A node's depth is n - ENDED[n + 1], because every earlier node whose subtree
//          has not ended is an ancestor.  A node's place in the order is the path's end minus the node's height above
//          the leaf.  No pointer is followed.
// sharing  of each path, one part: sums, from the path's end upwards, of consumers and of the tokens that they need not
//          read again, then a maximum.  A path is decided once the paths that hang on it are decided (PENDING counts
//          them); the thread that decided the last of these goes on with it.  Paths of up to FEW nodes take a thread,
//          others a warp, 32 nodes at a time.
// above    what a row inherits from a path is a difference of prefix sums along the order, so a walk to the root takes
//          a step for each path, at most log2 of the rows, and not one for each node.
#pragma once
#include "planner/plan_state.cuh"

namespace prefixkit {

constexpr int FEW = 8, NOWHERE = 0x7fffffff;

// ---- order ----
DEVICE int leaf_of(int n) { return at(SUBTREE_END)[n] - 1; }
DEVICE int depth_of(int n) { return n - at(ENDED)[n + 1]; }
DEVICE int path_begin(int leaf) { return at(ENDED)[leaf + 1]; }
DEVICE int path_end(int leaf) { return at(ENDED)[leaf + 2]; }
DEVICE bool is_top(int n) { return at(PLACE)[n] == path_begin(leaf_of(n)); }
DEVICE bool is_shared(int leaf, int place) { return at(LOW)[leaf] <= place && place <= at(HIGH)[leaf]; }

DEVICE void take_path_arrays() {
    if (threadIdx.x == 0) {
        take(LIMIT, LIMIT, p.nodes + 4);
        p.array[SEGMENT_BEFORE] = p.global, p.global += (p.a.segment_capacity + 3) & ~3;
        p.kept[0] = p.shared, p.kept[1] = p.global, p.kept_left = p.shared_left;
        take(ORDER, RUN_START, p.nodes + 4);
    }
    __syncthreads();
}
DEVICE void free_path_arrays() {
    if (threadIdx.x == 0) p.shared = p.kept[0], p.global = p.kept[1], p.shared_left = p.kept_left;
    __syncthreads();
}

DEVICE void order_paths() {
    ROLLED for (int i = threadIdx.x; i < p.nodes + 2; i += THREADS) at(ENDED)[i] = 0;
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) atomicAdd(at(ENDED) + at(SUBTREE_END)[n], 1);
    __syncthreads();
    scan_each(p.nodes + 2, [](int i) { return u64(at(ENDED)[i]); }, [](int i, u64 before) {
        at(ENDED)[i] = low_of(before);
    });
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        const int leaf = leaf_of(n), place = path_end(leaf) - 1 - (depth_of(leaf) - depth_of(n));
        at(PLACE)[n] = place, at(ORDER)[place] = n;
    }
    __syncthreads();
}

// ---- sharing ----
struct Part {
    int spared;        // consumers of the path's first node that the parts decided below spare
    u64 saved;
    double net;        // the net gain of the part
    int begin, left;   // the place of its first node, or -1; the consumers that no longer read what is above it
    int last;          // the last place that two consumers read
};

// Extends a part by one more node of the path, from the end upwards, with the sums up to that node.
DEVICE void extend(Part& x, int place, int node, int most, u64 saved) {
    const double gain = __dmul_rn(double((long long)saved), p.a.gain_per_token);
    const double net = __dadd_rn(gain, -price_of(node));
    if (net > x.net) x.net = net, x.begin = place, x.left = most - 1;
    if (most > 1) x.last = max(x.last, place);
}
DEVICE u64 unread(int most, int node) { return most > 1 ? u64(most - 1) * u64(at(LENGTH)[node]) : 0; }
DEVICE int spared_at(int node) { return *(volatile int*)(at(SPARED) + node); }

DEVICE Part part_of_few(int leaf) {
    Part x = {0, 0, 0.0, -1, 0, -1};
    ROLLED for (int place = path_end(leaf) - 1; place >= path_begin(leaf); --place) {
        const int node = at(ORDER)[place];
        x.spared += spared_at(node);
        const int most = at(MOST)[node] - x.spared;
        x.saved += unread(most, node);
        extend(x, place, node, most, x.saved);
    }
    return x;
}

// The same part, found by a warp.
DEVICE Part part_of_many(int leaf) {
    Part x = {0, 0, 0.0, -1, 0, -1};
    ROLLED for (int end = path_end(leaf); end > path_begin(leaf); end -= 32) {
        const int place = end - 1 - lane_of();
        const bool there = place >= path_begin(leaf);
        const int node = there ? at(ORDER)[place] : 0;
        const int spared = x.spared + warp_sums(there ? spared_at(node) : 0);
        const int most = there ? at(MOST)[node] - spared : 0;
        const u64 saved = x.saved + warp_sums(unread(most, node));
        if (there) extend(x, place, node, most, saved);
        x.spared = __shfl_sync(~0u, spared, 31), x.saved = __shfl_sync(~0u, saved, 31);
    }
    const double net = warp_reduce(x.net, [](double a, double b) { return a < b ? b : a; });
    const int begin = int(__reduce_max_sync(~0u, x.net == net ? x.begin + 1 : 0)) - 1;
    const u32 owner = __ballot_sync(~0u, x.begin == begin);
    x.left = __shfl_sync(~0u, x.left, __ffs(owner) - 1);
    x.net = net, x.begin = begin, x.last = int(__reduce_max_sync(~0u, x.last + 1)) - 1;
    return x;
}

// Records a path's part; returns the path above if all paths that hang on that one are decided, else -1.
CALLED int decide(int leaf, int spared, int begin, int left, int last) {
    if (begin >= 0) at(LOW)[leaf] = begin, at(HIGH)[leaf] = last, spared += left;
    const int above = at(PARENT)[at(ORDER)[path_begin(leaf)]];
    if (above < 0) return -1;
    atomicAdd(at(SPARED) + above, spared);
    __threadfence_block();
    if (atomicSub(at(PENDING) + leaf_of(above), 1) != 1) return -1;
    __threadfence_block();
    return leaf_of(above);
}

DEVICE void share_by_paths() {
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        at(MOST)[n] = at(UP)[at(SUBTREE_END)[n]] - at(UP)[n + 1];
        at(PENDING)[n] = at(SPARED)[n] = 0;
        at(LOW)[n] = NOWHERE, at(HIGH)[n] = -1;
    }
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        const int above = at(PARENT)[n];
        if (above >= 0 && at(MOST)[n] > 1 && is_top(n)) atomicAdd(at(PENDING) + leaf_of(above), 1);
    }
    __syncthreads();
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS)
        at(UP)[n] = at(MOST)[n] > 1 && is_top(n) && at(PENDING)[leaf_of(n)] == 0;
    __syncthreads();
    ROLLED for (int base = 0; base < p.nodes; base += THREADS) {
        const int n = base + threadIdx.x;
        int leaf = n < p.nodes && at(UP)[n] ? leaf_of(n) : -1;
        ROLLED while (true) {
            ROLLED while (leaf >= 0 && path_end(leaf) - path_begin(leaf) <= FEW) {
                const Part x = part_of_few(leaf);
                leaf = decide(leaf, x.spared, x.begin, x.left, x.last);
            }
            const u32 left = __ballot_sync(~0u, leaf >= 0);
            if (!left) break;
            const int owner = __ffs(left) - 1, path = __shfl_sync(~0u, leaf, owner);
            const Part x = part_of_many(path);
            if (lane_of() == owner) leaf = decide(path, x.spared, x.begin, x.left, x.last);
            __syncwarp();
        }
    }
    __syncthreads();
    if (p.pays) return;
    // The first node of a path's part, if its queries take tiles, or -1.
    const auto head_of = [](int leaf) {
        const int head = at(HIGH)[leaf] < 0 ? -1 : at(ORDER)[at(LOW)[leaf]];
        return head < 0 || by_decode(queries_below(head)) ? -1 : head;
    };
    ROLLED for (int n = threadIdx.x; n < p.nodes; n += THREADS) {
        const int leaf = leaf_of(n), times = at(MOST)[n] - 1;
        if (!is_shared(leaf, at(PLACE)[n]) || head_of(leaf) < 0) continue;
        count_spared((long long)times * at(LENGTH)[n]);
        if (n == head_of(leaf)) count_above(n, times, [](int up) { return is_shared(leaf_of(up), at(PLACE)[up]); });
    }
    __syncthreads();
    if (is_enough((long long)p.tokens_spared)) return;
    ROLLED for (int leaf = threadIdx.x; leaf < p.nodes; leaf += THREADS)
        if (head_of(leaf) >= 0) at(LOW)[leaf] = NOWHERE, at(HIGH)[leaf] = -1;
    __syncthreads();
}

}  // namespace prefixkit
