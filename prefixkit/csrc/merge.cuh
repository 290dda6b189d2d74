// The end of a launch: all blocks meet, then every warp folds partial states of some rows, in the plan's order.
//
// cost   reads each partial state once (4 D + 4 bytes per head) and writes each row once; the meeting costs about 1.5 us.
// limits all blocks must be resident at once: the grid is at most one block per multiprocessor.
#pragma once
#include "plan.cuh"
#include "variant.cuh"

namespace prefixkit {

// All blocks of the grid meet.  One thread of each block calls it; works for any grid size and resets itself: the top bit of
// the counter flips once all have come.
DEVICE void grid_meet(u32* counter) {
    __threadfence();
    const u32 mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    const u32 before = atomicAdd(counter, mine);
    while (((before ^ load_acquire(counter)) & 0x80000000u) == 0) __nanosleep(20);
    __threadfence();
}

// One warp folds one head of one row.
DEVICE void merge_row(const Attention& a, int row, int head, int begin, int count) {
    const int lane = threadIdx.x & 31;
    constexpr int VECTORS = (D + 127) / 128;
    const int* parts = a.merge_indices + begin;
    float top = MINUS_INFINITY;
    for (int i = lane; i < count; i += 32) top = fmaxf(top, load_global1(a.partial_lse + (long long)parts[i] * a.heads + head));
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float base = top == MINUS_INFINITY ? 0.f : top;
    float4 sum[VECTORS] = {};
    float total = 0.f;
    for (int block = 0; block < count; block += 32) {
        const int n = min(32, count - block);
        const int part = lane < n ? parts[block + lane] : 0;
        const float weight = lane < n ? exp2_fast((load_global1(a.partial_lse + (long long)part * a.heads + head) - base) * LOG2E) : 0.f;
#pragma unroll 4
        for (int i = 0; i < n; ++i) {
            const float w = __shfl_sync(~0u, weight, i);
            const float* from = a.partial_out + ((long long)__shfl_sync(~0u, part, i) * a.heads + head) * D;
            total += w;
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const int d = 4 * lane + 128 * j;
                if (D % 128 == 0 || d < D) {
                    const float4 x = load_global(from + d);
                    sum[j].x += w * x.x, sum[j].y += w * x.y, sum[j].z += w * x.z, sum[j].w += w * x.w;
                }
            }
        }
    }
    float lse = total > 0.f ? base + LN2 * log2_fast(total) : MINUS_INFINITY;
    const float factor = (total > 0.f ? 1.f / total : 0.f) * join_sink(lse, head);
    u16* to = a.out + ((long long)row * a.heads + head) * D;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int d = 4 * lane + 128 * j;
        if (D % 128 == 0 || d < D)
            *(uint2*)(to + d) = make_uint2(pack(sum[j].x * factor, sum[j].y * factor), pack(sum[j].z * factor, sum[j].w * factor));
    }
    if (lane == 0) a.lse[(long long)row * a.heads + head] = lse;
}

// Warp `warp` of `warps` in the grid takes its share of the rows.
DEVICE void merge_rows(const Attention& a, int rows, int warp, int warps) {
    const int units = rows * a.heads;
    for (int unit = warp; unit < units; unit += warps) {
        const int row = unit / a.heads;
        const int begin = a.merge_indptr[row], count = a.merge_indptr[row + 1] - begin;
        if (count) merge_row(a, row, unit - row * a.heads, begin, count);
    }
}

}  // namespace prefixkit
