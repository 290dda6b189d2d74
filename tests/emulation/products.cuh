// A product of a warp on the CPU, whose lanes hold what the PTX manual says.
#pragma once
#include "fibers.cuh"

namespace prefixkit {
// What the lanes of a warp bring, each number widened once; the other buffer may still be read.
struct Factors { float a[16][16], b[8][16]; };
static Factors factors[EMULATED_THREADS / 32][2];

// mma.m16n8k16 of numbers of 16 bits.
template <class Number> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const int warp = emulation::current / 32, lane = emulation::current % 32, row = lane / 4, column = 2 * (lane % 4);
    Factors& all = factors[warp][emulation::warps[warp].generation & 1];
    for (int i = 0; i < 4; ++i) {
        const int k = 8 * (i / 2) + column + i % 2, shift = 16 * (i % 2);
        for (int high = 0; high < 2; ++high)
            all.a[row + 8 * high][k] = widen(Number{u16(a[i / 2 * 2 + high] >> shift)});
        all.b[row][k] = widen(Number{u16((i / 2 ? b1 : b0) >> shift)});
    }
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const float *x = all.a[row + 8 * (i / 2)], *y = all.b[column + i % 2];
        for (int k = 0; k < 16; ++k) d[i] += x[k] * y[k];
    }
}
}  // namespace prefixkit
