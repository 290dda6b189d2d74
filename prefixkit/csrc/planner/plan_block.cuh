// Division, searches and loops, for a block of 1,024 threads that plans.
//
// The code runs once and mostly waits for instructions, so it must be small: loops are ROLLED, functions CALLED.
#pragma once
#include "common/warp.cuh"

namespace prefixkit {

#define CALLED __device__ __noinline__
#define ROLLED _Pragma("unroll 1")

constexpr int THREADS = 1024, WARPS = THREADS / 32;

// a / b, where the quotient is below 2^20.
DEVICE u32 divide(u32 a, u32 b) {
    u32 quotient = u32(float(a) * reciprocal(float(b)));  // off by one at most
    const int rest = int(a - quotient * b);
    if (rest < 0) --quotient;
    else if (rest >= int(b)) ++quotient;
    return quotient;
}
DEVICE int ceil_div(int a, int b) { return int(divide(u32(a + b - 1), u32(b))); }
DEVICE u64 join(int high, int low) { return u64(u32(high)) << 32 | u32(low); }
DEVICE int high_of(u64 x) { return int(x >> 32); }
DEVICE int low_of(u64 x) { return int(u32(x)); }

// The index of the last of `count` ascending bounds that is at most `x`; bounds[0] <= x.
CALLED int find(const int* bounds, int count, int x) {
    int low = 0;
    while (count > 1) {
        const int half = count >> 1;
        if (bounds[low + half] <= x) low += half;
        count -= half;
    }
    return low;
}

}  // namespace prefixkit
