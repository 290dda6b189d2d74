// The parts of two processes, summed or side by side: each process writes its part to memory of the other, and reads
// the other's part from its own memory.
//
// shapes   sum_parts: residual, other, sum [vectors] of 16 bytes; residual may be null, and other if residual is.  part
//          is float32: [vectors] if the sum is, and [vectors, 2] for a sum in 16 bits.  gather_parts: part [rows, width]
//          vectors, sent like part, what the other process gets; whole [rows, 2, width], the process of rank 0 first.
//          theirs, own [BLOCKS, 2 AHEAD, PLACE, THREADS] vectors, memory of the other process and of this one; both
//          processes see both.  their_flags, own_flags [BLOCKS] in the same memory; epochs [BLOCKS] of this process
//          alone.  Flags and epochs are zero at first.
// tiling   a block takes THREADS vectors of each stripe; there are as many blocks as a stripe needs, up to BLOCKS.  A
//          chunk is a block's part of VECTORS stripes, which fill VECTORS / PLACE places.  THREADS threads write chunks
//          and THREADS others read them, so that the link is busy while a block adds.  Both processes launch the same
//          number of blocks, so a block waits only for the block of the same number.
// cost     part and residuals are read and the result is written once.  As many bytes as the result has cross the link
//          in each direction and are read back from the L2.  What a block sends of a sum it keeps in 64 KB of its own
//          memory, so that its part is read once.  A chunk costs the link a round trip, because a fence waits for
//          everything written; so chunks are as large as registers allow.
// order    a block numbers its places from its epoch on and takes them in turn, across launches of either kernel.  Its
//          flag says how many places the other process has written.  A chunk that ends at place n is written once this
//          process has read all places before n - AHEAD.  To read those, this process has seen a flag that the other
//          one raised after it had read all places before n - 2 AHEAD, which are what the chunk overwrites.
// numbers  for a sum in 16 bits a part crosses the link as whole numbers of 15 bits (`Eight`), and its own process adds
//          these as well: both get the same bits, for a sum of two does not depend on their order.  Sums are float32 and
//          are rounded once.  Residuals are added to that in float32, which is rounded again.
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

// A thread's part of a vector's numbers, and the 16 bytes of them that cross the link.
struct Raw {
    int4 x;
    DEVICE void load(const int4* part, u32 at) { x = part[at]; }
    DEVICE int4 sent() const { return x; }
};

// Eight float32 as whole numbers of 15 bits times a power of two: 2^(e - 13) where 2^e is that of the largest number, so
// none is off by more than 2^-14 of the largest.  Word i of the 16 bytes has numbers 2i and 2i + 1, 16,384 added to each,
// and bits 2i of e.  With e for infinities and NaN a number is the upper half of its float32, without the last bit.
struct Eight {
    static constexpr u32 SMALLEST = 14, NOT_FINITE = 255, MASK = 0x7fff;  // exponents as float32 has them
    static constexpr float OFFSET = 8388608 + 16384;                      // float32 has whole numbers there
    int4 x, y;
    DEVICE void load(const int4* part, u32 at) {
        part += 2 * at;
        x = part[0], y = part[1];
    }
    DEVICE int4 sent() const {
        u32 most = max(max(larger(x.x, x.y), larger(x.z, x.w)), max(larger(y.x, y.y), larger(y.z, y.w)));
        const u32 exponent = max(most >> 23, SMALLEST);
        const float scale = __uint_as_float((267 - exponent) << 23);
        return make_int4(two(x.x, x.y, exponent, scale, 0), two(x.z, x.w, exponent, scale, 1),
                         two(y.x, y.y, exponent, scale, 2), two(y.z, y.w, exponent, scale, 3));
    }
    DEVICE static u32 larger(u32 a, u32 b) { return max(a & 0x7fffffff, b & 0x7fffffff); }
    DEVICE static u32 two(u32 a, u32 b, u32 exponent, float scale, int word) {
        return one(a, exponent, scale) | one(b, exponent, scale) << 15 | (exponent >> 2 * word & 3) << 30;
    }
    DEVICE static u32 one(u32 bits, u32 exponent, float scale) {
        if (exponent == NOT_FINITE) return bits >> 17 | ((bits & 0x7fffffff) > 0x7f800000);
        // The largest may be rounded up to 2^14, which is one more than there is.
        return __float_as_uint(fminf(fmaf(__uint_as_float(bits), scale, OFFSET), OFFSET + 16383)) & MASK;
    }
    DEVICE static u32 exponent_of(int4 sent) {
        return u32(sent.x) >> 30 | u32(sent.y) >> 30 << 2 | u32(sent.z) >> 30 << 4 | u32(sent.w) >> 30 << 6;
    }
    DEVICE static float value(u32 number, u32 exponent) {
        if (exponent == NOT_FINITE) return __uint_as_float(number << 17);
        return (__uint_as_float(0x4b000000 | number) - OFFSET) * __uint_as_float((exponent - 13) << 23);
    }
};

template <class T> DEVICE u32 plus(u32 x, u32 y) {
    return pack<T>(widen(T{u16(x)}) + widen(T{u16(y)}), widen(T{u16(x >> 16)}) + widen(T{u16(y >> 16)}));
}
template <> DEVICE u32 plus<float>(u32 x, u32 y) { return __float_as_uint(__uint_as_float(x) + __uint_as_float(y)); }
template <class T> DEVICE u32 plus(u32 x, u32 y, u32 z) {
    return pack<T>(widen(T{u16(x)}) + widen(T{u16(y)}) + widen(T{u16(z)}),
                   widen(T{u16(x >> 16)}) + widen(T{u16(y >> 16)}) + widen(T{u16(z >> 16)}));
}
template <> DEVICE u32 plus<float>(u32 x, u32 y, u32 z) {
    return __float_as_uint(__uint_as_float(x) + __uint_as_float(y) + __uint_as_float(z));
}
template <class T, class... More> DEVICE int4 add(int4 x, int4 y, More... z) {
    return make_int4(plus<T>(x.x, y.x, z.x...), plus<T>(x.y, y.y, z.y...), plus<T>(x.z, y.z, z.z...),
                     plus<T>(x.w, y.w, z.w...));
}

// The sum in T of what both processes have sent.
template <class T> DEVICE int4 total(int4 ours, int4 theirs) {
    const u32 e = Eight::exponent_of(ours), other = Eight::exponent_of(theirs);
    const auto word = [&](u32 a, u32 b) {
        return pack<T>(Eight::value(a & Eight::MASK, e) + Eight::value(b & Eight::MASK, other),
                       Eight::value(a >> 15 & Eight::MASK, e) + Eight::value(b >> 15 & Eight::MASK, other));
    };
    return make_int4(word(ours.x, theirs.x), word(ours.y, theirs.y), word(ours.z, theirs.z), word(ours.w, theirs.w));
}
template <> DEVICE int4 total<float>(int4 ours, int4 theirs) { return add<float>(ours, theirs); }

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
    template <class Given> DEVICE void load(Given (&x)[VECTORS], const int4* from) const {
        each([&](int v, u32 at) { x[v].load(from, at); });
    }
    DEVICE bool some() const { return begin - thread() < end; }  // the same for all threads
    DEVICE void next() { begin += VECTORS * stride; }
    // The offset of vector v in memory that both processes see, in a chunk that begins at place `number`.
    DEVICE u32 shared(u32 number, int v) const {
        return ((blockIdx.x * 2 * AHEAD + (number + v / PLACE) % (2 * AHEAD)) * PLACE + v % PLACE) * THREADS + thread();
    }
    // Likewise in the block's memory, for place `k` of this launch.
    DEVICE u32 kept(u32 k, int v) const { return ((k + v / PLACE) % AHEAD * PLACE + v % PLACE) * THREADS + thread(); }
};

// Places of a launch that a block has read and written, as addresses in its shared memory.
struct Progress {
    u32 read, written;
};

// KEEP: what is written is kept in the block's memory as well, for its readers.
template <class Sent, bool KEEP, int VECTORS, class Given>
DEVICE void write(const Given& a, const int4* from, Chunk<VECTORS> chunk, u32 epoch, Progress progress) {
    Sent x[VECTORS];
    chunk.load(x, from);
    for (u32 k = 0; chunk.some();) {
        const u32 place = k;
        k += chunk.PLACES;
        while (acquire_shared(progress.read) + AHEAD < k);
        chunk.each([&](int v, u32) {
            const int4 sent = x[v].sent();
            a.theirs[chunk.shared(epoch + place, v)] = sent;
            if (KEEP) block_memory()[chunk.kept(place, v)] = sent;
        });
        chunk.next();
        chunk.load(x, from);  // before the barrier: raising the flag waits until all has been written
        named_barrier<WRITERS, THREADS>();
        if (thread() == 0) {
            release_shared(progress.written, k);
            release_system(a.their_flags + blockIdx.x, epoch + k);
        }
    }
}

// Calls `before(chunk)` before either process is known to have written a chunk, and `after(chunk, k)` afterwards.
template <int VECTORS, class Given, class Before, class After>
DEVICE void read_chunks(const Given& a, Chunk<VECTORS> chunk, u32 epoch, Progress progress, Before before,
                        After after) {
    u32 k = 0;
    for (; chunk.some(); chunk.next()) {
        before(chunk);
        k += chunk.PLACES;
        if (thread() == 0) {  // the other process may be ahead
            while (int(acquire_system(a.own_flags + blockIdx.x) - (epoch + k)) < 0);
            while (acquire_shared(progress.written) < k);
        }
        named_barrier<READERS, THREADS>();
        after(chunk, k - chunk.PLACES);
        named_barrier<READERS, THREADS>();  // at once, for writers have few places besides those of two chunks
        if (thread() == 0) release_shared(progress.read, k);
    }
    if (thread() == 0) a.epochs[blockIdx.x] = epoch + k;
}

// Half of the threads run `readers(first, epoch, progress)` while the others write what is at `from`.
template <class Sent, bool KEEP, int VECTORS, class Given, class Readers>
DEVICE void exchange(const Given& a, const int4* from, Readers readers) {
    static_assert(VECTORS % PLACE == 0 && 2 * VECTORS / PLACE <= AHEAD, "one chunk is written while another is read");
    __shared__ u32 read, written;  // places
    const Progress progress = {shared_address(&read), shared_address(&written)};
    const u32 epoch = a.epochs[blockIdx.x];
    const Chunk<VECTORS> first = {blockIdx.x * THREADS + thread(), gridDim.x * THREADS, u32(a.vectors)};
    if (threadIdx.x == 0) read = written = 0;
    __syncthreads();
    if (threadIdx.x < THREADS) write<Sent, KEEP>(a, from, first, epoch, progress);
    else readers(first, epoch, progress);
}

constexpr int SUMMED = 4, GATHERED = 8;  // vectors of a chunk
constexpr int AT_ONCE = 2;               // vectors that a thread adds at once; more would spill
template <class T> struct SentFor { using Sent = Eight; };
template <> struct SentFor<float> { using Sent = Raw; };

template <class T> __global__ void __launch_bounds__(2 * THREADS, 2) sum_parts(const __grid_constant__ SumParts a) {
    using Sent = typename SentFor<T>::Sent;
    exchange<Sent, true, SUMMED>(a, a.part, [&](const Chunk<SUMMED>& first, u32 epoch, Progress progress) {
        Chunk<AT_ONCE> next = {first.begin, first.stride, first.end};
        Raw residual[AT_ONCE], other[AT_ONCE];
        const auto load = [&] {
            if (a.residual) next.load(residual, a.residual);
            if (a.other) next.load(other, a.other);
        };
        const auto sum = [&](const Chunk<SUMMED>& chunk, u32 place) {
#pragma unroll 1
            for (int v0 = 0; v0 < SUMMED; v0 += AT_ONCE) {
                int4 y[AT_ONCE];
                next.each([&](int v, u32) { y[v] = load_system(a.own + chunk.shared(epoch + place, v0 + v)); });
                next.each([&](int v, u32 at) {
                    const int4 both = total<T>(block_memory()[chunk.kept(place, v0 + v)], y[v]);
                    a.sum[at] = a.other      ? add<T>(residual[v].x, other[v].x, both)
                                : a.residual ? add<T>(both, residual[v].x)
                                             : both;
                });
                next.next();
                load();  // also of the next chunk, whatever the other process has written
            }
        };
        // Residuals were written some layers' weights ago, so they are in main memory: they are fetched a chunk ahead.
        const auto fetch = [&](Chunk<SUMMED> chunk) {
            if (thread() % 8 == 0)  // for 128 bytes
                chunk.each([&](int, u32 at) {
                    if (a.residual) prefetch(a.residual + at);
                    if (a.other) prefetch(a.other + at);
                });
        };
        const auto fetch_next = [&](Chunk<SUMMED> chunk) { chunk.next(), fetch(chunk); };
        fetch(first);
        load();
        read_chunks(a, first, epoch, progress, fetch_next, sum);
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
    exchange<Raw, false, GATHERED>(a, a.sent, [&](const Gathered& first, u32 epoch, Progress progress) {
        const auto own = [&](const Gathered& chunk) {
            copy(a, chunk, a.rank, [&](u32, int, u32 at) { return a.part[at]; });
        };
        const auto theirs = [&](const Gathered& chunk, u32 number) {
            copy(a, chunk, 1 - a.rank, [&](u32 place, int v, u32) {
                return load_system(a.own + chunk.shared(epoch + number + place, v));
            });
        };
        read_chunks(a, first, epoch, progress, own, theirs);
    });
}

}  // namespace prefixkit
