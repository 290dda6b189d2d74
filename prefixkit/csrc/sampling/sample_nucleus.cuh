// Top-p: the lightest weight of the nucleus, and how much each warp's tokens of the nucleus weigh.
#pragma once
#include "sampling/sample_narrow.cuh"

namespace prefixkit {

DEVICE Nucleus nucleus_of(float border, u64 need, float least) {
    const u64 weight = u64(border);
    return {border, u32((need + weight - 1) / weight), least};
}

// A warp's tokens of the nucleus: what those above the border weigh, and how many are at it.
struct Kept {
    u64 above = 0;
    u32 ties = 0;
    DEVICE void add(float weight, Nucleus n) {
        ties += weight == n.border;
        if (weight > n.border && weight >= n.least) above += u64(weight);
    }
};

// Drops the surplus of the tokens at the border, the first ones by id, and adds the weights of the others to the sums
// above it; the tables of all warps hold both.
DEVICE void drop_surplus(Nucleus n) {
    Shared& s = shared();
    if (warp_of() == 0) {
        const u32 surplus = table_sum(s.ties) - n.count;
        u32 before = 0;
        for (int part = 0; part < warps(); part += 32) {
            const int i = part + lane_of();
            const u32 here = i < warps() ? s.ties[i] : 0, sums = warp_sums(here), first = before + sums - here;
            const u32 drop = surplus > first ? min(surplus - first, here) : 0;
            __syncwarp();
            if (i < warps()) {
                s.ties[i] = drop;
                if (n.border >= n.least) s.sums[i] += u64(here - drop) * u64(n.border);
            }
            before += __shfl_sync(~0u, sums, 31);
        }
    }
    __syncthreads();
}
DEVICE void publish_kept(Kept kept, Nucleus n) {
    publish(shared().sums, warp_sum(kept.above));
    publish(shared().ties, warp_sum(kept.ties));
    cluster_sync();
    drop_surplus(n);
}

// Weighs the nucleus over the whole row.
template <class T, bool CACHED> DEVICE Kept weigh_nucleus(const Row<T, CACHED>& row, const Filter& filter, Nucleus n) {
    Kept kept;
    Sum sum;
    row.template each_score<1>([&](int step, int, float4 x) {
        if ((step & 127) == 127) kept.above += sum.take();
        const float4 w = filter.weight(x, CACHED);
        if (largest(w) < n.border) return;
        each(w, [&](float y) {
            kept.ties += y == n.border;
            if (y > n.border && y >= n.least) sum.add(y);
        });
    });
    kept.above += sum.take();
    return kept;
}

// Appends the tokens in a range of weights to this warp's list of `count`; returns this lane's part of what heavier
// tokens weigh.
template <class T, bool CACHED>
DEVICE u64 list_range(const Row<T, CACHED>& row, const Filter& filter, float from, float to, u32& count) {
    u64 above = 0;
    Sum sum;
    row.template each_score<1>([&](int step, int, float4 x) {
        if ((step & 127) == 127) above += sum.take();
        const float4 w = filter.weight(x, CACHED);
        const float most = largest(w);
        if (!__ballot_sync(~0u, most >= from)) return;
        if (most >= to) each(w, [&](float y) { sum.add(y >= to ? y : 0); });
        const auto inside = [=](float y) { return y >= from && y < to; };
        if (__ballot_sync(~0u, inside(w.x) || inside(w.y) || inside(w.z) || inside(w.w))) append(w, count, inside);
    });
    return above + sum.take();
}

// Finds the nucleus by all digits of the weights.
template <class T, bool CACHED>
DEVICE Nucleus nucleus_by_digits(const Row<T, CACHED>& row, const Filter& filter, u64 need, float floor, float least) {
    Border b = {0, need};
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn)
        b = next_digit<Masses>(row, b, turn, floor, [&](float4 x) { return filter.weight(x, CACHED); });
    const Nucleus n = nucleus_of(Masses::float_of(b.key), b.need, least);
    publish_kept(weigh_nucleus(row, filter, n), n);
    return n;
}

// The nucleus that ends in a range whose tokens are all chosen, or all weigh the same.
DEVICE Nucleus nucleus_of_range(Gathered g, Range r, Units units, u64 need, float least) {
    Shared& s = shared();
    if (warp_of() == 0) {
        Least at = {units.of(float_of(r.low)), 0};
        const u64 missing = need - table_sum(s.parts);
        if (!r.one()) at = least_of_units(g.all, missing, units, at.key, units.of(float_of(r.high)));
        const Nucleus n = nucleus_of(units.weight(at.key), missing - at.above, least);
        if (lane_of() == 0) s.least = bits_of(n.border), s.first = n.count;
    }
    __syncthreads();
    return {float_of(s.least), s.first, least};
}

// Adds up, in every block, what each warp's tokens of the nucleus weigh, from the weight above the range and the lists.
DEVICE void sum_warps(Gathered g, Range r, Units units, Nucleus n) {
    Shared& s = shared();
    const int list = thread_of() / 4;
    Kept kept;
    if (!r.one())
        for (u32 i = thread_of() & 3; i < g.count; i += 4) kept.add(units.weight(chosen()[g.begin + i]), n);
#pragma unroll
    for (int step = 2; step; step /= 2) {
        kept.above += __shfl_xor_sync(~0u, kept.above, step);
        kept.ties += __shfl_xor_sync(~0u, kept.ties, step);
    }
    if (list < warps() && !(thread_of() & 3)) {
        s.sums[list] = s.parts[list] + kept.above;
        s.ties[list] = r.one() ? s.firsts[list] : kept.ties;
    }
    __syncthreads();
    drop_surplus(n);
}

// Finds the nucleus by a range that holds few tokens or one weight, and a list of these tokens; if there is none, by
// digits.
template <class T, bool CACHED>
DEVICE Nucleus nucleus_of_row(const Row<T, CACHED>& row, const Filter& filter, u64 need, u64 total, float least) {
    Shared& s = shared();
    // Tokens lighter than `floor` lie outside: all of them together hold less than is left over.
    const float left = __fmul_rn(__ull2float_rd(total - need), 1 - 0x1p-20f);
    const float floor = fmaxf(__fdiv_rn(left, float(row.vocab)), 1.0f);
    Range r;
    r.low = bits_of(floor), r.high = bits_of(TOP);
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn) {
        if (turn) cluster_sync();  // no block reads the bins any more
        r = narrow(row, filter, r, need);
        if (!r.few && !r.one()) continue;
        float from = float_of(r.low), to = float_of(r.high + 1);
        const bool lighter = least >= to;  // the whole range is lighter than what min-p keeps
        if (lighter) from = to = least;
        const Units units = {int(r.low >> 23)};
        u32 count = 0;
        publish(s.parts, warp_sum(list_range(row, filter, from, to, count)));
        const Gathered g = gather_lists(count, [=](float y) { return units.of(y); });
        if (g.all < 0 && !r.one()) continue;
        __syncthreads();
        cluster_arrive();  // this block has read the others' lists
        const Nucleus n = lighter ? Nucleus{0, 0, least} : nucleus_of_range(g, r, units, need, least);
        sum_warps(g, r, units, n);
        cluster_wait();
        return n;
    }
    return nucleus_by_digits(row, filter, need, floor, least);
}

// The nucleus among the `all` tokens that top-k chose; `count` of them are in this warp's list.
DEVICE Nucleus nucleus_of_chosen(const Filter& filter, int all, u32 count, double top_p, float least) {
    u64 mine = 0, total;
    for (int i = thread_of(); i < all; i += THREADS) {
        const float w = filter.weight(of_key(chosen()[i]));
        mine += u64(w), chosen()[i] = u32(__float_as_int(w));
    }
    block_sums(mine, shared().parts, total);
    const u64 need = share(total, top_p);
    const Least at = least_chosen<u64>(all, need, [](u32 key) { return u64(__int_as_float(int(key))); });
    const Nucleus n = nucleus_of(__int_as_float(int(at.key)), need - at.above, least);
    Kept kept;
    each_listed(count, [&](float y) { kept.add(filter.weight(y), n); });
    publish_kept(kept, n);
    return n;
}

}  // namespace prefixkit
