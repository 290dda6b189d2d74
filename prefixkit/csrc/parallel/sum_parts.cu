// The sum of what two processes have: each writes its part to memory of the other, and adds what it finds in its own.
//
// shapes   part, sum [vectors] of 16 bytes; theirs, own [2, BLOCKS, VECTORS, THREADS] vectors, memory of the other process
//          and of this one, each of which both see; their_flags, own_flags [BLOCKS] in the same memory; epochs [BLOCKS]
//          of this process alone.  Flags and epochs are zero at first.
// tiling   a block takes THREADS vectors of each of its rounds' VECTORS stripes; as many blocks as there are stripes, up
//          to BLOCKS.  Both processes launch as many, so blocks of a number wait for each other and for nobody else.
// cost     part is read and sum written once; as many bytes go each way between the GPUs, and come back from the L2.
// order    A block's round has a number, its epoch, of which both processes have the same.  Its flag says up to which one
//          the other has written.  Rounds use halves of the memory in turns: before a process writes round n + 2, it has
//          seen the flag of n + 1, which the other one raises after it has read round n.
// numbers  float32, rounded once; both processes get the same bits, for a sum of two does not depend on their order.
// limits   all blocks of a launch must be on the GPU at once: BLOCKS is at most the number of multiprocessors.  A process
//          that does not launch lets the other one wait for ever, as any collective does.
#include "layouts/sum_parts.h"
#include "states/numbers.cuh"

namespace prefixkit {

constexpr int THREADS = 512, VECTORS = 8;

DEVICE void raise_flag(u32* flag, u32 epoch) {
    EFFECT("fence.acq_rel.sys;");
    EFFECT("st.release.sys.global.b32 [%0], %1;", "l"(flag), "r"(epoch));
}
DEVICE void wait_for_flag(const u32* flag, u32 epoch) {
    u32 seen;
    do asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    while (int(seen - epoch) < 0);  // the other one may be a round ahead
}
// Past the L1, which may hold what was there in an earlier round.
DEVICE int4 load_written(const int4* p) {
    int4 x;
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}

template <class T> DEVICE u32 add(u32 x, u32 y) {
    return pack<T>(widen(T{u16(x)}) + widen(T{u16(y)}), widen(T{u16(x >> 16)}) + widen(T{u16(y >> 16)}));
}
template <> DEVICE u32 add<float>(u32 x, u32 y) { return __float_as_uint(__uint_as_float(x) + __uint_as_float(y)); }

template <class T> __global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ SumParts a) {
    const int blocks = gridDim.x, thread = threadIdx.x, first = blockIdx.x * THREADS;
    u32 epoch = a.epochs[blockIdx.x];
    for (long long at = first; at < a.vectors; at += (long long)blocks * THREADS * VECTORS) {
        ++epoch;
        const long long slot = (long long)((epoch & 1) * a.blocks + blockIdx.x) * VECTORS * THREADS + thread;
        int4 own[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const long long place = at + (long long)v * blocks * THREADS + thread;
            if (place < a.vectors) a.theirs[slot + v * THREADS] = own[v] = a.part[place];
        }
        __syncthreads();
        if (thread == 0) raise_flag(a.their_flags + blockIdx.x, epoch), wait_for_flag(a.own_flags + blockIdx.x, epoch);
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const long long place = at + (long long)v * blocks * THREADS + thread;
            if (place >= a.vectors) continue;
            const int4 x = own[v], y = load_written(a.own + slot + v * THREADS);
            a.sum[place] = make_int4(add<T>(x.x, y.x), add<T>(x.y, y.y), add<T>(x.z, y.z), add<T>(x.w, y.w));
        }
    }
    if (thread == 0) a.epochs[blockIdx.x] = epoch;
}

}  // namespace prefixkit
