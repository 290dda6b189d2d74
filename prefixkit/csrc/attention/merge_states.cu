// Merges two partial states of attention by their log-sum-exps; each state covers some rows of a step.
//
// shapes     first, second [their rows, heads, V] and lse [their rows, heads]; place [rows]: for each row of the step
//            its row in a state, or -1; out [rows, heads, V].
// dtypes     out has the storage type; the states have it too, or float32 with PREFIXKIT_PART.
// tiling     a thread merges 8 elements of a head.
// cost       each state is read once, out written once: 6 V bytes per row and head, 10 V of states of float32.
// limits     V is a multiple of 8.
#include "common/ptx.cuh"
#include "layouts/merge_states.h"

namespace prefixkit {

#ifndef PREFIXKIT_PART
#define PREFIXKIT_PART 0
#endif
#if PREFIXKIT_PART
using Part = float;
#else
using Part = u16;
#endif

// Loads the 8 elements at `from`, whose index is a multiple of 8.
DEVICE void load_eight(float (&x)[8], const float* from) {
    const float4 low = ((const float4*)from)[0], high = ((const float4*)from)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
DEVICE void load_eight(float (&x)[8], const u16* from) {
    const uint4 at = *(const uint4*)from;
    const u32 words[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = widen(Storage{u16(words[j / 2] >> 16 * (j % 2))});
}

extern "C" __global__ void __launch_bounds__(256) merge_states(const __grid_constant__ MergeStates a) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;  // index among all vectors of 8 elements
    const int row = int(i / a.vectors), vector = int(i - (long long)row * a.vectors);
    if (row >= a.rows) return;
    const int head = vector / (a.vectors / a.heads);
    const int places[2] = {a.first_place[row], a.second_place[row]};
    float lse[2], weight[2];
    float x[2][8] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        lse[k] = MINUS_INFINITY;
        if (places[k] >= 0) lse[k] = (k ? a.second_lse : a.first_lse)[(long long)places[k] * a.heads + head];
        if (lse[k] > MINUS_INFINITY)
            load_eight(x[k], (const Part*)(k ? a.second : a.first) + 8 * ((long long)places[k] * a.vectors + vector));
    }
    const float top = fmaxf(lse[0], lse[1]), base = top > MINUS_INFINITY ? top : 0.f;
#pragma unroll
    for (int k = 0; k < 2; ++k) weight[k] = exp2_fast((lse[k] - base) * LOG2E);
    const float total = weight[0] + weight[1], factor = total > 0.f ? 1.f / total : 0.f;
    weight[0] *= factor, weight[1] *= factor;
    u32 out[4];
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        out[j / 2] = pack(weight[0] * x[0][j] + weight[1] * x[1][j], weight[0] * x[0][j + 1] + weight[1] * x[1][j + 1]);
    ((uint4*)a.out)[i] = make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace prefixkit
