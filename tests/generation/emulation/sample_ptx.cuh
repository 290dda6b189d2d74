// A cluster of blocks on the CPU, for tests without a GPU: every thread a fiber, and the instructions that sampling takes.
//
// Takes the place of csrc/sample_ptx.cuh.  A fiber runs until it meets others; whoever comes last lets all go on.
#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define DEVICE inline

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

namespace prefixkit {
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr int THREADS = 256, WARPS = THREADS / 32;
}  // namespace prefixkit

namespace emulation {
constexpr int THREADS = prefixkit::THREADS, LANES = 32, STACK = 32 * 1024, MOST = 8, SHARED = 232 * 1024;

struct Meeting {
    int arrived = 0, gone = 0;
    unsigned generation = 0;
    uint64_t values[2][LANES];
};
inline ucontext_t scheduler, fibers[MOST * THREADS];
inline bool done[MOST * THREADS];
inline int current, blocks, first_block;
inline Meeting warps[MOST * THREADS / LANES], block_meetings[MOST], cluster, start;
inline void (*body)();
alignas(16) inline char memory[MOST][SHARED];

inline void give_way() { swapcontext(&fibers[current], &scheduler); }
inline void meet(Meeting& m, int count) {
    const unsigned mine = m.generation;
    if (++m.arrived == count - m.gone) m.arrived = 0, ++m.generation;
    else while (m.generation == mine) give_way();
}
// Who has returned is waited for no longer.
inline void leave(Meeting& m, int count) {
    ++m.gone;
    if (m.arrived && m.arrived == count - m.gone) m.arrived = 0, ++m.generation;
}
// What all lanes of this warp bring.
inline const uint64_t* exchange(uint64_t value) {
    Meeting& m = warps[current / LANES];
    uint64_t* values = m.values[m.generation & 1];
    values[current % LANES] = value;
    meet(m, LANES);
    return values;
}
inline void enter() {
    body();
    done[current] = true;
    leave(cluster, blocks * THREADS);
    leave(block_meetings[current / THREADS], THREADS);
    while (true) give_way();
}
inline void run(int count, int first, void (*kernel)()) {
    static std::vector<char> stacks(size_t(MOST) * THREADS * STACK);
    body = kernel, blocks = count, first_block = first, cluster = {};
    std::memset(memory, 0xcd, sizeof memory);
    const int threads = count * THREADS;
    for (int i = 0; i < threads; ++i) {
        warps[i / LANES] = {}, block_meetings[i / THREADS] = {};
        done[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks.data() + size_t(i) * STACK;
        fibers[i].uc_stack.ss_size = STACK;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (bool all = false; !all;) {
        all = true;
        for (int i = 0; i < threads; ++i) {
            if (done[i]) continue;
            current = i;
            swapcontext(&scheduler, &fibers[i]);
            all = all && done[i];
        }
    }
}
template <class To, class From> inline To as(From x) {
    To y;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&y, &x, sizeof y);
    return y;
}
template <class T> inline uint64_t pack(T x) {
    uint64_t y = 0;
    std::memcpy(&y, &x, sizeof x);
    return y;
}
template <class T> inline T unpack(uint64_t y) {
    T x;
    std::memcpy(&x, &y, sizeof x);
    return x;
}
}  // namespace emulation

static inline void __syncthreads() { emulation::meet(emulation::block_meetings[emulation::current / emulation::THREADS], emulation::THREADS); }
static inline void __syncwarp() { emulation::exchange(0); }
template <class T> static inline T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = emulation::current % 32;
    const uint64_t* all = emulation::exchange(emulation::pack(value));
    return emulation::unpack<T>(all[lane >= step ? lane - step : lane]);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    const int lane = emulation::current % 32;
    return emulation::unpack<T>(emulation::exchange(emulation::pack(value))[lane ^ mask]);
}
template <class T> static inline T __shfl_sync(unsigned, T value, int lane) {
    return emulation::unpack<T>(emulation::exchange(emulation::pack(value))[lane & 31]);
}
static inline unsigned __ballot_sync(unsigned, bool value) {
    const uint64_t* all = emulation::exchange(value);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane]) << lane;
    return bits;
}
static inline unsigned atomicAdd(unsigned* to, unsigned value) { const unsigned old = *to; *to += value; return old; }
static inline unsigned atomicMin(unsigned* to, unsigned value) { const unsigned old = *to; *to = min(old, value); return old; }
static inline unsigned atomicOr(unsigned* to, unsigned value) { const unsigned old = *to; *to |= value; return old; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
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
