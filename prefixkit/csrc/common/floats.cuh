// Sixteen-bit numbers as float32.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

struct Half { u16 bits; };
struct BFloat { u16 bits; };
DEVICE float widen(float x) { return x; }
DEVICE float widen(BFloat x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float widen(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }

}  // namespace prefixkit
