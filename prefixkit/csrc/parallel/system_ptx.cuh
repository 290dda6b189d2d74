// Instructions that order memory between GPUs, and within a block, for sum_parts.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

// A thread that acquires a value sees what the releasing thread has written, or knows that its block has written.
DEVICE void release_system(u32* to, u32 x) { EFFECT("st.release.sys.global.b32 [%0], %1;", "l"(to), "r"(x)); }
LOAD(u32, acquire_system, const u32*, "ld.acquire.sys.global.b32", "=r", "l")
DEVICE void release_shared(u32 to, u32 x) { EFFECT("st.release.cta.shared.b32 [%0], %1;", "r"(to), "r"(x)); }
LOAD(u32, acquire_shared, u32, "ld.acquire.cta.shared.b32", "=r", "r")
// Loads what another GPU has written, past the L1, which may hold older values.
LOAD4(int4, load_system, const int4*, "ld.relaxed.sys.global.v4.b32", "=r", "l")

DEVICE void prefetch(const void* at) { EFFECT("prefetch.global.L2 [%0];", "l"(at)); }
extern __shared__ int4 dynamic_shared[];
DEVICE int4* block_memory() { return dynamic_shared; }  // what a launch gives each block

}  // namespace prefixkit
