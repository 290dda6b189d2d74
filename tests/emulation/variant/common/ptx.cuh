// Numbers alone, for the functions of variants.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 1
#define EMULATED_BLOCKS 1
#include "fibers.cuh"

static inline float __int_as_float(int x) { return emulation::as<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulation::as<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulation::as<unsigned>(x); }
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
#include "numbers.cuh"

namespace prefixkit {
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float log2_fast(float x) { return std::log2(x); }
DEVICE float reciprocal(float x) { return 1.f / x; }
}  // namespace prefixkit
