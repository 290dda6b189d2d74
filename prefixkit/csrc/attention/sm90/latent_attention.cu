// Attention over a whole tree of latents in one launch, for Hopper (sm_90a).
//
// shapes     q [rows, heads, D], out [rows, heads, V_DIM]; pages of latents and of rotary keys; see latent.cuh.
// tiling     one block per multiprocessor, with roles: a warp loads KV tiles, three load queries, one warpgroup
//            computes scores, two add values.  After a grid barrier the blocks merge.
// cost       floor = max(2 D bytes per token read / 4.3 TB/s, flops / 790 TFLOP/s); measured:
//            docs/appendix/kernel_log.md.
// limits     the grid is one block per multiprocessor; SHARED_BYTES of dynamic shared memory, 512 threads.
#define PREFIXKIT_MAPS 1
#include "attention/sm90/latent.cuh"

namespace prefixkit {

// What a block keeps in shared memory; tiles begin at multiples of 1024 bytes.
struct Shared {
    unsigned char rings[LATENT_STAGES * K_TILE_BYTES], q[LATENT_ROWS * COLUMNS * 128], p[LATENT_ROWS * 128];
    u64 barriers[LATENT_BARRIERS];
    int4 items[2];
    KVTileInfo kv_tiles[LATENT_STAGES];
    float shrink[LATENT_ROWS], factor[LATENT_ROWS];
    int rose[SCORE_WARPS];
};
constexpr int SHARED_BYTES = sizeof(Shared);
static_assert(sizeof(Shared::barriers) % 16 == 0, "what follows is read by 16 bytes");
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block can have");

// 65,536 registers / 128 threads: the register counts of a thread of each of the 4 warpgroups add up to 512 at most.
constexpr int LOAD_REGISTERS = 48, SCORE_REGISTERS = 80, VALUE_REGISTERS = 192;

DEVICE LatentShared latent_shared(Shared& s) {
    LatentShared w;
    TileShared& t = w.tile;
    t.stages = LATENT_STAGES;
    t.k = kept(shared_address(s.rings)), t.v = t.k;
    const auto at = [&](const void* p) { return t.k + u32((const unsigned char*)p - s.rings); };
    t.full = at(s.barriers), t.k_empty = t.full + 8 * LATENT_STAGES * PARTS, t.v_empty = t.k_empty;
    t.item_full = t.k_empty + 8 * LATENT_STAGES, t.item_empty = t.item_full + 16;
    t.items = at(s.items), t.kv_tiles = at(s.kv_tiles), t.ones = 0;
    w.q = at(s.q), w.p = at(s.p);
    w.q_full = t.item_empty + 16, w.q_empty = w.q_full + 8, w.p_full = w.q_full + 16, w.p_empty = w.q_full + 24;
    w.shrink = at(s.shrink), w.factor = at(s.factor), w.rose = at(s.rose);
    return w;
}

// The value warps merge, once all warps of all blocks are done.
DEVICE void merge(const Attention& a) {
    const int thread = threadIdx.x - 256;
    merge_heads(a, a.counts[2], thread >> 5, VALUE_WARPS, [&] {
        named_barrier<1, 512>();
        if (thread == 0) grid_barrier(a.sync);
        named_barrier<4, 256>();
    });
}

extern "C" __global__ void __launch_bounds__(512, 1) latent_attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    hold_parameters(a);
    if (threadIdx.x == 0) {
        latent_barriers(latent_shared(shared));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    const int warp = uniform(threadIdx.x >> 5), role = warp >> 2;
    if (role == 0) {
        registers_down<LOAD_REGISTERS>();
        // Overlaps the read of counts.
        const Item first = load_item(a.tile_items, blockIdx.x, a.kv_heads, a.tile_capacity);
        if (warp == 0) tile_load(a, latent_shared(shared).tile, false, first);
        else clear_padding(a, threadIdx.x - 32, 96), query_load(a, latent_shared(shared), warp - 1);
        __syncwarp();
        named_arrive<1, 512>();
    } else if (role == 1) {
        registers_down<SCORE_REGISTERS>();
        score_role(a, latent_shared(shared));
        named_arrive<1, 512>();
    } else {
        registers_up<VALUE_REGISTERS>();
        value_role(a, latent_shared(shared), role - 2);
        if (is_merged(a)) merge(a);
    }
}

}  // namespace prefixkit
