// Attention of many query rows to shared KV with mma.sync, for any GPU from sm_80 on: the matrix path.
//
// shapes     an item has up to 128 rows, or those of one query: (query, head of the group) pairs of one KV head.  A tile takes TILE.
// tiling     a block of four warps shares KV tiles of KV_TILE tokens.  A warp has 16 rows of each 64: scores, probabilities (rounded to the
//            operand of the second product) and output stay in its registers, queries in shared memory.  Keys and values of the KV tiles
//            come alternately through a ring of SLOTS tiles, filled by 16-byte copies that run SLOTS - 1 tiles ahead, across items.
// cost       4 D flops per row and token; of shared memory 512 bytes for 4 matrix instructions (2 where a tile has 64 rows).
// limits     head sizes that 16 divides, up to 256: above 128 a tile has 64 rows, for registers are short.
#pragma once
#include "attention/sm80/tile_queue.cuh"

namespace prefixkit {

// ---- loading ----

// A complete group in one page; slots lie `stride` elements apart.  `to`: row 0 of the group in the tile.
template <int ROWS> DEVICE void copy_whole(u32 to, const u16* from, long long stride) {
    // A warp copies WIDE pieces of STEP rows at a time; WIDE is the largest power of two that divides a row.
    constexpr int WIDE = ROW_VECTORS & -ROW_VECTORS, STEP = 32 / WIDE;
    const int lane = lane_anew(), column = lane % WIDE, sub = lane / WIDE;
    const u32 base = to + (column >> 3) * (ROWS * 128) + sub * 128, turn = ((column ^ sub) & 7) << 4;
    from += sub * stride + column * 8;
#pragma unroll
    for (int row = 0; row < GROUP; row += STEP)
#pragma unroll
        for (int c = 0; c < ROW_VECTORS; c += WIDE)
            copy16(base + (c >> 3) * (ROWS * 128) + row * 128 + (turn ^ (((row ^ c) & 7) << 4)), from + row * stride + c * 8, true);
}

// This warp's part of a KV tile's keys, or values: tokens [low, high), the others zero.
DEVICE void tile_copy(const Attention& a, const KVTile& kv_tile, const u16* base, u32 tile, bool values) {
    const int warp = threadIdx.x >> 5, part = warp % PARTS;
    // With fewer groups than warps, some copy keys and the others values.
    const bool mine = PARTS == BLOCK_WARPS || warp / PARTS % 2 == values;
    if (mine && !(kv_tile.flags() & STOP)) {
        const u32 row = kv_tile.row[part], to = tile + part * GROUP * 128;
        if (row != RAGGED) {
            copy_whole<KV_TILE>(to, base + (long long)row * 8, a.slot_stride);
        } else {
            Span span;
            span.pages = kv_tile.pages;
            const int at = part * GROUP;
            gather_rows<KV_TILE>(a, base, to, span, kv_tile.slot + at, kv_tile.low() - at, kv_tile.high() - at, kv_tile.head());
        }
    }
    copy_commit();
}

// Query rows and their positions; rows that the item lacks keep what was there, and their results are not read.
DEVICE void tile_queries(const Attention& a, const KVTile& item, const TileShared& s) {
    const int group = group_of(a), rows = item.rows(), row0 = item.row0(), head = item.head() * group;
#pragma unroll 4
    for (int piece = threadIdx.x; piece < rows * ROW_VECTORS; piece += 32 * BLOCK_WARPS) {
        const int row = piece / ROW_VECTORS, column = piece % ROW_VECTORS;
        const int query = divide_small(row0 + row, group), of = row0 + row - query * group;
        const long long from = ((long long)(item.q_begin + query) * a.heads + head + of) * D + column * 8;
        store_shared16(s.q + piece_at<TILE>(row, column), *(const int4*)(a.q + from));
    }
    for (int row = threadIdx.x; row < rows; row += 32 * BLOCK_WARPS)
        s.positions[row] = int(a.q_positions[item.q_begin + divide_small(row0 + row, group)]);
}

// ---- computing ----

// A lane has rows lane / 4 (+ 8) of its warp's 16 in each stripe, and columns 2 (lane % 4) (+ 1) of every 8.
struct TileState {
    u32 p[STRIPES][KV_TILE / 16][4];                // probabilities, rounded, as operand
    float o[STRIPES][D / 8][4];
    float top[STRIPES][2], sum[STRIPES][2];      // `sum` over this lane's columns
    float shrink[STRIPES][2];                    // what the output must be multiplied by before more is added
};

using Scores = float[STRIPES][KV_TILE / 8][4];

// `S`: stripes that have rows.
template <int S> DEVICE void tile_scores(Scores& x, u32 q, u32 k) {
    const int lane = lane_anew();
    const int q_row = 16 * (threadIdx.x >> 5) + (lane & 15), k_row = (lane & 7) + (lane >> 4) * 8;
    const u32 q_base = q + q_row * 128, q_turn = (((lane >> 4) ^ q_row) & 7) << 4;
    const u32 k_base = k + k_row * 128, k_turn = (((lane >> 3 & 1) ^ k_row) & 7) << 4;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int n = 0; n < KV_TILE / 8; ++n) x[s][n][0] = x[s][n][1] = x[s][n][2] = x[s][n][3] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        u32 mq[S][4], mk[KV_TILE / 16][4];
#pragma unroll
        for (int s = 0; s < S; ++s) load_matrix(mq[s], q_base + s * 64 * 128 + (i / 4) * (TILE * 128) + (q_turn ^ ((2 * i & 7) << 4)));
#pragma unroll
        for (int n = 0; n < KV_TILE / 16; ++n) load_matrix(mk[n], k_base + n * 2048 + (i / 4) * (KV_TILE * 128) + (k_turn ^ ((2 * i & 7) << 4)));
#pragma unroll
        for (int n = 0; n < KV_TILE / 16; ++n)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                mma(x[s][2 * n], mq[s], mk[n][0], mk[n][1]);
                mma(x[s][2 * n + 1], mq[s], mk[n][2], mk[n][3]);
            }
    }
}

template <int S> DEVICE void tile_values(TileState& w, u32 v) {
    const int lane = lane_anew(), v_row = lane & 15;
    const u32 v_base = v + v_row * 128, v_turn = (((lane >> 4) ^ v_row) & 7) << 4;
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
#pragma unroll
    for (int n = 0; n < KV_TILE / 16; ++n)
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            u32 m[4];
            load_matrix_transposed(m, v_base + n * 2048 + (i / 4) * (KV_TILE * 128) + (v_turn ^ ((2 * i & 7) << 4)));
#pragma unroll
            for (int s = 0; s < S; ++s) {
                mma(w.o[s][2 * i], w.p[s][n], m[0], m[1]);
                mma(w.o[s][2 * i + 1], w.p[s][n], m[2], m[3]);
            }
        }
}

DEVICE int stripe_row(int stripe, int half) { return 64 * stripe + 16 * (threadIdx.x >> 5) + lane_anew() / 4 + 8 * half; }

// Scores to exponents of 2, -inf where hidden.
template <int S>
DEVICE void tile_exponents(const Attention& a, const KVTile& kv_tile, const int* positions, Scores& x) {
    const int column = 2 * (lane_anew() & 3), group = group_of(a);
    const int low = kv_tile.low(), high = kv_tile.high(), position = kv_tile.position, rows = kv_tile.rows(), row0 = kv_tile.row0();
    const int first_head = kv_tile.head() * group;
    const bool compare = kv_tile.flags() & CAUSAL;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(stripe_row(s, half), rows - 1), mine = positions[row];
            const int of = row0 + row, q_head = first_head + of - divide_small(of, group) * group;
#pragma unroll
            for (int n = 0; n < KV_TILE / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int token = 8 * n + column + j;
                    const bool visible = token >= low && token < high && (!compare || position + token <= mine);
                    float& y = x[s][n][2 * half + j];
                    y = exponent(y, a.scale, visible, mine, position + token, q_head, a.parameters);
                }
        }
}

// Exponents, or plain scores, to probabilities relative to the largest so far; says what older outputs shrink by.
template <bool PLAIN, int S> DEVICE void tile_softmax(float scale, TileState& w, Scores& x) {
    const float factor = PLAIN ? scale * LOG2E : 1.f;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = x[s][0][2 * half];
#pragma unroll
            for (int n = 0; n < KV_TILE / 8; ++n) top = fmaxf(top, fmaxf(x[s][n][2 * half], x[s][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * factor;
            top = fmaxf(top, w.top[s][half]);
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

template <int S> DEVICE void tile_keys(const Attention& a, const KVTile& kv_tile, const TileShared& s, TileState& w, u32 k) {
    Scores x;
    tile_scores<S>(x, s.q, k);
    if (MODIFIED || (kv_tile.flags() & CAUSAL) || kv_tile.low() > 0 || kv_tile.high() < KV_TILE) {
        tile_exponents<S>(a, kv_tile, s.positions, x);
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

DEVICE void tile_finish(const Attention& a, const KVTile& item, TileState& w) {
    const int group = group_of(a), rows = item.rows(), row0 = item.row0(), column = 2 * (lane_anew() & 3);
#pragma unroll
    for (int s = 0; s < STRIPES; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = w.sum[s][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int row = stripe_row(s, half);
            if (row >= rows) continue;
            const int query = divide_small(row0 + row, group), head = item.head() * group + row0 + row - query * group;
            float lse = sum > 0.f ? (w.top[s][half] + log2_fast(sum)) * LN2 : MINUS_INFINITY;
            float factor = sum > 0.f ? 1.f / sum : 0.f;
            if (item.partial >= 0) {
                const long long at = (long long)(item.partial + query) * a.heads + head;
                float* to = a.partial_out + at * D + column;
#pragma unroll
                for (int i = 0; i < D / 8; ++i)
                    *(float2*)(to + 8 * i) = make_float2(w.o[s][i][2 * half] * factor, w.o[s][i][2 * half + 1] * factor);
                if (column == 0) a.partial_lse[at] = lse;
            } else {
                factor *= join_sink(lse, head, a.parameters);
                const long long at = (long long)(item.q_begin + query) * a.heads + head;
                u16* to = a.out + at * D + column;
#pragma unroll
                for (int i = 0; i < D / 8; ++i)
                    *(u32*)(to + 8 * i) = pack(w.o[s][i][2 * half] * factor, w.o[s][i][2 * half + 1] * factor);
                if (column == 0) a.lse[at] = lse;
            }
        }
}

// The block's whole share of the tile list.  A step waits for its tile of the ring, sends for the tile that takes the place of the
// one before, and computes.
DEVICE void tile_role(const Attention& a, const TileShared& s) {
    const int warp = threadIdx.x >> 5, first_row = 16 * warp;
    if (int(blockIdx.x) >= a.counts[0] * a.kv_heads * slices_of(a)) return;
    int filled = 0, at = 0, to = 0;              // KV tiles in the queue; tiles of the ring to compute and to fill
    if (warp == 0) {
        Refill refill(a, s);
        refill.begin();
        refill.until(AHEAD, QUEUE, s.walk);
        filled = refill.w.filled;
    }
    __syncthreads();
    for (int kv_tile = 0; kv_tile < AHEAD; ++kv_tile) {
        tile_copy(a, s.kv_tiles[kv_tile], a.k, s.ring + to++ * SLOT_BYTES, false);
        tile_copy(a, s.kv_tiles[kv_tile], a.v, s.ring + to++ * SLOT_BYTES, true);
    }
    TileState w = {};  // else the compiler keeps registers for it outside of this role
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
        if (warp == 0 && filled <= need) {       // free: the KV tiles before this one are done
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
