// Narrows the range in which the lightest weight of a nucleus lies, by approximate sums over tokens of about the same
// weight.
#pragma once
#include "sampling/sample_lists.cuh"

namespace prefixkit {

DEVICE u32 bits_of(float x) { return u32(__float_as_int(x)); }
DEVICE float float_of(u32 bits) { return __int_as_float(int(bits)); }

struct Range {
    u32 low, high;        // bits of the weights at its ends, which belong to it
    u64 least = 0, most = 0;  // bounds of what heavier tokens hold; `most` is less than what is needed
    bool few = false;     // no more tokens than can be chosen lie in it, and their exponents are the same or neighbours

    DEVICE bool one() const { return low == high; }
};

// Tokens are counted in bins of equal width by the bits of their weights.  All weights of a bin have one exponent, so
// one atomic a token adds up mantissas, without the `cut` lowest bits, with which a bin might overflow.  So sums fall
// short by up to 1 part in 2^(23 - cut), and the range takes all bins in which the border may lie.
template <class T, bool CACHED>
DEVICE Range narrow(const Row<T, CACHED>& row, const Filter& filter, Range r, u64 need) {
    constexpr int EACH = 4;
    static_assert(EACH * THREADS == CHOSEN);
    Shared& s = shared();
    int shift = max(22 - __clz(int(r.high - r.low)), 0);
    if ((r.high >> shift) - (r.low >> shift) >= CHOSEN) ++shift;
    const u32 first = r.high >> shift, last = first - (r.low >> shift);
    const int cut = max(24 - __clz(row.vocab - 1), 0);
    u32* bins = chosen() + (CHOSEN - EACH - EACH * thread_of());  // this thread's bins: heavier tokens lie higher
    u32* heaviest = chosen() + (CHOSEN - 1);
    *(uint4*)bins = uint4{0, 0, 0, 0};
    __syncthreads();
    row.template each_score<2>([&](int, int, float4 x) {
        const float4 w = filter.weight(x, CACHED);
        if (bits_of(largest(w)) < r.low) return;
        each(w, [&](float y) {
            const u32 bits = bits_of(y);
            const u32 mantissa = (bits & 0x7fffffu) | 0x800000u;
            if (bits - r.low <= r.high - r.low) atomicAdd(heaviest + (bits >> shift) - first, mantissa >> cut);
        });
    });
    cluster_sync();
    u32 held[EACH] = {};
    for (int rank = 0; rank < cluster_size(); ++rank) {
        const uint4 x = *(const uint4*)peer(bins, rank);
        held[0] += x.w, held[1] += x.z, held[2] += x.y, held[3] += x.x;
    }
    u64 masses[EACH], mine = 0, all;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const u32 bin = u32(EACH * thread_of() + j), lightest = (first - min(bin, last)) << shift;
        const int exponent = int(lightest >> 23) - 150 + cut;
        masses[j] = exponent < 0 ? held[j] >> -exponent : u64(held[j]) << exponent;
        mine += masses[j];
    }
    const auto most = [&](u64 sum) { return r.most + sum + (sum >> (23 - cut)) + 2 * CHOSEN; };
    u64 sum = block_sums(mine, (u64*)list_of(0), all);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const u32 bin = u32(EACH * thread_of() + j);
        const u64 before = sum;
        sum += masses[j];
        if (bin > last) break;
        if ((bin == 0 || most(before) < need) && most(sum) >= need) s.first = bin, s.above = before;
        if (r.least + before < need && (bin == last || r.least + sum >= need)) s.last = bin, s.held = sum;
    }
    __syncthreads();
    const u64 above = s.above;
    Range n;
    n.high = min(r.high, ((first - s.first + 1) << shift) - 1), n.low = max(r.low, (first - s.last) << shift);
    n.least = r.least + above, n.most = s.first ? most(above) : r.most;
    n.few = (n.high >> 23) - (n.low >> 23) < 2 && s.held - above <= CHOSEN * u64(float_of(n.low));
    return n;
}

// Weights whose biased exponent is `base` or the next one, as whole numbers of 24 and 25 bits.
struct Units {
    int base;

    DEVICE u32 of(float weight) const {
        const u32 bits = bits_of(weight);
        return ((bits & 0x7fffffu) | 0x800000u) << (int(bits >> 23) - base);
    }
    DEVICE float weight(u32 units) const { return __fmul_rn(float(units), float_of(u32(base - 23) << 23)); }
    // Converts a sum of units, which is a whole number of ones, to ones.
    DEVICE u64 total(u64 units) const { return base < 150 ? units >> (150 - base) : units << (base - 150); }
};

// Among the `count` units chosen, between `least` and `most`: the least that is needed to reach `need`, from the
// largest down, and what the larger ones hold.  One warp bisects, from one chosen unit to another.
DEVICE Least least_of_units(int count, u64 need, Units units, u32 least, u32 most) {
    const u32* all = chosen();
    const auto sum_from = [&](u32 border, u32& up, u32& down) {
        u32 sum = 0;  // of up to 32
        for (int i = 4 * lane_of(); i < count; i += 128) {
            const uint4 x = *(const uint4*)(all + i);
            const u32 four[] = {x.x, x.y, x.z, x.w};
            for (u32 y : four) {
                if (y >= border) sum += y, up = min(up, y);
                else down = max(down, y);
            }
        }
        return units.total((u64(__reduce_add_sync(~0u, sum >> 16)) << 16) + __reduce_add_sync(~0u, sum & 0xffffu));
    };
#pragma unroll 1
    while (least < most) {
        u32 up = most, down = least;
        const u64 sum = sum_from(most - (most - least) / 2, up, down);
        if (sum >= need) least = __reduce_min_sync(~0u, up);
        else most = __reduce_max_sync(~0u, down);
    }
    u32 up = ~0u, down = 0;
    return {least, sum_from(least + 1, up, down)};
}

}  // namespace prefixkit
