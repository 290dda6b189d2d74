// The end of a launch on Hopper where many rows are merged: bulk copies load the partial states.
//
// tiling     a warp merges slabs of 8 heads of a row, 4 lanes a head.  A slab of a partial state is one copy of 8 V_DIM
//            floats into a ring of six in shared memory: the 28 KB of L1 would keep too few loads in flight.
// cost       reads each partial state once (4 V_DIM + 4 bytes per head), at the bandwidth of the L2.
// limits     V_DIM is a whole number of 16-byte vectors.  There is memory for three floats after the log-sum-exps,
//            which is read with the last of them.
#pragma once
#include "attention/merge.cuh"
#include "attention/sm90/tile_shared.cuh"

namespace prefixkit {

constexpr int SLAB = 8, SLAB_LANES = 4, SLAB_VECTORS = V_DIM / (4 * SLAB_LANES);
constexpr int SLAB_BYTES = SLAB * V_DIM * 4, SLAB_STAGES = 6, SLAB_WARPS = CONSUMER_WARPS;
// A slab's log-sum-exps are copied in 16-byte vectors, the first of which may begin before them.  After the vectors
// lies the number of floats before the first log-sum-exp.
constexpr int SLAB_SUMS_BEFORE = 12 * 4, SLAB_SUMS_BYTES = 16 * 4;
constexpr int SLAB_RING_BYTES = SLAB_WARPS * SLAB_STAGES * (SLAB_BYTES + SLAB_SUMS_BYTES + 8);

// Clears the floats that copies of the last log-sum-exps include.
DEVICE void clear_behind_sums(const Attention& a, int thread) {
    const int partials = a.counts[3];
    if (blockIdx.x == 0 && thread < 3 && partials != 0) a.partial_lse[(long long)partials * a.heads + thread] = 0.f;
}

// One warp's ring.
struct SlabRing {
    u32 data, lse, full;
    DEVICE SlabRing(u32 rings, int warp) {
        data = rings + warp * (SLAB_STAGES * SLAB_BYTES);
        lse = rings + SLAB_WARPS * SLAB_STAGES * SLAB_BYTES + warp * (SLAB_STAGES * SLAB_SUMS_BYTES);
        full = rings + SLAB_WARPS * SLAB_STAGES * (SLAB_BYTES + SLAB_SUMS_BYTES) + warp * (SLAB_STAGES * 8);
    }
};

// Up to 32 pairs (row, slab) of one warp.  Pair i has number first + i * step among all pairs, and lane i knows its
// partials.
struct SlabBatch {
    int first, step, size;
    int begin = 0, count = 0, part0 = 0, part1 = 0;  // where this lane's partials are listed, how many, the first two

    DEVICE SlabBatch(const Attention& a, int first, int step, int pairs, int slabs) : first(first), step(step) {
        size = first < pairs ? min(32, (pairs - first + step - 1) / step) : 0;
        if (lane_anew() >= size) return;
        const int row = (first + lane_anew() * step) / slabs;
        begin = a.merge_indptr[row], count = a.merge_indptr[row + 1] - begin;
        if (count > 0) part0 = a.merge_indices[begin];
        if (count > 1) part1 = a.merge_indices[begin + 1];
    }
};

// A partial of a pair, in the order in which they are merged.
struct SlabPartial {
    int pair = 0, part = 0;
    // Passes over pairs without partials; false at the end.
    DEVICE bool find(const SlabBatch& b) {
        while (pair < b.size && part >= __shfl_sync(~0u, b.count, pair)) ++pair, part = 0;
        return pair < b.size;
    }
};

DEVICE void slab_issue(
    const Attention& a, const SlabRing& ring, const SlabBatch& b, SlabPartial& p, int slabs, int stage) {
    if (!p.find(b)) return;
    const int head = (b.first + p.pair * b.step) % slabs * SLAB, heads = min(SLAB, a.heads - head);
    const int known = __shfl_sync(~0u, p.part == 0 ? b.part0 : b.part1, p.pair);
    const int begin = __shfl_sync(~0u, b.begin, p.pair);
    const long long at = (long long)(p.part < 2 ? known : a.merge_indices[begin + p.part]) * a.heads + head;
    if (lane_anew() == 0) {
        const u32 full = ring.full + 8 * stage, sums = ring.lse + stage * SLAB_SUMS_BYTES;
        const int before = int(at & 3), sum_bytes = (before + heads + 3 & ~3) * 4;
        store_shared_int(sums + SLAB_SUMS_BEFORE, before);
        barrier_arrive_expect(full, heads * (V_DIM * 4) + sum_bytes);
        copy_bulk(ring.data + stage * SLAB_BYTES, a.partial_out + at * V_DIM, heads * (V_DIM * 4), full);
        copy_bulk(sums, a.partial_lse + at - before, sum_bytes, full);
    }
    ++p.part;
}

// The first column of a lane's vector j.  Heads begin with different columns, so that 8 lanes read from different
// banks.
DEVICE int slab_column(int lane, int j) {
    return 4 * (lane % SLAB_LANES + SLAB_LANES * ((j + lane / SLAB_LANES) % SLAB_VECTORS));
}

DEVICE void slab_merge(const SlabRing& ring, int stage, Merged<SLAB_VECTORS>& f) {
    const int lane = lane_anew(), head = lane / SLAB_LANES;
    const u32 sums = ring.lse + stage * SLAB_SUMS_BYTES;
    float lse[1] = {load_shared1(sums + 4 * (load_shared_int(sums + SLAB_SUMS_BEFORE) + head))};
    float4 x[1][SLAB_VECTORS];
#pragma unroll
    for (int j = 0; j < SLAB_VECTORS; ++j)
        x[0][j] = load_shared(ring.data + stage * SLAB_BYTES + 4 * (head * V_DIM + slab_column(lane, j)));
    merge_partials<1>(f, lse, x, 1);
}

// `warp` of SLAB_WARPS in each block merges its share of all rows.  `block_barrier` returns once no warp of the block
// uses the rings, `all_barrier` once all partial states are written.
template <class BlockBarrier, class AllBarrier>
DEVICE void merge_slabs(
    const Attention& a, int rows, u32 rings, int warp, BlockBarrier block_barrier, AllBarrier all_barrier) {
    const int slabs = (a.heads + SLAB - 1) / SLAB, pairs = rows * slabs, step = gridDim.x * SLAB_WARPS;
    const SlabRing ring(rings, warp);
    int first = blockIdx.x + gridDim.x * warp, stage = 0, phase = 0;
    SlabBatch b(a, first, step, pairs, slabs);
    block_barrier();
    if (lane_anew() == 0) {
        for (int i = 0; i < SLAB_STAGES; ++i) barrier_init(ring.full + 8 * i, 1);
        async_fence();
    }
    all_barrier();
    async_fence_global();  // partial states were written by ordinary stores
    while (b.size > 0) {
        SlabPartial ahead, here;
#pragma unroll 1
        for (int i = 0; i < SLAB_STAGES; ++i) slab_issue(a, ring, b, ahead, slabs, (stage + i) % SLAB_STAGES);
        while (here.find(b)) {
            Merged<SLAB_VECTORS> f;
            const int count = __shfl_sync(~0u, b.count, here.pair), pair = b.first + here.pair * step;
#pragma unroll 1
            for (; here.part < count; ++here.part) {
                barrier_wait(ring.full + 8 * stage, phase);
                slab_merge(ring, stage, f);
                __syncwarp();
                slab_issue(a, ring, b, ahead, slabs, stage);
                if (++stage == SLAB_STAGES) stage = 0, phase ^= 1;
            }
            const int lane = lane_anew(), head = pair % slabs * SLAB + lane / SLAB_LANES;
            auto column = [&](int j) { return slab_column(lane, j); };
            if (head < a.heads) finish_head(a, f, pair / slabs, head, lane % SLAB_LANES == 0, column);
        }
        first += 32 * step;
        b = SlabBatch(a, first, step, pairs, slabs);
    }
}

}  // namespace prefixkit
