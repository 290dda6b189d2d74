// A block of threads on the CPU, for tests without a GPU: every thread a fiber, and the instructions that planning takes.
//
// Takes the place of csrc/ptx.cuh.  A fiber runs until it meets others; whoever comes last lets all go on.
#pragma once
#include <ucontext.h>
#include <cstdint>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define DEVICE static inline

struct int4 { int x, y, z, w; };
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

namespace prefixkit {
using u32 = unsigned int;
using u64 = unsigned long long;
}  // namespace prefixkit

namespace emulation {
constexpr int THREADS = 1024, LANES = 32, STACK = 64 * 1024;

struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
    uint64_t values[2][LANES];
};
struct Index { int x; };

inline ucontext_t scheduler, fibers[THREADS];
inline bool done[THREADS];
inline int current;
inline Meeting warps[THREADS / LANES], block;
inline void (*body)();

inline void give_way() { swapcontext(&fibers[current], &scheduler); }
inline void meet(Meeting& m, int count) {
    const unsigned mine = m.generation;
    if (++m.arrived == count) m.arrived = 0, ++m.generation;
    else while (m.generation == mine) give_way();
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
    while (true) give_way();
}
inline void run(void (*kernel)()) {
    static std::vector<char> stacks(size_t(THREADS) * STACK);
    body = kernel;
    block = {};
    for (int i = 0; i < THREADS; ++i) {
        warps[i / LANES] = {};
        done[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks.data() + size_t(i) * STACK;
        fibers[i].uc_stack.ss_size = STACK;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (bool all = false; !all;) {
        all = true;
        for (int i = 0; i < THREADS; ++i) {
            if (done[i]) continue;
            current = i;
            swapcontext(&scheduler, &fibers[i]);
            all = all && done[i];
        }
    }
}
inline Index thread_index() { return {current}; }
}  // namespace emulation

#define threadIdx (emulation::thread_index())

static inline void __syncthreads() { emulation::meet(emulation::block, emulation::THREADS); }
static inline void __syncwarp() { emulation::exchange(0); }
static inline void __threadfence_block() {}
template <class T> static inline T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = emulation::current % 32;
    const uint64_t* all = emulation::exchange(uint64_t(value));
    return T(all[lane >= step ? lane - step : lane]);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    const int lane = emulation::current % 32;
    return T(emulation::exchange(uint64_t(value))[lane ^ mask]);
}
template <class T> static inline T __shfl_sync(unsigned, T value, int lane) { return T(emulation::exchange(uint64_t(value))[lane & 31]); }
static inline unsigned __ballot_sync(unsigned, bool value) {
    const uint64_t* all = emulation::exchange(value);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane]) << lane;
    return bits;
}
static inline unsigned __match_any_sync(unsigned, int value) {
    const uint64_t* all = emulation::exchange(uint32_t(value));
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane] == uint32_t(value)) << lane;
    return bits;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t* all = emulation::exchange(value);
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane) most = max(most, unsigned(all[lane]));
    return most;
}
static inline int __reduce_add_sync(unsigned, int value) {
    const uint64_t* all = emulation::exchange(uint32_t(value));
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += unsigned(all[lane]);
    return int(sum);
}
template <class T, class V> static inline T atomicAdd(T* to, V value) { const T old = *to; *to += T(value); return old; }
static inline int atomicSub(int* to, int value) { const int old = *to; *to -= value; return old; }
static inline int atomicMax(int* to, int value) { const int old = *to; *to = max(old, value); return old; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
