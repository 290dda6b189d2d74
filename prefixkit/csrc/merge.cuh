// The end of a launch: all blocks meet, then the wide warps fold partial states, in the plan's order.
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

// LANES lanes fold one head of one row.  Partials are read in one pass, several at a time: what a merge costs is the latency of
// its reads.  Many rows: few lanes each, to have many rows under way; few rows: many lanes, to have many partials under way.
template <int VECTORS> struct Folded {
    float4 sum[VECTORS];
    float top, total;
};

template <int VECTORS> DEVICE void fold(Folded<VECTORS>& f, float lse, const float4 (&x)[VECTORS]) {
    const float top = fmaxf(f.top, lse), base = top == MINUS_INFINITY ? 0.f : top;
    const float shrink = exp2_fast((f.top - base) * LOG2E), weight = exp2_fast((lse - base) * LOG2E);
    f.top = top, f.total = f.total * shrink + weight;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        f.sum[j].x = f.sum[j].x * shrink + weight * x[j].x, f.sum[j].y = f.sum[j].y * shrink + weight * x[j].y;
        f.sum[j].z = f.sum[j].z * shrink + weight * x[j].z, f.sum[j].w = f.sum[j].w * shrink + weight * x[j].w;
    }
}

// A head of a row to fold, and the first of its partials: known one unit ahead, for each is a read that waits for the last.
template <int AT_ONCE> struct Parts {
    int begin = 0, count = 0;
    int first[AT_ONCE];
};

template <int AT_ONCE> DEVICE void find_bounds(const Attention& a, Parts<AT_ONCE>& p, int unit, int units) {
    p.count = 0;
    if (unit >= units) return;
    const int row = unit / a.heads;
    p.begin = a.merge_indptr[row], p.count = a.merge_indptr[row + 1] - p.begin;
}
template <int AT_ONCE> DEVICE void find_first(const Attention& a, Parts<AT_ONCE>& p) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
        if (i < p.count) p.first[i] = a.merge_indices[p.begin + i];
}

// Reads `count` (at most AT_ONCE) partials of a head, then folds them in order.
template <int AT_ONCE, int LANES, int VECTORS>
DEVICE void fold_some(const Attention& a, Folded<VECTORS>& f, const int (&parts)[AT_ONCE], int count, int head, int lane) {
    float lse[AT_ONCE];
    float4 x[AT_ONCE][VECTORS];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        if (i >= count) break;
        const long long at = (long long)parts[i] * a.heads + head;
        lse[i] = load_global1(a.partial_lse + at);
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) x[i][j] = load_global(a.partial_out + at * D + 4 * (lane + LANES * j));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
        if (i < count) fold(f, lse[i], x[i]);
}

template <int LANES, int VECTORS> DEVICE void finish_row(const Attention& a, const Folded<VECTORS>& f, int row, int head, int lane) {
    float lse = f.total > 0.f ? f.top + LN2 * log2_fast(f.total) : MINUS_INFINITY;
    const float factor = (f.total > 0.f ? 1.f / f.total : 0.f) * join_sink(lse, head, a.parameters);
    const long long at = (long long)row * a.heads + head;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
        *(uint2*)(a.out + at * D + 4 * (lane + LANES * j)) =
            make_uint2(pack(f.sum[j].x * factor, f.sum[j].y * factor), pack(f.sum[j].z * factor, f.sum[j].w * factor));
    if (lane == 0) a.lse[at] = lse;
}

// The threads [0, `threads`) of each block, `thread` of them this, fold all rows.  What they fold first, the plan says, so they look it
// up before they `meet` the other blocks, whose partial states they read.
template <int LANES, int AT_ONCE, class Meet> DEVICE void merge_rows_by(const Attention& a, int rows, int thread, int threads, Meet meet) {
    static_assert(D % (4 * LANES) == 0, "a lane holds whole vectors of a head");
    constexpr int VECTORS = D / (4 * LANES);
    const int units = rows * a.heads, lane = thread % LANES, step = gridDim.x * (threads / LANES);
    int unit = blockIdx.x + gridDim.x * (thread / LANES);
    Parts<AT_ONCE> now, next;
    find_bounds(a, now, unit, units);
    find_bounds(a, next, unit + step, units);
    find_first(a, now);
    meet();
    for (; unit < units; unit += step) {
        Parts<AT_ONCE> after;
        find_first(a, next);
        find_bounds(a, after, unit + 2 * step, units);
        if (now.count > 0) {
            const int row = unit / a.heads, head = unit - row * a.heads;
            Folded<VECTORS> f = {};
            f.top = MINUS_INFINITY;
            fold_some<AT_ONCE, LANES>(a, f, now.first, min(AT_ONCE, now.count), head, lane);
            for (int i = AT_ONCE; i < now.count; i += AT_ONCE) {
                Parts<AT_ONCE> more = now;
                more.begin += i, more.count -= i;
                find_first(a, more);
                fold_some<AT_ONCE, LANES>(a, f, more.first, min(AT_ONCE, more.count), head, lane);
            }
            finish_row<LANES>(a, f, row, head, lane);
        }
        now = next, next = after;
    }
}

template <class Meet> DEVICE void merge_rows(const Attention& a, int rows, int thread, int threads, Meet meet) {
    constexpr int MANY = D % 128 == 0 ? 32 : D % 64 == 0 ? 16 : D % 32 == 0 ? 8 : 4, FEW = D > 128 && D % 32 == 0 ? 8 : 4;
    if (rows * a.heads <= 2 * int(gridDim.x) * threads / MANY) merge_rows_by<MANY, D % 64 ? 4 : D <= 128 ? 16 : 8>(a, rows, thread, threads, meet);
    else merge_rows_by<FEW, 2>(a, rows, thread, threads, meet);
}

}  // namespace prefixkit
