// KV tiles of pages in e4m3 on Hopper: wgmma takes operands of 16 bits from shared memory.
//
// tiling     TMA fills STAGED places for K and as many for V.  From there KV tiles are widened to the ring of 16-bit KV
//            tiles and multiplied like any other.  Warps claim SLICES of a KV tile's rows to widen, one after the
//            other: the warp that issued the loads, when it needs a place or waits, and the warps of the decode path,
//            once their items are done.
// cost       64 x D numbers per KV tile.  The warps that widen a KV tile together issue D / 8 loads of vectors, D / 4
//            stores, and 2 D conversions, 4 lanes a cycle of a scheduler.  There are as many conversions as
//            exponentials, so they are spread over schedulers.
// limits     rows of at most 128 numbers.
#pragma once
#include "attention/sm90/tile_shared.cuh"
#include "attention/widen.cuh"

namespace prefixkit {

DEVICE int4 widen_e4m3(u32 first, u32 second) {
    return make_int4(widen_e4m3(first), widen_e4m3(first >> 16), widen_e4m3(second), widen_e4m3(second >> 16));
}

// A warp writes the numbers of a slice to rows of 16-bit numbers.  Eight lanes hold four vectors of each of two rows,
// whose numbers differ in bits 0 and 2: by the swizzle, neither loads nor stores have bank conflicts.
DEVICE void widen_slice(u32 from, u32 to) {
    const int lane = lane_anew(), vector = lane & 3, row = lane >> 3 ^ (lane & 4 ? 5 : 0);
    const u32 source = from + row * 128 + ((vector ^ row) << 4);
    const u32 first = to + row * 128 + ((2 * vector ^ row) << 4), second = first ^ 16;
    constexpr int LOADS = SLICE_BYTES / (8 * 128);
#pragma unroll 1
    for (int block = 0; block < COLUMNS; ++block) {  // of 64 columns
        int4 x[LOADS];  // all are on their way before the first is stored
#pragma unroll
        for (int i = 0; i < LOADS; ++i) x[i] = load_shared_int4((source ^ block * 64) + i * (8 * 128));
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const u32 at = block * COLUMN_BYTES + i * (8 * 128);
            store_shared16(first + at, widen_e4m3(u32(x[i].x), u32(x[i].y)));
            store_shared16(second + at, widen_e4m3(u32(x[i].z), u32(x[i].w)));
        }
    }
}

// The slices of K or of V, over the KV tiles in the order of their loads.
struct Slices {
    static constexpr u32 PLACES = FP8 ? STAGED : 1, NONE = ~0u, ENDED = 1u << 31;
    const TileShared& s;
    bool is_v;

    DEVICE u32 claimed() const { return s.slices + 8 * is_v; }    // address of the number of claimed slices
    DEVICE u32 loaded() const { return s.slices + 8 * is_v + 4; }  // address of the number of loaded KV tiles | ENDED
    DEVICE u32 place_of(u32 kv_tile) const { return is_v * PLACES + kv_tile % PLACES; }
    DEVICE u32 data(u32 kv_tile) const { return s.staged + place_of(kv_tile) * STAGED_BYTES; }
    DEVICE u32 full(u32 kv_tile) const { return s.staged_full + 8 * place_of(kv_tile); }
    DEVICE u32 empty(u32 kv_tile) const { return s.staged_empty + 8 * place_of(kv_tile); }
    DEVICE u32 kv_tile_info(u32 kv_tile) const { return s.staged_kv_tiles + 16 * (kv_tile % PLACES); }

    // Claims a warp's next slice of the first `kv_tiles` KV tiles; NONE if none is left.
    DEVICE u32 claim(u32 kv_tiles) const {
        u32 mine = NONE;
        if (lane_anew() == 0) {
            u32 next = read_shared_word(claimed());
            while (next < kv_tiles * SLICES && mine == NONE) {
                const u32 found = swap_shared(claimed(), next, next + 1);
                if (found == next) mine = next;
                next = found;
            }
        }
        return uniform(mine);
    }
    DEVICE void widen(u32 slice) const {
        const u32 kv_tile = slice / SLICES, part = slice % SLICES, turn = kv_tile / s.stages;
        const u32 stage = kv_tile - turn * s.stages, place = data(kv_tile);
        barrier_wait(full(kv_tile), kv_tile / PLACES & 1);
        barrier_wait((is_v ? s.v_empty : s.k_empty) + 8 * stage, (turn & 1) ^ 1);
        widen_slice(place + part * SLICE_BYTES, (is_v ? s.v : s.k) + stage * K_TILE_BYTES + part * SLICE_BYTES);
        if (!is_v && part == 0 && lane_anew() == 0)
            store_shared16(s.kv_tiles + 16 * stage, load_shared_int4(kv_tile_info(kv_tile)));
        async_fence();  // wgmma reads the numbers, and TMA writes to their place next
        barrier_arrive(s.full + 8 * stage);
        barrier_arrive_warp(empty(kv_tile));
    }
    // Widens unclaimed slices of the first `kv_tiles` KV tiles until the phase has ended for which this warp waits:
    // consumers may need these slices before they can end the phase.
    DEVICE void widen_until(u32 kv_tiles, u32 barrier, u32 parity) const {
        while (!barrier_ended(barrier, parity)) {
            const u32 slice = claim(kv_tiles);
            if (slice == NONE) break;
            widen(slice);
        }
        barrier_wait(barrier, parity);
    }
    // Called before KV tile `kv_tile` is loaded: waits until its place is free.
    DEVICE void make_room(u32 kv_tile) const { widen_until(kv_tile, empty(kv_tile), (kv_tile / PLACES & 1) ^ 1); }
    // Called once the loads of KV tile `kv_tile` are issued.
    DEVICE void publish(u32 kv_tile) const {
        if (lane_anew() == 0) write_shared_word(loaded(), kv_tile + 1);
    }
    // Called when there are no more KV tiles.
    DEVICE void end(u32 kv_tiles) const {
        if (lane_anew() == 0) write_shared_word(loaded(), kv_tiles | ENDED);
        for (u32 slice; (slice = claim(kv_tiles)) != NONE;) widen(slice);
    }
    // Run by a warp that has nothing else to do.
    DEVICE void help() const {
        while (true) {
            u32 known = 0;
            if (lane_anew() == 0) known = read_shared_word(loaded());
            known = uniform(known);
            const u32 slice = claim(known & ~ENDED);
            if (slice != NONE) widen(slice);
            else if (known & ENDED) return;
            else rest_a_little();
        }
    }
};

}  // namespace prefixkit
