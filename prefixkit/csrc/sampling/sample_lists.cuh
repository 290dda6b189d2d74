// A row's few relevant tokens: a list for each warp, then one list of all in every block, ranked by comparing all
// pairs.
#pragma once
#include "sampling/sample_find.cuh"

namespace prefixkit {

// Both lists share memory with the bins in which digits are counted at other times.
constexpr int CHOSEN = BINS / 2, LIST = CHOSEN / WARPS;
DEVICE float* list_of(int warp) { return (float*)shared().bins + warp * LIST; }
DEVICE u32* chosen() { return shared().bins + CHOSEN; }

// Appends those of four values that f accepts to this warp's list of `count`; values past the list's end are only
// counted.
template <class F> DEVICE void append(float4 x, u32& count, F f) {
    float* list = list_of(warp_of());
    each(x, [&](float y) {
        const bool mine = f(y);
        const u32 takers = __ballot_sync(~0u, mine), at = count + __popc(takers & ((1u << lane_of()) - 1));
        if (mine && at < LIST) list[at] = y;
        count += __popc(takers);
    });
}
// Calls f(token's value) for this lane's part of its warp's list.
template <class F> DEVICE void each_listed(u32 count, F f) {
    for (u32 i = lane_of(); i < count; i += 32) f(list_of(warp_of())[i]);
}

struct Gathered {
    int all;           // -1: too many; then none are chosen
    u32 begin, count;  // this thread's list among all, in order of warps; four threads share it
};
// Copies all lists into every block, converted by `key`; `count` is the length of this warp's list.
template <class F> DEVICE Gathered gather_lists(u32 count, F key) {
    Shared& s = shared();
    publish(s.firsts, count);
    cluster_sync();
    const int at = 2 * lane_of(), list = thread_of() / 4;  // four threads a list
    const u32 first = at < warps() ? s.firsts[at] : 0, second = at < warps() ? s.firsts[at + 1] : 0;
    const u32 sums = warp_sums(first + second);
    const int all = __shfl_sync(~0u, sums, 31);
    if (__ballot_sync(~0u, max(first, second) > LIST) || all > CHOSEN) return {-1, 0, 0};
    const u32 even = __shfl_sync(~0u, first, list / 2), odd = __shfl_sync(~0u, second, list / 2);
    u32 to = __shfl_sync(~0u, sums - first - second, list / 2);
    if (list & 1) to += even;
    const u32 here = list & 1 ? odd : even;
    if (list < warps()) {
        const float* from = peer(list_of(list % WARPS), list / WARPS);
        for (u32 i = thread_of() & 3; i < here; i += 4) chosen()[to + i] = key(from[i]);
    }
    if (thread_of() < 4 && all + thread_of() < CHOSEN) chosen()[all + thread_of()] = 0;  // they are read by fours
    return {all, to, here};
}

// The least of the chosen that is needed to reach `need`, from the largest down; `above` is what the larger ones hold.
struct Least {
    u32 key;
    u64 above;
};
template <class V, class F> DEVICE Least least_chosen(int count, u64 need, F value) {
    Shared& s = shared();
    const u32* keys = chosen();
    if (thread_of() == 0) s.least = ~0u;
    __syncthreads();
    Least mine = {~0u, 0};
    for (int i = thread_of(); i < count; i += THREADS) {
        const u32 key = keys[i];
        V above = 0;
#pragma unroll 1
        for (int j = 0; j < count; j += 4) {
            const uint4 x = *(const uint4*)(keys + j);
            if (x.x > key) above += value(x.x);
            if (x.y > key) above += value(x.y);
            if (x.z > key) above += value(x.z);
            if (x.w > key) above += value(x.w);
        }
        if (above < need && key < mine.key) mine = {key, above};
    }
    atomicMin(&s.least, mine.key);
    __syncthreads();
    if (mine.key == s.least) s.above = mine.above;  // all that write write the same
    __syncthreads();
    return {s.least, s.above};
}

// A lower bound of scores: the largest scores of at least `need` threads of the cluster, and of few more, do not lie
// below it; see `chosen`.
DEVICE float bound(u32 need) {
    Shared& s = shared();
    u32 keys[MOST_BLOCKS];
#pragma unroll
    for (int rank = 0; rank < MOST_BLOCKS; ++rank)
        keys[rank] = rank < cluster_size() ? peer(chosen(), rank)[thread_of()] : 0;
    // The largest of every warp is at least the least of these.
    u32 least = key_of(need <= warps() ? table_reduce(s.tops, -MINUS_INFINITY, least_of<float>) : MINUS_INFINITY);
    u32 most = key_of(table_max(s.tops));
#pragma unroll 1
    for (int turn = 0; least < most; ++turn) {
        const u32 middle = most - (most - least) / 2;
        u32 count = 0;
        for (u32 key : keys) count += key >= middle;
        u64* table = s.parts + (turn & 1) * WARPS;  // late threads still read the other one
        const u32 sum = __reduce_add_sync(~0u, count);
        if (lane_of() == 0) table[warp_of()] = sum;
        __syncthreads();
        u32 all = 0;
        for (int i = 0; i < WARPS; ++i) all += u32(table[i]);
        if (all < need) {
            most = middle - 1;
        } else {
            least = middle;
            if (all <= need + need / 8 + 8) break;
        }
    }
    return of_key(least);
}

// Lists the tokens whose score is at least `low`, and adds up exponentials if `sums`.
template <class T, bool CACHED>
DEVICE u32 list_scores(const Row<T, CACHED>& row, float low, float top, bool sums, float& exps) {
    u32 count = 0;
    row.template each_score<2>([&](int, int, float4 x) {
        if (sums) exps += exps_of(x, top);
        if (__ballot_sync(~0u, largest(x) >= low)) append(x, count, [=](float y) { return y >= low; });
    });
    return count;
}

}  // namespace prefixkit
