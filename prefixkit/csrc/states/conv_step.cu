// One token through a depthwise causal convolution: y = sum_w weight[w] window[w] + bias, optionally y * sigmoid(y).
//
// shapes   x [rows, channels], a row contiguous; weight [channels, W]; bias [channels] or null; states [slots,
//          channels, W], the last W inputs, the oldest first; source, target [rows] int64 slots; out [rows, channels].
// tiling   one thread takes a channel of a row: it shifts the window by one input, and writes it to the target slot.
// cost     reads and writes each state once: rows x channels x (2 W + 2) numbers; the weights come from the L2.
// numbers  float32, rounded once.
// limits   slots are the contract of conv_step in prefixkit/ops/state_ops.py; a row whose slots do not exist gets
//          zeros.
#include "states/numbers.cuh"
#include "layouts/conv_step.h"

namespace prefixkit {

template <class T, int W> struct alignas(W & (W - 1) ? sizeof(T) : W * sizeof(T)) Window { T x[W]; };

template <class T, int W> __global__ void __launch_bounds__(256) conv_step(const __grid_constant__ ConvStep a) {
    const int blocks = (a.channels + 255) / 256, row = int(blockIdx.x) / blocks;
    const int channel = int(blockIdx.x) % blocks * 256 + int(threadIdx.x);
    if (channel >= a.channels) return;
    const long long source = a.source[row], target = a.target[row];
    const bool there = target && source >= 0 && source < a.slots && target < a.slots;
    T* out = (T*)a.out + (long long)row * a.channels + channel;
    if (!there) {
        *out = narrow<T>(0);
        return;
    }
    Window<T, W>* states = (Window<T, W>*)a.states;
    Window<T, W> window = states[source * a.channels + channel];
    const Window<T, W> weight = ((const Window<T, W>*)a.weight)[channel];
    float y = a.bias ? widen(((const T*)a.bias)[channel]) : 0.0f;
#pragma unroll
    for (int w = 0; w < W; ++w) {
        window.x[w] = w + 1 < W ? window.x[w + 1 < W ? w + 1 : w] : ((const T*)a.x)[row * a.x_row + channel];
        y += widen(weight.x[w]) * widen(window.x[w]);
    }
    if (target > 0) states[target * a.channels + channel] = window;
    *out = narrow<T>(a.silu ? silu(y) : y);
}

}  // namespace prefixkit
