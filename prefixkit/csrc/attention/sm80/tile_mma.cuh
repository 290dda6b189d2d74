// The tensor-core tile path with mma.sync, for any GPU from sm_80 on: attention of many tile rows to shared KV.
//
// shapes     an item has up to 128 tile rows, or those of one query; a tile takes TILE of them.
// tiling     a block of four warps shares KV tiles of KV_TILE tokens.  A warp takes 16 of every 64 rows: scores,
//            probabilities and output stay in its registers, queries in shared memory.  Keys and values alternate in a
//            ring of SLOTS tiles, filled by 16-byte copies that run SLOTS - 1 tiles ahead, across items.
// cost       4 D flops per row and token; 512 bytes of shared memory for 4 matrix instructions (2 where TILE is 64).
// limits     head sizes that 16 divides, up to 256; registers limit TILE to 64 above 128.
#pragma once
#include "attention/sm80/tile_queue.cuh"

namespace prefixkit {

// Copies this warp's part of a KV tile's keys or values: tokens [low, high), the others zero.
DEVICE void tile_copy(const Attention& a, const KVTile& kv_tile, const u16* base, u32 tile, bool values) {
    const int warp = threadIdx.x >> 5, part = warp % PARTS;
    // With fewer groups than warps, some copy keys and the others values.
    const bool mine = PARTS == BLOCK_WARPS || warp / PARTS % 2 == values;
    if (mine && !(kv_tile.flags() & STOP)) {
        const u32 row = kv_tile.row[part], to = tile + part * GROUP * 128;
        if (row != RAGGED) {
            copy_group<KV_TILE>(to, base + (long long)row * 8, a.slot_stride);
        } else {
            const int at = part * GROUP, low = kv_tile.low() - at, high = kv_tile.high() - at;
            gather_rows<KV_TILE>(a, base, to, kv_tile.pages, kv_tile.slot + at, low, high, kv_tile.head());
        }
    }
    copy_commit();
}

// One past the last position that a query of a CLIPPED item sees.
DEVICE int end_seen(const Attention& a, const KVTile& item, int query) {
    return end_seen(a, item.flags() & LIMITED ? LIMIT : OWN, item.q_begin, item.partial, query);
}

// Stores 16 columns of a row as pairs 0, 2, 4, 6, then pairs 1, 3, 5, 7: where pages hold e4m3, a lane's four
// neighbours of a key serve as columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a product (see e4m3_products.cuh).
DEVICE void store_parted(u32 q, int row, int i, const u16* from) {
    const int4 x = ((const int4*)from)[0], y = ((const int4*)from)[1];
    store_shared16(q + vector_at<TILE>(row, 2 * i), make_int4(x.x, x.z, y.x, y.z));
    store_shared16(q + vector_at<TILE>(row, 2 * i + 1), make_int4(x.y, x.w, y.y, y.w));
}

// Copies queries, and what each sees; rows that the item lacks keep stale queries, and their results are not read.
DEVICE void tile_queries(const Attention& a, const KVTile& item, const TileShared& s) {
    const int rows = item.rows(), row0 = item.row0(), head = item.head();
    constexpr int WIDTH = FP8 ? 16 : 8, STEPS = D / WIDTH;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * STEPS; i += 32 * BLOCK_WARPS) {
        const int row = i / STEPS, column = i % STEPS;
        const long long from = TileRow(a, head, row0 + row).index(a, item.q_begin) * D + column * WIDTH;
        if (FP8) store_parted(s.q, row, column, a.q + from);
        else store_shared16(s.q + vector_at<TILE>(row, column), *(const int4*)(a.q + from));
    }
    for (int row = threadIdx.x; row < rows; row += 32 * BLOCK_WARPS) {
        const int query = TileRow(a, head, row0 + row).query;
        s.positions[row] = MODIFIED ? int(a.q_positions[item.q_begin + query]) : end_seen(a, item, query);
    }
}

// A lane holds rows lane / 4 (+ 8) of its warp's 16 in each stripe, and columns 2 (lane % 4) (+ 1) of every 8.
struct TileState {
    u32 p[STRIPES][KV_TILE / 16][4];  // probabilities, rounded, as operand
    float o[STRIPES][D / 8][4];
    float top[STRIPES][2], sum[STRIPES][2];  // `sum` over this lane's columns
    float shrink[STRIPES][2];  // factor for the output before more is added
};

using Scores = float[STRIPES][KV_TILE / 8][4];

// Computes scores of keys in e4m3: 16 tokens and 32 columns at a time.
template <int S> DEVICE void e4m3_scores(Scores& x, const MatrixRow<TILE>& q_row, u32 k) {
    const MatrixRow<KV_TILE> k_row(k, lane_anew() & 15, lane_anew() >> 4);
#pragma unroll
    for (int i = 0; i < E4M3_LOADS; ++i) {
        u32 mq[2][S][4];
#pragma unroll
        for (int j = 0; j < 2 && 2 * i + j < D / 16; ++j)
#pragma unroll
            for (int s = 0; s < S; ++s) load_matrix(mq[j][s], q_row.at(2 * i + j) + s * 64 * 128);
#pragma unroll
        for (int n = 0; n < KV_TILE / 16; ++n) {
            u32 m[4];
            load_matrix(m, k_row.at(i) + n * 2048);
#pragma unroll
            for (int part = 0; part < 4 && 2 * i + part / 2 < D / 16; ++part) {  // of 8 tokens
                const u32 low = widen_e4m3(m[part]), high = widen_e4m3(m[part] >> 16);
#pragma unroll
                for (int s = 0; s < S; ++s) mma(x[s][2 * n + part % 2], mq[part / 2][s], low, high);
            }
        }
    }
}

// `S`: stripes that have rows.
template <int S> DEVICE void tile_scores(Scores& x, u32 q, u32 k) {
    const int lane = lane_anew();
    const MatrixRow<TILE> q_row(q, 16 * (threadIdx.x >> 5) + (lane & 15), lane >> 4);
    const MatrixRow<KV_TILE> k_row(k, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    if constexpr (FP8) e4m3_scores<S>(x, q_row, k);
    else
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            u32 mq[S][4], mk[KV_TILE / 16][4];
#pragma unroll
            for (int s = 0; s < S; ++s) load_matrix(mq[s], q_row.at(i) + s * 64 * 128);
#pragma unroll
            for (int n = 0; n < KV_TILE / 16; ++n) load_matrix(mk[n], k_row.at(i) + n * 2048);
#pragma unroll
            for (int n = 0; n < KV_TILE / 16; ++n)
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    mma(x[s][2 * n], mq[s], mk[n][0], mk[n][1]);
                    mma(x[s][2 * n + 1], mq[s], mk[n][2], mk[n][3]);
                }
        }
}

// Adds values in e4m3: 16 tokens and 32 columns at a time. w.o holds the even columns of every 16 before the odd ones.
template <int S> DEVICE void e4m3_values(TileState& w, u32 v) {
    const MatrixRow<KV_TILE> row(v, lane_anew() & 15, lane_anew() >> 4);
#pragma unroll
    for (int n = 0; n < KV_TILE / 16; ++n)
#pragma unroll
        for (int i = 0; i < E4M3_LOADS; ++i) {
            u32 m[4];
            load_matrix_transposed(m, row.at(i) + n * 2048);
#pragma unroll
            for (int k = 2 * i; k < 2 * i + 2 && k < D / 16; ++k) {
                const u32 low = __byte_perm(m[2 * (k & 1)], 0, 0x3120);
                const u32 high = __byte_perm(m[2 * (k & 1) + 1], 0, 0x3120);
                const u32 even[2] = {widen_e4m3(low), widen_e4m3(high)};
                const u32 odd[2] = {widen_e4m3(low >> 16), widen_e4m3(high >> 16)};
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    mma(w.o[s][2 * k], w.p[s][n], even[0], even[1]);
                    mma(w.o[s][2 * k + 1], w.p[s][n], odd[0], odd[1]);
                }
            }
        }
}

template <int S> DEVICE void tile_values(TileState& w, u32 v) {
    const MatrixRow<KV_TILE> row(v, lane_anew() & 15, lane_anew() >> 4);
    bool changed = false;
#pragma unroll
    for (int s = 0; s < S; ++s) changed = changed || w.shrink[s][0] != 1.f || w.shrink[s][1] != 1.f;
    if (__any_sync(~0u, changed))
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
                w.o[s][i][0] *= w.shrink[s][0], w.o[s][i][1] *= w.shrink[s][0];
                w.o[s][i][2] *= w.shrink[s][1], w.o[s][i][3] *= w.shrink[s][1];
            }
    if constexpr (FP8) e4m3_values<S>(w, v);
    else
#pragma unroll
        for (int n = 0; n < KV_TILE / 16; ++n)
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                u32 m[4];
                load_matrix_transposed(m, row.at(i) + n * 2048);
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    mma(w.o[s][2 * i], w.p[s][n], m[0], m[1]);
                    mma(w.o[s][2 * i + 1], w.p[s][n], m[2], m[3]);
                }
            }
}

DEVICE int stripe_row(int stripe, int half) {
    return 64 * stripe + 16 * (threadIdx.x >> 5) + lane_anew() / 4 + 8 * half;
}

// Turns scores into exponents of 2, -inf where hidden.
template <int S>
DEVICE void tile_exponents(const Attention& a, const KVTile& kv_tile, const TileShared& s, Scores& x) {
    const int column = 2 * (lane_anew() & 3), low = kv_tile.low(), high = kv_tile.high(), position = kv_tile.position;
    const bool clipped = kv_tile.flags() & CLIPPED, masked = kv_tile.flags() & MASKED;
#pragma unroll
    for (int stripe = 0; stripe < S; ++stripe)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(stripe_row(stripe, half), kv_tile.rows() - 1);
            const int mine = s.positions[row];
            const TileRow of(a, kv_tile.head(), kv_tile.row0() + row);
            int end = mine - position;
            if (MODIFIED && clipped) end = end_seen(a, kv_tile, of.query) - position;
            const int sequence = sequence_of(a, kv_tile.q_begin + of.query);
#pragma unroll
            for (int n = 0; n < KV_TILE / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int token = 8 * n + column + j;
                    const bool visible = token >= low && token < high && (!clipped || token < end);
                    float& y = x[stripe][n][2 * half + j];
                    y = exponent(y, a.scale, a.scale_log2, sequence, of.head, mine, position + column, 8 * n + j,
                                 a.words);
                    if (!visible) y = MINUS_INFINITY;
                }
            if (Variant::HAS_MASK && masked)
#pragma unroll
                for (int n = 0; n < KV_TILE / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        if (!Variant::mask(sequence, of.head, mine, position + 8 * n + column + j, a.words))
                            x[stripe][n][2 * half + j] = MINUS_INFINITY;
        }
}

// Turns exponents, or PLAIN scores, into probabilities relative to the largest so far; sets `shrink` for older outputs.
template <bool PLAIN, int S> DEVICE void tile_softmax(float scale, TileState& w, Scores& x) {
    const float factor = PLAIN ? scale * LOG2E : 1.f;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = x[s][0][2 * half];
#pragma unroll
            for (int n = 0; n < KV_TILE / 8; ++n) top = fmaxf(top, fmaxf(x[s][n][2 * half], x[s][n][2 * half + 1]));
            top = fmaxf(lanes_max<1, 4>(top) * factor, w.top[s][half]);
            const float base = top == MINUS_INFINITY ? 0.f : top, shrink = exp2_fast(w.top[s][half] - base);
            w.shrink[s][half] = shrink, w.top[s][half] = top;
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < KV_TILE / 8; ++n) {
                const float one = exp2_fast(x[s][n][2 * half] * factor - base);
                const float two = exp2_fast(x[s][n][2 * half + 1] * factor - base);
                sum += one + two;
                w.p[s][n / 2][2 * (n & 1) + half] = pack(one, two);
            }
            w.sum[s][half] = w.sum[s][half] * shrink + sum;
        }
}

template <int S>
DEVICE void tile_keys(const Attention& a, const KVTile& kv_tile, const TileShared& s, TileState& w, u32 k) {
    Scores x = {};
    tile_scores<S>(x, s.q, k);
    if (Variant::HAS_SCORE || (kv_tile.flags() & (CLIPPED | MASKED)) || kv_tile.low() > 0 || kv_tile.high() < KV_TILE) {
        tile_exponents<S>(a, kv_tile, s, x);
        tile_softmax<false, S>(a.scale, w, x);
    } else {
        tile_softmax<true, S>(a.scale, w, x);
    }
}

DEVICE void tile_begin(TileState& w) {
#pragma unroll
    for (int s = 0; s < STRIPES; ++s) {
        w.top[s][0] = w.top[s][1] = MINUS_INFINITY, w.sum[s][0] = w.sum[s][1] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) w.o[s][i][0] = w.o[s][i][1] = w.o[s][i][2] = w.o[s][i][3] = 0.f;
    }
}

// Stores this lane's columns of a row: pairs of every 8, or four of every 16 where pages hold e4m3.
template <class T> DEVICE void store_row(T* to, const float (&o)[D / 8][4], int half) {
#pragma unroll
    for (int i = 0; i < D / 8; i += FP8 ? 2 : 1) {
        const float x = o[i][2 * half], y = o[i][2 * half + 1];
        if constexpr (FP8) store_four(to + 8 * i, make_float4(x, o[i + 1][2 * half], y, o[i + 1][2 * half + 1]));
        else store_two(to + 8 * i, x, y);
    }
}

DEVICE void tile_finish(const Attention& a, const KVTile& item, TileState& w) {
    const int column = (FP8 ? 4 : 2) * (lane_anew() & 3);
#pragma unroll
    for (int s = 0; s < STRIPES; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = lanes_sum<1, 4>(w.sum[s][half]);
            const int row = stripe_row(s, half);
            if (row >= item.rows()) continue;
            const TileRow of(a, item.head(), item.row0() + row);
            const float lse = sum > 0.f ? (w.top[s][half] + log2_rounded(sum)) * LN2 : MINUS_INFINITY;
            float factor = sum > 0.f ? 1.f / sum : 0.f;
            const long long at = finish_row(a, item.q_begin, item.partial, of, lse, factor, column == 0) * D + column;
#pragma unroll
            for (int i = 0; i < D / 8; ++i) w.o[s][i][2 * half] *= factor, w.o[s][i][2 * half + 1] *= factor;
            if (item.partial >= 0) store_row(a.partial_out + at, w.o[s], half);
            else store_row(outputs(a) + at, w.o[s], half);
        }
}

// Runs the block's whole share of the tile list.  A step waits for its tile of the ring, issues the copy that replaces
// the previous tile, and computes.
DEVICE void tile_role(const Attention& a, const TileShared& s) {
    const int warp = threadIdx.x >> 5, first_row = 16 * warp;
    if (int(blockIdx.x) >= a.counts[0] * a.kv_heads * slices_of(a)) return;
    int filled = 0, at = 0, to = 0;  // KV tiles in the queue; tiles of the ring to compute and to fill
    if (warp == 0) {
        Refill refill(a, s);
        refill.w.round = refill.w.filled = 0;
        refill.next_item();
        refill.until(AHEAD, QUEUE, s.walk);
        filled = refill.w.filled;
    }
    __syncthreads();
    for (int kv_tile = 0; kv_tile < AHEAD; ++kv_tile) {
        tile_copy(a, s.kv_tiles[kv_tile], a.k, s.ring + to++ * SLOT_BYTES, false);
        tile_copy(a, s.kv_tiles[kv_tile], a.v, s.ring + to++ * SLOT_BYTES, true);
    }
    TileState w = {};  // uninitialised, it would take registers outside of this role
    for (int number = 0;; ++number) {
        const KVTile& kv_tile = s.kv_tiles[number % QUEUE];
        const KVTile& later = s.kv_tiles[(number + AHEAD) % QUEUE];
        copy_wait<SLOTS - 2>();
        __syncthreads();
        tile_copy(a, later, a.k, s.ring + to * SLOT_BYTES, false);
        to = to + 1 == SLOTS ? 0 : to + 1;
        if (kv_tile.flags() & STOP) break;
        if (kv_tile.flags() & FIRST) {
            tile_queries(a, kv_tile, s);
            tile_begin(w);
            __syncthreads();
        }
        u32 tile = s.ring + at * SLOT_BYTES;
        if (STRIPES > 1 && first_row + 64 < kv_tile.rows()) tile_keys<STRIPES>(a, kv_tile, s, w, tile);
        else if (first_row < kv_tile.rows()) tile_keys<1>(a, kv_tile, s, w, tile);
        at = at + 1 == SLOTS ? 0 : at + 1;
        copy_wait<SLOTS - 2>();
        __syncthreads();
        tile_copy(a, later, a.v, s.ring + to * SLOT_BYTES, true);
        to = to + 1 == SLOTS ? 0 : to + 1;
        const int need = number + AHEAD + 1;
        if (warp == 0 && filled <= need) {  // earlier KV tiles are done, so their places in the queue are free
            Refill refill(a, s);
            refill.until(need, number + QUEUE, s.walk);
            filled = refill.w.filled;
        }
        tile = s.ring + at * SLOT_BYTES;
        if (STRIPES > 1 && first_row + 64 < kv_tile.rows()) tile_values<STRIPES>(w, tile);
        else if (first_row < kv_tile.rows()) tile_values<1>(w, tile);
        at = at + 1 == SLOTS ? 0 : at + 1;
        if ((kv_tile.flags() & LAST) && first_row < kv_tile.rows()) tile_finish(a, kv_tile, w);
    }
    copy_wait<0>();
    __syncthreads();
}

}  // namespace prefixkit
