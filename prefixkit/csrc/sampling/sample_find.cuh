// Finds the token: one block, with all of its threads, among the tokens of one of its warps.
#pragma once
#include "sampling/sample_passes.cuh"

namespace prefixkit {

// The sum over the threads of the block before this one, and over all of them; `table` has a place for each warp.
template <class V> DEVICE V block_sums(V x, V* table, V& all) {
    const V sums = warp_sums(x);
    __syncthreads();
    if (lane_of() == 31) table[warp_of()] = sums;
    __syncthreads();
    V before = sums - x;
    all = 0;
    for (int i = 0; i < WARPS; ++i) {
        const V sum = table[i];
        if (i < warp_of()) before += sum;
        all += sum;
    }
    return before;
}

// By a block: the token at which the cumulative kept weights of warp `owner` exceed `target`, if this thread has it,
// else -1.
template <class T, bool CACHED>
DEVICE int find_token(const Row<T, CACHED>& row, const Filter& filter, int owner, u64 target, bool top_p, bool stored,
                      Nucleus n, u32 drop) {
    constexpr int EACH = 8;
    Shared& s = shared();
    const int begin = row.begin(owner % WARPS), end = begin + 128 * row.steps(owner % WARPS);
#pragma unroll 1
    for (int part = begin; part < end; part += EACH * THREADS) {
        const int at = part + EACH * thread_of();
        float w[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j += 4) {
            const float4 x = at < end ? filter.weight(row.score(at + j), CACHED && stored) : make_float4(0, 0, 0, 0);
            w[j] = floorf(x.x), w[j + 1] = floorf(x.y), w[j + 2] = floorf(x.z), w[j + 3] = floorf(x.w);
        }
        if (top_p) {
            u32 ties = 0, all;
            for (float y : w) ties += y == n.border;
            u32 tie = block_sums(ties, s.firsts, all);
            for (float& y : w)
                if (y < n.border || y < n.least || (y == n.border && tie++ < drop)) y = 0;
            drop -= min(drop, all);
        }
        u64 mine = 0, all;
        for (float y : w) mine += u64(y);
        u64 sum = block_sums(mine, s.parts, all);
        if (target >= all) {
            target -= all;
            continue;
        }
        if (sum > target || sum + mine <= target) return -1;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            sum += u64(w[j]);
            if (sum > target) return at + j;
        }
    }
    return -1;
}

}  // namespace prefixkit
