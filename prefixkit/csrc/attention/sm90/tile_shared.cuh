// What the producer and consumer warps of the tile path share on Hopper: rings, barriers, descriptions of KV tiles.
#pragma once
#include "attention/sm90/decode_load.cuh"

namespace prefixkit {

// Warpgroups that multiply tiles, 64 rows each.  Outputs of 64 x 256 take half of all registers, so there is only one
// warpgroup, and its scores and exponentials have the registers that are left, enough for 32 tokens.
constexpr int TILE_WARPGROUPS = !LATENT && V_DIM > 128 ? 1 : 2;
constexpr int KV_TILE = TILE_WARPGROUPS == 1 ? 32 : 64;  // tokens
constexpr int COLUMN_BYTES = KV_TILE * 128;  // of a block of 64 columns
constexpr int K_TILE_BYTES = COLUMNS * COLUMN_BYTES, V_TILE_BYTES = V_COLUMNS * COLUMN_BYTES;
constexpr int KV_TILE_GROUPS = KV_TILE / GROUP;
constexpr int TILE_STAGES = FP8 || LATENT || TILES_ONLY || TILE_WARPGROUPS == 1 ? 4 : 6;  // at most
constexpr int STAGED = FP8 ? 2 : 0, STAGED_BYTES = STORED_COLUMNS * COLUMN_BYTES;  // see widen_tile.cuh
static_assert(!FP8 || STORED_COLUMNS == 1, "rows of e4m3 have 128 bytes at most");
constexpr int SLICES = 2, SLICE_BYTES = COLUMN_BYTES / SLICES;  // of a KV tile in e4m3
constexpr int CONSUMER_WARPS = 4 * TILE_WARPGROUPS;  // each warp frees a stage by itself
// A KV tile of latents lands in parts of three column blocks, each with a barrier, so that products begin early.
constexpr int PART_COLUMNS = LATENT ? 3 : COLUMNS, PARTS = (COLUMNS + PART_COLUMNS - 1) / PART_COLUMNS;

struct KVTileInfo {  // what a consumer must know of a KV tile; 16 bytes
    int flags;     // LAST of its item; CLIPPED, LIMITED; COMPARE: not all of its tokens count for all rows; MASKED
    int bounds;    // tokens [low, high) count
    int bits;      // of a MASKED KV tile, where its bits begin, or -1
    int position;  // of token 0

    DEVICE int low() const { return bounds & 255; }
    DEVICE int high() const { return bounds >> 8; }
};
enum { COMPARE = 16 };

struct TileShared {
    u32 k, v;                    // rings
    u32 stages;                  // of each ring
    u32 full, k_empty, v_empty;  // barriers of stages, 8 bytes apart; full (PARTS of them): K and V have landed
    u32 item_full, item_empty;   // of the two places for items
    u32 items;                   // TileItem for each place; an item without rows: no more work
    u32 kv_tiles;                // KVTileInfo for each stage of K
    u32 ones;                    // descriptor of 8 rows of 8 ones
    u32 staged, staged_full;     // for pages in e4m3: places of KV tiles, first those of K, and their full barriers
    u32 staged_empty;            // the places' empty barriers
    u32 staged_kv_tiles;         // KVTileInfo for each place of K
    u32 slices;                  // of K, then of V: the numbers of claimed slices and of loaded KV tiles
};
constexpr int TILE_BARRIERS = 3 * TILE_STAGES + 4 + 4 * STAGED;

DEVICE void tile_barriers(const TileShared& s) {
    constexpr u32 readers = CONSUMER_WARPS * WARP_ARRIVALS, slice_readers = SLICES * WARP_ARRIVALS;
    for (int i = 0; i < TILE_STAGES; ++i) {
        barrier_init(s.full + 8 * i, FP8 ? 2 * SLICES * 32 : 2 * WARP_ARRIVALS);
        barrier_init(s.k_empty + 8 * i, readers), barrier_init(s.v_empty + 8 * i, readers);
    }
    for (int i = 0; i < 2; ++i)
        barrier_init(s.item_full + 8 * i, 1), barrier_init(s.item_empty + 8 * i, readers);
    for (int i = 0; i < 2 * STAGED; ++i)
        barrier_init(s.staged_full + 8 * i, WARP_ARRIVALS), barrier_init(s.staged_empty + 8 * i, slice_readers);
    if (FP8) store_zeros(s.slices);
}

}  // namespace prefixkit
