// The end of a launch where there are many rows to merge, by loads alone.
//
// tiling a few lanes merge one head of one row, so that many rows are under way.
// cost   reads each partial state once (4 D + 4 bytes per head); partials are read in one pass, two at a time.
#pragma once
#include "attention/merge.cuh"

namespace prefixkit {

// A head of a row to merge, and the first of its partials: known one unit ahead, for each is a read that waits for the last.
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

// Reads `count` (at most AT_ONCE) partials of a head, then merges them in order.
template <int AT_ONCE, int LANES, int VECTORS>
DEVICE void fold_some(const Attention& a, Merged<VECTORS>& f, const int (&parts)[AT_ONCE], int count, int head, int lane) {
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
    merge_partials(f, lse, x, count);
}

// `thread` of `threads` in each block: merges its share of all heads, with LANES lanes each.
template <int LANES, int AT_ONCE, class Barrier> DEVICE void merge_rows_by(const Attention& a, int rows, int thread, int threads, Barrier barrier) {
    static_assert(D % (4 * LANES) == 0, "a lane holds whole vectors of a head");
    constexpr int VECTORS = D / (4 * LANES);
    const int units = rows * a.heads, lane = thread % LANES, step = gridDim.x * (threads / LANES);
    int unit = blockIdx.x + gridDim.x * (thread / LANES);
    Parts<AT_ONCE> now, next;
    find_bounds(a, now, unit, units);
    find_bounds(a, next, unit + step, units);
    find_first(a, now);
    barrier();
    for (; unit < units; unit += step) {
        Parts<AT_ONCE> after;
        find_first(a, next);
        find_bounds(a, after, unit + 2 * step, units);
        if (now.count > 0) {
            const int row = unit / a.heads, head = unit - row * a.heads;
            Merged<VECTORS> f = {};
            f.top = MINUS_INFINITY;
            fold_some<AT_ONCE, LANES>(a, f, now.first, min(AT_ONCE, now.count), head, lane);
            for (int i = AT_ONCE; i < now.count; i += AT_ONCE) {
                Parts<AT_ONCE> more = now;
                more.begin += i, more.count -= i;
                find_first(a, more);
                fold_some<AT_ONCE, LANES>(a, f, more.first, min(AT_ONCE, more.count), head, lane);
            }
            finish_head<LANES>(a, f, row, head, lane);
        }
        now = next, next = after;
    }
}

template <class Barrier> DEVICE void merge_rows(const Attention& a, int rows, int thread, int threads, Barrier barrier) {
    constexpr int LANES = D > 128 && D % 32 == 0 ? 8 : 4;
    if (few_heads(a, rows, threads / 32)) merge_heads(a, rows, thread >> 5, threads >> 5, barrier);
    else merge_rows_by<LANES, 2>(a, rows, thread, threads, barrier);
}

}  // namespace prefixkit
