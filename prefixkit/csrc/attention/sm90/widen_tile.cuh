// KV tiles of pages in e4m3 on Hopper: wgmma takes operands of 16 bits from shared memory.
//
// tiling     TMA fills STAGED places for K and as many for V.  The warp that issued the loads widens each KV tile to the
//            ring of 16 bits, from where it is multiplied as any other, and then issues the next loads into its place.
// cost       64 x D numbers: a lane loads D / 8 vectors and stores D / 4.
// limits     rows of at most 128 numbers.  All KV tiles of an item are widened before the next item is looked up.
#pragma once
#include "attention/sm90/tile_shared.cuh"
#include "attention/widen.cuh"

namespace prefixkit {

DEVICE int4 widen_e4m3(u32 first, u32 second) {
    return make_int4(widen_e4m3(first), widen_e4m3(first >> 16), widen_e4m3(second), widen_e4m3(second >> 16));
}

// A warp writes the numbers of a KV tile to rows of 16 bits.  Eight lanes have four vectors of each of two rows whose
// numbers differ in bits 0 and 2: by the swizzle neither loads nor stores meet a bank twice.
DEVICE void widen_tile(u32 from, u32 to) {
    const int lane = lane_anew(), vector = lane & 3, row = lane >> 3 ^ (lane & 4 ? 5 : 0);
    const u32 source = from + row * 128 + ((vector ^ row) << 4);
    const u32 first = to + row * 128 + ((2 * vector ^ row) << 4), second = first ^ 16;
#pragma unroll 1
    for (int block = 0; block < COLUMNS; ++block) {  // of 64 columns
#pragma unroll 4
        for (int at = 0; at < KV_TILE * 128; at += 8 * 128) {
            const int4 x = load_shared_int4((source ^ block * 64) + at);
            store_shared16(first + block * COLUMN_BYTES + at, widen_e4m3(u32(x.x), u32(x.y)));
            store_shared16(second + block * COLUMN_BYTES + at, widen_e4m3(u32(x.z), u32(x.w)));
        }
    }
}

// The places of a producer warp's KV tiles, and its ring, to which it widens them in the order of their loads.
struct StagedTiles {
    const TileShared& s;
    Ring& ring;
    Ring places, oldest;
    int pending = 0;  // KV tiles loaded and not widened
    bool is_v;

    DEVICE StagedTiles(const TileShared& s, Ring& ring, bool is_v)
        : s(s), ring(ring), places{s.staged + is_v * STAGED * STAGED_BYTES, s.staged_full + is_v * (8 * STAGED), 0, STAGED, 0},
          oldest(places), is_v(is_v) {}

    // Before a KV tile is loaded: one place is free.
    DEVICE void make_room() {
        if (pending == STAGED) widen();
        ++pending;
    }
    DEVICE void widen_all() {
        while (pending > 0) widen();
    }
    DEVICE void widen() {
        barrier_wait(oldest.full + 8 * oldest.stage, oldest.phase);
        barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
        widen_tile(oldest.data + oldest.stage * STAGED_BYTES, ring.data + ring.stage * K_TILE_BYTES);
        if (!is_v && lane_anew() == 0)
            store_shared16(s.kv_tiles + 16 * ring.stage, load_shared_int4(s.staged_kv_tiles + 16 * oldest.stage));
        async_fence();  // wgmma reads the numbers, and TMA writes to their place next
        barrier_arrive(ring.full + 8 * ring.stage);
        ring.next(), oldest.next(), --pending;
    }
};

}  // namespace prefixkit
