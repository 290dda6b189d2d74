// One token through the recurrence of Mamba 2.  Of each head of a row, with s = softplus(dt + bias):
// h = exp(s rate) h + (s x) (outer) inward;  y = h . outward + skip x, times silu(gate) where there is one.
//
// shapes   x, gate, out [rows, heads, P]; dt [rows, heads]; rate, skip, bias [heads]; inward, outward [rows, groups,
//          N]; states [slots, heads, P, N] float32; source, target [rows] int64 slots.
// tiling   a block of 8 warps takes a head of a row.  LANES lanes take a row of the state, four or eight numbers each,
//          in vectors of 16 bytes; AHEAD rows are loaded at once, before anything else is waited for.  inward and
//          outward stay in registers.
// cost     reads and writes each state once: rows x heads x P x N x 8 bytes; all else is a hundredth of that.
// numbers  float32; what a row returns is rounded once.
// limits   N is a power of two from 16 to 256, P at most MOST_DIM; states lie at multiples of 16 bytes.  Slots are the
//          contract of mamba2_step in prefixkit/ops/state_ops.py; a row whose slots do not exist gets zeros.
#include "states/numbers.cuh"
#include "layouts/mamba2_step.h"

namespace prefixkit {

constexpr int STEP_THREADS = 256, MOST_DIM = 256;

// As torch's softplus, which is the identity above 20.
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

template <int N> struct StepTiling {
    static constexpr int LANES = N / 4 < 32 ? N / 4 : 32, VECTORS = N / 4 / LANES;
    static constexpr int GROUPS = STEP_THREADS / LANES, AHEAD = 8 / VECTORS;
};

// Advances a row of the state by a token; returns this lane's part of the row's product with outward.
DEVICE float advance_row(float4& h, float decay, float added, const float4& inward, const float4& outward) {
    h.x = decay * h.x + added * inward.x, h.y = decay * h.y + added * inward.y;
    h.z = decay * h.z + added * inward.z, h.w = decay * h.w + added * inward.w;
    return h.x * outward.x + h.y * outward.y + h.z * outward.z + h.w * outward.w;
}
template <class T> DEVICE float4 widen4(const void* from, long long at) {
    const T* p = (const T*)from + at;
    return make_float4(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]));
}

template <class T, int N>
__global__ void __launch_bounds__(STEP_THREADS, 3) mamba2_step(const __grid_constant__ Mamba2Step a) {
    using Tiling = StepTiling<N>;
    constexpr int LANES = Tiling::LANES, VECTORS = Tiling::VECTORS, GROUPS = Tiling::GROUPS, AHEAD = Tiling::AHEAD;
    __shared__ float added[MOST_DIM], sums[MOST_DIM];
    const int tid = threadIdx.x, lane = tid % LANES, group = tid / LANES;
    const int head = int(blockIdx.x) % a.heads, row = int(blockIdx.x) / a.heads;
    const long long source = a.source[row], target = a.target[row];
    const bool there = target && source >= 0 && source < a.slots && target < a.slots;
    const long long place = ((long long)row * a.heads + head) * a.dim;  // of this block's part of out
    if (!there) {
        for (int p = tid; p < a.dim; p += STEP_THREADS) ((T*)a.out)[place + p] = narrow<T>(0);
        return;
    }
    const float4* from = (const float4*)a.states + (source * a.heads + head) * a.dim * (N / 4) + lane;
    float4* to = (float4*)a.states + (target * a.heads + head) * a.dim * (N / 4) + lane;
    float4 h[AHEAD][VECTORS];
    const auto load = [&](int base) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int p = base + i * GROUPS + group;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                if (p < a.dim) h[i][v] = from[(long long)p * (N / 4) + v * LANES];
        }
    };
    load(0);
    const float step = softplus(number(a.dt, row * a.dt_row + head, a.dt_kind) + number(a.bias, head, a.bias_kind));
    const float decay = expf(step * a.rate[head]), skip = number(a.skip, head, a.skip_kind);
    const T* x = (const T*)a.x + row * a.x_row + (long long)head * a.dim;
    for (int p = tid; p < a.dim; p += STEP_THREADS) added[p] = step * widen(x[p]);
    float4 inward[VECTORS], outward[VECTORS];
    const long long first = (long long)(head / a.heads_per_group) * N + lane * 4;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        inward[v] = widen4<T>(a.inward, row * a.inward_row + first + v * LANES * 4);
        outward[v] = widen4<T>(a.outward, row * a.outward_row + first + v * LANES * 4);
    }
    __syncthreads();
    for (int base = 0; base < a.dim; base += AHEAD * GROUPS) {
        if (base) load(base);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int p = base + i * GROUPS + group;
            float sum = 0;
            if (p < a.dim) {
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    sum += advance_row(h[i][v], decay, added[p], inward[v], outward[v]);
                    if (target > 0) to[(long long)p * (N / 4) + v * LANES] = h[i][v];
                }
            }
#pragma unroll
            for (int lanes = LANES / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (lane == 0 && p < a.dim) sums[p] = sum;
        }
    }
    __syncthreads();
    const T* gate = a.gate ? (const T*)a.gate + row * a.gate_row + (long long)head * a.dim : nullptr;
    for (int p = tid; p < a.dim; p += STEP_THREADS) {
        const float y = sums[p] + skip * widen(x[p]);
        ((T*)a.out)[place + p] = narrow<T>(gate ? y * silu(widen(gate[p])) : y);
    }
}

}  // namespace prefixkit
