// One block of Hopper's decode path after the other on the CPU: two loading warps, and the four that compute.
#ifdef EMULATED_PORTABLE
#include "portable.cuh"
#else
#define PREFIXKIT_MAPS 1
#include "common/ptx.cuh"
#include "attention/sm90/decode_load.cuh"

namespace prefixkit {
static Attention arguments;
static int ring_stages;
struct alignas(1024) Shared {
    unsigned char rings[RINGS * RING_STAGES * STAGE_BYTES];
    u64 barriers[DECODE_BARRIERS];
};
static DecodeKVTile kv_tiles[RINGS * RING_STAGES];
static Resolved batches[RINGS * BATCH];

static DecodeShared shared() {
    DecodeShared n;
    Shared& s = *(Shared*)memory;
    n.rings = shared_address(s.rings), n.stages = ring_stages;
    n.full = shared_address(s.barriers), n.empty = n.full + 8 * RINGS * RING_STAGES;
    n.kv_tiles = kv_tiles, n.batches = batches;
    return n;
}
}  // namespace prefixkit

extern "C" void widen_pairs(unsigned* to) {
    for (unsigned two = 0; two < 65536; ++two) to[two] = prefixkit::widen_by_words(two);
}

// stages: of each ring.
extern "C" int decode_on_cpu(const prefixkit::Attention* a, int blocks, int stages) {
    using namespace prefixkit;
    arguments = *a, ring_stages = stages, gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::memset(memory, 0xff, sizeof(memory));  // NaN
        barriers.clear(), flying.clear(), spins = 0;
        decode_barriers(shared());
        emulation::run(1, [] {
            const int warp = emulation::current / 32;
            if (warp < 2) decode_load(arguments, shared(), warp);
            else {
                clear_padding(arguments, emulation::current - 64, 128);
                decode_role(arguments, shared(), warp - 2);
            }
        });
    }
    if (!flying.empty()) std::abort();
    return sizeof(Attention);
}

#ifdef EMULATED_TILES
#include "tiles.cuh"
#endif
#endif
