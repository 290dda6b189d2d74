// What rotating and appending take of a GPU, on the CPU.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 32  // threads do not meet, so there are no fibers
#define EMULATED_BLOCKS 1
#include "fibers.cuh"

struct uint2 { unsigned x, y; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float __uint_as_float(unsigned x) { return emulation::as<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulation::as<unsigned>(x); }
struct Dim { unsigned x; };
static Dim blockIdx, blockDim, threadIdx;

namespace prefixkit {
struct Half { u16 bits; };
struct BFloat { u16 bits; };
inline float widen(float x) { return x; }
inline float widen(BFloat x) { return __uint_as_float(u32(x.bits) << 16); }
inline float widen(Half x) { return float(emulation::as<_Float16>(x.bits)); }
inline u32 round_to(Half, float x) { return emulation::as<u16>(_Float16(x)); }
// To the nearest, ties to even; the GPU's not-a-number.
inline u32 round_to(BFloat, float x) {
    const u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class T> inline u32 pack(float low, float high) { return round_to(T{}, low) | round_to(T{}, high) << 16; }
inline void pdl_launch() {}
inline void pdl_await() {}
}  // namespace prefixkit
