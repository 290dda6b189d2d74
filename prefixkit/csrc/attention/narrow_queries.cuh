// Queries in bfloat16 as operands in float16, where pages hold e4m3 and products are in float16.
//
// Each row is multiplied by the power of two that brings its largest number to [2^14, 2^15), and its scores are divided
// by that power, which rounds nothing.  Numbers down to 2^-32 of a row's largest keep all their bits; smaller ones err
// by at most 2^-39 of the largest.  Infinities and NaN stay what they are.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

constexpr bool NARROWED = PREFIXKIT_HALF_OPERANDS && !PREFIXKIT_HALF;

// The bits of the largest magnitude, of a float and two bfloat16.
DEVICE u32 larger_bits(u32 largest, u32 two) {
    return max(max(largest, two & 0x7fff0000), two << 16 & 0x7fff0000);
}
// The largest over the four lanes that hold a row.
DEVICE u32 largest_of_quad(u32 largest) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    return max(largest, __shfl_xor_sync(~0u, largest, 2));
}
// The power of two for a row whose largest number has these bits, and its inverse.
DEVICE float narrowing_factor(u32 largest) { return __uint_as_float(min(268 - (largest >> 23), 253u) << 23); }
DEVICE float inverse_power(float factor) { return __uint_as_float((254u << 23) - __float_as_uint(factor)); }
// Two powers of two in one register.
DEVICE u32 two_powers(float low, float high) { return __float_as_uint(low) >> 16 | __float_as_uint(high); }
DEVICE float one_power(u32 two, int high) { return __uint_as_float(high ? two & 0xffff0000 : two << 16); }
DEVICE u32 narrow_pair(u32 two, float factor) {
    return pack<Half>(widen(BFloat{u16(two)}) * factor, widen(BFloat{u16(two >> 16)}) * factor);
}

}  // namespace prefixkit
