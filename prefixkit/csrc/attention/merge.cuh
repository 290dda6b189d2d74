// The end of a launch: a grid barrier, then the merge of partial states in the plan's order.  Here a warp merges each
// head.
//
// tiling a lane looks up one partial (its row and log-sum-exp) and sums a few columns over all partials.
// cost   each partial state (4 V_DIM + 4 bytes per head) is read once; the grid barrier costs 1.5 us.  A merge of few
//        heads costs the latency of its reads and of fetching its code, so the code is short.
// limits all blocks must be resident at once, which a cooperative launch guarantees.
#pragma once
#include "attention/plan.cuh"
#include "attention/variant.cuh"

namespace prefixkit {

// Called by one thread of each block.  The counter's top bit flips once all blocks have arrived, so the counter resets
// itself.
DEVICE void grid_barrier(u32* counter) {
    fence_device();
    const u32 mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    const u32 before = atomicAdd(counter, mine);
    while (((before ^ load_acquire(counter)) & 0x80000000u) == 0) {}
}

// Finishes an item's row, as a partial state or, with the sink, as an output: scales `factor`, stores the log-sum-exp
// if `writes`, and returns the row's index in [rows, heads].
DEVICE long long finish_row(
    const Attention& a, int q_begin, int partial, const TileRow& row, float lse, float& factor, bool writes) {
    if (partial < 0) factor *= finish_sum(lse, row.head, a.sinks);
    const long long at = row.index(a, partial < 0 ? q_begin : partial);
    if (writes) (partial < 0 ? a.lse : a.partial_lse)[at] = lse;
    return at;
}

// The state of a head being merged, by lanes that hold some columns each.
template <int VECTORS> struct Merged {
    float4 sum[VECTORS] = {};
    float top = MINUS_INFINITY, total = 0.f;
};

DEVICE void scale(float4& x, float by) { x.x *= by, x.y *= by, x.z *= by, x.w *= by; }
DEVICE void add(float4& sum, float weight, const float4& x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// Adds `count` (at most N) partials in order; the weights are computed first, because they do not depend on each other.
template <int N, int VECTORS>
DEVICE void merge_partials(Merged<VECTORS>& f, const float (&lse)[N], const float4 (&x)[N][VECTORS], int count) {
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

// Writes a merged head.  `column(j)` is the first column of this lane's vector j; one lane `writes` the log-sum-exp.
template <int VECTORS, class Column>
DEVICE void finish_head(const Attention& a, const Merged<VECTORS>& f, int row, int head, bool writes, Column column) {
    float lse = f.total > 0.f ? f.top + LN2 * log2_rounded(f.total) : MINUS_INFINITY;
    const float factor = (f.total > 0.f ? reciprocal(f.total) : 0.f) * finish_sum(lse, head, a.sinks);
    const long long at = (long long)row * a.heads + head;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        store_four(
            outputs(a) + at * V_DIM + column(j),
            make_float4(f.sum[j].x * factor, f.sum[j].y * factor, f.sum[j].z * factor, f.sum[j].w * factor));
    if (writes) a.lse[at] = lse;
}

// Whether there are so few heads to merge that each warp gets at most two of them.
DEVICE bool few_heads(const Attention& a, int rows, int warps) { return rows * a.heads <= 2 * int(gridDim.x) * warps; }

// Where the plan lists the partials of a row.  `entry` is one of `entries` pairs (row, head), counted row by row.
struct PartialList {
    int begin = 0, count = 0;

    DEVICE PartialList(const Attention& a, int entry, int entries) {
        if (entry >= entries) return;
        const int row = entry / a.heads;
        begin = a.merge_indptr[row], count = a.merge_indptr[row + 1] - begin;
    }
    // The partial that this lane looks up, among 32 from `first` on.
    DEVICE int look_up(const Attention& a, int first) const {
        const int i = first + lane_anew();
        return i < count ? a.merge_indices[begin + i] : 0;
    }
};

constexpr int HEAD_VECTORS = (V_DIM + 127) / 128, HEAD_LANES = V_DIM / 4 / HEAD_VECTORS, HEAD_PARTS = 32 / HEAD_VECTORS;
constexpr int HEAD_STEP = 4;
static_assert(HEAD_LANES * HEAD_VECTORS * 4 == V_DIM, "lanes hold a head together");

// Adds `count` (at most 32) partials of a head; this lane has looked up one of them, `mine`.
DEVICE void merge_head(const Attention& a, Merged<HEAD_VECTORS>& f, int mine, int count, int head) {
    const int lane = lane_anew(), column = 4 * min(lane, HEAD_LANES - 1);
    float lse = MINUS_INFINITY, weight = 0.f;
    if (lane < count) lse = load_global1(a.partial_lse + (long long)mine * a.heads + head);
#pragma unroll 1
    for (int first = 0; first < count; first += HEAD_PARTS) {
        float4 x[HEAD_PARTS][HEAD_VECTORS];
        // Loads four partials at a time; past the last partial, it loads the last one again.
#pragma unroll
        for (int step = 0; step < HEAD_PARTS; step += HEAD_STEP) {
            if (first + step >= count) break;
#pragma unroll
            for (int i = step; i < step + HEAD_STEP; ++i) {
                const int part = __shfl_sync(~0u, mine, min(first + i, count - 1));
                const float* from = a.partial_out + ((long long)part * a.heads + head) * V_DIM + column;
#pragma unroll
                for (int j = 0; j < HEAD_VECTORS; ++j) x[i][j] = load_global(from + 4 * HEAD_LANES * j);
            }
        }
        if (first == 0) {  // while these loads are in flight
            const float top = fmaxf(lanes_max<1, 32>(lse), f.top);
            const float base = top == MINUS_INFINITY ? 0.f : top, shrink = exp2_fast((f.top - base) * LOG2E);
            weight = exp2_fast((lse - base) * LOG2E);
            f.top = top, f.total = f.total * shrink + lanes_sum<1, 32>(weight);
#pragma unroll
            for (int j = 0; j < HEAD_VECTORS; ++j) scale(f.sum[j], shrink);
        }
#pragma unroll
        for (int step = 0; step < HEAD_PARTS; step += HEAD_STEP) {
            if (first + step >= count) break;
#pragma unroll
            for (int i = step; i < step + HEAD_STEP; ++i) {
                const float by = __shfl_sync(~0u, weight, first + i);  // 0 past the last partial
#pragma unroll
                for (int j = 0; j < HEAD_VECTORS; ++j) add(f.sum[j], by, x[i][j]);
            }
        }
    }
}

// `warp` of `warps` in each block merges its share of all heads.  The warp looks up the partials of its first head
// before it waits at `barrier` for the partial states of other blocks.
template <class Barrier> DEVICE void merge_heads(const Attention& a, int rows, int warp, int warps, Barrier barrier) {
    const int entries = rows * a.heads, step = gridDim.x * warps;
    int entry = blockIdx.x + gridDim.x * warp;
    PartialList now(a, entry, entries);
    int mine = now.look_up(a, 0);
    barrier();
#pragma unroll 1
    for (; entry < entries; entry += step) {
        const PartialList next(a, entry + step, entries);
        const int later = next.look_up(a, 0);
        if (now.count > 0) {
            const int row = entry / a.heads, head = entry - row * a.heads;
            Merged<HEAD_VECTORS> f;
#pragma unroll 1
            for (int first = 0; first < now.count; first += 32)
                merge_head(a, f, first ? now.look_up(a, first) : mine, min(32, now.count - first), head);
            const int lane = lane_anew();
            if (lane < HEAD_LANES)
                finish_head(a, f, row, head, lane == 0, [&](int j) { return 4 * (lane + HEAD_LANES * j); });
        }
        now = next, mine = later;
    }
}

}  // namespace prefixkit
