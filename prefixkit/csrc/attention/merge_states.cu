// Two partial states of attention merged by their log-sum-exps: each of some rows of a step.
//
// shapes     first, second [their rows, heads, V] and lse [their rows, heads]; place [rows]: for each row of the step its
//            row in a state, or -1; out [rows, heads, V].
// tiling     a thread merges 8 elements of a head.
// cost       each state is read once, out written once: 6 V bytes per row and head.
// limits     V is a multiple of 8.
#include "common/ptx.cuh"
#include "layouts/merge_states.h"

namespace prefixkit {

extern "C" __global__ void __launch_bounds__(256) merge_states(const __grid_constant__ MergeStates a) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;  // of all vectors of 8 elements
    const int row = int(i / a.vectors), vector = int(i - (long long)row * a.vectors);
    if (row >= a.rows) return;
    const int head = vector / (a.vectors / a.heads);
    const int places[2] = {a.first_place[row], a.second_place[row]};
    float lse[2], weight[2];
    uint4 x[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        lse[k] = MINUS_INFINITY;
        if (places[k] >= 0) lse[k] = (k ? a.second_lse : a.first_lse)[(long long)places[k] * a.heads + head];
        if (lse[k] > MINUS_INFINITY)
            x[k] = ((const uint4*)(k ? a.second : a.first))[(long long)places[k] * a.vectors + vector];
    }
    const float top = fmaxf(lse[0], lse[1]), base = top > MINUS_INFINITY ? top : 0.f;
#pragma unroll
    for (int k = 0; k < 2; ++k) weight[k] = exp2_fast((lse[k] - base) * LOG2E);
    const float total = weight[0] + weight[1], factor = total > 0.f ? 1.f / total : 0.f;
    weight[0] *= factor, weight[1] *= factor;
    const u32 words[2][4] = {{x[0].x, x[0].y, x[0].z, x[0].w}, {x[1].x, x[1].y, x[1].z, x[1].w}};
    u32 out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float low = 0.f, high = 0.f;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            low += weight[k] * widen(Storage{u16(words[k][j])});
            high += weight[k] * widen(Storage{u16(words[k][j] >> 16)});
        }
        out[j] = pack(low, high);
    }
    ((uint4*)a.out)[i] = make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace prefixkit
