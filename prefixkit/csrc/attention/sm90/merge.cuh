// The end of a launch on Hopper where there are many rows to merge: partial states come by bulk copies.
//
// tiling     a warp merges slabs of 8 heads of a row, 4 lanes a head.  A partial state of a slab is 8 D floats in one copy, which a ring in
//            shared memory, free by now, holds six of: loads through L1, of which the rings leave 28 KB, would keep too few under way.
// cost       reads each partial state once (4 D + 4 bytes per head), at what the L2 gives.
// limits     heads are a multiple of 4: 16-byte copies of log-sum-exps.
#pragma once
#include "attention/merge.cuh"

namespace prefixkit {

constexpr int SLAB = 8, SLAB_LANES = 4, SLAB_VECTORS = D / (4 * SLAB_LANES);
constexpr int SLAB_BYTES = SLAB * D * 4, SLAB_STAGES = 6, SLAB_WARPS = 8;
constexpr int SLAB_RING_BYTES = SLAB_WARPS * SLAB_STAGES * (SLAB_BYTES + SLAB * 4 + 8);

// One warp's ring.
struct SlabRing {
    u32 data, lse, full;
    DEVICE SlabRing(u32 rings, int warp) {
        data = rings + warp * (SLAB_STAGES * SLAB_BYTES);
        lse = rings + SLAB_WARPS * SLAB_STAGES * SLAB_BYTES + warp * (SLAB_STAGES * SLAB * 4);
        full = rings + SLAB_WARPS * SLAB_STAGES * (SLAB_BYTES + SLAB * 4) + warp * (SLAB_STAGES * 8);
    }
    DEVICE void begin() const {
        for (int i = 0; i < SLAB_STAGES; ++i) barrier_init(full + 8 * i, 1);
        async_fence();
    }
};

// Up to 32 pairs (row, slab) of one warp, lane i knowing number i.
struct SlabUnits {
    int first, step, number;        // unit i is first + i * step
    int begin, count, part0, part1; // this lane's: where its partials are listed, how many, the first two

    DEVICE SlabUnits(const Attention& a, int first, int step, int units, int slabs) : first(first), step(step) {
        number = first < units ? min(32, (units - first + step - 1) / step) : 0;
        begin = count = part0 = part1 = 0;
        if (lane_anew() >= number) return;
        const int row = (first + lane_anew() * step) / slabs;
        begin = a.merge_indptr[row], count = a.merge_indptr[row + 1] - begin;
        if (count > 0) part0 = a.merge_indices[begin];
        if (count > 1) part1 = a.merge_indices[begin + 1];
    }
};

// A partial of a pair, in the order in which they are merged.
struct SlabPlace {
    int unit = 0, part = 0;
    // Passes over units without partials; false at the end.
    DEVICE bool settle(const SlabUnits& u) {
        while (unit < u.number && part >= __shfl_sync(~0u, u.count, unit)) ++unit, part = 0;
        return unit < u.number;
    }
};

DEVICE void slab_issue(const Attention& a, const SlabRing& ring, const SlabUnits& u, SlabPlace& place, int slabs, int stage) {
    if (!place.settle(u)) return;
    const int unit = u.first + place.unit * u.step, head = unit % slabs * SLAB, heads = min(SLAB, a.heads - head);
    const int first = __shfl_sync(~0u, place.part == 0 ? u.part0 : u.part1, place.unit), begin = __shfl_sync(~0u, u.begin, place.unit);
    const long long at = (long long)(place.part < 2 ? first : a.merge_indices[begin + place.part]) * a.heads + head;
    if (lane_anew() == 0) {
        barrier_arrive_expect(ring.full + 8 * stage, heads * (D * 4 + 4));
        copy_bulk(ring.data + stage * SLAB_BYTES, a.partial_out + at * D, heads * (D * 4), ring.full + 8 * stage);
        copy_bulk(ring.lse + stage * (SLAB * 4), a.partial_lse + at, heads * 4, ring.full + 8 * stage);
    }
    ++place.part;
}

// Vector j of a lane: heads begin at different ones, so that the 8 lanes that read together find different banks.
DEVICE int slab_column(int lane, int j) { return 4 * (lane % SLAB_LANES + SLAB_LANES * ((j + lane / SLAB_LANES) % SLAB_VECTORS)); }

DEVICE void slab_merge(const SlabRing& ring, int stage, Merged<SLAB_VECTORS>& f) {
    const int lane = lane_anew(), head = lane / SLAB_LANES;
    float lse[1] = {load_shared1(ring.lse + stage * (SLAB * 4) + 4 * head)};
    float4 x[1][SLAB_VECTORS];
#pragma unroll
    for (int j = 0; j < SLAB_VECTORS; ++j) x[0][j] = load_shared(ring.data + stage * SLAB_BYTES + 4 * (head * D + slab_column(lane, j)));
    merge_partials<1>(f, lse, x, 1);
}

DEVICE void slab_finish(const Attention& a, const Merged<SLAB_VECTORS>& f, int row, int slab) {
    const int lane = lane_anew(), head = slab * SLAB + lane / SLAB_LANES;
    if (head >= a.heads) return;
    float lse = f.total > 0.f ? f.top + LN2 * log2_fast(f.total) : MINUS_INFINITY;
    const float factor = (f.total > 0.f ? reciprocal(f.total) : 0.f) * join_sink(lse, head, a.parameters);
    const long long at = (long long)row * a.heads + head;
#pragma unroll
    for (int j = 0; j < SLAB_VECTORS; ++j)
        *(uint2*)(a.out + at * D + slab_column(lane, j)) =
            make_uint2(pack(f.sum[j].x * factor, f.sum[j].y * factor), pack(f.sum[j].z * factor, f.sum[j].w * factor));
    if (lane % SLAB_LANES == 0) a.lse[at] = lse;
}

// `warp` of SLAB_WARPS in each block: merges its share of all rows.  `block_barrier` returns once no warp of the block uses the rings,
// `all_barrier` once all partial states are written.
template <class BlockBarrier, class AllBarrier>
DEVICE void merge_slabs(const Attention& a, int rows, u32 rings, int warp, BlockBarrier block_barrier, AllBarrier all_barrier) {
    const int slabs = (a.heads + SLAB - 1) / SLAB, units = rows * slabs, step = gridDim.x * SLAB_WARPS;
    const SlabRing ring(rings, warp);
    int first = blockIdx.x + gridDim.x * warp, stage = 0, phase = 0;
    SlabUnits u(a, first, step, units, slabs);
    block_barrier();
    if (lane_anew() == 0) ring.begin();
    all_barrier();
    async_fence_global();  // partial states were written by ordinary stores
    while (u.number > 0) {
        SlabPlace ahead, here;
#pragma unroll 1
        for (int i = 0; i < SLAB_STAGES; ++i) slab_issue(a, ring, u, ahead, slabs, (stage + i) % SLAB_STAGES);
        while (here.settle(u)) {
            Merged<SLAB_VECTORS> f = {};
            f.top = MINUS_INFINITY;
            const int count = __shfl_sync(~0u, u.count, here.unit), unit = u.first + here.unit * step;
#pragma unroll 1
            for (; here.part < count; ++here.part) {
                barrier_wait(ring.full + 8 * stage, phase);
                slab_merge(ring, stage, f);
                __syncwarp();
                slab_issue(a, ring, u, ahead, slabs, stage);
                if (++stage == SLAB_STAGES) stage = 0, phase ^= 1;
            }
            slab_finish(a, f, unit / slabs, unit % slabs);
        }
        first += 32 * step;
        u = SlabUnits(a, first, step, units, slabs);
    }
}

}  // namespace prefixkit
