// Norms by the root mean square: y = x / sqrt(mean(x x) + eps) (weight + offset), times silu(gate) where there is one.
//
// shapes   x, gate, out [rows, D]; weight [D].
// tiling   LANES threads take a row: a warp, eight rows a block, or a block.
// cost     reads x twice, the second time from a cache, and writes out once.
// numbers  float32, rounded once.
// limits   rows are contiguous.
#include "states/numbers.cuh"
#include "layouts/rms_norm.h"

namespace prefixkit {

constexpr int NORM_THREADS = 256;

template <class T, int LANES>
__global__ void __launch_bounds__(NORM_THREADS) rms_norm(const __grid_constant__ RmsNorm a) {
    __shared__ float of_warps[NORM_THREADS / 32];
    const int lane = int(threadIdx.x) % LANES;
    const long long row = (long long)blockIdx.x * (NORM_THREADS / LANES) + int(threadIdx.x) / LANES;
    const bool inside = row < a.rows;
    const T* x = (const T*)a.x + row * a.x_row;
    float sum = 0;
    for (int i = lane; inside && i < a.dim; i += LANES) {
        const float value = widen(x[i]);
        sum += value * value;
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (LANES > 32) {
        if (lane % 32 == 0) of_warps[lane / 32] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int warp = 0; warp < LANES / 32; ++warp) sum += of_warps[warp];
    }
    const float scale = 1.0f / sqrtf(sum / (float)a.dim + a.eps);
    const T* gate = a.gate ? (const T*)a.gate + row * a.gate_row : nullptr;
    for (int i = lane; inside && i < a.dim; i += LANES) {
        const float y = widen(x[i]) * scale * (number(a.weight, i, a.weight_kind) + a.offset);
        ((T*)a.out)[row * a.dim + i] = narrow<T>(gate ? y * silu(widen(gate[i])) : y);
    }
}

}  // namespace prefixkit
