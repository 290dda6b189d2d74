// The sum of what two processes have: each writes its part to memory of the other, and adds what it finds in its own.
//
// shapes   part, residual, sum [vectors] of 16 bytes, residual may be null; theirs, own [BLOCKS, 2 AHEAD, VECTORS,
//          THREADS] vectors, memory of the other process and of this one, each of which both see; their_flags,
//          own_flags [BLOCKS] in the same memory; epochs [BLOCKS] of this process alone.  Flags and epochs are zero at
//          first.
// tiling   a block takes THREADS vectors of each stripe; as many blocks as a stripe needs, up to BLOCKS.  A chunk is a
//          block's part of VECTORS stripes.  THREADS threads write chunks, and as many others add them, so that the
//          link is busy while a block adds.  Both processes launch as many blocks, so those of a number wait for each
//          other and for no others.
// cost     part and residual are read and sum written once; as many bytes as part has go each way between the GPUs, and
//          come back from the L2, as part does for the threads that add.
// order    A block's chunks are numbered from its epoch on and take 2 AHEAD places in turns.  Its flag says how many
//          the other process has written.  Chunk n is written once this process has added chunk n - AHEAD: to add it,
//          this process has seen a flag that the other one raised after it had added chunk n - 2 AHEAD, from the same
//          place.
// numbers  float32, rounded once; then the residual likewise.  Both processes get the same bits of the sum, for a sum
//          of two does not depend on their order.
// limits   all blocks of a launch must be on the GPU at once: BLOCKS is at most the number of multiprocessors.  A
//          process that does not launch lets the other one wait for ever, as any collective does.
#include "layouts/sum_parts.h"
#include "parallel/system_ptx.cuh"
#include "states/numbers.cuh"

namespace prefixkit {

constexpr int THREADS = 256, VECTORS = 3, AHEAD = 4;
enum Barrier { WRITERS = 1, ADDERS };

template <class T> DEVICE u32 add(u32 x, u32 y) {
    return pack<T>(widen(T{u16(x)}) + widen(T{u16(y)}), widen(T{u16(x >> 16)}) + widen(T{u16(y >> 16)}));
}
template <> DEVICE u32 add<float>(u32 x, u32 y) { return __float_as_uint(__uint_as_float(x) + __uint_as_float(y)); }
template <class T> DEVICE int4 add(int4 x, int4 y) {
    return make_int4(add<T>(x.x, y.x), add<T>(x.y, y.y), add<T>(x.z, y.z), add<T>(x.w, y.w));
}

// A block's chunk.  `each` calls f(v, place) for a thread's vectors; what loads them does nothing else, for a store
// would have to wait before the next load.
struct Chunk {
    u32 begin, stride, end, thread;
    template <class F> DEVICE void each(F f) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (const u32 place = begin + v * stride + thread; place < end) f(v, place);
    }
    DEVICE void load(int4 (&x)[VECTORS], const int4* from) const {
        each([&](int v, u32 place) { x[v] = from[place]; });
    }
    DEVICE bool some() const { return begin < end; }
    DEVICE void next() { begin += VECTORS * stride; }
};
// Where a block has the chunk of a number in memory that both processes see.
DEVICE u32 place_of(u32 number) { return (blockIdx.x * 2 * AHEAD + number % (2 * AHEAD)) * VECTORS * THREADS; }

DEVICE void write(const SumParts& a, Chunk chunk, u32 epoch, u32 added) {
    int4 x[VECTORS];
    chunk.load(x, a.part);
    for (u32 k = 0; chunk.some(); ++k) {
        while (acquire_shared(added) + AHEAD <= k);
        int4* to = a.theirs + place_of(epoch + k) + chunk.thread;
        chunk.each([&](int v, u32) { to[v * THREADS] = x[v]; });
        chunk.next();
        chunk.load(x, a.part);  // before the barrier, for what raises the flag waits until all has been written
        named_barrier<WRITERS, THREADS>();
        if (chunk.thread == 0) release_system(a.their_flags + blockIdx.x, epoch + k + 1);
    }
}

template <class T> DEVICE void sum(const SumParts& a, Chunk chunk, u32 epoch, u32 added) {
    u32 k = 0;
    for (; chunk.some(); ++k, chunk.next()) {
        int4 x[VECTORS], y[VECTORS], residual[VECTORS];
        chunk.load(x, a.part);
        if (a.residual) chunk.load(residual, a.residual);
        if (chunk.thread == 0)  // the other process may be ahead
            while (int(acquire_system(a.own_flags + blockIdx.x) - (epoch + k + 1)) < 0);
        named_barrier<ADDERS, THREADS>();
        if (chunk.thread == 0) release_shared(added, k);  // all are here: none still reads a chunk before
        const int4* from = a.own + place_of(epoch + k) + chunk.thread;
        chunk.each([&](int v, u32) { y[v] = load_system(from + v * THREADS); });
        chunk.each([&](int v, u32 place) {
            const int4 both = add<T>(x[v], y[v]);
            a.sum[place] = a.residual ? add<T>(both, residual[v]) : both;
        });
    }
    if (chunk.thread == 0) a.epochs[blockIdx.x] = epoch + k;
}

template <class T> __global__ void __launch_bounds__(2 * THREADS, 2) sum_parts(const __grid_constant__ SumParts a) {
    __shared__ u32 added;  // chunks
    const u32 epoch = a.epochs[blockIdx.x];
    const Chunk first = {blockIdx.x * THREADS, gridDim.x * THREADS, u32(a.vectors), threadIdx.x % THREADS};
    if (threadIdx.x == 0) added = 0;
    __syncthreads();
    if (threadIdx.x < THREADS) write(a, first, epoch, shared_address(&added));
    else sum<T>(a, first, epoch, shared_address(&added));
}

}  // namespace prefixkit
