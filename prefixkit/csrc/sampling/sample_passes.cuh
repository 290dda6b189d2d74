// What is done to all tokens of a row, one pass each.
#pragma once
#include "sampling/sample_select.cuh"

namespace prefixkit {

// What decides which tokens are kept, and how much they weigh.
struct Filter {
    float top, rate;
    float lowest = MINUS_INFINITY;  // score, by top-k
    float least = 0;                // weight, by min-p where there is no top-p, which comes before
    bool any;                       // one of both, or top-p: weights are cut to whole numbers before they are looked at

    DEVICE float cut(float score, float weight) const { return score >= lowest && weight >= least ? floorf(weight) : 0; }
    DEVICE float weight(float x) const { return cut(x, weigh(x, top, rate)); }
    DEVICE float4 weight(float4 x) const {
        const float4 w = make_float4(weigh(x.x, top, rate), weigh(x.y, top, rate), weigh(x.z, top, rate), weigh(x.w, top, rate));
        return any ? make_float4(cut(x.x, w.x), cut(x.y, w.y), cut(x.z, w.z), cut(x.w, w.w)) : w;
    }
};

template <class F> DEVICE void each(float4 x, F f) { f(x.x), f(x.y), f(x.z), f(x.w); }

// Reads the logits once: into the cache, for this thread's largest, and its largest score.
struct Tops {
    float score, raw;
};
template <class T, bool CACHED> DEVICE Tops read_row(const Row<T, CACHED>& row) {
    Tops t = {MINUS_INFINITY, MINUS_INFINITY};
    row.each_raw([&](int i, float4 x) {
        if (row.penalised) {
            each(x, [&](float y) { t.raw = max_nan(t.raw, y); });
            x = row.penalise(i, x);
        }
        each(x, [&](float y) { t.score = max_nan(t.score, y); });
        if (CACHED) row.keep(i, x);
    });
    if (!row.penalised) t.raw = t.score;
    return t;
}

// Adds up exp(logit - top) of this lane's tokens.
DEVICE float exp_of(float x, float top) { return exp2_fast(__fmul_rn(__fsub_rn(x, top), LOG2E)); }
DEVICE float exps_of(float4 x, float top) {
    return (exp_of(x.x, top) + exp_of(x.y, top)) + (exp_of(x.z, top) + exp_of(x.w, top));
}
template <class T, bool CACHED> DEVICE float exps_of_raw(const Row<T, CACHED>& row, float top) {
    float sum = 0;
    row.each_raw([&](int, float4 x) { sum += exps_of(x, top); });
    return sum;
}

// The first token with the largest score, and the sum of exponentials.
template <class T, bool CACHED> DEVICE u32 find_top(const Row<T, CACHED>& row, float top, bool sums, float& exps) {
    u32 first = ~0u;
    const int steps = row.steps(warp_of()), begin = row.begin(warp_of()) + 4 * lane_of();
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
        const int i = begin + 128 * step;
        const float4 x = row.score(i);
        if (sums) exps += exps_of(x, top);
        if (x.x == top || x.y == top || x.z == top || x.w == top) {
            const u32 here = i + (x.x == top ? 0 : x.y == top ? 1 : x.z == top ? 2 : 3);
            first = min(first, here);
        }
    }
    return first;
}

// Weighs all tokens: their sum, that of exponentials where asked for, and the weights into the cache in place of scores where asked for.
template <class T, bool CACHED>
DEVICE u64 weigh_row(const Row<T, CACHED>& row, const Filter& filter, bool sums, bool store, float& exps) {
    u64 total = 0;
    Sum sum;
    const int steps = row.steps(warp_of()), begin = row.begin(warp_of()) + 4 * lane_of();
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
        const int i = begin + 128 * step;
        const float4 x = row.score(i), w = filter.weight(x);
        if (sums) exps += exps_of(x, filter.top);
        each(w, [&](float y) { sum.add(y); });
        if (CACHED && store) row.keep(i, w);
        if ((step & 127) == 127) total += sum.take();
    }
    return total + sum.take();
}

// The weights that top-p looks at, as weigh_row left them.
template <class T, bool CACHED> DEVICE float4 weight_at(const Row<T, CACHED>& row, const Filter& filter, int i, bool stored) {
    const float4 x = row.score(i);
    return CACHED && stored ? x : filter.weight(x);
}

// The k-th largest score.
template <class T, bool CACHED> DEVICE float kth_largest(const Row<T, CACHED>& row, int k, float floor) {
    Border b = {0, u64(k)};
    const auto count = [&](u32* bins, int turn, u32 key) {
        const int steps = row.steps(warp_of()), begin = row.begin(warp_of()) + 4 * lane_of();
#pragma unroll 2
        for (int step = 0; step < steps; ++step) {
            const float4 x = row.score(begin + 128 * step);
            const float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
            if (!(most >= floor)) continue;
            // What lies beyond the vocabulary comes last: it counts only where all that is finite has been kept.
            each(x, [&](float y) {
                if (y >= floor) count_one<Counts>(bins, turn, key, y);
            });
        }
    };
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn) b = next_digit<Counts>(b, turn, count);
    return of_key(b.key);
}

// The least weight of those that hold `need`, how many of its size are needed, and what min-p keeps of them.
struct Nucleus {
    float border;
    u32 count;
    float least;
};

}  // namespace prefixkit
