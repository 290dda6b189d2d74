// Numbers of e4m3 as operands of products, whose types hold every e4m3 number.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

// Widens the two numbers in the lower 16 bits with integer operations, but for the last step; for GPUs without a
// conversion instruction.
DEVICE u32 widen_by_words(u32 two) {
    // Each number in the upper byte of a half.
    const u32 apart = __byte_perm(two, 0, 0x1404), size = apart & 0x7f007f00;
    // Exponent and mantissa, shifted to their places, are the number divided by 2^8 (bfloat16: by 2^120), below 2^-6
    // too.
    const u32 over = size >> (PREFIXKIT_HALF_OPERANDS ? 1 : 4) | (apart & 0x80008000);
    const u32 nan = size + 0x01000100 & 0x80008000;  // the upper bit of each half that is NaN
    return scaled_pair(over, PREFIXKIT_HALF_OPERANDS ? 0x5c005c00 : 0x7b807b80) | nan - (nan >> 15);
}
DEVICE u32 widen_e4m3(u32 two) {
#if __CUDA_ARCH__ >= 890
    const u32 halves = halves_of_e4m3(two);
    return PREFIXKIT_HALF_OPERANDS ? halves : pack<BFloat>(widen(Half{u16(halves)}), widen(Half{u16(halves >> 16)}));
#else
    return widen_by_words(two);
#endif
}

}  // namespace prefixkit
