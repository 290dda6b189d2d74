// The end of a launch where many rows are merged: a few lanes merge one head of one row, so that loads of many rows are
// in flight.  Each partial state (4 D + 4 bytes per head) is read once, two partials of a head at a time.
#pragma once
#include "attention/merge.cuh"

namespace prefixkit {

constexpr int MERGE_LANES = D > 128 && D % 32 == 0 ? 8 : 4, MERGE_VECTORS = D / (4 * MERGE_LANES);
static_assert(D % (4 * MERGE_LANES) == 0, "a lane holds whole vectors of a head");

// A head to merge, and two of its partials.
struct PartialPair : PartialList {
    int part[2];

    using PartialList::PartialList;
    DEVICE void look_up(const Attention& a) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (i < count) part[i] = a.merge_indices[begin + i];
    }
    // Adds both partials, or the one that is left.
    DEVICE void merge(const Attention& a, Merged<MERGE_VECTORS>& f, int head, int lane) const {
        float lse[2];
        float4 x[2][MERGE_VECTORS];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i >= count) break;
            const long long at = (long long)part[i] * a.heads + head;
            lse[i] = load_global1(a.partial_lse + at);
#pragma unroll
            for (int j = 0; j < MERGE_VECTORS; ++j)
                x[i][j] = load_global(a.partial_out + at * D + 4 * (lane + MERGE_LANES * j));
        }
        merge_partials(f, lse, x, count);
    }
};

// `thread` of `threads` in each block merges its share of all heads.  Each look-up waits for the previous one, so
// look-ups run ahead: two heads for the list, one head for the first two partials.
template <class Barrier>
DEVICE void merge_rows(const Attention& a, int rows, int thread, int threads, Barrier barrier) {
    if (few_heads(a, rows, threads / 32)) return merge_heads(a, rows, thread >> 5, threads >> 5, barrier);
    const int entries = rows * a.heads, lane = thread % MERGE_LANES, step = gridDim.x * (threads / MERGE_LANES);
    int entry = blockIdx.x + gridDim.x * (thread / MERGE_LANES);
    PartialPair now(a, entry, entries), next(a, entry + step, entries);
    now.look_up(a);
    barrier();
    for (; entry < entries; entry += step) {
        next.look_up(a);
        const PartialPair after(a, entry + 2 * step, entries);
        if (now.count > 0) {
            const int row = entry / a.heads, head = entry - row * a.heads;
            Merged<MERGE_VECTORS> f;
            now.merge(a, f, head, lane);
            while ((now.count -= 2) > 0) {
                now.begin += 2;
                now.look_up(a);
                now.merge(a, f, head, lane);
            }
            finish_head(a, f, row, head, lane == 0, [&](int j) { return 4 * (lane + MERGE_LANES * j); });
        }
        now = next, next = after;
    }
}

}  // namespace prefixkit
