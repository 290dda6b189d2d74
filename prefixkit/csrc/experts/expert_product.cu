// Products of rows with the matrices of their experts: out[p] = x[p / per] @ weight[index[p]] + bias[index[p]].
//
// shapes   x [pairs / per, k]; weight [experts, k, n], adjacent along n (ALONG_N) or along k; bias [experts, n] or
//          null; index [pairs] int64; out [pairs, n].  All but the index in the storage type.
// tiling   a block of 8 warps takes 128 columns of one expert: it lists the pairs of this expert in a window of 4,096,
//          and multiplies 64 of them at a time.  A warp takes 16 columns of all rows; 16 rows without a pair cost
//          nothing.  STAGES tiles of 64 along k are in flight by cp.async; 16-byte chunks are permuted by row, so that
//          ldmatrix meets all banks.
// cost     reads each weight once for every 64 pairs of its expert, and nothing of an expert without pairs.
// numbers  float32 sums, the bias added before they are rounded once.  A row does not depend on which others share its
//          tile, so the order of a list, which differs from launch to launch, changes nothing.
// limits   k, n and strides are multiples of 8, addresses of 16 bytes.  A pair whose expert does not exist gets zeros.
#include "common/warp.cuh"
#include "layouts/expert_product.h"

namespace prefixkit {

constexpr int EXPERT_ROWS = 64, EXPERT_COLUMNS = 128, EXPERT_STEP = 64, EXPERT_THREADS = 256, WINDOW = 4096;
constexpr int LOADS = 8;
constexpr int ROWS_BYTES = EXPERT_ROWS * EXPERT_STEP * 2;
constexpr int STAGE_BYTES = ROWS_BYTES + EXPERT_COLUMNS * EXPERT_STEP * 2;

// The offset of chunk `chunk` in row `row`, for rows of `bytes` bytes.
DEVICE u32 chunk_at(int row, int chunk, int bytes) { return u32(row * bytes + ((chunk ^ (row & 7)) << 4)); }

// What a thread copies in each step along k: one chunk of each of two rows, and four chunks of the expert's matrix.
template <bool ALONG_N> struct Source {
    const ExpertProduct& a;
    const u16 *rows[2], *weights;
    bool valid[2];
    int column;

    DEVICE Source(const ExpertProduct& a, int expert, int column) : a(a), column(column) {
        weights = a.weight + expert * a.expert_stride;
    }
    DEVICE void take_rows(const u16* list, int begin, int first, int count) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + int(threadIdx.x >> 3) + 32 * i;
            valid[i] = row < count;
            rows[i] = a.x + (valid[i] ? (begin + list[row]) / a.per * a.row_stride : 0);
        }
    }
    DEVICE void copy(u32 to, int step) const {
        const int tid = threadIdx.x, k0 = step * EXPERT_STEP, k = k0 + (tid & 7) * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool there = valid[i] && k < a.k;
            copy16(to + chunk_at((tid >> 3) + 32 * i, tid & 7, 128), there ? rows[i] + k : a.x, there);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = ALONG_N ? (tid >> 4) + 16 * i : (tid >> 3) + 32 * i, chunk = ALONG_N ? tid & 15 : tid & 7;
            const int major = ALONG_N ? k0 + row : column + row, minor = (ALONG_N ? column : k0) + chunk * 8;
            const bool there = major < (ALONG_N ? a.k : a.n) && minor < (ALONG_N ? a.n : a.k);
            const u16* from = there ? weights + major * a.weight_stride + minor : weights;
            copy16(to + ROWS_BYTES + chunk_at(row, chunk, ALONG_N ? 256 : 128), from, there);
        }
    }
};

using Sums = float[EXPERT_ROWS / 16][2][4];

// Multiplies in one step along k: a warp's 16 columns of `count` rows.
template <bool ALONG_N> DEVICE void multiply(Sums& sums, u32 stage, int count) {
    const int lane = lane_of(), matrix = lane >> 3, in_matrix = lane & 7, warp = warp_of();
#pragma unroll
    for (int part = 0; part < EXPERT_STEP / 16; ++part) {
        u32 b[4];
        if (ALONG_N) {
            const int k = part * 16 + (matrix & 1) * 8 + in_matrix;
            load_matrix_transposed(b, stage + ROWS_BYTES + chunk_at(k, warp * 2 + (matrix >> 1), 256));
        } else {
            const int column = warp * 16 + (matrix >> 1) * 8 + in_matrix;
            load_matrix(b, stage + ROWS_BYTES + chunk_at(column, part * 2 + (matrix & 1), 128));
        }
#pragma unroll
        for (int m = 0; m < EXPERT_ROWS / 16; ++m) {
            if (m * 16 >= count) break;
            u32 x[4];
            load_matrix(x, stage + chunk_at(m * 16 + (lane & 15), part * 2 + (lane >> 4), 128));
            mma(sums[m][0], x, b[0], b[1]);
            mma(sums[m][1], x, b[2], b[3]);
        }
    }
}

// Adds the bias, rounds, and stores each row in the place of its pair.
DEVICE void store_rows(const ExpertProduct& a, const Sums& sums, const u16* list, int begin, int count, int expert,
                       int column) {
    const int lane = lane_of();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int at = column + warp_of() * 16 + j * 8 + (lane & 3) * 2;
        if (at >= a.n) continue;
        float bias[2] = {0, 0};
        if (a.bias) {
            const u32 both = *(const u32*)(a.bias + (long long)expert * a.n + at);
            bias[0] = widen(Storage{u16(both)}), bias[1] = widen(Storage{u16(both >> 16)});
        }
#pragma unroll
        for (int m = 0; m < EXPERT_ROWS / 16; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = m * 16 + half * 8 + (lane >> 2);
                if (row >= count) continue;
                const u32 both = pack(sums[m][j][2 * half] + bias[0], sums[m][j][2 * half + 1] + bias[1]);
                *(u32*)(a.out + (long long)(begin + list[row]) * a.n + at) = both;
            }
    }
}

// Lists a window's pairs of the expert; the blocks of the first expert write zeros for pairs of no expert.
DEVICE int list_pairs(const ExpertProduct& a, u16* list, int* found, int begin, int expert, int column) {
    __syncthreads();  // the last window's list is read
    if (threadIdx.x == 0) *found = 0;
    __syncthreads();
    const int end = min(begin + WINDOW, a.pairs);
    for (int from = begin + int(threadIdx.x); from < end; from += LOADS * EXPERT_THREADS) {
        long long chosen[LOADS];  // loaded together
#pragma unroll
        for (int i = 0; i < LOADS; ++i) chosen[i] = a.index[min(from + i * EXPERT_THREADS, end - 1)];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int p = from + i * EXPERT_THREADS;
            if (p >= end) break;
            if (chosen[i] == expert) list[atomicAdd(found, 1)] = u16(p - begin);
            if (expert == 0 && (chosen[i] < 0 || chosen[i] >= a.experts))
                for (int n = column; n < min(column + EXPERT_COLUMNS, a.n); ++n) a.out[(long long)p * a.n + n] = 0;
        }
    }
    __syncthreads();
    return *found;
}

template <bool ALONG_N, int STAGES>
__global__ void __launch_bounds__(EXPERT_THREADS, 2) expert_product(const __grid_constant__ ExpertProduct a) {
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ u16 list[WINDOW];
    __shared__ int found;
    const int expert = blockIdx.y, column = blockIdx.x * EXPERT_COLUMNS, steps = (a.k + EXPERT_STEP - 1) / EXPERT_STEP;
    const u32 memory = shared_address(stages);
    Source<ALONG_N> source(a, expert, column);
    for (int begin = 0; begin < a.pairs; begin += WINDOW) {
        const int all = list_pairs(a, list, &found, begin, expert, column);
        for (int first = 0; first < all; first += EXPERT_ROWS) {
            const int count = min(EXPERT_ROWS, all - first);
            source.take_rows(list, begin, first, all);
#pragma unroll
            for (int step = 0; step < STAGES - 1; ++step) {
                if (step < steps) source.copy(memory + step * STAGE_BYTES, step);
                copy_commit();
            }
            Sums sums = {};
            for (int step = 0; step < steps; ++step) {
                copy_wait<STAGES - 2>();
                __syncthreads();  // this step has landed, and the one before is no longer read
                const int next = step + STAGES - 1;
                if (next < steps) source.copy(memory + next % STAGES * STAGE_BYTES, next);
                copy_commit();
                multiply<ALONG_N>(sums, memory + step % STAGES * STAGE_BYTES, count);
            }
            store_rows(a, sums, list + first, begin, count, expert, column);
            __syncthreads();  // the stages are free
        }
    }
}

}  // namespace prefixkit
