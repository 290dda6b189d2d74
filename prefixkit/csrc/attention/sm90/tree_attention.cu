// Attention over a whole tree in one launch, for Hopper (sm_90a).
//
// shapes     q [rows, heads, D], KV in pages; bfloat16 or float16; D from 64 to 128, 256, or 192 with values of 128.
// tiling     one block per multiprocessor, with roles: two warps load KV tiles for two warpgroups that multiply tiles
//            (tile.cuh), two load KV tiles for four warps that stream decode items (decode_load.cuh), so that
//            compute-bound and bandwidth-bound work share each multiprocessor.  After a grid barrier the blocks merge.
// cost       floor = max(KV bytes / 4.3 TB/s, flops / 790 TFLOP/s); measured: docs/appendix/kernel_log.md.
// limits     the grid is one block per multiprocessor; SHARED_BYTES of dynamic shared memory; 512 threads, or 384 where
//            D is 256.
#define PREFIXKIT_MAPS 1
#include "attention/sm90/merge.cuh"
#include "attention/sm90/decode_load.cuh"
#include "attention/sm90/tile.cuh"

namespace prefixkit {

// Stages of the rings that share the memory: of the tile path, and of each decode warp.
struct Stages { int tile, decode; };
// For pages in e4m3, loads of the tile path run ahead in STAGED places.  With fewer than three stages, all consumers
// would wait while one is widened: a stage of V is free only when the last warpgroup has added the values of a KV tile,
// and the next scores wait.
constexpr Stages MIXED = FP8                 ? Stages{3, DECODE_GROUPS > 2 ? 2 : 3}
                         : V_DIM > 128       ? Stages{3, 2}
                         : DECODE_GROUPS > 1 ? Stages{4, 4}
                         : D <= 64           ? Stages{4, 6}
                                             : Stages{4, 3};
// Where decode items take by far longer than tile items.
constexpr Stages STREAMS = FP8 || D <= 64 || V_DIM > 128 ? MIXED : Stages{2, 5};
// Where there are no tile items; 6 stages cost 1% of the bandwidth.
constexpr Stages ALONE = {0, V_DIM > 128 || DECODE_GROUPS > 2 ? 3 : 4};
// Where there are no decode items: an item's first KV tiles are being loaded before the previous item ends.
constexpr Stages PROMPTS = TILE_STAGES < 6 ? MIXED : Stages{TILE_STAGES, 0};
DEVICE constexpr int bytes_of_tiles(int stages) {
    return stages * (K_TILE_BYTES + V_TILE_BYTES) + (stages ? 2 * STAGED * STAGED_BYTES : 0);
}
DEVICE constexpr int bytes_of(Stages n) {
    return bytes_of_tiles(n.tile) + (TILES_ONLY ? 0 : DECODE_WARPS * n.decode * STAGE_BYTES);
}
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int RING_BYTES = larger(larger(bytes_of(MIXED), bytes_of(ALONE)), SLAB_RING_BYTES);

// What a block keeps in shared memory; the rings begin at multiples of 1024 bytes.
struct Shared {
    unsigned char rings[RING_BYTES];
    u64 barriers[TILE_BARRIERS + DECODE_BARRIERS];
    int4 items[2], slices;
    KVTileInfo kv_tiles[TILE_STAGES + STAGED];
    u32 ones[32];  // not the last member: memcheck takes wgmma_ones to read 256 bytes
    DecodeKVTile decode_kv_tiles[RINGS * RING_STAGES];
    Resolved batches[RINGS * BATCH];
};
constexpr int SHARED_BYTES = sizeof(Shared);
static_assert(bytes_of(STREAMS) <= RING_BYTES && bytes_of(PROMPTS) <= RING_BYTES, "all uses of the rings fit");
static_assert(MIXED.tile <= TILE_STAGES && PROMPTS.tile <= TILE_STAGES, "barriers");
static_assert(MIXED.decode * ROW_PARTS <= RING_STAGES, "barriers");
static_assert(STREAMS.decode * ROW_PARTS <= RING_STAGES && ALONE.decode * ROW_PARTS <= RING_STAGES, "barriers");
static_assert((sizeof(Shared::rings) + sizeof(Shared::barriers)) % 16 == 0, "what follows is read by 16 bytes");
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block can have");

// 65,536 registers / 128 threads: the register counts of a thread of each warpgroup add up to 512 at most.  Three
// warpgroups begin with 168 each, 504 in all.
struct Registers { int load, decode, tile; };
constexpr Registers REGISTERS = TILE_WARPGROUPS == 1 ? Registers{64, 184, 256}
                                : TILES_ONLY         ? Registers{64, 32, 208}
                                : FP8 && D <= 64     ? Registers{80, 96, 168}
                                : FP8                ? Registers{64, 96, 176}
                                : Variant::HAS_MASK  ? Registers{56, 88, 184}
                                                     : Registers{48, 96, 184};
constexpr int TILE_THREADS = 128 * TILE_WARPGROUPS, THREADS = 256 + TILE_THREADS;

DEVICE TileShared tile_shared(Shared& s, Stages stages) {
    TileShared w;
    w.stages = stages.tile;
    w.k = kept(shared_address(s.rings)), w.v = w.k + w.stages * K_TILE_BYTES;
    const auto at = [&](const void* p) { return w.k + u32((const unsigned char*)p - s.rings); };
    w.full = at(s.barriers), w.k_empty = w.full + 8 * TILE_STAGES, w.v_empty = w.k_empty + 8 * TILE_STAGES;
    w.item_full = w.v_empty + 8 * TILE_STAGES, w.item_empty = w.item_full + 16;
    w.items = at(s.items), w.kv_tiles = at(s.kv_tiles), w.ones = descriptor(at(s.ones), 0);
    w.staged = w.v + w.stages * V_TILE_BYTES, w.staged_full = w.item_empty + 16;
    w.staged_empty = w.staged_full + 8 * (2 * STAGED);
    w.staged_kv_tiles = w.kv_tiles + 16 * TILE_STAGES, w.slices = at(&s.slices);
    return w;
}

// The decode rings follow those of the tile path, or take all the memory where there are no tile items.
DEVICE DecodeShared decode_shared(Shared& s, Stages stages) {
    const u32 full = shared_address(s.barriers) + 8 * TILE_BARRIERS;
    return {shared_address(s.rings) + bytes_of_tiles(stages.tile), stages.decode * ROW_PARTS, full,
            full + 8 * RINGS * RING_STAGES, s.decode_kv_tiles, s.batches};
}

// A launch first fetches its code from the L2, line by line, and a role's code lies far from the entry.  So warps go to
// their role's code before they wait for the block's barriers and for the launch ahead, and read counts there.  The
// decode warps initialise the barriers, and wait only for each other.  Every other place in the code has a barrier of
// its own, because threads must not wait for one barrier at several places.
enum Begin { DECODING = 6, MULTIPLYING, LOADING_TILES = 10, LOADING_ITEMS };
template <int ID, int WARPS> DEVICE void begin_role() {
    named_barrier<ID, 32 * WARPS + 128>();
    pdl_wait();
}
DEVICE void begin_decoding(Shared& shared) {
    if (threadIdx.x == 128) {
        tile_barriers(tile_shared(shared, MIXED));
        decode_barriers(decode_shared(shared, MIXED));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    named_barrier<DECODING, 128>();
    named_arrive<MULTIPLYING, TILE_THREADS + 128>();
    named_arrive<LOADING_TILES, 64 + 128>();
    named_arrive<LOADING_ITEMS, 64 + 128>();
    pdl_wait();
}

DEVICE Stages stages_for(const Attention& a) {
    if (TILES_ONLY) return MIXED;
    return a.counts[0] == 0 ? ALONE : a.counts[1] == 0 ? PROMPTS : a.counts[5] ? STREAMS : MIXED;
}

// The tile warps merge, once all warps of all blocks are done.
DEVICE void merge(const Attention& a, u32 rings) {
    const int thread = threadIdx.x - 256, rows = a.counts[2];
    auto block_barrier = [] { named_barrier<1, THREADS>(); };
    auto all_barrier = [&] {
        if (thread == 0) grid_barrier(a.sync);
        named_barrier<4, TILE_THREADS>();
    };
    if (!few_heads(a, rows, SLAB_WARPS))
        merge_slabs(a, rows, rings, thread >> 5, block_barrier, all_barrier);
    else merge_heads(a, rows, thread >> 5, SLAB_WARPS, [&] { block_barrier(), all_barrier(); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tree_attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    Shared& shared = *(Shared*)bytes;
    hold_parameters(a);
    const int warp = uniform(threadIdx.x >> 5), role = warp >> 2;
    if (role == 0) {
        registers_down<REGISTERS.load>();
        if (warp < 2) {
            begin_role<LOADING_TILES, 2>();
            // Overlaps the read of counts.
            const Item first = load_item(a.tile_items, blockIdx.x, a.kv_heads, a.tile_capacity);
            tile_load(a, tile_shared(shared, stages_for(a)), warp == 1, first);
        } else {
            begin_role<LOADING_ITEMS, 2>();
            const Stages stages = stages_for(a);
            if constexpr (!TILES_ONLY) decode_load(a, decode_shared(shared, stages), warp - 2);
            if constexpr (FP8) {
                __syncwarp();
                Slices{tile_shared(shared, stages), warp == 3}.help();
            }
        }
        __syncwarp();
        named_arrive<1, THREADS>();
    } else if (role == 1) {
        if constexpr (TILE_WARPGROUPS == 1) registers_up<REGISTERS.decode>();
        else registers_down<REGISTERS.decode>();
        begin_decoding(shared);
        const Stages stages = stages_for(a);
        clear_padding(a, threadIdx.x - 128, 128), clear_behind_sums(a, threadIdx.x - 128);
        if constexpr (!TILES_ONLY) decode_role(a, decode_shared(shared, stages), warp - 4);
        if constexpr (FP8) Slices{tile_shared(shared, stages), (warp & 1) != 0}.help();
        named_arrive<1, THREADS>();
    } else {
        registers_up<REGISTERS.tile>();
        begin_role<MULTIPLYING, 4 * TILE_WARPGROUPS>();
        const Stages stages = stages_for(a);
        if (threadIdx.x == 256) write_ones(shared_address(shared.ones));
        named_barrier<5, TILE_THREADS>();
        if (role == 3) begin_late(a, tile_shared(shared, stages));
        tile_role(a, tile_shared(shared, stages), role - 2);
        if (is_merged(a)) merge(a, shared_address(shared.rings));
    }
}

}  // namespace prefixkit
