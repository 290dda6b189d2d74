// A digest of memory: total += sum_i word[i] * odd(start + i), modulo 2**64.
//
// shapes   words [count], of 8 bytes or of 1; total [1].
// tiling   256 threads; each loads AHEAD words before it waits for the first, and blocks take turns.
// cost     reads memory once; an atomic addition for each warp.
// numbers  integers, so that the order of additions does not matter.
// limits   words lie at multiples of their size.
#include "common/ptx.cuh"
#include "layouts/digest.h"

namespace prefixkit {

constexpr int DIGEST_THREADS = 256, AHEAD = 8;

DEVICE u64 odd(u64 place) {
    const u64 mixed = place * 0x9E3779B97F4A7C15ull;
    return (mixed ^ mixed >> 29) | 1;
}

template <class T> __global__ void __launch_bounds__(DIGEST_THREADS) digest(const __grid_constant__ Digest a) {
    const T* words = (const T*)a.words;
    const long long step = (long long)a.blocks * DIGEST_THREADS * AHEAD;
    u64 sum = 0;
    for (long long base = (long long)blockIdx.x * DIGEST_THREADS * AHEAD + threadIdx.x; base < a.count; base += step) {
        T x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const long long at = base + i * DIGEST_THREADS;
            x[i] = at < a.count ? words[at] : T(0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) sum += u64(x[i]) * odd(u64(a.start + base + i * DIGEST_THREADS));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(a.total, sum);
}

}  // namespace prefixkit
