// The instructions that sampling takes, one function each; a test puts a CPU's in their place.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

constexpr int THREADS = 256, WARPS = THREADS / 32;

DEVICE int thread_of() { return threadIdx.x; }
DEVICE int lane_of() { return threadIdx.x & 31; }
DEVICE int warp_of() { return threadIdx.x >> 5; }
DEVICE int block_of() { return blockIdx.x; }

// ---- clusters: one block where there are none ----
#if __CUDA_ARCH__ >= 900
DEVICE int cluster_rank() { int x; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
DEVICE int cluster_size() { int x; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(x)); return x; }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// With nothing written before that the others must see: no fence, which costs a warp 0.5 us.
DEVICE void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// A barrier of all threads of all blocks, which then see what the others wrote into shared memory.
DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// The same place in the shared memory of another block of the cluster.
template <class V> DEVICE V* peer(V* p, int rank) {
    u64 there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
    return (V*)there;
}
#else
DEVICE int cluster_rank() { return 0; }
DEVICE int cluster_size() { return 1; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_begin() {}
DEVICE void cluster_wait() {}
DEVICE void cluster_sync() { __syncthreads(); }
template <class V> DEVICE V* peer(V* p, int) { return p; }
#endif
extern __shared__ int4 dynamic_shared[];
DEVICE void* shared_memory() { return dynamic_shared; }

// ---- numbers ----
// The larger one; NaN if one of them is.
DEVICE float max_nan(float a, float b) { float x; asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b)); return x; }
// Rounded down.
DEVICE float add_down(float a, float b) { return __fadd_rd(a, b); }
DEVICE double log_exact(double x) { return log(x); }
DEVICE u32 warp_total(u32 x) { return __reduce_add_sync(~0u, x); }
// Bytes that will be read soon come nearer.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

// ---- four logits ----
DEVICE float4 load4(const float* p) { return __ldg((const float4*)p); }
template <class V> DEVICE float4 load4(const V* p) {
    const uint2 x = __ldg((const uint2*)p);
    return make_float4(widen(V{u16(x.x)}), widen(V{u16(x.x >> 16)}), widen(V{u16(x.y)}), widen(V{u16(x.y >> 16)}));
}

}  // namespace prefixkit
