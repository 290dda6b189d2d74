// What the warps of a cluster exchange: sums, and the place where a cumulative sum reaches a number.
#pragma once
#include "sampling/sample_row.cuh"

namespace prefixkit {

constexpr int MOST_BLOCKS = 8, MOST_WARPS = MOST_BLOCKS * WARPS;
constexpr int BINS = 2048;

// The first part of each block's shared memory; the row's cache follows.
struct Shared {
    u64 sums[MOST_WARPS];   // one for each warp of the cluster, as in the arrays below
    u64 parts[MOST_WARPS];
    u32 ties[MOST_WARPS];   // then those to drop
    float tops[MOST_WARPS], raws[MOST_WARPS], exps[MOST_WARPS];
    u32 firsts[MOST_WARPS];
    u64 uniform, above, held;
    u32 least, first, last, unused[3];
    u32 bins[BINS];
};
static_assert(sizeof(Shared) % 16 == 0, "the cache is read by 16 bytes");

DEVICE Shared& shared() { return *(Shared*)dynamic_shared; }
DEVICE int thread_of() { return threadIdx.x; }
DEVICE int warps() { return cluster_size() * WARPS; }
DEVICE int my_number() { return cluster_rank() * WARPS + warp_of(); }

// Writes a warp's value into every block's table; all lanes hold it.  A cluster_sync must follow.
template <class V> DEVICE void publish(V* table, V value) {
    if (lane_of() < cluster_size()) *peer(table + my_number(), lane_of()) = value;
}

template <class V> DEVICE V add(V a, V b) { return a + b; }
template <class V> DEVICE V least_of(V a, V b) { return min(a, b); }
template <class V> DEVICE V warp_sum(V x) { return warp_reduce(x, add<V>); }
// Reduces a table of all warps by f, starting with `x`; every lane gets the result.
template <class T, class V, class F> DEVICE V table_reduce(const T* table, V x, F f) {
    for (int i = lane_of(); i < warps(); i += 32) x = f(x, V(table[i]));
    return warp_reduce(x, f);
}
DEVICE float table_max(const float* table) { return table_reduce(table, MINUS_INFINITY, max_nan); }
template <class V> DEVICE V table_sum(const V* table) { return table_reduce(table, V(0), add<V>); }

struct Place {
    int index;
    u64 before;  // the sum up to it
};
// By a warp, finds the first of `count` values up to which they sum to `need`, which is at least 1; the last value if
// they do not.
template <class F> DEVICE Place find_sum(int count, u64 need, F value) {
    const int each = (count + 31) >> 5, begin = lane_of() * each, end = min(begin + each, count);
    u64 sum = 0;
    for (int i = begin; i < end; ++i) sum += value(i);
    const u64 all = warp_sums(sum);
    const u32 enough = __ballot_sync(~0u, all >= need);
    const int lane = enough ? __ffs(int(enough)) - 1 : 31;
    u64 before = __shfl_sync(~0u, all - sum, lane);
    int index = min(lane * each, count - 1);
    const int last = min(index + each, count) - 1;
    for (; index < last; ++index) {
        const u64 here = value(index);
        if (before + here >= need) break;
        before += here;
    }
    return {index, before};
}

}  // namespace prefixkit
