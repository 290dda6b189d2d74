// What a block of 1,024 threads needs to plan: prefix sums, searches, maxima, and memory that is shared while there is room.
#pragma once
#include "ptx.cuh"

namespace prefixkit {

constexpr int THREADS = 1024, WARPS = THREADS / 32;

DEVICE int lane_of() { return threadIdx.x & 31; }
DEVICE int warp_of() { return threadIdx.x >> 5; }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE u64 join(int high, int low) { return u64(u32(high)) << 32 | u32(low); }
DEVICE int high_of(u64 x) { return int(x >> 32); }
DEVICE int low_of(u64 x) { return int(u32(x)); }

// Arrays of ints, in shared memory first, then in global memory; both are addressed alike.
struct Arena {
    int* shared;
    int shared_left;
    int* global;
    DEVICE int* take(int count) {
        count = (count + 3) & ~3;
        int*& from = count <= shared_left ? shared : global;
        if (count <= shared_left) shared_left -= count;
        int* taken = from;
        from += count;
        return taken;
    }
};

// Prefix sums over the block, of two ints in one 64-bit number; sums must fit 32 bits.  `cells`: [2][WARPS] in shared memory.
struct Scan {
    u64 (*cells)[WARPS];
    int turn = 0;
    u64 total = 0;  // of all calls
    // The sum of all values before this thread's, in this call and those before.
    DEVICE u64 operator()(u64 value) {
        u64 sum = value;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(~0u, sum, step);
            if (lane_of() >= step) sum += other;
        }
        if (lane_of() == 31) cells[turn][warp_of()] = sum;
        __syncthreads();
        u64 warps = cells[turn][lane_of()];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(~0u, warps, step);
            if (lane_of() >= step) warps += other;
        }
        const u64 before = __shfl_sync(~0u, warps, max(warp_of() - 1, 0));
        const u64 result = total + sum - value + (warp_of() ? before : 0);
        total += __shfl_sync(~0u, warps, 31);
        turn ^= 1;  // who is ahead writes the other cells, and meets all in between
        return result;
    }
};

// The last of `count` rising bounds that is at most `x`; bounds[0] <= x.
DEVICE int find(const int* bounds, int count, int x) {
    int low = 0;
    while (count > 1) {
        const int half = count / 2;
        if (bounds[low + half] <= x) low += half;
        count -= half;
    }
    return low;
}

}  // namespace prefixkit
