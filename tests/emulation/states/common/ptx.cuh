// What steps of states take of a GPU, on the CPU.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#ifndef EMULATED_THREADS
#define EMULATED_THREADS 256
#endif
#define EMULATED_BLOCKS 1
#include "fibers.cuh"

#undef __shared__
#define __shared__ static  // one block after the other
#define threadIdx (emulation::thread_index())
struct Dim { int x; };
static Dim blockIdx;
static inline float __uint_as_float(unsigned x) { return emulation::as<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulation::as<unsigned>(x); }

#include "numbers.cuh"

namespace prefixkit {
inline float widen(float x) { return x; }
}  // namespace prefixkit
