// Rows of tile items on Hopper: queries into registers when an item begins, states out of them when it ends.
//
// tiling     wgmma gives the four lanes of a quad interleaved pairs of a row's columns.  The lanes exchange them, so
//            that each access covers 64 contiguous bytes of a row; accesses to single pairs would take 8 times as many
//            cycles.
// cost       32 shuffles a warp for queries, 32 for outputs (D 128).
#pragma once
#include "attention/variant.cuh"
#include "attention/sm90/tile_load.cuh"

namespace prefixkit {

constexpr int Q_PARTS = (D + 31) / 32;  // blocks of 32 columns, each of which a quad reads together
constexpr int V_PAD = V_COLUMNS * 64;  // columns of V in shared memory; those past V_DIM are zeros

struct TileState {
    u32 q[8 * Q_PARTS];    // operands: queries
    float s[KV_TILE / 2];  // scores, then exponentials, of two rows
    u32 p[KV_TILE / 4];    // the same, rounded, as operand
    float o[V_PAD / 2];
    float base[2];         // of the two rows
    float sum[2];          // of this thread's exponentials
    float weight[4];       // sums of rounded exponentials: two of each row, the same in the four lanes that hold it
    float rest[2];         // the same sums of earlier KV tiles
    u32 unscale;           // for NARROWED queries: the factors of both rows' scores
};

struct TileItem {
    int q_begin, rows, partial, head;
};

// Lane i of each quad gets x[i] of the quad's lanes 0 to 3.
DEVICE void transpose_quad(u32 (&x)[4]) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
        if (lane & 1) x[i] = got;
        else x[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
        if (lane & 2) x[i] = got;
        else x[i + 2] = got;
    }
}

// Reads the queries of rows row0 and row0 + 8 as they lie in memory; in place of rows that the item lacks, its last
// row.
DEVICE void read_queries(const Attention& a, const TileItem& item, TileState& w, int row0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = min(row0 + 8 * i, item.rows - 1);
        const u16* q = a.q + TileRow(a, item.head, row).index(a, item.q_begin) * D + 8 * (threadIdx.x & 3);
#pragma unroll
        for (int m = 0; m < Q_PARTS; ++m) {
            const bool there = D % 32 == 0 || 32 * m + 8 * (threadIdx.x & 3) < D;
            const uint4 x = there ? *(const uint4*)(q + 32 * m) : make_uint4(0, 0, 0, 0);
            // Straight to the registers that it stays in, so that nothing waits for it here.
            u32* const to = w.q + 8 * m + 4 * i;
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
    }
}

DEVICE void narrow_queries(TileState& w) {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 largest = 0;
#pragma unroll
        for (int m = i; m < 8 * Q_PARTS; m += 2) largest = larger_bits(largest, w.q[m]);
        const float factor = narrowing_factor(largest_of_quad(largest));
        inverse[i] = inverse_power(factor);
#pragma unroll
        for (int m = i; m < 8 * Q_PARTS; m += 2) w.q[m] = narrow_pair(w.q[m], factor);
    }
    w.unscale = two_powers(inverse[0], inverse[1]);
}

// Turns the queries that were read into operands.
DEVICE void make_operands(TileState& w) {
#pragma unroll
    for (int m = 0; m < Q_PARTS; ++m) {
        u32 x[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] = w.q[8 * m + 4 * i + j];
            transpose_quad(x[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) w.q[8 * m + 2 * j + i] = x[i][j];
    }
    if constexpr (NARROWED) narrow_queries(w);
}

// Resets the bases, sums and outputs.
DEVICE void tile_begin(TileState& w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) w.base[i] = LOWEST, w.sum[i] = w.rest[i] = w.weight[2 * i] = w.weight[2 * i + 1] = 0.f;
#pragma unroll
    for (int i = 0; i < V_PAD / 2; ++i) w.o[i] = 0.f;
}

// Stores a row of float32, by its quad; `there` is the same in all its lanes.
template <int N> DEVICE void store_row(float* to, const float (&o)[N], int i, float factor, bool there) {
    const bool odd = threadIdx.x & 1;
    to += 2 * (threadIdx.x & 2) + 8 * odd;
#pragma unroll
    for (int j = 0; j < N / 4 && 8 * j < V_DIM; j += 2) {
        const float a0 = o[4 * j + 2 * i] * factor, a1 = o[4 * j + 2 * i + 1] * factor;
        const float b0 = o[4 * j + 4 + 2 * i] * factor, b1 = o[4 * j + 5 + 2 * i] * factor;
        const float got0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), got1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
        if (there) *(float4*)(to + 8 * j) = odd ? make_float4(got0, got1, b0, b1) : make_float4(a0, a1, got0, got1);
    }
}

// Stores a row of the storage type, by its quad.
template <int N> DEVICE void store_row(u16* to, const float (&o)[N], int i, float factor, bool there) {
    to += 8 * (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < N / 4 && 8 * j < V_DIM; j += 4) {
        u32 x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            x[k] = pack(o[4 * (j + k) + 2 * i] * factor, o[4 * (j + k) + 2 * i + 1] * factor);
        transpose_quad(x);
        const bool inside = V_DIM % 32 == 0 || 8 * (j + (threadIdx.x & 3)) < V_DIM;
        if (there && inside) *(uint4*)(to + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

DEVICE void tile_finish(const Attention& a, const TileItem& item, TileState& w, int row0) {
    float factor[2];
    long long at[2];
    // Everything but the columns first: reads would wait behind the stores.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float weight = w.rest[i] + w.weight[2 * i], sum = lanes_sum<1, 4>(w.sum[i]);
        const int row = row0 + 8 * i;
        factor[i] = weight > 0.f ? reciprocal(weight) : 0.f;
        const float lse = sum > 0.f ? (w.base[i] + log2_rounded(sum)) * LN2 : MINUS_INFINITY;
        const bool writes = row < item.rows && (threadIdx.x & 3) == 0;
        at[i] = V_DIM * finish_row(a, item.q_begin, item.partial, TileRow(a, item.head, row), lse, factor[i], writes);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool there = row0 + 8 * i < item.rows;
        if (item.partial >= 0) store_row(a.partial_out + at[i], w.o, i, factor[i], there);
        else store_row(outputs(a) + at[i], w.o, i, factor[i], there);
    }
}

}  // namespace prefixkit
