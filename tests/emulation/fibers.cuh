// Blocks of threads on the CPU, for tests without a GPU: every thread is a fiber, which runs until it waits for others;
// the last to come lets all go on.
//
// The header that takes the place of a kernel's instructions says EMULATED_THREADS, of a block, and EMULATED_BLOCKS, of
// a cluster, and includes this.
#pragma once
// Fibers begin by setcontext and change by the compiler's own jumps, which save three registers.
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#define __device__
#define __global__
#define __shared__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define DEVICE inline

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

namespace prefixkit {
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
}  // namespace prefixkit

#ifndef EMULATED_STACK
#define EMULATED_STACK (64 * 1024)  // bytes of a fiber
#endif

namespace emulation {
constexpr int THREADS = EMULATED_THREADS, BLOCKS = EMULATED_BLOCKS, LANES = 32;
constexpr int STACK = EMULATED_STACK + 5 * 64;  // a power of 2 apart, stacks would drive each other out of the caches

struct Meeting {
    int arrived = 0, gone = 0;
    unsigned generation = 0;
    uint64_t values[2][LANES];
};
inline ucontext_t fibers[BLOCKS * THREADS];
inline void *scheduler[5], *left_at[BLOCKS * THREADS][5];  // for __builtin_setjmp
inline bool begun[BLOCKS * THREADS], done[BLOCKS * THREADS];
inline int current, blocks;
inline Meeting warps[BLOCKS * THREADS / LANES], halves[BLOCKS * THREADS / LANES][2], block_meetings[BLOCKS], cluster;
inline void (*body)();
// What a fiber waits for others to change; the scheduler passes over it until they have.
inline const unsigned* awaited[BLOCKS * THREADS];
inline unsigned seen[BLOCKS * THREADS];

// A function of its own: the compiler's jumps may not leave the function that is to be returned to.
__attribute__((noinline)) inline void jump(void** to) { __builtin_longjmp(to, 1); }
__attribute__((noinline)) inline void give_way() {
    if (__builtin_setjmp(left_at[current]) == 0) jump(scheduler);
}
// Returns when the fiber gives way.
__attribute__((noinline)) inline void go_on_with(int fiber) {
    if (__builtin_setjmp(scheduler) != 0) return;
    current = fiber;
    if (begun[fiber]) jump(left_at[fiber]);
    begun[fiber] = true;
    setcontext(&fibers[fiber]);
}
inline void meet(Meeting& m, int count) {
    const unsigned mine = m.generation;
    if (++m.arrived == count - m.gone) m.arrived = 0, ++m.generation;
    else {
        awaited[current] = &m.generation, seen[current] = mine;
        give_way();
        awaited[current] = nullptr;
    }
}
// Who has returned is waited for no longer.
inline void leave(Meeting& m, int count) {
    ++m.gone;
    if (m.arrived && m.arrived == count - m.gone) m.arrived = 0, ++m.generation;
}
// What all lanes of this warp bring, or those of the half that `mask` names.
inline const uint64_t* exchange(uint64_t value, unsigned mask = ~0u) {
    const bool half = mask == 0xffffu || mask == 0xffff0000u;
    Meeting& m = half ? halves[current / LANES][mask != 0xffffu] : warps[current / LANES];
    uint64_t* values = m.values[m.generation & 1];
    values[current % LANES] = value;
    meet(m, half ? LANES / 2 : LANES);
    return values;
}
inline void enter() {
    body();
    done[current] = true;
    leave(cluster, blocks * THREADS);
    leave(block_meetings[current / THREADS], THREADS);
    while (true) give_way();
}
// `count` blocks together.
inline void run(int count, void (*kernel)()) {
    // Touched as far as fibers go.
    static const std::unique_ptr<char[]> stacks(new char[size_t(BLOCKS) * THREADS * STACK]);
    body = kernel, blocks = count, cluster = {};
    const int threads = count * THREADS;
    for (int i = 0; i < threads; ++i) {
        warps[i / LANES] = halves[i / LANES][0] = halves[i / LANES][1] = {}, block_meetings[i / THREADS] = {};
        begun[i] = done[i] = false, awaited[i] = nullptr;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks.get() + size_t(i) * STACK;
        fibers[i].uc_stack.ss_size = STACK;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (bool all = false; !all;) {
        all = true;
        for (int i = 0; i < threads; ++i) {
            if (done[i]) continue;
            if (!awaited[i] || *awaited[i] != seen[i]) go_on_with(i);
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
struct Index { int x; };
inline Index thread_index() { return {current % THREADS}; }
}  // namespace emulation

static inline void __syncthreads() {
    emulation::meet(emulation::block_meetings[emulation::current / emulation::THREADS], emulation::THREADS);
}
static inline void __syncwarp(unsigned mask = ~0u) { emulation::exchange(0, mask); }
static inline void __threadfence_block() {}
template <class T> static inline T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = emulation::current % 32;
    const uint64_t* all = emulation::exchange(emulation::pack(value));
    return emulation::unpack<T>(all[lane >= step ? lane - step : lane]);
}
template <class T> static inline T __shfl_xor_sync(unsigned lanes, T value, int mask) {
    const int lane = emulation::current % 32;
    return emulation::unpack<T>(emulation::exchange(emulation::pack(value), lanes)[lane ^ mask]);
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane) {
    return emulation::unpack<T>(emulation::exchange(emulation::pack(value), mask)[lane & 31]);
}
static inline unsigned __ballot_sync(unsigned mask, bool value) {
    const uint64_t* all = emulation::exchange(value, mask);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (mask >> lane & 1 ? unsigned(all[lane]) : 0) << lane;
    return bits;
}
template <class T, class V> static inline T atomicAdd(T* to, V value) {
    const T old = *to;
    *to += T(value);
    return old;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
