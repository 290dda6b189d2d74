// The decode path's loads on Hopper: two producer warps fill the rings of the four consumer warps.
//
// tiling     half a warp feeds one ring, with one TMA load each for the keys and the values of a KV tile, across items.
//            Both halves issue one KV tile per turn, so their rings advance in step.  Where two warps take an item
//            together, there are two rings, twice as long, and each producer warp fills one.
// cost       no instruction of the consumer warps; 2 TMA loads per KV tile, or 64 where pages hold no groups of 16.
#pragma once
#include "attention/decode.cuh"

namespace prefixkit {

constexpr int RING_STAGES = (FP8 ? 4 : D <= 64 ? 6 : 5) * ROW_PARTS;  // at most

struct DecodeShared {
    u32 rings;               // one after the other
    int stages;              // of each ring
    u32 full, empty;         // barriers of the first ring's stages, 8 bytes apart; RING_STAGES for each ring
    DecodeKVTile* kv_tiles;  // one for each stage; RING_STAGES for each ring
    Resolved* batches;       // BATCH for each ring
};
constexpr int DECODE_BARRIERS = 2 * RINGS * RING_STAGES;

DEVICE void decode_barriers(const DecodeShared& s) {
    for (int i = 0; i < RINGS * RING_STAGES; ++i)
        barrier_init(s.full + 8 * i, 1), barrier_init(s.empty + 8 * i, 32 * ROW_PARTS);
}

// A ring as its producer (phase 1 at first) or its consumer (phase 0) sees it.
struct Ring {
    u32 data, full, empty;
    int stages, phase, stage = 0;

    DEVICE void next() { if (++stage == stages) stage = 0, phase ^= 1; }
};
struct DecodeRing : Ring {
    DecodeKVTile* kv_tiles;

    DEVICE DecodeRing(const DecodeShared& s, int ring, int phase)
        : Ring{s.rings + ring * s.stages * STAGE_BYTES, s.full + 8 * ring * RING_STAGES,
               s.empty + 8 * ring * RING_STAGES, s.stages, phase},
          kv_tiles(s.kv_tiles + ring * RING_STAGES) {}
};

// Copies 64 columns of one row of a node by TMA.  Where the row is not `there`, the coordinates lie outside every
// tensor, which gives zeros.
DEVICE void copy_row(const Attention& a, const TensorMap* map, u32 to, int pages, int slot, bool there, int head,
                     int column, u32 barrier, u64 policy) {
    const u32 index = there ? u32(slot) / u32(a.page_size) : 0;
    const int page = there ? a.pages[pages + index] : -1;
    tma_copy(to, map, column * 64, slot - index * a.page_size, head, page, barrier, policy);
}

// Where the groups of a half warp's KV tile go, and their pages.
struct GroupLoads {
    u32 to = ~0u, full;  // ~0u: the KV tile is loaded otherwise, or not at all
    int head, slot, page[DECODE_GROUPS];
};
// One lane issues the loads of groups for both halves of a warp.  If each lane issued one load, the compiler would
// serialise the lanes, 80 cycles a load.  (With 16-bit pages, twice as many bytes hide that.)
constexpr bool TOGETHER = FP8 && DECODE_GROUPS > 1 && ROW_PARTS == 1;

DEVICE void load_groups(const Attention& a, const GroupLoads& mine) {
    const u64 policy = policy_stream();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto of_half = [&](int x) { return __shfl_sync(~0u, x, 16 * half); };
        const u32 to = of_half(mine.to), full = of_half(mine.full);
        const int head = of_half(mine.head), slot = of_half(mine.slot);
        int page[DECODE_GROUPS];
#pragma unroll
        for (int g = 0; g < DECODE_GROUPS; ++g) page[g] = of_half(mine.page[g]);
        if (to == ~0u || !elected()) continue;
#pragma unroll
        for (int i = 0; i < 2 * DECODE_GROUPS; ++i) {
            const int g = i >> 1, in_page = place_in_page(a, slot + g * GROUP);
            const u32 box = to + (i & 1) * DECODE_KV_TILE_BYTES + g * (GROUP * 128);
            if constexpr (WORDS % 64 != 0) tma_copy(box, &a.k_map + (i & 1), 0, in_page, head, page[g], full, policy);
            else tma_copy(box, &a.k_group + (i & 1), 0, in_page, 0, head, page[g], full, policy);
        }
    }
}

// Issues the loads of KV tiles into one ring.
struct TmaLoader : DecodeWalk<16> {
    DecodeRing ring;

    DEVICE TmaLoader(const Attention& a, const DecodeShared& s, int ring, int worker)
        : DecodeWalk(a, s.batches + ring * BATCH, worker), ring(s, ring, 1) {}

    // Loads the next KV tile once its stage is free, unless it hands the groups over in `groups`, which both halves of
    // the warp then load together.  Returns whether there was a KV tile; `last` says whether it is the LAST of its
    // item.
    DEVICE bool issue(GroupLoads& groups, bool& last) {
        const u32 full = ring.full + 8 * ring.stage;
        if (flags & STOP) {
            barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
            if (lane() == 0) {
                ring.kv_tiles[ring.stage].flags = STOP;
                barrier_arrive(full);
            }
            return false;
        }
        const int head = current().head(), pages = span.pages, low = span.slot & 15, slot = span.slot - low;
        const int high = max(0, min(DECODE_KV_TILE, span.end - slot)), position = span.position + slot;
        const bool masked = classes.current() == COMPARED;
        last = advance(slot + DECODE_KV_TILE);
        barrier_wait(ring.empty + 8 * ring.stage, ring.phase);  // as late as possible: all look-ups are done
        if (lane() == 0) {
            describe(ring.kv_tiles + ring.stage, low, high, position, masked, last);
            barrier_arrive_expect(full, STAGE_BYTES);
        }
        sync();
        const u32 to = ring.data + ring.stage * STAGE_BYTES;
        const u64 policy = policy_stream();
        if (a.tma_groups && high > low) {
            if constexpr (DECODE_GROUPS == 1 && WORDS % 64 != 0) {
                // A column block for each lane: columns past the last lie outside the tensor, which gives zeros.
                const int i = lane() & 1, block = lane() >> 1, in_page = place_in_page(a, slot);
                if (block < STORED_COLUMNS)
                    tma_copy(to + i * DECODE_KV_TILE_BYTES + block * (GROUP * 128), &a.k_map + i, block * 64, in_page,
                             head, page[0], full, policy);
            } else if constexpr (DECODE_GROUPS == 1) {
                const int i = lane(), in_page = place_in_page(a, slot);
                if (i < 2)
                    tma_copy(to + i * DECODE_KV_TILE_BYTES, &a.k_group + i, 0, in_page, 0, head, page[0], full, policy);
            } else if constexpr (TOGETHER) {
                groups.to = to, groups.full = full, groups.head = head, groups.slot = slot;
                // A group in which the segment has no token is loaded from outside the tensor, which gives zeros.
#pragma unroll
                for (int g = 0; g < DECODE_GROUPS; ++g) groups.page[g] = g * GROUP < high ? page[g] : -1;
            } else if (lane() < 2 * DECODE_GROUPS) {
                const int i = lane() & 1, g = lane() >> 1, in_page = place_in_page(a, slot + g * GROUP);
                int where = page[0];
#pragma unroll
                for (int other = 1; other < DECODE_GROUPS; ++other) where = g == other ? page[other] : where;
                if (g * GROUP >= high) where = -1;
                const u32 box = to + i * DECODE_KV_TILE_BYTES + g * (GROUP * 128);
                if constexpr (WORDS % 64 != 0) tma_copy(box, &a.k_map + i, 0, in_page, head, where, full, policy);
                else tma_copy(box, &a.k_group + i, 0, in_page, 0, head, where, full, policy);
            }
        } else {
            for (int i = lane(); i < 2 * STORED_COLUMNS * DECODE_KV_TILE; i += 16) {
                const int row = i % DECODE_KV_TILE, block = i / DECODE_KV_TILE;
                const TensorMap* map = block < STORED_COLUMNS ? &a.k_row : &a.v_row;
                const bool there = row >= low && row < high;
                copy_row(a, map, to + i * 128, pages, slot + row, there, head, block % STORED_COLUMNS, full, policy);
            }
        }
        flags &= ~FIRST;
        if constexpr (!TOGETHER) pass(last);
        return true;
    }
    // Advances to the next KV tile once this one's loads are issued.
    DEVICE void pass(bool last) {
        if (last) begin_item();
        else look_up();
        ring.next();
    }
};

// One of two producer warps, `pair` 0 or 1.
DEVICE void decode_load(const Attention& a, const DecodeShared& s, int pair) {
    if (ROW_PARTS > 1 && lane_anew() >= 16) return;
    const int ring = ROW_PARTS > 1 ? pair : 2 * pair + (lane_anew() >> 4);
    // Neighbours in the list are heads of one item, whose keys are neighbours in memory: a block takes neighbours
    // together if the list is long enough for all blocks.
    const bool crowded = a.counts[1] * a.kv_heads >= int(RINGS * gridDim.x);
    TmaLoader loader(a, s, ring, crowded ? blockIdx.x * RINGS + ring : ring * gridDim.x + blockIdx.x);
    bool last;
    if constexpr (ROW_PARTS > 1) {
        for (GroupLoads none; loader.issue(none, last);) {}
    } else {
        // The vote makes the halves converge; diverged, each would wait for the instructions of the other.
        for (bool more = true; __any_sync(~0u, more);) {
            GroupLoads groups;
            if (more) more = loader.issue(groups, last);
            if constexpr (TOGETHER) {
                load_groups(a, groups);
                if (more) loader.pass(last);
            }
        }
    }
}

// A consumer warp.
DEVICE void decode_role(const Attention& a, const DecodeShared& s, int warp) {
    DecodeRing ring(s, warp / ROW_PARTS, 0);
    DecodeState state;
    barrier_wait(ring.full, 0);
    if (!(ring.kv_tiles->flags & STOP)) decode_queries(a, *ring.kv_tiles, state);
    while (true) {
        const DecodeKVTile& c = ring.kv_tiles[ring.stage];  // read from shared memory where needed: registers are short
        const int flags = c.flags, stage = ring.stage;
        if (flags & STOP) break;
        if (flags & FIRST) decode_begin(a, c, state);
        decode_compute(a, c, state, ring.data + stage * STAGE_BYTES);
        ring.next();
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
        if (flags & LAST) {
            const DecodeKVTile& next = ring.kv_tiles[ring.stage];
            if (!(next.flags & STOP)) decode_queries(a, next, state);
            decode_finish(a, c, state);
        }
        barrier_arrive(ring.empty + 8 * stage);  // every lane has read the stage's KV tile
    }
}

}  // namespace prefixkit
