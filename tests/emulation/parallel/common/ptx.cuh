// What sums of two processes take of a GPU, on the CPU: the blocks of a number, of each of them one, run together.
// Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 512
#define EMULATED_BLOCKS 2
#define EMULATED_STACK (16 * 1024)
#include <random>
#include "fibers.cuh"

namespace emulation {
inline Meeting named[BLOCKS][16];
inline std::minstd_rand random;
inline int process() { return current / THREADS; }
// Some others go on first; seldom they may go on for several chunks.
inline void linger(unsigned most = 8) {
    for (unsigned turns = random() % most; turns; --turns) give_way();
}
inline void may_linger() {
    if (random() % 16 == 0) linger(random() % 256 ? 8 : 512);
}
}  // namespace emulation

#undef __shared__
#define __shared__ static
struct Dim { unsigned x; };
static Dim blockIdx, gridDim;
#define threadIdx (Dim{unsigned(emulation::current % emulation::THREADS)})
static inline float __uint_as_float(unsigned x) { return emulation::as<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulation::as<unsigned>(x); }

#include "numbers.cuh"

namespace prefixkit {
inline float widen(float x) { return x; }
template <int ID, int COUNT> inline void named_barrier() {
    emulation::meet(emulation::named[emulation::process()][ID], COUNT);
}
inline u32 shared_address(const void* at) { return u32((unsigned long long)at); }
}  // namespace prefixkit
