// The instructions that the kernels use, one function each.  NVRTC compiles them without any CUDA header.
#pragma once

namespace prefixkit {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

struct Half { u16 bits; };
struct BFloat { u16 bits; };
#ifndef PREFIXKIT_HALF
#define PREFIXKIT_HALF 0  // 1: float16, 0: bfloat16
#endif
#if PREFIXKIT_HALF
using Storage = Half;
#define STORAGE "f16"
#else
using Storage = BFloat;
#define STORAGE "bf16"
#endif
// Operands of products.  On Hopper, operands from pages in e4m3 are float16, which holds every e4m3 number: one
// instruction widens two of them, where bfloat16 takes four.
#if PREFIXKIT_HALF || (PREFIXKIT_KV_FP8 && PREFIXKIT_MAPS)
#define PREFIXKIT_HALF_OPERANDS 1
using Operand = Half;
#define OPERAND "f16"
#else
#define PREFIXKIT_HALF_OPERANDS 0
using Operand = BFloat;
#define OPERAND "bf16"
#endif

// An instruction without a result that changes memory or waits for it; then its operands.
#define EFFECT(text, ...) asm volatile(text ::__VA_ARGS__ : "memory")
// A function that loads one register, or four, from an address; `to` and `from` are the asm constraints of both.
#define LOAD(Value, name, Address, text, to, from) \
    DEVICE Value name(Address p) { Value x; asm volatile(text " %0, [%1];" : to(x) : from(p) : "memory"); return x; }
#define LOAD4(Value, name, Address, text, to, from)                                       \
    DEVICE Value name(Address p) {                                                        \
        Value x;                                                                          \
        asm volatile(text " {%0,%1,%2,%3}, [%4];"                                         \
                     : to(x.x), to(x.y), to(x.z), to(x.w) : from(p) : "memory");          \
        return x;                                                                         \
    }

// The lane, read anew: what is computed from it is not kept in registers across loops in which registers are short.
DEVICE int lane_anew() { int x; asm volatile("mov.u32 %0, %%laneid;" : "=r"(x)); return x; }

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// ---- copies ----
// 16 bytes from global to shared memory; zeros where `valid` is false (`from` must still be an address).
DEVICE void copy16(u32 to, const void* from, bool valid) {
    EFFECT("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;", "r"(to), "l"(from), "r"(valid ? 16 : 0));
}
DEVICE void copy_commit() { EFFECT("cp.async.commit_group;"); }
template <int PENDING> DEVICE void copy_wait() { EFFECT("cp.async.wait_group %0;", "n"(PENDING)); }
// Copies a TMA box of a tensor from global to shared memory.  `map` describes tensor, box and swizzle; x... are the
// box's first coordinates, innermost first.  The bytes count towards `barrier`.  `policy` tells the L2 what to do with
// the lines.
DEVICE void tma_copy(u32 to, const void* map, int x, int y, int z, int w, u32 barrier, u64 policy) {
    EFFECT("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
           "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;",
           "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy));
}
DEVICE void tma_copy(u32 to, const void* map, int x, int y, int z, int w, int v, u32 barrier, u64 policy) {
    EFFECT("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
           "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;",
           "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(policy));
}
// Copies `bytes` at once, a multiple of 16, as both addresses are.
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    EFFECT("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
           "r"(to), "l"(from), "r"(bytes), "r"(barrier));
}
DEVICE u64 policy_stream() { u64 x; asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(x)); return x; }
DEVICE u64 policy_keep() { u64 x; asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(x)); return x; }
// Prefetches `bytes` (a multiple of 16, as the address is) to the L2 without waiting for them (sm_90).
DEVICE void prefetch_l2(const void* p, u32 bytes) {
    EFFECT("cp.async.bulk.prefetch.L2.global [%0], %1;", "l"(p), "r"(bytes));
}

DEVICE void store_shared16(u32 to, int4 x) {
    EFFECT("st.shared.v4.b32 [%0], {%1,%2,%3,%4};", "r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}
DEVICE void store_shared1(u32 to, float x) { EFFECT("st.shared.f32 [%0], %1;", "r"(to), "f"(x)); }
DEVICE void store_shared_int(u32 to, int x) { EFFECT("st.shared.b32 [%0], %1;", "r"(to), "r"(x)); }
DEVICE void store_zeros(u32 to) { EFFECT("st.shared.v4.b32 [%0], {%1, %1, %1, %1};", "r"(to), "r"(0)); }
LOAD(float, load_shared1, u32, "ld.shared.f32", "=f", "r")
LOAD(int, load_shared_int, u32, "ld.shared.b32", "=r", "r")
LOAD4(int4, load_shared_int4, u32, "ld.shared.v4.b32", "=r", "r")
LOAD4(float4, load_shared, u32, "ld.shared.v4.f32", "=f", "r")
// Replaces a word of shared memory by `to` if it is `from`; returns what it was.
DEVICE u32 swap_shared(u32 address, u32 from, u32 to) {
    u32 x;
    asm volatile("atom.shared.cas.b32 %0, [%1], %2, %3;" : "=r"(x) : "r"(address), "r"(from), "r"(to) : "memory");
    return x;
}
// A word of shared memory that some warps read while others write it: a reader sees everything written before the word.
DEVICE u32 read_shared_word(u32 from) {
    u32 x;
    asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;" : "=r"(x) : "r"(from) : "memory");
    return x;
}
DEVICE void write_shared_word(u32 to, u32 x) {
    EFFECT("{.reg .b32 y; atom.release.cta.shared.exch.b32 y, [%0], %1;}", "r"(to), "r"(x));
}
DEVICE void rest_a_little() { EFFECT("nanosleep.u32 100;"); }
// Orders ordinary accesses to memory before those of TMA and the warpgroup instructions (sm_90).
DEVICE void async_fence() { EFFECT("fence.proxy.async.shared::cta;"); }
DEVICE void async_fence_global() { EFFECT("fence.proxy.async.global;"); }

// ---- matrices ----
#define LOAD_MATRIX(name, layout)                                                               \
    DEVICE void name(u32 (&a)[4], u32 address) {                                                \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" layout ".shared.b16 {%0,%1,%2,%3}, [%4];"  \
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory"); \
    }
LOAD_MATRIX(load_matrix, "")
LOAD_MATRIX(load_matrix_transposed, ".trans")
DEVICE u32 transpose8(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// d[16 x 8] += a[16 x 16] b[16 x 8]
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers ----
DEVICE float widen(float x) { return x; }
DEVICE float widen(BFloat x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float widen(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
// Two floats rounded to the nearest T, `low` in the lower half.
template <class T = Storage> DEVICE u32 pack(float low, float high);
#define PACK(T, name)                                                                  \
    template <> DEVICE u32 pack<T>(float low, float high) {                            \
        u32 x;                                                                         \
        asm("cvt.rn." name "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));      \
        return x;                                                                      \
    }
PACK(Half, "f16")
PACK(BFloat, "bf16")
// Stores neighbours, unchanged or rounded to the storage type.
DEVICE void store_two(float* to, float x, float y) { *(float2*)to = make_float2(x, y); }
DEVICE void store_two(u16* to, float x, float y) { *(u32*)to = pack(x, y); }
DEVICE void store_four(float* to, const float4& x) { *(float4*)to = x; }
DEVICE void store_four(u16* to, const float4& x) { *(uint2*)to = make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }
// Rounds both floats to the operands' type.
DEVICE void round_pair(float& low, float& high) {
    const u32 x = pack<Operand>(low, high);
    low = widen(Operand{u16(x)}), high = widen(Operand{u16(x >> 16)});
}
// Packs two floats that operands hold exactly.
DEVICE u32 pack_rounded(float low, float high) {
    return PREFIXKIT_HALF_OPERANDS ? pack<Operand>(low, high)
                                   : __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
#if __CUDA_ARCH__ >= 890
// Two numbers of e4m3 as float16, which holds every e4m3 number.
DEVICE u32 halves_of_e4m3(u32 two) { u32 y; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(u16(two))); return y; }
#endif
// Two operands times two factors.
DEVICE u32 scaled_pair(u32 x, u32 factor) {
    u32 y;
    asm("fma.rn." OPERAND "x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(factor), "r"(0x80008000));
    return y;
}
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// Within a unit in the last place, where log2_fast errs by up to 2^-22: for log-sum-exps, once a row.
DEVICE float log2_rounded(float x) { return log2f(x); }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// a / b for 0 <= a < 8192 and 0 < b < 1024, in a few instructions.
DEVICE int divide_small(int a, int b) { return int((float(a) + 0.5f) * reciprocal(float(b))); }
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define MINUS_INFINITY __int_as_float(0xff800000)

// ---- global memory that other blocks write ----
LOAD(float, load_global1, const float*, "ld.global.cg.f32", "=f", "l")
LOAD4(float4, load_global, const float*, "ld.global.cg.v4.f32", "=f", "l")
LOAD(u32, load_acquire, const u32*, "ld.acquire.gpu.global.u32", "=r", "l")
// Makes what this thread has written, or knows that its block has written, visible to all blocks before what follows.
DEVICE void fence_device() { EFFECT("fence.acq_rel.gpu;"); }

DEVICE u32 clock_low() { u32 x; asm volatile("mov.u32 %0, %%clock;" : "=r"(x)); return x; }

// ---- hints to the compiler ----
// True in one lane of a warp.
DEVICE bool elected() {
    u32 mine;
    asm volatile("{.reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(mine));
    return mine;
}
// The first lane's value, which the compiler then knows to be the same in all lanes.
DEVICE u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }
// The same value, which the compiler keeps instead of computing it again.
DEVICE u32 kept(u32 x) { u32 y; asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x)); return y; }

// ---- barriers ----
DEVICE void barrier_init(u32 barrier, u32 count) {
    EFFECT("mbarrier.init.shared.b64 [%0], %1;", "r"(barrier), "r"(count));
}
DEVICE void barrier_arrive(u32 barrier) { EFFECT("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}", "r"(barrier)); }
// How often a warp arrives: once for all its lanes, or once for every lane.  compute-sanitizer's racecheck sees no
// order through an elected lane, so it needs the build in which every lane arrives.
#ifdef PREFIXKIT_EVERY_LANE
constexpr u32 WARP_ARRIVALS = 32;
#else
constexpr u32 WARP_ARRIVALS = 1;
#endif
// One lane of a warp arrives.  Before, the other lanes must have used what they read of the memory that the barrier
// guards, and must have converged: elect.sync orders no accesses.
DEVICE void barrier_arrive_elected(u32 barrier) {
    if (WARP_ARRIVALS == 32) return barrier_arrive(barrier);
    EFFECT("{.reg .pred p;\n .reg .b64 t;\n elect.sync _|p, 0xffffffff;\n @p mbarrier.arrive.shared.b64 t, [%0];\n}",
           "r"(barrier));
}
// One lane of a warp arrives, once all lanes have come.
DEVICE void barrier_arrive_warp(u32 barrier) {
    __syncwarp();
    barrier_arrive_elected(barrier);
}
// Arrives, and makes the phase wait for `bytes` bytes of boxes, which must not land before this.
DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
    EFFECT("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;}", "r"(barrier), "r"(bytes));
}
// Waits for the end of the phase with this parity.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    EFFECT("{.reg .pred p;\nWAIT%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT%=;\n}",
           "r"(barrier), "r"(parity));
}
// Whether the phase with this parity has ended, as far as a warp sees.
DEVICE bool barrier_ended(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile("{.reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return __all_sync(~0u, ended);
}
template <int ID, int THREADS> DEVICE void named_barrier() { EFFECT("bar.sync %0, %1;", "n"(ID), "n"(THREADS)); }
template <int ID, int THREADS> DEVICE void named_arrive() { EFFECT("bar.arrive %0, %1;", "n"(ID), "n"(THREADS)); }

// ---- programmatic dependent launch (PDL): a kernel begins before the one ahead of it in the stream has ended ----
#if __CUDA_ARCH__ >= 900
DEVICE void pdl_launch() { EFFECT("griddepcontrol.launch_dependents;"); }  // the next kernel may begin
DEVICE void pdl_await() { EFFECT("griddepcontrol.wait;"); }  // the last kernel's results can be read from here on
#else
DEVICE void pdl_launch() {}
DEVICE void pdl_await() {}
#endif
DEVICE void pdl_wait() { pdl_launch(), pdl_await(); }

}  // namespace prefixkit
