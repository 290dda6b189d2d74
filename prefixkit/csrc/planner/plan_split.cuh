// How many KV splits each tile gets: choose_splits and busiest of attention/gpu/kv_split.py, one warp for each
// candidate.
#pragma once
#include "planner/plan_state.cuh"

namespace prefixkit {

// How many tiles of each length a role has, if no tile is too long for the bins; else null, and tiles are visited one
// by one.
DEVICE int* bins_of(int role) { return p.longest[role] <= BINS ? counters + LEVEL_INTS + role * BINS : nullptr; }

DEVICE void count_lengths() {
    ROLLED for (int base = 0; base < p.tiles; base += THREADS) {
        const int number = base + threadIdx.x;
        const int packed = number < p.tiles ? at(TILE_KV_TILES)[number] : 0;
        const u32 alike = __match_any_sync(~0u, packed);
        if (!packed || lane_of() != __ffs(alike) - 1) continue;
        int* bins = bins_of(packed < 0);
        if (bins) atomicAdd(bins + (packed & 0x7fffffff) - 1, __popc(alike));
    }
}

// Evaluates this warp's candidate: the time at which the busiest worker would end, times the number of workers.
CALLED void try_splits(int role) {
    const RoleCost& cost = p.a.cost[role];
    const int* bins = bins_of(role);
    int* levels = counters + warp_of() * (LEVELS + 1);
    const int candidate = warp_of(), longest = p.longest[role], workers = cost.workers * p.a.num_sms;
    const int split_size = max(cost.least, ceil_div(longest, CANDIDATE_SPLITS[cost.workers > 1][candidate]));
    const int shift = max(0, 32 - __clz(min(split_size, longest) * POINT + cost.start + cost.write) - LEVEL_BITS);
    __syncwarp();  // the other role's levels have been read
    ROLLED for (int i = lane_of(); i <= LEVELS; i += 32) levels[i] = 0;
    __syncwarp();
    int extra = 0, partials = 0;
    const int count = bins ? longest : p.tiles;
    ROLLED for (int i = lane_of(); i < count; i += 32) {
        const int packed = bins ? i + 1 : at(TILE_KV_TILES)[i], kv_tiles = packed & 0x7fffffff;
        const int alike = bins ? bins[i] : (packed < 0) == role;
        if (!alike) continue;
        const int splits = ceil_div(kv_tiles, split_size);
        const int size = ceil_div(kv_tiles, splits) * POINT + cost.start + (splits > 1 ? cost.write : 0);
        atomicAdd(levels + ((size + (1 << shift) - 1) >> shift), splits * alike);
        extra += (splits - 1) * alike, partials += splits > 1 ? splits * alike : 0;
    }
    __syncwarp();
    // The entries at each level and above: a lane takes MINE levels, lane 0 the highest ones.
    constexpr int MINE = LEVELS / 32;
    const int* top = levels + LEVELS - MINE * lane_of();
    int at_least = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i) at_least += top[-i];
    int above = int(warp_sums(u64(at_least))) - at_least, rounds = 0;
    ROLLED for (int i = 0; i < MINE; ++i) {
        above += top[-i];
        rounds += ceil_div(above * p.a.kv_heads, workers);
    }
    rounds = __reduce_add_sync(~0u, rounds), extra = __reduce_add_sync(~0u, extra);
    partials = __reduce_add_sync(~0u, partials);
    if (lane_of() == 0) {
        const int chain = CHAIN * ceil_div(longest, split_size);
        const u64 merges = u64(cost.merge) * u64(partials) * u64(p.a.kv_heads);
        p.time[role][candidate] = ((u64(rounds) << shift) + chain) * u64(workers) + merges;
        p.extra[role][candidate] = extra;
    }
}

// Chooses the fewest splits whose time is within 2% of the least.  One warp per role.
DEVICE void choose_candidate() {
    const int role = warp_of();
    if (role > 1 || !p.of[role]) return;
    const RoleCost& cost = p.a.cost[role];
    // Candidates that were not tried stay zero: if none was, the first one is as good as any.
    const int extra = p.extra[role][lane_of()];
    const bool fits = !lane_of() || extra * p.a.kv_heads <= EXTRA * cost.workers * p.a.num_sms;
    const u64 time = fits ? p.time[role][lane_of()] : ~0ull >> 8;
    const u64 least = warp_reduce(time, [](u64 a, u64 b) { return b < a ? b : a; });
    const u32 good = __ballot_sync(~0u, 50 * time <= 51 * least);
    if (lane_of() != __ffs(good) - 1) return;
    p.split_size[role] = max(cost.least, ceil_div(p.longest[role], CANDIDATE_SPLITS[cost.workers > 1][lane_of()]));
    p.item_count[role] = p.of[role] + extra;
}

DEVICE bool choose_splits() {
    ROLLED for (int i = threadIdx.x; i < 2 * BINS; i += THREADS) counters[LEVEL_INTS + i] = 0;
    __syncthreads();
    count_lengths();
    __syncthreads();
    ROLLED for (int role = 0; role < 2; ++role)
        if (p.longest[role] > p.a.cost[role].least) try_splits(role);
    __syncthreads();
    choose_candidate();
    __syncthreads();
    const int items = p.item_count[0] + p.item_count[1];
    const bool fits = p.item_count[0] <= p.a.tile_capacity && p.item_count[1] <= p.a.decode_capacity;
    if (threadIdx.x == 0) {
        p.items = items;
        if (fits) take(ITEM_SPLIT, PARTIAL_OF, items);
    }
    const auto splits_of_tile = [](int number) {
        const int packed = at(TILE_KV_TILES)[number];
        return u64(at(SPLITS)[number] = ceil_div(packed & 0x7fffffff, p.split_size[packed < 0]));
    };
    scan_each(p.tiles, splits_of_tile, [](int number, u64 before) { at(FIRST_ITEM)[number] = low_of(before); });
    if (threadIdx.x == 0) at(FIRST_ITEM)[p.tiles] = items;
    __syncthreads();
    return fits;
}

}  // namespace prefixkit
