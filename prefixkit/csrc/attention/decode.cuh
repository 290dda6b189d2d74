// The decode (GEMV) path: attention of at most 8 tile rows to long KV, or of 16 where PREFIXKIT_ROW_PARTS is 2.
//
// shapes     an item has up to 8 tile rows, pairs (query, head of the group) of one KV head, for each of its warps.
// tiling     KV tiles of 16 tokens (on Hopper 32 or 64, where rows are short) pass through a warp's own ring, which TMA
//            fills (Hopper), or 16-byte copies that run a ring ahead, across items.  Operands are swapped: S^T[16 x 8]
//            = K Q^T and O^T[D x 8] = V^T P^T, so tile rows cost an eighth of a product and the output takes D / 4
//            registers.  Each warp works alone.  Two warps that take an item together share its ring and hold 8 of its
//            rows each, because the registers of one warp cannot hold 16.
// cost       2 x 2 D bytes per token (2 D in e4m3, see below); D / 8 matrix instructions per 16 tokens and warp.
// limits     any page size and stride.
#pragma once
#include "attention/decode_walk.cuh"
#include "attention/e4m3_products.cuh"
#include "attention/merge.cuh"

namespace prefixkit {

// A warp's state for up to 8 tile rows: a lane holds rows 2 (lane % 4) (+ 1) and columns lane / 4 (+ 8) of each 16.
struct DecodeState {
    u32 q[D / 16][2];
    float o[D / 16][4];
    float base[2], sum[2], weight[2];
    int sequence[2], position[2], q_head[2];  // where the variant changes scores
    int end[2];  // one past the last position that each row sees, for CLIPPED items
    u32 unscale;  // for NARROWED queries: the factors of both rows' scores
};

// Reads an item's queries early: their registers are free once the previous item's scores are computed.
DEVICE void decode_queries(const Attention& a, const DecodeKVTile& c, DecodeState& s) {
    const int lane = lane_anew(), n = first_of_part() + lane / 4;
    const u16* q = a.q + TileRow(a, c.head, n).index(a, c.q_begin) * D + (FP8 ? 4 : 2) * (lane & 3);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        s.q[k][0] = n < c.rows ? *(const u32*)(q + 16 * k) : 0;
        s.q[k][1] = n < c.rows ? *(const u32*)(q + 16 * k + (FP8 ? 2 : 8)) : 0;
    }
}

// Row i of this lane's two; where the item lacks that row, its last row.
DEVICE TileRow row_of_lane(const Attention& a, const DecodeKVTile& c, int i) {
    return TileRow(a, c.head, min(first_of_part() + 2 * (lane_anew() & 3) + i, c.rows - 1));
}

// One past the last position that row i of this lane's two sees, for a CLIPPED item.
DEVICE int end_of_row(const Attention& a, const DecodeKVTile& c, int i) {
    const int query = row_of_lane(a, c, i).query;
    return end_seen(a, c.flags & LIMITED ? LIMIT : OWN, c.q_begin, c.partial, query);
}

// Narrows the queries of row lane / 4.
DEVICE void narrow_queries(DecodeState& s) {
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) largest = larger_bits(larger_bits(largest, s.q[k][0]), s.q[k][1]);
    const float factor = narrowing_factor(largest_of_quad(largest)), inverse = inverse_power(factor);
    const int lane = 8 * (lane_anew() & 3);  // the lane that holds the first of this lane's two rows
    s.unscale = two_powers(__shfl_sync(~0u, inverse, lane), __shfl_sync(~0u, inverse, lane + 4));
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
        s.q[k][0] = narrow_pair(s.q[k][0], factor), s.q[k][1] = narrow_pair(s.q[k][1], factor);
}

DEVICE void decode_begin(const Attention& a, const DecodeKVTile& c, DecodeState& s) {
    if constexpr (NARROWED) narrow_queries(s);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) s.o[k][0] = s.o[k][1] = s.o[k][2] = s.o[k][3] = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        s.base[i] = LOWEST, s.sum[i] = s.weight[i] = 0.f;
        if (Variant::HAS_SCORE || (c.flags & CLIPPED)) {
            const TileRow row = row_of_lane(a, c, i);
            s.end[i] = end_of_row(a, c, i);
            s.position[i] = int(a.q_positions[c.q_begin + row.query]), s.q_head[i] = row.head;
            s.sequence[i] = sequence_of(a, c.q_begin + row.query);
        }
    }
}

// Which of a lane's scores the masks show in a MASKED KV tile, one bit for each.  Rows are looked up again, because
// registers are short and such KV tiles are few.
DEVICE u32 shown_scores(const Attention& a, const DecodeKVTile& c) {
    u32 shown = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const TileRow of = row_of_lane(a, c, row);
        const int position = int(a.q_positions[c.q_begin + of.query]), sequence = sequence_of(a, c.q_begin + of.query);
#pragma unroll 1
        for (int i = row; i < 4 * DECODE_GROUPS; i += 2) {
            const int token = c.position + lane_anew() / 4 + 8 * (i / 2);
            shown |= u32(Variant::mask(sequence, of.head, position, token, a.words)) << i;
        }
    }
    return shown;
}

// Waits for the other warps that take the same item; each ring has a named barrier for that.
DEVICE void join_parts() {
    static_assert(ROW_PARTS == 1 || RINGS == 2, "a barrier for each ring");
    if constexpr (ROW_PARTS > 1) {
        if ((threadIdx.x >> 5) / ROW_PARTS % RINGS == 0) named_barrier<8, 32 * ROW_PARTS>();
        else named_barrier<9, 32 * ROW_PARTS>();
    }
}

// Clears the values outside tokens [low, high): TMA loads whatever lies there, and 0 * NaN is NaN.
DEVICE void clear_absent(u32 values, int low, int high) {
    const int first = lane_anew() + (ROW_PARTS == 1 ? 0 : 32 * int((threadIdx.x >> 5) % ROW_PARTS));
#pragma unroll 1
    for (int i = first; i < DECODE_KV_TILE * STORED_VECTORS; i += 32 * ROW_PARTS) {
        const int row = i / STORED_VECTORS;
        if (row < low || row >= high) store_zeros(values + vector_at<DECODE_KV_TILE>(row, i % STORED_VECTORS));
    }
    async_fence();  // TMA writes here next
    __syncwarp();
    join_parts();
}

// The row of values, among the 16 from row `first` on, whose address a lane passes to ldmatrix.
DEVICE MatrixRow<DECODE_KV_TILE> values_of_lane(u32 values, int first, int lane) {
    if (FP8) return {values, first + (lane & 15), lane >> 4};
    return {values, first + (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1};
}

DEVICE void decode_compute(const Attention& a, const DecodeKVTile& c, DecodeState& s, u32 stage) {
    const u32 shown = Variant::HAS_MASK && (c.flags & MASKED) ? shown_scores(a, c) : ~0u;
    const int lane = lane_anew();
    // Independent sums: on Hopper each dependent product would also wait for the products of the tile warps.
    constexpr int SUMS = FP8 ? 2 : 4;
    float dot[DECODE_GROUPS][SUMS][4] = {};
#pragma unroll
    for (int g = 0; g < DECODE_GROUPS; ++g) {
        const MatrixRow<DECODE_KV_TILE> keys(stage, g * GROUP + (lane & 15), lane >> 4);
        if constexpr (FP8) add_e4m3_scores(keys, s.q, dot[g]);
        else
#pragma unroll
            for (int first = 0; first < D / 16; first += 4) {  // four loads in flight at a time
                u32 m[4][4];
#pragma unroll
                for (int k = first; k < first + 4 && k < D / 16; ++k)
                    load_matrix(m[k - first], keys.at(k));
#pragma unroll
                for (int k = first; k < first + 4 && k < D / 16; ++k)
                    mma(dot[g][k & 3], m[k - first], s.q[k][0], s.q[k][1]);
            }
    }
    const int low = c.low, high = c.high, flags = c.flags;
    const u32 values = stage + DECODE_KV_TILE_BYTES;
    if (PREFIXKIT_MAPS && a.tma_groups && (low > 0 || high < DECODE_KV_TILE)) clear_absent(values, low, high);
    const MatrixRow<DECODE_KV_TILE> value_row = values_of_lane(values, 0, lane);
    constexpr int LOADS = FP8 ? E4M3_LOADS : D / 16;
    u32 v[4][4];  // the first loads overlap the exponentials
#pragma unroll
    for (int k = 0; k < 4 && k < LOADS; ++k) load_matrix_transposed(v[k], value_row.at(k));
    float x[4 * DECODE_GROUPS];
#pragma unroll
    for (int i = 0; i < 4 * DECODE_GROUPS; ++i) {
        const float(&d)[SUMS][4] = dot[i / 4];
        float sum = d[0][i % 4] + d[1][i % 4];
#pragma unroll
        for (int k = 2; k < SUMS; k += 2) sum += d[k][i % 4] + d[k + 1][i % 4];
        if constexpr (NARROWED) sum *= one_power(s.unscale, i & 1);
        x[i] = exponent(sum, a.scale, a.scale_log2, s.sequence[i & 1], s.q_head[i & 1], s.position[i & 1],
                        c.position + lane / 4, 8 * (i / 2), a.words);
    }
    if ((flags & CLIPPED) || low > 0 || high < DECODE_KV_TILE) {
#pragma unroll
        for (int i = 0; i < 4 * DECODE_GROUPS; ++i) {
            const int token = lane / 4 + 8 * (i / 2);
            if (token < low || token >= high || ((flags & CLIPPED) && c.position + token >= s.end[i & 1]))
                x[i] = MINUS_INFINITY;
        }
    }
    if (Variant::HAS_MASK && (flags & MASKED)) {
#pragma unroll
        for (int i = 0; i < 4 * DECODE_GROUPS; ++i)
            if (!(shown >> i & 1)) x[i] = MINUS_INFINITY;
    }
    float top[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
#pragma unroll
    for (int i = 4; i < 4 * DECODE_GROUPS; ++i) top[i & 1] = fmaxf(top[i & 1], x[i]);
    if (__any_sync(~0u, top[0] > s.base[0] + HEADROOM || top[1] > s.base[1] + HEADROOM)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float base = fmaxf(s.base[i], lanes_max<4, 32>(top[i]) - LIFT), shrink = exp2_fast(s.base[i] - base);
            s.base[i] = base, s.sum[i] *= shrink, s.weight[i] *= shrink;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) s.o[k][i] *= shrink, s.o[k][i + 2] *= shrink;
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * DECODE_GROUPS; ++i) x[i] = exp2_fast(x[i] - s.base[i & 1]);
#pragma unroll
    for (int i = 0; i < 4 * DECODE_GROUPS; i += 2) {
        s.sum[0] += x[i], s.sum[1] += x[i + 1];
        round_pair(x[i], x[i + 1]);
        s.weight[0] += x[i], s.weight[1] += x[i + 1];
    }
#pragma unroll
    for (int g = 0; g < DECODE_GROUPS; ++g) {
        const MatrixRow<DECODE_KV_TILE> more = values_of_lane(values, g * GROUP, lane);
        const float* w = x + 4 * g;
        const u32 p0 = transpose8(pack_rounded(w[0], w[1])), p1 = transpose8(pack_rounded(w[2], w[3]));
#pragma unroll
        for (int first = 0; first < LOADS; first += 4) {
#pragma unroll
            for (int k = first; k < first + 4 && k < LOADS; ++k) {
                if (g > 0) load_matrix_transposed(v[k - first], more.at(k));
                else if (first > 0) load_matrix_transposed(v[k - first], value_row.at(k));
            }
#pragma unroll
            for (int k = first; k < first + 4 && k < LOADS; ++k) {
                if constexpr (FP8) add_e4m3_values(s.o, v[k - first], k, p0, p1);
                else mma(s.o[k], v[k - first], p0, p1);
            }
        }
    }
}

// Stores two elements that lie 8 apart, or are neighbours where pages hold e4m3 (e4m3_products.cuh).
DEVICE void store_apart(float* to, float x, float y) {
    if (FP8) store_two(to, x, y);
    else to[0] = x, to[8] = y;
}
DEVICE void store_apart(u16* to, float x, float y) {
    if (FP8) return store_two(to, x, y);
    const u32 both = pack(x, y);
    to[0] = u16(both), to[8] = u16(both >> 16);
}

DEVICE void decode_finish(const Attention& a, const DecodeKVTile& c, DecodeState& s) {
    const int lane = lane_anew();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = lanes_sum<4, 32>(s.sum[i]), weight = lanes_sum<4, 32>(s.weight[i]);
        const int row = first_of_part() + 2 * (lane & 3) + i;
        if (row >= c.rows) continue;
        const float lse = sum > 0.f ? (s.base[i] + log2_rounded(sum)) * LN2 : MINUS_INFINITY;
        float factor = weight > 0.f ? reciprocal(weight) : 0.f;
        const long long of_row = finish_row(a, c.q_begin, c.partial, TileRow(a, c.head, row), lse, factor, lane < 4);
        const long long at = of_row * D + (FP8 ? 2 : 1) * (lane / 4);
        if (c.partial >= 0) {
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                store_apart(a.partial_out + at + 16 * k, s.o[k][i] * factor, s.o[k][i + 2] * factor);
        } else {
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                store_apart(outputs(a) + at + 16 * k, s.o[k][i] * factor, s.o[k][i + 2] * factor);
        }
    }
}

}  // namespace prefixkit
