// Attention over a whole tree in one launch, for any GPU from sm_80 on: the narrow path alone.
//
// shapes     as tree_attention on Hopper; head sizes 64, 96, 128, 192, 256.  Every item is narrow: at most 8 rows, so plans come from
//            make_gpu_plan(..., narrow_only=True), and groups are at most 8.
// tiling     blocks of 4 warps that each stream items of their own (narrow.cuh); at the end all blocks meet and fold (merge.cuh).
// cost       the bandwidth of narrow items; a shared node is read again, mostly from L2, for every 8 rows.
// limits     not measured; a matrix path with 64-row tiles is missing here.  One block per multiprocessor.
#define PREFIXKIT_NARROW_FIRST 0
#include "narrow.cuh"

namespace prefixkit {

// 99 KB are what the smallest of these GPUs gives a block.
constexpr int STAGES = D <= 128 ? 3 : D <= 192 ? 2 : 1;
constexpr int RING_BYTES = NARROW_WARPS * STAGES * STAGE_BYTES, INFO_BYTES = NARROW_WARPS * MAX_STAGES * 32;
constexpr int SHARED_BYTES = RING_BYTES + INFO_BYTES + NARROW_WARPS * BATCH * 48;
static_assert(SHARED_BYTES <= 101376, "more shared memory than a block can have");

extern "C" __global__ void __launch_bounds__(128, 1) tree_attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char base[];
    const int warp = threadIdx.x >> 5;
    narrow_role(a, shared_address(base) + warp * STAGES * STAGE_BYTES, STAGES, (Chunk*)(base + RING_BYTES) + warp * MAX_STAGES,
                (Resolved*)(base + RING_BYTES + INFO_BYTES) + warp * BATCH);
    if (a.counts[3] == 0) return;
    __syncthreads();
    if (threadIdx.x == 0) grid_meet(a.sync);
    __syncthreads();
    merge_rows(a, a.counts[2], threadIdx.x, 128);
}

}  // namespace prefixkit
