// The parts of two processes, summed or side by side: each process writes its part to memory of the other, and reads
// the other's part from its own memory.
//
// shapes   sum_parts: part, residual, sum [vectors] of 16 bytes, residual may be null.  gather_parts: part [rows,
//          width] vectors, whole [rows, 2, width], the process of rank 0 first.  theirs, own [BLOCKS, 2 AHEAD, PLACE,
//          THREADS] vectors, memory of the other process and of this one; both processes see both.  their_flags,
//          own_flags [BLOCKS] in the same memory; epochs [BLOCKS] of this process alone.  Flags and epochs are zero at
//          first.
// tiling   a block takes THREADS vectors of each stripe; there are as many blocks as a stripe needs, up to BLOCKS.  A
//          chunk is a block's part of VECTORS stripes, which fill VECTORS / PLACE places.  THREADS threads write chunks
//          and THREADS others read them, so that the link is busy while a block adds.  Both processes launch the same
//          number of blocks, so a block waits only for the block of the same number.
// cost     part and residual are read and the result is written once.  The bytes of part cross the link in each
//          direction and are read back from the L2; the threads that read take part from the L2 too.  A chunk costs the
//          link a round trip, because a fence waits for everything written; so chunks are as large as registers allow.
// order    a block numbers its places from its epoch on and takes them in turn, across launches of either kernel.  Its
//          flag says how many places the other process has written.  A chunk that ends at place n is written once this
//          process has read all places before n - AHEAD.  To read those, this process has seen a flag that the other
//          one raised after it had read all places before n - 2 AHEAD, which are what the chunk overwrites.
// numbers  sums are float32, rounded once; then the residual likewise.  Both processes get the same bits of the sum,
//          for a sum of two does not depend on their order.
// limits   all blocks of a launch must be on the GPU at once: BLOCKS is at most the number of multiprocessors.  A
//          process that does not launch lets the other one wait for ever, as any collective does.
#include "layouts/gather_parts.h"
#include "layouts/sum_parts.h"
#include "parallel/system_ptx.cuh"
#include "states/numbers.cuh"

namespace prefixkit {

constexpr int THREADS = 256, PLACE = 4, AHEAD = 4;
enum Barrier { WRITERS = 1, READERS };
DEVICE u32 thread() { return threadIdx.x % THREADS; }  // index among the threads that write, or that read

template <class T> DEVICE u32 add(u32 x, u32 y) {
    return pack<T>(widen(T{u16(x)}) + widen(T{u16(y)}), widen(T{u16(x >> 16)}) + widen(T{u16(y >> 16)}));
}
template <> DEVICE u32 add<float>(u32 x, u32 y) { return __float_as_uint(__uint_as_float(x) + __uint_as_float(y)); }
template <class T> DEVICE int4 add(int4 x, int4 y) {
    return make_int4(add<T>(x.x, y.x), add<T>(x.y, y.y), add<T>(x.z, y.z), add<T>(x.w, y.w));
}

// A block's chunk, or a part of one.  `each` calls f(v, at) for a thread's vectors.  A call that loads does nothing
// else, because a store would have to wait before the next load.
template <int VECTORS> struct Chunk {
    static constexpr int PLACES = VECTORS / PLACE;
    u32 begin, stride, end;  // begin: this thread's first vector
    template <class F> DEVICE void each(F f) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (const u32 at = begin + v * stride; at < end) f(v, at);
    }
    DEVICE void load(int4 (&x)[VECTORS], const int4* from) const {
        each([&](int v, u32 at) { x[v] = from[at]; });
    }
    DEVICE bool some() const { return begin - thread() < end; }  // the same for all threads
    DEVICE void next() { begin += VECTORS * stride; }
    // The offset of vector v in memory that both processes see, in a chunk that begins at place `number`.
    DEVICE u32 shared(u32 number, int v) const {
        return ((blockIdx.x * 2 * AHEAD + (number + v / PLACE) % (2 * AHEAD)) * PLACE + v % PLACE) * THREADS + thread();
    }
};

template <int VECTORS, class Given> DEVICE void write(const Given& a, Chunk<VECTORS> chunk, u32 epoch, u32 read) {
    int4 x[VECTORS];
    chunk.load(x, a.part);
    for (u32 k = 0; chunk.some();) {
        const u32 number = epoch + k;
        k += chunk.PLACES;
        while (acquire_shared(read) + AHEAD < k);
        chunk.each([&](int v, u32) { a.theirs[chunk.shared(number, v)] = x[v]; });
        chunk.next();
        chunk.load(x, a.part);  // before the barrier: raising the flag waits until all has been written
        named_barrier<WRITERS, THREADS>();
        if (thread() == 0) release_system(a.their_flags + blockIdx.x, epoch + k);
    }
}

// Calls `before(chunk)` before the other process is known to have written a chunk, and `after(chunk, number)`
// afterwards.
template <int VECTORS, class Given, class Before, class After>
DEVICE void read_chunks(const Given& a, Chunk<VECTORS> chunk, u32 epoch, u32 read, Before before, After after) {
    u32 k = 0;
    for (; chunk.some(); chunk.next()) {
        before(chunk);
        k += chunk.PLACES;
        if (thread() == 0)  // the other process may be ahead
            while (int(acquire_system(a.own_flags + blockIdx.x) - (epoch + k)) < 0);
        named_barrier<READERS, THREADS>();
        after(chunk, epoch + k - chunk.PLACES);
        named_barrier<READERS, THREADS>();  // at once, for writers have few places besides those of two chunks
        if (thread() == 0) release_shared(read, k);
    }
    if (thread() == 0) a.epochs[blockIdx.x] = epoch + k;
}

// Half of the threads run `readers(first, epoch, read)` while the others write.
template <int VECTORS, class Given, class Readers> DEVICE void exchange(const Given& a, Readers readers) {
    static_assert(VECTORS % PLACE == 0 && 2 * VECTORS / PLACE <= AHEAD, "one chunk is written while another is read");
    __shared__ u32 read;  // places read
    const u32 epoch = a.epochs[blockIdx.x];
    const Chunk<VECTORS> first = {blockIdx.x * THREADS + thread(), gridDim.x * THREADS, u32(a.vectors)};
    if (threadIdx.x == 0) read = 0;
    __syncthreads();
    if (threadIdx.x < THREADS) write(a, first, epoch, shared_address(&read));
    else readers(first, epoch, shared_address(&read));
}

constexpr int SUMMED = 4, GATHERED = 8;             // vectors of a chunk
template <class T> constexpr int AT_ONCE = SUMMED;  // vectors that a thread adds at once
template <> constexpr int AT_ONCE<float> = 2;       // more would spill

template <class T> __global__ void __launch_bounds__(2 * THREADS, 2) sum_parts(const __grid_constant__ SumParts a) {
    exchange<SUMMED>(a, [&](const Chunk<SUMMED>& first, u32 epoch, u32 read) {
        Chunk<AT_ONCE<T>> next = {first.begin, first.stride, first.end};
        int4 x[AT_ONCE<T>], residual[AT_ONCE<T>];
        const auto load = [&] {
            next.load(x, a.part);
            if (a.residual) next.load(residual, a.residual);
        };
        const auto sum = [&](const Chunk<SUMMED>& chunk, u32 number) {
#pragma unroll 1
            for (int v0 = 0; v0 < SUMMED; v0 += AT_ONCE<T>) {
                int4 y[AT_ONCE<T>];
                next.each([&](int v, u32) { y[v] = load_system(a.own + chunk.shared(number, v0 + v)); });
                next.each([&](int v, u32 at) {
                    const int4 both = add<T>(x[v], y[v]);
                    a.sum[at] = a.residual ? add<T>(both, residual[v]) : both;
                });
                next.next();
                load();  // also of the next chunk, whatever the other process has written
            }
        };
        load();
        read_chunks(a, first, epoch, read, [](const Chunk<SUMMED>&) {}, sum);
    });
}

// Copies a chunk to the columns of the process of rank `rank`, from `from(place, v, at)`.
template <class From> DEVICE void copy(const GatherParts& a, const Chunk<GATHERED>& chunk, u32 rank, From from) {
    Chunk<PLACE> part = {chunk.begin, chunk.stride, chunk.end};
#pragma unroll 1
    for (u32 place = 0; place < chunk.PLACES; ++place, part.next()) {  // all at once would spill
        int4 x[PLACE];
        part.each([&](int v, u32 at) { x[v] = from(place, v, at); });
        // Before a row, the whole has twice as many vectors as the part has, and then the columns of lower ranks.
        part.each([&](int v, u32 at) { a.whole[at + (at / a.width + rank) * a.width] = x[v]; });
    }
}
__global__ void __launch_bounds__(2 * THREADS, 2) gather_parts(const __grid_constant__ GatherParts a) {
    using Gathered = Chunk<GATHERED>;
    exchange<GATHERED>(a, [&](const Gathered& first, u32 epoch, u32 read) {
        const auto own = [&](const Gathered& chunk) {
            copy(a, chunk, a.rank, [&](u32, int, u32 at) { return a.part[at]; });
        };
        const auto theirs = [&](const Gathered& chunk, u32 number) {
            copy(a, chunk, 1 - a.rank, [&](u32 place, int v, u32) {
                return load_system(a.own + chunk.shared(number + place, v));
            });
        };
        read_chunks(a, first, epoch, read, own, theirs);
    });
}

}  // namespace prefixkit
