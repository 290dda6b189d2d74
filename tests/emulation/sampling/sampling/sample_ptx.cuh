// The instructions that sampling takes, on the CPU, by a cluster of blocks.  Takes the place of csrc/sampling/sample_ptx.cuh.
#pragma once
#define EMULATED_THREADS 256
#define EMULATED_BLOCKS 8
#include "fibers.cuh"

namespace prefixkit {
constexpr int THREADS = emulation::THREADS, WARPS = THREADS / 32;
}  // namespace prefixkit

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
}  // namespace emulation

static inline unsigned atomicMin(unsigned* to, unsigned value) { const unsigned old = *to; *to = min(old, value); return old; }
static inline unsigned atomicOr(unsigned* to, unsigned value) { const unsigned old = *to; *to |= value; return old; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __ull2double_rn(unsigned long long x) { return double(x); }
static inline unsigned long long __double2ull_rz(double x) { return (unsigned long long)x; }
static inline float __double2float_ru(double x) { const float y = float(x); return y < x ? std::nextafter(y, INFINITY) : y; }
static inline float __ull2float_rd(unsigned long long x) {
    const float y = float(x);
    return __int128(y) > __int128(x) ? std::nextafter(y, 0.0f) : y;
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)(a) * b >> 64; }
static inline int __float_as_int(float x) { return emulation::as<int>(x); }
static inline float __int_as_float(int x) { return emulation::as<float>(x); }

namespace prefixkit {
inline int thread_of() { return emulation::current % THREADS; }
inline int lane_of() { return emulation::current % 32; }
inline int warp_of() { return thread_of() / 32; }
inline int cluster_rank() { return emulation::current / THREADS; }
inline int cluster_size() { return emulation::blocks; }
inline int block_of() { return emulation::first_block + cluster_rank(); }
inline void cluster_sync() { emulation::meet(emulation::cluster, emulation::blocks * THREADS); }
inline void cluster_arrive() {}
inline void cluster_begin() {}
inline void cluster_wait() { cluster_sync(); }
template <class V> inline V* peer(V* p, int rank) {
    using Byte = std::conditional_t<std::is_const_v<V>, const char, char>;
    return (V*)((Byte*)p + (rank - cluster_rank()) * emulation::SHARED);
}
inline void* shared_memory() { return emulation::memory[cluster_rank()]; }

inline float max_nan(float a, float b) { return std::isnan(a) ? a : std::isnan(b) ? b : a < b ? b : a; }
// In float64 the sum of these is exact, or so small a part of a step that it does not reach the next one.
inline float add_down(float a, float b) {
    const double sum = double(a) + double(b);
    const float rounded = float(sum);
    return rounded > sum ? std::nextafter(rounded, -INFINITY) : rounded;
}
inline u32 warp_total(u32 x) {
    const uint64_t* all = emulation::exchange(x);
    u32 sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += u32(all[lane]);
    return sum;
}
inline void prefetch(const void*) {}
inline double log_exact(double x) { return std::log(x); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float not_a_number() { return NAN; }
constexpr float LOG2E = 1.4426950408889634f;
#define MINUS_INFINITY (-INFINITY)

struct Half { u16 bits; };
struct BFloat { u16 bits; };
inline float widen(float x) { return x; }
inline float widen(BFloat x) { return emulation::as<float>(u32(x.bits) << 16); }
inline float widen(Half x) { return float(emulation::as<_Float16>(x.bits)); }
template <class V> inline float4 load4(const V* p) { return make_float4(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])); }
}  // namespace prefixkit
