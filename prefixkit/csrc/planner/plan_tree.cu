// A plan for tree_attention, made on the GPU: what attention/gpu/gpu_plan.py specifies, bit by bit, in one launch.
//
// shapes   a tree of `nodes` in depth-first order with `own` query rows in each; seven arrays of fixed capacity come
//          out.
// tiling   one block of 1,024 threads, for the work is small and its steps depend on each other: a thread per node,
//          tile, query or item, some twenty prefix sums in between.  Sharing is decided from the lowest candidates up.
//          Each warp tries one candidate number of KV splits.  Items are sorted by counting.
// paths    compiled with PREFIXKIT_PLAN_PATHS, it plans by heavy paths where sizes[1] says so: plan_paths.cuh puts the
//          nodes in an order path after path and decides which part of each is shared; plan_path_rows.cuh makes BSR
//          rows of parts.  From tiles on, both ways share the code; heavy paths add limits of queries, and segments
//          that begin within runs.
// cost     48 us for 1,024 leaves and 2,047 nodes on an H200: latency of shared memory, barriers and instructions on
//          one multiprocessor.  Ancestors that share nothing are walked one at a time: 2,000 of them take 550 us.  A
//          walk by heavy paths takes a whole path in one step.
// limits   a plan that exceeds a capacity sets counts[7], with no items.  Tiles are below 2^21, queries below 2^25, KV
//          tiles of a BSR row below 2^20, sums below 2^31.
#include "planner/plan_items.cuh"
#include "planner/plan_rows.cuh"
#include "planner/plan_split.cuh"

namespace prefixkit {

DEVICE void finish(bool fits) {
    if (threadIdx.x) return;
    // Tile items go head by head where there are many of them, or where those of all heads are many and about equally
    // long.
    const int items = p.item_count[0];
    const bool alike = 4 * p.tokens[0] >= 3 * u64(p.of[0]) * u64(p.longest[0]) * u64(p.a.cost[0].kv_tile);
    const bool by_head = p.a.kv_heads > 1 && items * p.a.kv_heads > p.a.num_sms && (items >= p.a.num_sms || alike);
    const double tile_time = __dmul_rn(double(3 * (p.tokens[0] >> p.low)), p.a.decode_rate);
    const bool streams = tile_time <= __dmul_rn(double(p.tokens[1]), p.a.tile_rate);
    int4* counts = (int4*)p.a.counts;
    counts[0] = make_int4(0, 0, p.queries, 0);
    if (fits) counts[0] = make_int4(items, p.item_count[1], p.queries, p.a.merge_indptr[p.queries]);
    counts[1] = make_int4(fits && by_head, fits && streams, 0, !fits);
}

// Attention reads items before it knows how many there are, so the entries past the last item are zero.  Nothing waits
// for these stores.
DEVICE void clear_items(const PlanTree& a) {
    for (int i = threadIdx.x; i < 2 * a.tile_capacity; i += THREADS) a.tile_items[i] = make_int4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < 2 * a.decode_capacity; i += THREADS) a.decode_items[i] = make_int4(0, 0, 0, 0);
}

DEVICE bool begin(const PlanTree& a) {
    static_assert(sizeof(PlanTree) % 4 == 0 && sizeof(State) / 4 < THREADS, "a thread per int");
    const int i = threadIdx.x;
    const int nodes = a.sizes[0];
    if (i < int(sizeof(PlanTree) / 4)) ((int*)&p)[i] = ((const int*)&a)[i];
    else if (i < int(sizeof(State) / 4)) ((int*)&p)[i] = 0;
    __syncthreads();
    if (i == 0) {
        const int taken = NODE_ARRAYS * (NODES ? NODES + 4 : 0);
        p.nodes = nodes;
        if (PATHS) p.by_paths = a.sizes[1];
        p.shared = dynamic_shared + taken, p.shared_left = a.shared_ints - taken;
        p.global = a.scratch + (NODES ? 0 : NODE_ARRAYS * (a.node_capacity + 4));
    }
    __syncthreads();
    return nodes <= a.node_capacity;
}

__global__ void __launch_bounds__(THREADS, 1) plan_tree(const __grid_constant__ PlanTree a) {
    clear_items(a);
    bool fits = begin(a) && count_rows();
    if (fits) {
        share();
        fits = make_rows() && make_tiles() && lower_tiles() && choose_splits() && number_merges();
    }
    if (fits) {
        order_items();
        fits = make_items();
    }
    if (fits) {
        fill_merges();
        sort_items();
    }
    finish(fits);
}

}  // namespace prefixkit
