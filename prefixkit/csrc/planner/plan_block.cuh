// What a block of 1,024 threads needs to plan: prefix sums, searches, and memory that is shared while it lasts.
//
// The code runs once, so it must be small before it is anything else: most of its time it waits for instructions.  Hence the calls.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

#define CALLED __device__ __noinline__

constexpr int THREADS = 1024, WARPS = THREADS / 32;

DEVICE int lane_of() { return threadIdx.x & 31; }
DEVICE int warp_of() { return threadIdx.x >> 5; }
// a / b where it is below 2^20.
DEVICE u32 divide(u32 a, u32 b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(float(b)));
    u32 quotient = u32(float(a) * inverse);  // off by one at most
    const int rest = int(a - quotient * b);
    if (rest < 0) --quotient;
    else if (rest >= int(b)) ++quotient;
    return quotient;
}
DEVICE int ceil_div(int a, int b) { return int(divide(u32(a + b - 1), u32(b))); }
DEVICE u64 join(int high, int low) { return u64(u32(high)) << 32 | u32(low); }
DEVICE int high_of(u64 x) { return int(x >> 32); }
DEVICE int low_of(u64 x) { return int(u32(x)); }

// Sums over the lanes up to this one.
DEVICE u64 warp_sums(u64 value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(~0u, value, step);
        if (lane_of() >= step) value += other;
    }
    return value;
}

// Prefix sums over the block, of two ints in one 64-bit number; sums must fit 32 bits.
struct Scan {
    u64 cells[2][WARPS];
};

// The sum of the values before this thread's, of `total` and this call; adds the block's to `total`.  `turn` alternates: who is
// ahead writes the other cells, and waits at a barrier in between.
CALLED u64 scan(Scan& s, int& turn, u64& total, u64 value) {
    const u64 sum = warp_sums(value);
    if (lane_of() == 31) s.cells[turn][warp_of()] = sum;
    __syncthreads();
    const u64 warps = warp_sums(s.cells[turn][lane_of()]);
    turn ^= 1;
    const u64 before = __shfl_sync(~0u, warps, max(warp_of() - 1, 0));
    const u64 result = total + sum - value + (warp_of() ? before : 0);
    total += __shfl_sync(~0u, warps, 31);
    return result;
}

// The last of `count` rising bounds that is at most `x`; bounds[0] <= x.
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
