// What the warps of a cluster tell each other: sums, and where a cumulative sum reaches a number.
#pragma once
#include "sampling/sample_row.cuh"

namespace prefixkit {

constexpr int MOST_BLOCKS = 8, MOST_WARPS = MOST_BLOCKS * WARPS;
constexpr int BINS = 2048;

// Each block's, the first part of its shared memory; the row's cache follows.
struct Shared {
    u64 sums[MOST_WARPS];   // of each warp of the cluster, as the following
    u64 parts[MOST_WARPS];
    u32 ties[MOST_WARPS];   // then those to drop
    float tops[MOST_WARPS], raws[MOST_WARPS], exps[MOST_WARPS];
    u32 firsts[MOST_WARPS];
    u64 uniform, above;
    u32 least, unused[3];
    u32 bins[BINS];
};
static_assert(sizeof(Shared) % 16 == 0, "the cache is read by 16 bytes");

DEVICE Shared& shared() { return *(Shared*)shared_memory(); }
DEVICE int warps() { return cluster_size() * WARPS; }
DEVICE int my_number() { return cluster_rank() * WARPS + warp_of(); }

// Writes a warp's value into every block's table; all lanes hold it.  A cluster_sync must follow.
template <class V> DEVICE void tell(V* table, V value) {
    if (lane_of() < cluster_size()) *peer(table + my_number(), lane_of()) = value;
}

template <class V> DEVICE V warp_sum(V x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = max_nan(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
DEVICE float warp_min(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fminf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
DEVICE u32 warp_min(u32 x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = min(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
// Sums over the lanes up to this one.
template <class V> DEVICE V warp_sums(V x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const V other = __shfl_up_sync(~0u, x, step);
        if (lane_of() >= step) x += other;
    }
    return x;
}
// Over a table of all warps, each lane two of them; the same in all lanes.
DEVICE float table_max(const float* table) {
    float x = MINUS_INFINITY;
    for (int i = lane_of(); i < warps(); i += 32) x = max_nan(x, table[i]);
    return warp_max(x);
}
DEVICE float table_min(const float* table) {
    float x = -MINUS_INFINITY;
    for (int i = lane_of(); i < warps(); i += 32) x = fminf(x, table[i]);
    return warp_min(x);
}
template <class V> DEVICE V table_sum(const V* table) {
    V x = 0;
    for (int i = lane_of(); i < warps(); i += 32) x += table[i];
    return warp_sum(x);
}

struct Place {
    int index;
    u64 before;  // the sum up to it
};
// The first of `count` values up to which they sum to `need`, by a warp; need >= 1.  The last one if they do not.
template <class F> DEVICE Place reach(int count, u64 need, F value) {
    const int each = (count + 31) >> 5, begin = lane_of() * each, end = min(begin + each, count);
    u64 sum = 0;
    for (int i = begin; i < end; ++i) sum += value(i);
    const u64 all = warp_sums(sum);
    const u32 reached = __ballot_sync(~0u, all >= need);
    const int lane = reached ? __ffs(int(reached)) - 1 : 31;
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
