// Numbers of 16 bits on the CPU, as csrc/common/ptx.cuh has them.
#pragma once
#include <cmath>

static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }

namespace prefixkit {
struct Half { u16 bits; };
struct BFloat { u16 bits; };
using Storage = BFloat;
#if PREFIXKIT_HALF || (PREFIXKIT_KV_FP8 && PREFIXKIT_MAPS)
#define PREFIXKIT_HALF_OPERANDS 1
using Operand = Half;
#else
#define PREFIXKIT_HALF_OPERANDS 0
using Operand = BFloat;
#endif

DEVICE u16 to_bfloat16(float x) {
    const u32 b = __float_as_uint(x);
    if ((b & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
DEVICE float from_bfloat16(u16 x) { return __uint_as_float(u32(x) << 16); }
DEVICE float widen(BFloat x) { return from_bfloat16(x.bits); }
DEVICE float widen(Half x) { _Float16 y; __builtin_memcpy(&y, &x.bits, 2); return float(y); }
template <class T = Storage> DEVICE u32 pack(float low, float high);
template <> inline u32 pack<BFloat>(float low, float high) {
    return u32(to_bfloat16(low)) | u32(to_bfloat16(high)) << 16;
}
template <> inline u32 pack<Half>(float low, float high) {
    const _Float16 both[2] = {_Float16(low), _Float16(high)};
    u32 x;
    __builtin_memcpy(&x, both, 4);
    return x;
}
}  // namespace prefixkit
