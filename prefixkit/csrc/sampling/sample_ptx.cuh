// The instructions that sampling takes beyond common/ptx.cuh; a test replaces them by functions for the CPU.
#pragma once
#include "common/warp.cuh"

namespace prefixkit {

constexpr int THREADS = 256, WARPS = THREADS / 32;
extern __shared__ int4 dynamic_shared[];

// ---- clusters: one block where there are none ----
#if __CUDA_ARCH__ >= 900
DEVICE int cluster_rank() { int x; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
DEVICE int cluster_size() { int x; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(x)); return x; }
// For use where nothing was written before that the others must see: there is no fence, which costs a warp 0.5 us.
DEVICE void cluster_arrive() { EFFECT("barrier.cluster.arrive.relaxed.aligned;"); }
DEVICE void cluster_wait() { EFFECT("barrier.cluster.wait.acquire.aligned;"); }
// A barrier of all threads of all blocks, which then see what the others wrote into shared memory.
DEVICE void cluster_sync() {
    EFFECT("barrier.cluster.arrive.release.aligned;");
    cluster_wait();
}
// The same address in the shared memory of another block of the cluster.
template <class V> DEVICE V* peer(V* p, int rank) {
    u64 there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
    return (V*)there;
}
#else
DEVICE int cluster_rank() { return 0; }
DEVICE int cluster_size() { return 1; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
DEVICE void cluster_sync() { __syncthreads(); }
template <class V> DEVICE V* peer(V* p, int) { return p; }
#endif

// The larger one; NaN if one of them is.
DEVICE float max_nan(float a, float b) { float x; asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b)); return x; }
// Prefetches a line to the L2.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE float4 load4(const float* p) { return __ldg((const float4*)p); }
template <class V> DEVICE float4 load4(const V* p) {
    const uint2 x = __ldg((const uint2*)p);
    return make_float4(widen(V{u16(x.x)}), widen(V{u16(x.x >> 16)}), widen(V{u16(x.y)}), widen(V{u16(x.y >> 16)}));
}

}  // namespace prefixkit
