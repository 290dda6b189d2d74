// The instructions that planning takes, on the CPU.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 1024
#define EMULATED_BLOCKS 1
#include "fibers.cuh"

#define threadIdx (emulation::thread_index())

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
static inline int atomicSub(int* to, int value) { const int old = *to; *to -= value; return old; }
static inline int atomicMax(int* to, int value) { const int old = *to; *to = max(old, value); return old; }

namespace prefixkit {
inline float reciprocal(float x) { return 1.0f / x; }
}  // namespace prefixkit
