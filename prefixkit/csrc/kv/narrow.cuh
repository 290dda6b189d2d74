// Numbers rounded to e4m3, which has a sign, 4 bits of exponent (bias 7) and 3 of mantissa; 0x7f and 0xff are NaN.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

// Rounds to the nearest number, to the even one of two, and to 448 for all above; NaN stays.  The operations are on
// integers, so that every GPU returns the same bits, those that torch returns for x.clamp(-448, 448).
DEVICE u32 to_e4m3(float x) {
    constexpr u32 INFINITE = 0x7f800000, MOST = 0x43e00000, LEAST_NORMAL = 0x3c800000;  // 448 and 2^-6
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > INFINITE) return sign | 0x7f;
    const u32 most = min(size, MOST);
    // Multiples of 2^-9, the step of float32 from 2^14 on.
    if (most < LEAST_NORMAL) return sign | (__float_as_uint(__uint_as_float(most) + 16384.f) - 0x46800000);
    return sign | (most + 0x7ffff + (most >> 20 & 1) - (120 << 23)) >> 20;
}
DEVICE u32 to_e4m3(const float* x) {
    return to_e4m3(x[0]) | to_e4m3(x[1]) << 8 | to_e4m3(x[2]) << 16 | to_e4m3(x[3]) << 24;
}

// 16 bytes of T as float32.
template <class T> DEVICE void unpack(const uint4& x, float* to) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[2 * i] = widen(T{u16(words[i])}), to[2 * i + 1] = widen(T{u16(words[i] >> 16)});
}
template <> DEVICE void unpack<float>(const uint4& x, float* to) {
    to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y);
    to[2] = __uint_as_float(x.z), to[3] = __uint_as_float(x.w);
}

// 16 bytes of T as e4m3: vector `at` of 16 / sizeof(T) bytes from `to` on.
template <class T> DEVICE void store_e4m3(void* to, long long at, const uint4& x) {
    float numbers[16 / sizeof(T)];
    unpack<T>(x, numbers);
    if constexpr (sizeof(T) == 2) ((uint2*)to)[at] = make_uint2(to_e4m3(numbers), to_e4m3(numbers + 4));
    else ((u32*)to)[at] = to_e4m3(numbers);
}

}  // namespace prefixkit
