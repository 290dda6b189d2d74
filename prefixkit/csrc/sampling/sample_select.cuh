// The k-th largest score, and the least weight of a nucleus, without sorting: digits of the key from the highest down.
// The blocks of a cluster count each value of a digit, add up, and go on with the tokens whose digit holds the wanted
// rank.
#pragma once
#include "sampling/sample_block.cuh"

namespace prefixkit {

// A larger float has a larger key.
DEVICE u32 key_of(float x) {
    const u32 bits = u32(__float_as_int(x));
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}
DEVICE float of_key(u32 key) { return __int_as_float(int(key ^ (key >> 31 ? 1u << 31 : ~0u))); }

// Scores are counted: three digits of 11, 11 and 10 bits.
struct Counts {
    static constexpr int SIZE = BINS;
    static DEVICE u32 key(float x) { return key_of(x); }
    static DEVICE int shift(int turn) { return turn == 0 ? 21 : turn == 1 ? 10 : 0; }
    static DEVICE int bits(int turn) { return turn == 2 ? 10 : 11; }
    static DEVICE void add(u32* bins, int bin, float) { atomicAdd(bins + bin, 1u); }
    static DEVICE u64 get(const u32* bins, int bin) { return bins[bin]; }
    static DEVICE void put(u32* bins, int bin, u64 x) { bins[bin] = u32(x); }
    static DEVICE u64 value(u64 x, u32) { return x; }
};

// Weights of at least 1: three digits of 10, 10 and 9 bits.  A bin has one exponent, so mantissas are summed.
struct Masses {
    static constexpr int SIZE = BINS / 2;
    static DEVICE u32 key(float x) { return u32(__float_as_int(x)) - (126u << 23); }
    static DEVICE float float_of(u32 key) { return __int_as_float(int(key + (126u << 23))); }
    static DEVICE int shift(int turn) { return turn == 0 ? 19 : turn == 1 ? 9 : 0; }
    static DEVICE int bits(int turn) { return turn == 2 ? 9 : 10; }
    // A mantissa is added in two halves of 12 bits: neither sum of 2^20 halves overflows, and no thread waits for the
    // sum before.
    static DEVICE void add(u32* bins, int bin, float x) {
        const u32 mantissa = (u32(__float_as_int(x)) & 0x7fffffu) | 0x800000u;
        atomicAdd(bins + bin, mantissa & 0xfffu);
        atomicAdd(bins + SIZE + bin, mantissa >> 12);
    }
    static DEVICE u64 get(const u32* bins, int bin) { return (u64(bins[SIZE + bin]) << 12) + bins[bin]; }
    static DEVICE void put(u32* bins, int bin, u64 x) { bins[bin] = u32(x) & 0xfffu, bins[SIZE + bin] = u32(x >> 12); }
    // `key`, that of any token of the bin, holds the bin's exponent.
    static DEVICE u64 value(u64 x, u32 key) {
        const int exponent = int(key >> 23) - 1 - 23;
        return exponent >= 0 ? x << exponent : exponent > -64 ? x >> -exponent : 0;
    }
};

DEVICE float largest(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }
template <class F> DEVICE void each(float4 x, F f) { f(x.x), f(x.y), f(x.z), f(x.w); }

struct Border {
    u32 key;
    u64 need;  // what is needed of the tokens whose key begins with `key`
};

// One digit: finds the bin up to which the sum from the largest digit down is `need` or more.  Counts tokens whose
// value(score) is at least `floor` and whose key begins with b.key.  A cluster_sync must follow before a block ends or
// writes its bins.
template <class K, class R, class F> DEVICE Border next_digit(const R& row, Border b, int turn, float floor, F value) {
    Shared& s = shared();
    const int bits = K::bits(turn), shift = K::shift(turn), blocks = cluster_size();
    const int mine = K::SIZE / blocks, part = mine / WARPS;  // bins of a block, and of a warp
    const u32 mask = (1u << bits) - 1;
    const auto key_in = [=](int bin) { return ((b.key << bits) | (mask - u32(bin))) << shift; };
    cluster_sync();  // no other block reads the bins any more
    for (int i = thread_of(); i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
    row.template each_score<2>([&](int, int, float4 scores) {
        const float4 x = value(scores);
        if (!(largest(x) >= floor)) return;
        each(x, [&](float y) {
            const u32 digits = K::key(y) >> shift;
            if (y >= floor && (turn == 0 || digits >> bits == b.key)) K::add(s.bins, int(mask - (digits & mask)), y);
        });
    });
    cluster_sync();
    // Each warp adds up its bins over all blocks, and keeps the sums in their place: no other warp reads these.
    const int begin = cluster_rank() * mine + warp_of() * part, used = 1 << bits;
    u64 sum = 0;
    for (int bin = begin + lane_of(); bin < min(begin + part, used); bin += 32) {
        u64 held = 0;
        for (int rank = 0; rank < blocks; ++rank) held += K::get(peer(s.bins, rank), bin);
        K::put(s.bins, bin, held);
        sum += K::value(held, key_in(bin));
    }
    publish(s.parts, warp_sum(sum));
    cluster_sync();
    const Place at = find_sum(warps(), b.need, [&](int i) { return s.parts[i]; });
    const u32* bins = peer(s.bins, at.index / WARPS);
    const int from = at.index * part;
    const Place bin = find_sum(min(part, max(used - from, 1)), b.need - at.before,
                            [&](int i) { return K::value(K::get(bins, from + i), key_in(from + i)); });
    return {key_in(from + bin.index) >> shift, b.need - at.before - bin.before};
}

}  // namespace prefixkit
