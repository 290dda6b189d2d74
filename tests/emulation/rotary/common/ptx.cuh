// What rotating takes of a GPU, on the CPU.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 32  // threads do not meet, so there are no fibers
#define EMULATED_BLOCKS 1
#include "fibers.cuh"

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float __uint_as_float(unsigned x) { return emulation::as<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulation::as<unsigned>(x); }
struct Dim { unsigned x; };
static Dim blockIdx, threadIdx;

namespace prefixkit {
inline float half_to_float(u16 x) { return float(emulation::as<_Float16>(x)); }
inline u32 to_half(float x) { return emulation::as<u16>(_Float16(x)); }
// To the nearest, ties to even; the GPU's not-a-number.
inline u32 to_bfloat(float x) {
    const u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
}  // namespace prefixkit
