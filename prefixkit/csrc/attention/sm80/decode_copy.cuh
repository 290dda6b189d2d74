// Loading for the bandwidth path by 16-byte copies: each warp fills its own ring, a few KV tiles ahead, across items.
//
// limits     rows of any page size and stride; each row's page is looked up by one lane.
#pragma once
#include "attention/decode.cuh"

namespace prefixkit {

#ifndef PREFIXKIT_DECODE_FIRST
#define PREFIXKIT_DECODE_FIRST 0  // the first of a block's decode warps
#endif
// Neighbours in the list go to different blocks.
DEVICE int decode_worker() { return ((threadIdx.x >> 5) - PREFIXKIT_DECODE_FIRST) * gridDim.x + blockIdx.x; }

// Walks a worker's list and issues its loads.  BATCH items are resolved at once, one by each lane, into shared memory: each is
// a chain of dependent reads.
struct Loader {
    const Attention& a;
    Resolved* batch;
    int taken = 0;                   // items begun
    // the current item and segment
    int seg, flags;
    Span span;
    int page = 0;                    // of the next KV tile

    DEVICE Loader(const Attention& a, Resolved* batch) : a(a), batch(batch) { begin_item(); }

    DEVICE void resolve() {
        const int lane = lane_anew();
        __syncwarp();
        if (lane < BATCH) batch[lane] = resolve_item(a, entry_of(taken + lane, decode_worker(), DECODE_WARPS * gridDim.x));
        __syncwarp();
    }

    DEVICE const Resolved& current() const { return batch[(taken - 1) % BATCH]; }

    DEVICE void begin_item() {
        if (taken % BATCH == 0) resolve();
        const Resolved& r = batch[taken % BATCH];
        flags = r.flags, seg = r.seg, span = r.span;
        ++taken;
        if (flags & STOP) return;
        page = r.page;
        if (span.slot >= span.end) skip_empty(), look_up();
    }

    DEVICE void skip_empty() {
        while (span.slot >= span.end && seg < current().seg_end) {
            span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], current().range);
            ++seg;
        }
    }

    DEVICE void look_up() {
        if (holds_groups(a)) page = span.slot < span.end ? a.pages[span.pages + page_index(a, span.slot)] : 0;
    }

    // Fills a stage with the next KV tile.
    DEVICE void issue(u32 stage, DecodeKVTile* info) {
        const int lane = lane_anew();
        if (flags & STOP) {
            if (lane == 0) info->flags = STOP;
            copy_commit();
            return;
        }
        const Resolved& item = current();
        const int head = item.head();
        const int low = span.slot & 15, slot = span.slot - low;
        const int high = max(0, min(DECODE_KV_TILE, span.end - slot));
        // Asked of what is left, not of `high`: NVRTC 13.0 gets "clamped to 16, is 16" wrong.
        copy_chunk(stage, slot, low, high, head, low == 0 && span.end - slot >= DECODE_KV_TILE);
        copy_commit();
        const int position = span.position + slot;
        if (flags & FIRST) {  // its queries are read a few KV tiles later, from L1
            const int group = group_of(a);
            const char* q = (const char*)(a.q + ((long long)item.q_begin * a.heads + head * group) * D);
            for (int row = 0; row < item.rows(); row += group, q += (long long)a.heads * D * 2)
                for (int at = lane * 32; at < group * D * 2; at += 32 * 32) touch(q + at);
        }
        span.slot = slot + DECODE_KV_TILE;
        skip_empty();
        const bool done = span.slot >= span.end;
        if (lane == 0) {
            int4* to = (int4*)info;
            to[0] = make_int4(item.q_begin, item.rows(), item.partial, head);
            to[1] = make_int4((flags & (FIRST | CAUSAL)) | (done ? LAST : 0), low, high, position);
        }
        flags &= ~FIRST;
        if (done) begin_item();
        else look_up();
    }

    DEVICE void copy_chunk(u32 stage, int slot, int low, int high, int head, bool whole) {
        if (holds_groups(a) && whole) {
            const long long from = (long long)row_of(a, page, place_in_page(a, slot), head) * 8;
            copy_group<DECODE_KV_TILE>(stage, a.k + from);
            copy_group<DECODE_KV_TILE>(stage + DECODE_KV_TILE_BYTES, a.v + from);
        } else {
            gather_rows<DECODE_KV_TILE>(a, a.k, stage, span, slot, low, high, head);
            gather_rows<DECODE_KV_TILE>(a, a.v, stage + DECODE_KV_TILE_BYTES, span, slot, low, high, head);
        }
    }
};

// Waits until at most `pending` of the latest KV tiles are under way.
DEVICE void ring_wait(int pending) {
    switch (pending) {
        case 1: return copy_wait<1>();
        case 2: return copy_wait<2>();
        case 5: return copy_wait<5>();
        default: return copy_wait<0>();
    }
}

// A warp's whole share of the decode list, through a ring of `stages`: 3 or 6.
DEVICE void decode_role(const Attention& a, u32 ring, int stages, DecodeKVTile* infos, Resolved* batch) {
    if (decode_worker() >= a.counts[1] * a.kv_heads) return;
    Loader loader(a, batch);
    DecodeState state = {};  // else the compiler keeps registers for it outside of this role
    for (int i = 0; i < stages; ++i) loader.issue(ring + i * STAGE_BYTES, infos + i);
    for (int stage = 0;;) {
        ring_wait(stages - 1);
        __syncwarp();
        const DecodeKVTile& c = infos[stage];  // read from shared memory where needed: registers are short
        const int flags = c.flags;
        if (flags & STOP) break;
        if (flags & FIRST) decode_queries(a, c, state), decode_begin(a, c, state);
        decode_compute(a, c, state, ring + stage * STAGE_BYTES);
        if (flags & LAST) decode_finish(a, c, state);
        __syncwarp();
        loader.issue(ring + stage * STAGE_BYTES, infos + stage);
        if (++stage == stages) stage = 0;
    }
    copy_wait<0>();
}

}  // namespace prefixkit
