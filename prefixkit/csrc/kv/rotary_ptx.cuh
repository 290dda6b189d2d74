// The instructions that rotating takes; a test puts a CPU's in their place.
#pragma once
#include "common/floats.cuh"

namespace prefixkit {

// Wait for the kernel ahead, then let the one behind set itself up: attention follows, and waits for our end before it reads what we write.
DEVICE void follow_and_lead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Two numbers, rounded to the nearest, the first in the low half.
template <class T> DEVICE u32 narrow2(float low, float high);
template <> DEVICE u32 narrow2<BFloat>(float low, float high) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
template <> DEVICE u32 narrow2<Half>(float low, float high) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }

// 16 bytes as float32, and back.
template <class T> DEVICE void unpack(const uint4& x, float* to) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) to[2 * i] = widen(T{u16(words[i])}), to[2 * i + 1] = widen(T{u16(words[i] >> 16)});
}
template <> DEVICE void unpack<float>(const uint4& x, float* to) {
    to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y), to[2] = __uint_as_float(x.z), to[3] = __uint_as_float(x.w);
}
template <class T> DEVICE uint4 pack(const float* x) {
    return make_uint4(narrow2<T>(x[0], x[1]), narrow2<T>(x[2], x[3]), narrow2<T>(x[4], x[5]), narrow2<T>(x[6], x[7]));
}
template <> DEVICE uint4 pack<float>(const float* x) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

}  // namespace prefixkit
