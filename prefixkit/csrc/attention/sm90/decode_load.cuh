// Loading for the bandwidth path on Hopper: two warps feed the rings of the four warps that compute.
//
// tiling     half a warp feeds one ring: 8 lanes resolve 8 items at once (each is a chain of dependent reads), then KV tiles follow
//            each other across items, two TMA boxes each.  Both halves issue one KV tile per turn, so their
//            rings run in step.
// cost       no instruction of the computing warps; 2 boxes, or 64 where pages hold no groups of 16.
#pragma once
#include "attention/sm90/tma.cuh"
#include "attention/decode.cuh"

namespace prefixkit {

constexpr int RING_STAGES = D <= 64 ? 6 : 5;     // at most

struct DecodeShared {
    u32 rings;                  // of the computing warps, one after the other
    int stages;                 // of each ring
    u32 full, empty;            // barriers of the first warp's stages, 8 bytes apart; RING_STAGES for each warp
    DecodeKVTile* kv_tiles;              // one for each stage; RING_STAGES for each warp
    Resolved* batches;          // BATCH for each warp
};
constexpr int DECODE_BARRIERS = 2 * DECODE_WARPS * RING_STAGES;

DEVICE void decode_barriers(const DecodeShared& s) {
    for (int i = 0; i < DECODE_WARPS * RING_STAGES; ++i) barrier_init(s.full + 8 * i, 1), barrier_init(s.empty + 8 * i, 32);
}

// Walks one worker's list; the 16 lanes of a half-warp hold the same state.
struct TmaLoader {
    const Attention& a;
    Resolved* batch;
    u32 ring, full, empty;
    DecodeKVTile* kv_tiles;
    int stages, worker, lane;       // lane: in the half
    u32 mask;
    int taken = 0;                  // items begun
    int stage = 0, phase = 1;
    int seg, flags;
    Span span;
    int page = 0;                   // of the next KV tile

    DEVICE TmaLoader(const Attention& a, const DecodeShared& s, int pair) : a(a) {
        const int half = lane_anew() >> 4, mine = 2 * pair + half;
        lane = lane_anew() & 15, mask = 0xffffu << 16 * half;
        batch = s.batches + mine * BATCH, kv_tiles = s.kv_tiles + mine * RING_STAGES, stages = s.stages;
        ring = s.rings + mine * stages * STAGE_BYTES, full = s.full + 8 * mine * RING_STAGES, empty = s.empty + 8 * mine * RING_STAGES;
        // Neighbours in the list are heads of one item, whose keys are neighbours in memory: a block takes them together, if there is
        // enough for all blocks.
        const bool crowded = a.counts[1] * a.kv_heads >= int(DECODE_WARPS * gridDim.x);
        worker = crowded ? blockIdx.x * DECODE_WARPS + mine : mine * gridDim.x + blockIdx.x;
        begin_item();
    }

    DEVICE void begin_item() {
        if (taken % BATCH == 0) {
            __syncwarp(mask);
            if (lane < BATCH) batch[lane] = resolve_item(a, entry_of(taken + lane, worker, DECODE_WARPS * gridDim.x));
            __syncwarp(mask);
        }
        const Resolved& r = batch[taken % BATCH];
        flags = r.flags, seg = r.seg, span = r.span;
        ++taken;
        if (flags & STOP) return;
        page = r.page;
        if (span.slot >= span.end) skip_empty(), look_up();
    }

    DEVICE const Resolved& current() const { return batch[(taken - 1) % BATCH]; }

    DEVICE void skip_empty() {
        while (span.slot >= span.end && seg < current().seg_end) {
            span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], current().range);
            ++seg;
        }
    }

    DEVICE void look_up() {
        if (a.tma_groups && span.slot < span.end) page = a.pages[span.pages + page_index(a, span.slot)];
    }

    // The next KV tile, once its stage is free; returns whether there was one.
    DEVICE bool issue() {
        const u32 at = full + 8 * stage;
        if (flags & STOP) {
            barrier_wait(empty + 8 * stage, phase);
            if (lane == 0) {
                kv_tiles[stage].flags = STOP;
                barrier_arrive(at);
            }
            return false;
        }
        const Resolved& item = current();
        const int head = item.head(), low = span.slot & 15, slot = span.slot - low, high = max(0, min(DECODE_KV_TILE, span.end - slot));
        const Span here = span;
        const int first = flags & FIRST;
        // Where the next KV tile is, before this one is told: LAST must be right for its reader.
        span.slot = slot + DECODE_KV_TILE;
        skip_empty();
        const bool done = span.slot >= span.end;
        barrier_wait(empty + 8 * stage, phase);  // as late as can be: all that was to be found is found
        if (lane == 0) {
            int4* to = (int4*)(kv_tiles + stage);
            to[0] = make_int4(item.q_begin, item.rows(), item.partial, head);
            to[1] = make_int4((flags & (FIRST | CAUSAL)) | (done ? LAST : 0), low, high, here.position + slot);
            barrier_arrive_expect(at, STAGE_BYTES);
        }
        __syncwarp(mask);
        const u32 to = ring + stage * STAGE_BYTES;
        if (a.tma_groups && high > low) {
            if (lane < 2)
                tma_copy(to + lane * DECODE_KV_TILE_BYTES, &a.k_group + lane, 0, place_in_page(a, slot), 0, head, page, at, policy_stream());
        } else {
            for (int i = lane; i < 2 * COLUMNS * DECODE_KV_TILE; i += 16) {
                const int row = i % DECODE_KV_TILE, part = i / DECODE_KV_TILE;
                copy_row(a, part < COLUMNS ? &a.k_row : &a.v_row, to + i * 128, here, slot + row, row >= low && row < high, head, part % COLUMNS, at,
                         policy_stream());
            }
        }
        if (first) bring_queries(item);
        flags &= ~FIRST;
        if (done) begin_item();
        else look_up();
        if (++stage == stages) stage = 0, phase ^= 1;
        return true;
    }

    // The queries are read a few KV tiles later, from L1.
    DEVICE void bring_queries(const Resolved& item) {
        const int group = group_of(a);
        const char* q = (const char*)(a.q + ((long long)item.q_begin * a.heads + item.head() * group) * D);
        for (int row = 0; row < item.rows(); row += group, q += (long long)a.heads * D * 2)
            for (int at = lane * 32; at < group * D * 2; at += 16 * 32) touch(q + at);
    }
};

// One of two warps, `pair` 0 or 1.
DEVICE void decode_load(const Attention& a, const DecodeShared& s, int pair) {
    TmaLoader loader(a, s, pair);
    // The vote brings the halves together again: apart, each would wait for the other's instructions.
    for (bool more = true; __any_sync(~0u, more);)
        if (more) more = loader.issue();
}

// A computing warp.
DEVICE void decode_role(const Attention& a, const DecodeShared& s, int mine) {
    const u32 ring = s.rings + mine * s.stages * STAGE_BYTES, full = s.full + 8 * mine * RING_STAGES, empty = s.empty + 8 * mine * RING_STAGES;
    const DecodeKVTile* kv_tiles = s.kv_tiles + mine * RING_STAGES;
    DecodeState state;
    int stage = 0, phase = 0;
    barrier_wait(full, 0);
    if (!(kv_tiles->flags & STOP)) decode_queries(a, *kv_tiles, state);
    while (true) {
        const DecodeKVTile& c = kv_tiles[stage];  // read from shared memory where needed: registers are short
        const int flags = c.flags;
        if (flags & STOP) break;
        if (flags & FIRST) decode_begin(a, c, state);
        decode_compute(a, c, state, ring + stage * STAGE_BYTES);
        const int done = stage;
        if (++stage == s.stages) stage = 0, phase ^= 1;
        barrier_wait(full + 8 * stage, phase);
        if (flags & LAST) {
            if (!(kv_tiles[stage].flags & STOP)) decode_queries(a, kv_tiles[stage], state);
            decode_finish(a, c, state);
        }
        barrier_arrive(empty + 8 * done);  // every lane has read what the stage says
    }
}

}  // namespace prefixkit
