// Attention over a whole tree in one launch, for Hopper (sm_90a).
//
// shapes     q [rows, heads, D], KV in pages; bfloat16 or float16; D 64 or 128; see plan.cuh for all that a launch gets.
// tiling     one block per multiprocessor, with roles: 4 warps gather KV for two warpgroups that multiply wide tiles (wide_sm90.cuh),
//            and 4 warps stream narrow items (narrow.cuh) beside them, so that matrix-bound prefixes and memory-bound
//            suffixes share each multiprocessor.  At the end all blocks meet and fold partial states (merge.cuh).
// cost       floor = max(KV bytes / 4.3 TB/s, flops / 790 TFLOP/s); docs/kernels.md has predictions and measurements.
// limits     the grid is one block per multiprocessor; SHARED_BYTES of dynamic shared memory, 512 threads.
#include "wide_sm90.cuh"

namespace prefixkit {

constexpr int MIXED_STAGES = D <= 64 ? 6 : 3;    // 96 KB of narrow ring beside the wide tiles
constexpr int ALONE_STAGES = MAX_STAGES;         // 192 KB (D 128) where there are no wide tiles
constexpr int MIXED_BYTES = WIDE_BYTES + NARROW_WARPS * MIXED_STAGES * STAGE_BYTES;
constexpr int ALONE_BYTES = NARROW_WARPS * ALONE_STAGES * STAGE_BYTES;
constexpr int DATA_BYTES = MIXED_BYTES > ALONE_BYTES ? MIXED_BYTES : ALONE_BYTES;
constexpr int INFO_BYTES = (NARROW_WARPS * MAX_STAGES + 2) * 32;
constexpr int BATCH_BYTES = NARROW_WARPS * BATCH * 48;
constexpr int SHARED_BYTES = DATA_BYTES + INFO_BYTES + BATCH_BYTES + 128;
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block can have");

// 65,536 registers: 4 warpgroups of 128 threads at 512 in all.  The wide warps need 184 (fewer, and their products run one by
// one); where wide work is the longer part the loaders get what keeps them from spilling, else the narrow warps do.
#ifndef PREFIXKIT_WIDE_BOUND
#define PREFIXKIT_WIDE_BOUND 0
#endif
constexpr int LOAD_REGISTERS = PREFIXKIT_WIDE_BOUND ? 40 : 24, NARROW_REGISTERS = PREFIXKIT_WIDE_BOUND ? 104 : 120;
constexpr int WIDE_REGISTERS = 184;

extern "C" __global__ void __launch_bounds__(512, 1) tree_attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char base[];
    const u32 data = shared_address(base), barriers = data + DATA_BYTES + INFO_BYTES + BATCH_BYTES;
    Resolved* batches = (Resolved*)(base + DATA_BYTES + INFO_BYTES);
    Chunk* infos = (Chunk*)(base + DATA_BYTES);
    WideShared s;
    s.q = data, s.k = data + Q_BYTES, s.v = s.k + 2 * UNIT_BYTES, s.infos = infos + NARROW_WARPS * MAX_STAGES;
    s.q_full = barriers, s.q_empty = barriers + 8, s.k_full = barriers + 16, s.k_empty = barriers + 32;
    s.v_full = barriers + 48, s.v_empty = barriers + 64;
    if (threadIdx.x == 0) {
        barrier_init(s.q_full, LOADERS), barrier_init(s.q_empty, 2);
        for (int i = 0; i < 2; ++i) {
            barrier_init(s.k_full + 8 * i, LOADERS + 1), barrier_init(s.k_empty + 8 * i, 2);
            barrier_init(s.v_full + 8 * i, LOADERS), barrier_init(s.v_empty + 8 * i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int warp = threadIdx.x >> 5, role = warp >> 2;
    if (role == 0) {
        registers_down<LOAD_REGISTERS>();
        wide_load(a, s);
        asm volatile("bar.arrive 1, 512;" ::: "memory");
    } else if (role == 1) {
        registers_down<NARROW_REGISTERS>();
        const int mine = warp - 4;
        const bool alone = a.counts[0] == 0;
        const int stages = alone ? ALONE_STAGES : MIXED_STAGES;
        narrow_role(a, data + (alone ? 0 : WIDE_BYTES) + mine * stages * STAGE_BYTES, stages, infos + mine * MAX_STAGES,
                    batches + mine * BATCH);
        asm volatile("bar.arrive 1, 512;" ::: "memory");
    } else {
        registers_up<WIDE_REGISTERS>();
        wide_role(a, s, role - 2);
        if (a.counts[3] != 0) {
            named_barrier<1, 512>();
            if (threadIdx.x == 256) grid_meet(a.sync);
            named_barrier<4, 256>();
            merge_rows(a, a.counts[2], threadIdx.x - 256, 256);
        }
    }
}

}  // namespace prefixkit
