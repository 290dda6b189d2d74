// The instructions that the kernels use, one function each.  No CUDA header is needed, so NVRTC compiles us alone.
#pragma once

namespace prefixkit {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

#ifndef PREFIXKIT_HALF
#define PREFIXKIT_HALF 0  // 1: float16, 0: bfloat16
#endif

// The lane, read anew: what is computed from it is not kept in registers across loops, where they are short.
DEVICE int lane_anew() { int x; asm volatile("mov.u32 %0, %%laneid;" : "=r"(x)); return x; }

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// ---- copies ----
// 16 bytes from global to shared memory; zeros where `valid` is false (`from` must still be an address).
DEVICE void copy16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void store_shared16(u32 to, int4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// A TMA box of a tensor, from global to shared memory; `map` describes tensor, box and swizzle, x... are the box's
// first coordinates, innermost first.  Its bytes count towards `barrier`.  `policy`: what L2 should do with the lines.
DEVICE void tma_copy(u32 to, const void* map, int x, int y, int z, int w, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy) : "memory");
}
DEVICE void tma_copy(u32 to, const void* map, int x, int y, int z, int w, int v, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(policy) : "memory");
}
// `bytes` in one copy, a multiple of 16 as both addresses are.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE u64 policy_stream() { u64 x; asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(x)); return x; }
DEVICE u64 policy_keep() { u64 x; asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(x)); return x; }
// Brings a line near without waiting for it.
DEVICE void touch(const void* p) { asm volatile("{.reg .b32 x; ld.global.ca.b32 x, [%0];}" ::"l"(p)); }

DEVICE void store_zeros(u32 to) { asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory"); }
DEVICE float load_shared1(u32 from) { float x; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory"); return x; }
DEVICE int load_shared_int(u32 from) { int x; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory"); return x; }
DEVICE int4 load_shared_int4(u32 from) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}
DEVICE float4 load_shared(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
    return x;
}
// Orders ordinary accesses to memory before those of TMA and the warpgroup instructions (sm_90).
DEVICE void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void async_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- matrices ----
DEVICE void load_matrix(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
DEVICE void load_matrix_transposed(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
DEVICE u32 transpose8(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// d[16 x 8] += a[16 x 16] b[16 x 8]
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if PREFIXKIT_HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers ----
// Two floats rounded to the storage type, `low` in the lower half.
DEVICE u32 pack(float low, float high) {
    u32 x;
#if PREFIXKIT_HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
    return x;
}
// Both floats become what the storage type makes of them.
DEVICE void round_pair(float& low, float& high) {
    const u32 x = pack(low, high);
#if PREFIXKIT_HALF
    asm("{.reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(x));
#else
    low = __uint_as_float(x << 16), high = __uint_as_float(x & 0xffff0000u);
#endif
}
// Two floats that the storage type can hold.
DEVICE u32 pack_rounded(float low, float high) {
#if PREFIXKIT_HALF
    return pack(low, high);
#else
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
#endif
}
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// a / b for 0 <= a < 8192 and 0 < b < 1024, in a few instructions.
DEVICE int divide_small(int a, int b) {
    return int((float(a) + 0.5f) * reciprocal(float(b)));
}
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define MINUS_INFINITY __int_as_float(0xff800000)

// ---- global memory that other blocks write ----
DEVICE float4 load_global(const float* p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
    return x;
}
DEVICE float load_global1(const float* p) { float x; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory"); return x; }
// What this thread has written, or knows that others of its block have, is there for all blocks before what it does next.
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE u32 load_acquire(const u32* p) { u32 x; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory"); return x; }

// ---- what the compiler should know ----
// True in one lane of a warp.
DEVICE bool elected() {
    u32 mine;
    asm volatile("{.reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(mine));
    return mine;
}
// The first lane's value, which the compiler then knows to be the same in all lanes.
DEVICE u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }
// The same value, which the compiler will keep rather than compute again.
DEVICE u32 kept(u32 x) { u32 y; asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x)); return y; }

// ---- barriers in shared memory ----
DEVICE void barrier_init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
DEVICE void barrier_arrive(u32 barrier) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(barrier) : "memory"); }
// One lane of a warp arrives, once all have come.
DEVICE void barrier_arrive_warp(u32 barrier) {
    asm volatile("{.reg .pred p;\n .reg .b64 t;\n elect.sync _|p, 0xffffffff;\n @p mbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for so many bytes of boxes; they must not land before.
DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase with this parity.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred p;\n"
                 "WAIT%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra WAIT%=;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
// Whether the phase with this parity has ended, as far as a warp sees.
DEVICE bool barrier_ended(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile("{.reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return __all_sync(~0u, ended);
}
// Where a kernel may begin before the one ahead of it in the stream has ended (programmatic dependent launch): lets the next begin, and
// waits for the end of the last, whose results are read from here on.  Nothing elsewhere.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
#endif
}
template <int ID, int THREADS> DEVICE void named_barrier() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }
template <int ID, int THREADS> DEVICE void named_arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory"); }

}  // namespace prefixkit
