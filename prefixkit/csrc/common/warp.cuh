// Sums and other reductions over the 32 lanes of a warp.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

DEVICE int lane_of() { return threadIdx.x & 31; }
DEVICE int warp_of() { return threadIdx.x >> 5; }

// Reduces x by f over all lanes; every lane gets the result.
template <class V, class F> DEVICE V warp_reduce(V x, F f) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = f(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
// Sums of x over the lanes up to this one.
template <class V> DEVICE V warp_sums(V x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const V other = __shfl_up_sync(~0u, x, step);
        if (lane_of() >= step) x += other;
    }
    return x;
}

}  // namespace prefixkit
