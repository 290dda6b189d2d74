// Numbers whose type is known when the kernel is compiled, and numbers whose type is known at a launch.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

// Rounded to the nearest T.
template <class T> DEVICE T narrow(float x) { return T{u16(pack<T>(x, 0))}; }
template <> DEVICE float narrow<float>(float x) { return x; }

enum Kind { NONE, FLOAT32, BFLOAT16, FLOAT16 };  // of numbers at an address

DEVICE float number(const void* from, long long at, int kind) {
    if (kind == FLOAT32) return ((const float*)from)[at];
    if (kind == BFLOAT16) return widen(((const BFloat*)from)[at]);
    return kind == FLOAT16 ? widen(((const Half*)from)[at]) : 0.0f;
}
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

}  // namespace prefixkit
