// The rings of KV tiles and of items, as the warpgroups that consume them see them.
#pragma once
#include "attention/sm90/tile_rows.cuh"
#include "attention/sm90/wgmma.cuh"

namespace prefixkit {

// A warpgroup's position in the rings.
struct Cursor {
    u32 stage = 0, phase = 0;
    u32 before = 0;  // the stage of the KV tile before
    DEVICE void next(const TileShared& s) {
        before = stage;
        if (++stage == s.stages) stage = 0, phase ^= 1;
    }
};

DEVICE u32 keys_at(const TileShared& s, u32 stage) { return descriptor(s.k, 16) + stage * (K_TILE_BYTES / 16); }
DEVICE u32 values_at(const TileShared& s, u32 stage) {
    return descriptor(s.v, KV_TILE * 128) + stage * (V_TILE_BYTES / 16);
}
DEVICE int kv_tile_flags(const TileShared& s, const Cursor& at) {
    return uniform(load_shared_int(s.kv_tiles + 16 * at.stage));
}
// The flags of a KV tile, once it has landed.
DEVICE int wait_kv_tile(const TileShared& s, const Cursor& at) {
    barrier_wait(s.full + 8 * at.stage, at.phase);
    return kv_tile_flags(s, at);
}

// Tells the producers that this warp has read a stage of K or V.  The warp's lanes have converged since: wgmma reads K
// and V, and what lanes read of KVTileInfo, and of K for lost scores, goes into a vote (a barrier here costs prompts
// 5%).
DEVICE void free_stage(u32 empty, u32 stage) { barrier_arrive_elected(empty + 8 * stage); }
// Tells the producers that this warp has read an item.
DEVICE void free_item(const TileShared& s, int place) { barrier_arrive_warp(s.item_empty + 8 * place); }

// The row of a thread's first scores; the thread also holds the scores of row + 8.
DEVICE int first_row(int half) { return 64 * half + 16 * (threadIdx.x >> 5 & 3) + (threadIdx.x & 31) / 4; }

template <class T> DEVICE T load_record(u32 from) {
    const int4 x = load_shared_int4(from);
    return {x.x, x.y, x.z, x.w};
}
DEVICE TileItem read_item(const TileShared& s, int place) { return load_record<TileItem>(s.items + 16 * place); }

}  // namespace prefixkit
