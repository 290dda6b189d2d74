// Attention over latents on Hopper (multi-head latent attention, absorbed): all query heads share one KV head of D
// elements, whose first V_DIM elements are also the values.
//
// shapes     an item has up to 64 tile rows, (query, head of the group) pairs; D up to 576, V_DIM 256 or 512.
// tiling     outputs of 64 rows take the registers of two warpgroups, each of which adds P V for half the columns.  A
//            third warpgroup computes scores and exponentials, and hands P over in shared memory.  Q K^T of a KV tile
//            and P V of the previous one share the tensor cores.  Two KV tiles of 64 tokens fit next to Q; each lands
//            in PARTS parts.
// cost       2 (D + V_DIM) flops per row and token against 790 TFLOP/s; 2 D bytes per token and item, which at 64 rows
//            are 72 KB in 2,176 cycles of products: half of what a multiprocessor can read from the L2.
// limits     causal attention without variants.
#pragma once
#include "attention/merge.cuh"
#include "attention/sm90/exponentials.cuh"

namespace prefixkit {

constexpr int LATENT_ROWS = 64, LATENT_STAGES = 2, HALF_COLUMNS = V_DIM / 2;
constexpr int SCORE_WARPS = 4, VALUE_WARPS = 8, QUERY_WARPS = 3;
constexpr int LATENT_BARRIERS = LATENT_STAGES * (PARTS + 1) + 8;
static_assert(!LATENT || HALF_COLUMNS % 128 == 0, "a warpgroup adds 128 or 256 columns");

struct LatentShared {
    TileShared tile;        // the ring of KV tiles, and items
    u32 q, p;               // Q [64, D] and P [64, 64] as tiles
    u32 q_full, q_empty, p_full, p_empty;  // barriers
    u32 shrink, factor;     // [64] floats each: factors of a row's outputs, before this KV tile and when an item ends
    u32 rose;               // [4] ints: whether `shrink` applies to the rows of each warp
};

DEVICE void latent_barriers(const LatentShared& s) {
    for (int i = 0; i < LATENT_STAGES * PARTS; ++i) barrier_init(s.tile.full + 8 * i, WARP_ARRIVALS);
    for (int i = 0; i < LATENT_STAGES; ++i) barrier_init(s.tile.k_empty + 8 * i, VALUE_WARPS * WARP_ARRIVALS);
    for (int i = 0; i < 2; ++i) {
        barrier_init(s.tile.item_full + 8 * i, 1);
        barrier_init(s.tile.item_empty + 8 * i, (SCORE_WARPS + VALUE_WARPS + QUERY_WARPS) * WARP_ARRIVALS);
    }
    barrier_init(s.q_full, QUERY_WARPS * WARP_ARRIVALS), barrier_init(s.q_empty, SCORE_WARPS * WARP_ARRIVALS);
    // Each thread arrives, because each writes or reads P: compute-sanitizer sees no order through an elected lane.
    barrier_init(s.p_full, 32 * SCORE_WARPS), barrier_init(s.p_empty, 32 * VALUE_WARPS);
}

// Waits for item `number` to be published; an item without rows means that there are no more.
DEVICE TileItem wait_item(const TileShared& s, int number) {
    barrier_wait(s.item_full + 8 * (number & 1), number >> 1 & 1);
    return read_item(s, number & 1);
}

// Where a row's queries begin; in place of rows that the item lacks, its last row.
DEVICE const u16* queries_of(const Attention& a, const TileItem& item, int row) {
    return a.q + TileRow(a, item.head, min(row, item.rows - 1)).index(a, item.q_begin) * D;
}

// Warp `warp` of QUERY_WARPS loads the queries of each item, and zeros for rows that the item lacks.
DEVICE void query_load(const Attention& a, const LatentShared& s, int warp) {
    for (int number = 0;; ++number) {
        const TileItem item = wait_item(s.tile, number);
        if (uniform(item.rows) == 0) break;
        // Prefetches to the L2, while the scores of the previous item still need that item's queries.
#pragma unroll 1
        for (int row = 32 * warp + lane_anew(); row < item.rows; row += 32 * QUERY_WARPS)
            prefetch_l2(queries_of(a, item, row), D * 2);
        barrier_wait(s.q_empty, (number & 1) ^ 1);
#pragma unroll 4
        for (int i = 32 * warp + lane_anew(); i < LATENT_ROWS * ROW_VECTORS; i += 32 * QUERY_WARPS) {
            const int row = i / ROW_VECTORS, column = i - row * ROW_VECTORS;
            copy16(s.q + vector_at<LATENT_ROWS>(row, column), queries_of(a, item, row) + 8 * column, row < item.rows);
        }
        copy_commit();
        free_item(s.tile, number & 1);
        copy_wait<0>();
        async_fence();
        __syncwarp();
        barrier_arrive_warp(s.q_full);
    }
}

struct ScoreState {
    float s[KV_TILE / 2];  // scores, then exponentials, of two rows
    u32 p[KV_TILE / 4];    // the same, rounded
    // Of the two rows: base, sum of this thread's exponentials, sum of the rounded ones.
    float base[2], sum[2], weight[2];
};

// Computes the scores of a KV tile, part by part as it lands.
DEVICE void latent_scores(const LatentShared& s, ScoreState& w, const Cursor& at) {
    const u32 q = uniform(descriptor(s.q, 16)), k = uniform(keys_at(s.tile, at.stage));
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        barrier_wait(s.tile.full + 8 * (at.stage * PARTS + part), at.phase);
#pragma unroll
        for (int i = 4 * PART_COLUMNS * part; i < 4 * PART_COLUMNS * (part + 1) && i < D / 16; ++i) {
            const int step = (i / 4) * (COLUMN_BYTES / 16) + (i % 4) * 2;
            wgmma_shared_rows(w.s, q + step, k + step, i != 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(w.s);
}

// Writes the rounded exponentials to P, and adds them to the sums of weights.
DEVICE void hand_over(const LatentShared& s, ScoreState& w) {
    const int lane = lane_anew(), row = 16 * (threadIdx.x >> 5 & 3) + lane / 4;
    pack_exponentials(w);
#pragma unroll
    for (int i = 0; i < KV_TILE / 4; ++i) {
        const int place = i & 1, column = i / 2;  // which 8 rows, and which 8 columns
        w.weight[place] += widen(Storage{u16(w.p[i])}) + widen(Storage{u16(w.p[i] >> 16)});
        store_shared_int(s.p + vector_at<LATENT_ROWS>(row + 8 * place, column) + 4 * (lane & 3), int(w.p[i]));
    }
}

// Stores a row's log-sum-exp, and the factor that its outputs still need.
DEVICE void finish_scores(const Attention& a, const LatentShared& s, const TileItem& item, ScoreState& w, int row0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float weight = lanes_sum<1, 4>(w.weight[i]), sum = lanes_sum<1, 4>(w.sum[i]);
        const int row = row0 + 8 * i;
        float factor = weight > 0.f ? reciprocal(weight) : 0.f;
        const float lse = sum > 0.f ? (w.base[i] + log2_rounded(sum)) * LN2 : MINUS_INFINITY;
        const bool writes = row < item.rows && (threadIdx.x & 3) == 0;
        finish_row(a, item.q_begin, item.partial, TileRow(a, item.head, min(row, item.rows - 1)), lse, factor, writes);
        if ((threadIdx.x & 3) == 0) store_shared1(s.factor + 4 * row, factor);
    }
}

// The warpgroup that computes scores.
DEVICE void score_role(const Attention& a, const LatentShared& s) {
    ScoreState w;
    Cursor at;
    const int row0 = first_row(0), warp = threadIdx.x >> 5 & 3;
    int tile = 0;
    for (int number = 0;; ++number) {
        const TileItem item = wait_item(s.tile, number);
        if (uniform(item.rows) == 0) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) w.base[i] = LOWEST, w.sum[i] = w.weight[i] = 0.f;
        BiasLines lines;
        if constexpr (Variant::LINEAR) lines.read(a, item, row0);
        const u32 places = Variant::HAS_MASK ? places_of_bits(a, item, row0) : 0;
        barrier_wait(s.q_full, number & 1);
        for (bool last = false; !last; ++tile) {
            float shrink[2] = {1.f, 1.f};
            latent_scores(s, w, at);
            const KVTileInfo kv_tile = load_record<KVTileInfo>(s.tile.kv_tiles + 16 * at.stage);
            last = uniform(kv_tile.flags) & LAST;
            if (last) barrier_arrive_warp(s.q_empty);
            const bool masked = Variant::HAS_MASK && (kv_tile.flags & MASKED);
            const u32 shown = masked ? shown_scores(a, kv_tile, item, row0, places) : ~0u;
            const bool rose = exponentials(a, kv_tile, item, row0, lines, shown, w, shrink);
            if (rose) w.weight[0] *= shrink[0], w.weight[1] *= shrink[1];
            barrier_wait(s.p_empty, (tile & 1) ^ 1);
            hand_over(s, w);
            if (rose && (threadIdx.x & 3) == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) store_shared1(s.shrink + 4 * (row0 + 8 * i), shrink[i]);
            }
            if (lane_anew() == 0) store_shared_int(s.rose + 4 * warp, rose);
            if (last) finish_scores(a, s, item, w, row0);
            barrier_arrive(s.p_full);
            at.next(s.tile);
        }
        free_item(s.tile, number & 1);
    }
}

// Loads P of a warp's 16 rows as operands, and the factors of the outputs so far, if they apply.
DEVICE bool take_over(const LatentShared& s, u32 (&p)[KV_TILE / 16][4], float (&shrink)[2]) {
    const int lane = lane_anew(), warp = threadIdx.x >> 5 & 3, row0 = 16 * warp + lane / 4;
    const MatrixRow<LATENT_ROWS> row(s.p, 16 * warp + (lane & 15), lane >> 4);
#pragma unroll
    for (int i = 0; i < KV_TILE / 16; ++i) load_matrix(p[i], row.at(i));
    const bool rose = uniform(load_shared_int(s.rose + 4 * warp));
    if (rose) shrink[0] = load_shared1(s.shrink + 4 * row0), shrink[1] = load_shared1(s.shrink + 4 * row0 + 32);
    return rose;
}

// Clears this warpgroup's columns in the rows without a token, whatever they hold: 0 * NaN is NaN.
DEVICE void clear_values(const LatentShared& s, u32 tile, int low, int high, int half) {
    constexpr int VECTORS = HALF_COLUMNS / 8;
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < KV_TILE * VECTORS; i += 128) {
        const int row = i / VECTORS;
        if (row < low || row >= high) store_zeros(tile + vector_at<KV_TILE>(row, half * VECTORS + i % VECTORS));
    }
    async_fence();
    if (half == 0) named_barrier<6, 128>();
    else named_barrier<7, 128>();
}

// A warpgroup that adds values: columns HALF_COLUMNS * half... of every item.
DEVICE void value_role(const Attention& a, const LatentShared& s, int half) {
    float o[HALF_COLUMNS / 128][64];
    Cursor at;
    const int row0 = first_row(0);
    int tile = 0;
    for (int number = 0;; ++number) {
        if (uniform(wait_item(s.tile, number).rows) == 0) break;
        float factor[2];
        bool first = true;
        for (bool last = false; !last; ++tile, first = false) {
            barrier_wait(s.p_full, tile & 1);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                barrier_wait(s.tile.full + 8 * (at.stage * PARTS + part), at.phase);
            const KVTileInfo kv_tile = load_record<KVTileInfo>(s.tile.kv_tiles + 16 * at.stage);
            last = uniform(kv_tile.flags) & LAST;
            if (a.tma_groups && uniform(kv_tile.low() > 0 || kv_tile.high() < KV_TILE))
                clear_values(s, s.tile.k + at.stage * K_TILE_BYTES, kv_tile.low(), kv_tile.high(), half);
            u32 p[KV_TILE / 16][4];
            float shrink[2];
            const bool rose = take_over(s, p, shrink);
            if (last) factor[0] = load_shared1(s.factor + 4 * row0), factor[1] = load_shared1(s.factor + 4 * row0 + 32);
            barrier_arrive(s.p_empty);
            if (rose && !first) {
#pragma unroll
                for (int j = 0; j < HALF_COLUMNS / 128; ++j)
#pragma unroll
                    for (int i = 0; i < 64; ++i) o[j][i] *= shrink[i >> 1 & 1];
            }
            const u32 v = uniform(descriptor(s.tile.k, COLUMN_BYTES) + at.stage * (K_TILE_BYTES / 16) +
                                  half * (HALF_COLUMNS / 64) * (COLUMN_BYTES / 16));
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < HALF_COLUMNS / 128; ++j)
#pragma unroll
                for (int i = 0; i < KV_TILE / 16; ++i)
                    wgmma_columns(o[j], p[i], v + 2 * j * (COLUMN_BYTES / 16) + 128 * i, i != 0 || !first);
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < HALF_COLUMNS / 128; ++j) pin(o[j]);
            barrier_arrive_warp(s.tile.k_empty + 8 * at.stage);
            at.next(s.tile);
        }
        const TileItem item = read_item(s.tile, number & 1);
        free_item(s.tile, number & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row0 + 8 * i, begin = item.partial < 0 ? item.q_begin : item.partial;
            const TileRow from(a, item.head, min(row, item.rows - 1));
            const long long to = from.index(a, begin) * V_DIM + half * HALF_COLUMNS;
#pragma unroll
            for (int j = 0; j < HALF_COLUMNS / 128; ++j) {
                if (item.partial >= 0) store_row(a.partial_out + to + 128 * j, o[j], i, factor[i], row < item.rows);
                else store_row(outputs(a) + to + 128 * j, o[j], i, factor[i], row < item.rows);
            }
        }
    }
}

}  // namespace prefixkit
