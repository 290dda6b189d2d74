// The decode path's loads by 16-byte copies: each warp fills its own ring, a few KV tiles ahead, across items.
#pragma once
#include "attention/decode.cuh"

namespace prefixkit {

// Issues a warp's loads of KV tiles, one after the other.
struct Loader : DecodeWalk<32> {
    using DecodeWalk::DecodeWalk;

    // Fills a stage with the next KV tile.
    DEVICE void issue(u32 stage, DecodeKVTile* kv_tile) {
        if (flags & STOP) {
            if (lane() == 0) kv_tile->flags = STOP;
            copy_commit();
            return;
        }
        const int head = current().head(), low = span.slot & 15, slot = span.slot - low, left = span.end - slot;
        const int high = max(0, min(DECODE_KV_TILE, left)), position = span.position + slot;
        // Compares `left`, because NVRTC 13.0 gets "clamped to 16, is 16" wrong.
        const bool whole = holds_groups(a) && low == 0 && left >= DECODE_KV_TILE;
        if (whole) {
            const long long from = (long long)row_of(a, page[0], place_in_page(a, slot), head) * 8;
            copy_group<DECODE_KV_TILE>(stage, a.k + from, WORDS);
            copy_group<DECODE_KV_TILE>(stage + DECODE_KV_TILE_BYTES, a.v + from, WORDS);
        } else {
            gather_rows<DECODE_KV_TILE>(a, a.k, stage, span.pages, slot, low, high, head);
            gather_rows<DECODE_KV_TILE>(a, a.v, stage + DECODE_KV_TILE_BYTES, span.pages, slot, low, high, head);
        }
        copy_commit();
        const bool masked = classes.current() == COMPARED, last = advance(slot + DECODE_KV_TILE);
        if (lane() == 0) describe(kv_tile, low, high, position, masked, last);
        flags &= ~FIRST;
        if (last) begin_item();
        else look_up();
    }
};

// Runs a warp's whole share of the decode list, through a ring of STAGES.
template <int STAGES>
DEVICE void decode_role(const Attention& a, u32 ring, DecodeKVTile* kv_tiles, Resolved* batch) {
    const int worker = (threadIdx.x >> 5) * gridDim.x + blockIdx.x;  // neighbours in the list go to different blocks
    if (worker >= a.counts[1] * a.kv_heads) return;
    Loader loader(a, batch, worker);
    DecodeState state = {};  // uninitialised, it would take registers outside of this role
    for (int i = 0; i < STAGES; ++i) loader.issue(ring + i * STAGE_BYTES, kv_tiles + i);
    for (int stage = 0;; stage = stage + 1 == STAGES ? 0 : stage + 1) {
        copy_wait<STAGES - 1>();
        __syncwarp();
        const DecodeKVTile& c = kv_tiles[stage];  // read from shared memory where needed: registers are short
        const int flags = c.flags;
        if (flags & STOP) break;
        if (flags & FIRST) decode_queries(a, c, state), decode_begin(a, c, state);
        decode_compute(a, c, state, ring + stage * STAGE_BYTES);
        if (flags & LAST) decode_finish(a, c, state);
        __syncwarp();
        loader.issue(ring + stage * STAGE_BYTES, kv_tiles + stage);
    }
    copy_wait<0>();
}

}  // namespace prefixkit
