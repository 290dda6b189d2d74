// Operands of mma.sync from rows of e4m3 in shared memory, for the decode path.
//
// A register that ldmatrix fills holds four numbers.  Those of keys are neighbours in a row and serve as columns 2t, 2t
// + 1, 2t + 8 and 2t + 9 of a product's 16 (t: the lane in its quad); queries are read in the same order.  Those of
// values, which are transposed, are columns 2c and 2c + 1 of two tokens (c: the quad) and serve as rows c and c + 8 of
// the product.
#pragma once
#include "attention/gather.cuh"
#include "attention/widen.cuh"

namespace prefixkit {

constexpr int E4M3_LOADS = (D + 31) / 32;  // ldmatrix instructions for 16 tokens

// Adds the products of 16 tokens with the queries to independent sums.  `keys`: row lane % 16, vector lane / 16.
template <int ROWS, int SUMS>
DEVICE void add_e4m3_scores(const MatrixRow<ROWS>& keys, const u32 (&q)[D / 16][2], float (&dot)[SUMS][4]) {
#pragma unroll
    for (int first = 0; first < E4M3_LOADS; first += 2) {
        u32 m[2][4];
#pragma unroll
        for (int i = first; i < first + 2 && i < E4M3_LOADS; ++i) load_matrix(m[i - first], keys.at(i));
#pragma unroll
        for (int k = 2 * first; k < 2 * first + 4 && k < D / 16; ++k) {
            const u32 low = m[k / 2 - first][2 * (k & 1)], high = m[k / 2 - first][2 * (k & 1) + 1];
            const u32 both[4] = {widen_e4m3(low), widen_e4m3(high), widen_e4m3(low >> 16), widen_e4m3(high >> 16)};
            mma(dot[k % SUMS], both, q[k][0], q[k][1]);
        }
    }
}

// Adds columns 32 i... of 16 transposed tokens, multiplied by the weights p, to the outputs.
DEVICE void add_e4m3_values(float (&o)[D / 16][4], const u32 (&v)[4], int i, u32 p0, u32 p1) {
#pragma unroll
    for (int k = 2 * i; k < 2 * i + 2 && k < D / 16; ++k) {
        const u32 low = __byte_perm(v[2 * (k & 1)], 0, 0x3120), high = __byte_perm(v[2 * (k & 1) + 1], 0, 0x3120);
        const u32 both[4] = {widen_e4m3(low), widen_e4m3(low >> 16), widen_e4m3(high), widen_e4m3(high >> 16)};
        mma(o[k], both, p0, p1);
    }
}

}  // namespace prefixkit
