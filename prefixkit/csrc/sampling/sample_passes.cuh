// The passes over all tokens of a row.
#pragma once
#include "sampling/sample_select.cuh"

namespace prefixkit {

// What decides which tokens are kept, and how much they weigh.
struct Filter {
    float top, rate;
    float lowest = MINUS_INFINITY;  // score, by top-k
    float least = 0;                // weight, by min-p where there is no top-p, which precedes min-p
    bool any, whole;                // any: one of both is set; whole: top-p alone, whole numbers are compared

    DEVICE float keep(float score, float w) const { return score >= lowest && w >= least ? floorf(w) : 0; }
    DEVICE float weight(float x) const { return keep(x, weigh(x, top, rate)); }
    // The weights of four tokens, from their scores, or stored weights as they are.
    DEVICE float4 weight(float4 x, bool stored) const {
        if (stored) return x;
        const float4 w = {weigh(x.x, top, rate), weigh(x.y, top, rate), weigh(x.z, top, rate), weigh(x.w, top, rate)};
        if (any) return make_float4(keep(x.x, w.x), keep(x.y, w.y), keep(x.z, w.z), keep(x.w, w.w));
        return whole ? make_float4(floorf(w.x), floorf(w.y), floorf(w.z), floorf(w.w)) : w;
    }
};

// One pass reads the logits into the cache and finds this thread's largest score and largest logit.
struct Tops {
    float score, raw;
};
template <class T, bool CACHED> DEVICE Tops read_row(const Row<T, CACHED>& row) {
    Tops t = {MINUS_INFINITY, MINUS_INFINITY};
    row.each_raw([&](int i, float4 x) {
        if (row.changed()) {
            each(x, [&](float y) { t.raw = max_nan(t.raw, y); });
            x = row.change(i, x);
        }
        each(x, [&](float y) { t.score = max_nan(t.score, y); });
        if (CACHED) row.keep(i, x);
    });
    if (!row.changed()) t.raw = t.score;
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
    row.template each_score<2>([&](int, int i, float4 x) {
        if (sums) exps += exps_of(x, top);
        if (x.x == top || x.y == top || x.z == top || x.w == top)
            first = min(first, u32(i + (x.x == top ? 0 : x.y == top ? 1 : x.z == top ? 2 : 3)));
    });
    return first;
}

// The sum of all weights.  If `sums`, exponentials are added up too; if `store`, weights replace the scores in the
// cache.
template <class T, bool CACHED>
DEVICE u64 weigh_row(const Row<T, CACHED>& row, const Filter& filter, bool sums, bool store, float& exps) {
    u64 total = 0;
    Sum sum;
    row.template each_score<2>([&](int step, int i, float4 x) {
        const float4 w = filter.weight(x, false);
        if (sums) exps += exps_of(x, filter.top);
        each(w, [&](float y) { sum.add(y); });
        if (CACHED && store) row.keep(i, w);
        if ((step & 127) == 127) total += sum.take();
    });
    return total + sum.take();
}

// The k-th largest score.  Tokens beyond the vocabulary come last, after all that is finite.
template <class T, bool CACHED> DEVICE float kth_largest(const Row<T, CACHED>& row, int k, float floor) {
    Border b = {0, u64(k)};
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn) b = next_digit<Counts>(row, b, turn, floor, [](float4 x) { return x; });
    return of_key(b.key);
}

// The least weight of the tokens that hold `need`, how many of that weight are needed, and the least that min-p keeps.
struct Nucleus {
    float border;
    u32 count;
    float least;
};

}  // namespace prefixkit
