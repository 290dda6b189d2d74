// The end of a launch: a grid barrier, then merging of partial states, in the plan's order.  Here: how one head of one row is merged where there
// are few of them, by a warp.
//
// tiling a lane looks up one partial (its row, its log-sum-exp) and sums a few columns over all.
// cost   reads each partial state once (4 D + 4 bytes per head) and writes each row once; the grid barrier costs about 1.5 us.  What a merge
//        of few heads costs is the latency of its reads, and of its instructions, each of which comes once: the code is short.
// limits all blocks must be resident at once, which a cooperative launch sees to.
#pragma once
#include "attention/plan.cuh"
#include "attention/variant.cuh"

namespace prefixkit {

// A barrier of the whole grid.  One thread of each block calls it; works for any grid size and resets itself: the top bit of
// the counter flips once all have come.
DEVICE void grid_barrier(u32* counter) {
    fence_device();
    const u32 mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    const u32 before = atomicAdd(counter, mine);
    while (((before ^ load_acquire(counter)) & 0x80000000u) == 0) {}
}

// A head being merged, by lanes that hold some columns each.
template <int VECTORS> struct Merged {
    float4 sum[VECTORS];
    float top, total;
};

DEVICE void scale(float4& x, float by) { x.x *= by, x.y *= by, x.z *= by, x.w *= by; }
DEVICE void add(float4& sum, float weight, const float4& x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// The next `count` (at most N) partials, which join in order: all weights first, for they need not wait for each other.
template <int N, int VECTORS> DEVICE void merge_partials(Merged<VECTORS>& f, const float (&lse)[N], const float4 (&x)[N][VECTORS], int count) {
    float top = f.top, weight[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) top = fmaxf(top, lse[i]);
    const float base = top == MINUS_INFINITY ? 0.f : top, shrink = exp2_fast((f.top - base) * LOG2E);
    f.top = top, f.total *= shrink;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        weight[i] = i < count ? exp2_fast((lse[i] - base) * LOG2E) : 0.f;
        f.total += weight[i];
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) scale(f.sum[j], shrink);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) add(f.sum[j], weight[i], x[i][j]);
    }
}

// Writes a head; this is `lane` of LANES that hold it.
template <int LANES, int VECTORS> DEVICE void finish_head(const Attention& a, const Merged<VECTORS>& f, int row, int head, int lane) {
    float lse = f.total > 0.f ? f.top + LN2 * log2_fast(f.total) : MINUS_INFINITY;
    const float factor = (f.total > 0.f ? reciprocal(f.total) : 0.f) * join_sink(lse, head, a.parameters);
    const long long at = (long long)row * a.heads + head;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        *(uint2*)(a.out + at * D + 4 * (lane + LANES * j)) =
            make_uint2(pack(f.sum[j].x * factor, f.sum[j].y * factor), pack(f.sum[j].z * factor, f.sum[j].w * factor));
    if (lane == 0) a.lse[at] = lse;
}

// Whether there are so few heads to merge that each gets a warp of its own, or two share one.
DEVICE bool few_heads(const Attention& a, int rows, int warps) { return rows * a.heads <= 2 * int(gridDim.x) * warps; }

// The partials of one head of one row: how many, where their list begins, and this lane's of the first 32.
struct HeadParts {
    int begin = 0, count = 0, mine = 0;

    DEVICE HeadParts() {}
    DEVICE HeadParts(const Attention& a, int unit, int units) {
        if (unit >= units) return;
        const int row = unit / a.heads;
        begin = a.merge_indptr[row], count = a.merge_indptr[row + 1] - begin;
        mine = look_up(a, 0);
    }
    DEVICE int look_up(const Attention& a, int first) const {
        const int i = first + lane_anew();
        return i < count ? a.merge_indices[begin + i] : 0;
    }
};

constexpr int HEAD_VECTORS = (D + 127) / 128, HEAD_LANES = D / 4 / HEAD_VECTORS, HEAD_PARTS = 32 / HEAD_VECTORS, HEAD_STEP = 4;
static_assert(HEAD_LANES * HEAD_VECTORS * 4 == D, "lanes hold a head together");

// Partials [first, first + 32) of a head, of which this lane knows one.
DEVICE void merge_head(const Attention& a, Merged<HEAD_VECTORS>& f, int mine, int count, int head) {
    const int lane = lane_anew();
    float lse = lane < count ? load_global1(a.partial_lse + (long long)mine * a.heads + head) : MINUS_INFINITY, weight = 0.f;
#pragma unroll 1
    for (int first = 0; first < count; first += HEAD_PARTS) {
        float4 x[HEAD_PARTS][HEAD_VECTORS];
        // Four at a time, the last ones again where there are fewer.
#pragma unroll
        for (int step = 0; step < HEAD_PARTS; step += HEAD_STEP) {
            if (first + step >= count) break;
#pragma unroll
            for (int i = step; i < step + HEAD_STEP; ++i) {
                const int part = __shfl_sync(~0u, mine, min(first + i, count - 1));
                const float* from = a.partial_out + ((long long)part * a.heads + head) * D + 4 * min(lane, HEAD_LANES - 1);
#pragma unroll
                for (int j = 0; j < HEAD_VECTORS; ++j) x[i][j] = load_global(from + 4 * HEAD_LANES * j);
            }
        }
        if (first == 0) {  // while they come
            float top = lse, total;
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            top = fmaxf(top, f.top);
            const float base = top == MINUS_INFINITY ? 0.f : top, shrink = exp2_fast((f.top - base) * LOG2E);
            weight = total = exp2_fast((lse - base) * LOG2E);
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
            f.top = top, f.total = f.total * shrink + total;
#pragma unroll
            for (int j = 0; j < HEAD_VECTORS; ++j) scale(f.sum[j], shrink);
        }
#pragma unroll
        for (int step = 0; step < HEAD_PARTS; step += HEAD_STEP) {
            if (first + step >= count) break;
#pragma unroll
            for (int i = step; i < step + HEAD_STEP; ++i) {
                const float by = __shfl_sync(~0u, weight, first + i);  // 0 behind the last
#pragma unroll
                for (int j = 0; j < HEAD_VECTORS; ++j) add(f.sum[j], by, x[i][j]);
            }
        }
    }
}

// `warp` of `warps` in each block: merges its share of all heads.  What it merges first, the plan says, so it looks that up before it
// waits at `barrier` for the other blocks, whose partial states it reads.
template <class Barrier> DEVICE void merge_heads(const Attention& a, int rows, int warp, int warps, Barrier barrier) {
    const int units = rows * a.heads, step = gridDim.x * warps;
    int unit = blockIdx.x + gridDim.x * warp;
    HeadParts now(a, unit, units);
    barrier();
#pragma unroll 1
    for (; unit < units; unit += step) {
        const HeadParts next(a, unit + step, units);
        if (now.count > 0) {
            const int row = unit / a.heads, head = unit - row * a.heads;
            Merged<HEAD_VECTORS> f = {};
            f.top = MINUS_INFINITY;
#pragma unroll 1
            for (int first = 0; first < now.count; first += 32)
                merge_head(a, f, first ? now.look_up(a, first) : now.mine, min(32, now.count - first), head);
            if (lane_anew() < HEAD_LANES) finish_head<HEAD_LANES>(a, f, row, head, lane_anew());
        }
        now = next;
    }
}

}  // namespace prefixkit
