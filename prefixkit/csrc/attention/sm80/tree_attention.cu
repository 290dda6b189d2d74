// Attention over a whole tree in one launch, for any GPU from sm_80 on.
//
// shapes     as tree_attention on Hopper, with any head size up to 256 that 16 divides.
// tiling     PREFIXKIT_BLOCKS blocks of four warps on each multiprocessor.  A block takes its tile items, four warps
//            together (tile_mma.cuh), and its decode items, one per warp (decode.cuh).  Half of the blocks begin with
//            the decode items, so that compute-bound and bandwidth-bound work share each multiprocessor.  After a grid
//            barrier all blocks merge partial states (merge.cuh).
// cost       floor = max(KV bytes / bandwidth, flops / what mma.sync reaches); measured: docs/appendix/kernel_log.md.
// limits     all blocks must be resident at once; PREFIXKIT_SHARED bytes of dynamic shared memory a block, 128 threads.
#include "attention/sm80/tile_mma.cuh"

namespace prefixkit {

constexpr int MAX_STAGES = 6;  // of a decode warp's ring
constexpr int INFO_BYTES = DECODE_WARPS * MAX_STAGES * sizeof(DecodeKVTile);
constexpr int BATCH_BYTES = DECODE_WARPS * BATCH * sizeof(Resolved);
constexpr int STAGES_FIT = (PREFIXKIT_SHARED - INFO_BYTES - BATCH_BYTES) / (DECODE_WARPS * STAGE_BYTES);
constexpr int STAGES = STAGES_FIT >= MAX_STAGES ? MAX_STAGES : STAGES_FIT >= 3 ? 3 : STAGES_FIT;
constexpr int RING_BYTES = DECODE_WARPS * STAGES * STAGE_BYTES;
constexpr int DECODE_BYTES = RING_BYTES + INFO_BYTES + BATCH_BYTES;
constexpr int SHARED_BYTES = TILE_BYTES > DECODE_BYTES ? TILE_BYTES : DECODE_BYTES;
static_assert(STAGES >= 1 && SHARED_BYTES <= PREFIXKIT_SHARED, "more shared memory than a block can have");

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, PREFIXKIT_BLOCKS)
    tree_attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char base[];
    const int warp = threadIdx.x >> 5;
    clear_padding(a, threadIdx.x, 32 * BLOCK_WARPS);
    const int tile_round = blockIdx.x / (gridDim.x / PREFIXKIT_BLOCKS) & 1;  // blocks of one multiprocessor differ
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        if (round == tile_round) {
            unsigned char* extra = base + Q_BYTES + SLOTS * SLOT_BYTES;
            TileShared s;
            s.q = shared_address(base), s.ring = s.q + Q_BYTES;
            s.walk = (Walk*)extra, s.kv_tiles = (KVTile*)(s.walk + 1), s.positions = (int*)(s.kv_tiles + QUEUE);
            tile_role(a, s);
        } else {
            decode_role<STAGES>(a, shared_address(base) + warp * STAGES * STAGE_BYTES,
                                (DecodeKVTile*)(base + RING_BYTES) + warp * MAX_STAGES,
                                (Resolved*)(base + RING_BYTES + INFO_BYTES) + warp * BATCH);
        }
        __syncthreads();
    }
    if (!is_merged(a)) return;
    merge_rows(a, a.counts[2], threadIdx.x, 32 * BLOCK_WARPS, [&] {
        if (threadIdx.x == 0) grid_barrier(a.sync);
        __syncthreads();
    });
}

}  // namespace prefixkit
