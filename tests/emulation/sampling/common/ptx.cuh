// The instructions that sampling takes, on the CPU, by a cluster of blocks.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 256
#define EMULATED_BLOCKS 8
#include "fibers.cuh"

namespace emulation {
constexpr int SHARED = 232 * 1024;
inline int first_block;
alignas(16) inline char memory[BLOCKS][SHARED];

// The blocks from `first` on, whose shared memory holds nothing of use.
inline void run(int count, int first, void (*kernel)()) {
    first_block = first;
    std::memset(memory, 0xcd, sizeof memory);
    run(count, kernel);
}
inline Index block_index() { return {first_block + current / THREADS}; }
}  // namespace emulation

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::block_index())

static inline unsigned atomicMin(unsigned* to, unsigned value) {
    const unsigned old = *to;
    *to = min(old, value);
    return old;
}
static inline unsigned atomicOr(unsigned* to, unsigned value) { const unsigned old = *to; *to |= value; return old; }
static inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const uint64_t* all = emulation::exchange(value);
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += unsigned(all[lane]);
    return sum;
}
static inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    const uint64_t* all = emulation::exchange(value);
    for (int lane = 0; lane < 32; ++lane) value = min(value, unsigned(all[lane]));
    return value;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t* all = emulation::exchange(value);
    for (int lane = 0; lane < 32; ++lane) value = max(value, unsigned(all[lane]));
    return value;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
// In float64 the sum of these is exact, or so small a part of a step that it does not reach the next one.
static inline float __fadd_rd(float a, float b) {
    const double sum = double(a) + double(b);
    const float rounded = float(sum);
    return rounded > sum ? std::nextafter(rounded, -INFINITY) : rounded;
}
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __ull2double_rn(unsigned long long x) { return double(x); }
static inline unsigned long long __double2ull_rz(double x) { return (unsigned long long)x; }
static inline float __double2float_ru(double x) {
    const float y = float(x);
    return y < x ? std::nextafter(y, INFINITY) : y;
}
static inline float __ull2float_rd(unsigned long long x) {
    const float y = float(x);
    return __int128(y) > __int128(x) ? std::nextafter(y, 0.0f) : y;
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)(a) * b >> 64;
}
static inline int __float_as_int(float x) { return emulation::as<int>(x); }
static inline float __int_as_float(int x) { return emulation::as<float>(x); }

namespace prefixkit {
inline float exp2_fast(float x) { return std::exp2(x); }
constexpr float LOG2E = 1.4426950408889634f;
#define MINUS_INFINITY (-INFINITY)

struct Half { u16 bits; };
struct BFloat { u16 bits; };
inline float widen(float x) { return x; }
inline float widen(BFloat x) { return emulation::as<float>(u32(x.bits) << 16); }
inline float widen(Half x) { return float(emulation::as<_Float16>(x.bits)); }
}  // namespace prefixkit
