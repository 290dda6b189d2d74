// One row of logits, and which warp reads which tokens.
#pragma once
#include "layouts/sampling_record.h"
#include "layouts/sample.h"
#include "sampling/sample_weight.cuh"

namespace prefixkit {

DEVICE float penalise(float x, float penalty) { return x < 0 ? __fmul_rn(x, penalty) : __fdiv_rn(x, penalty); }
// Penalises those of four tokens that the sequence holds, by the lowest bits of `marks`; -inf where the next four bits
// are set.
static __device__ __noinline__ float4 change_marked(float4 x, u32 marks, float penalty) {
    if (marks & 1) x.x = penalise(x.x, penalty);
    if (marks & 2) x.y = penalise(x.y, penalty);
    if (marks & 4) x.z = penalise(x.z, penalty);
    if (marks & 8) x.w = penalise(x.w, penalty);
    if (marks & 16) x.x = MINUS_INFINITY;
    if (marks & 32) x.y = MINUS_INFINITY;
    if (marks & 64) x.z = MINUS_INFINITY;
    if (marks & 128) x.w = MINUS_INFINITY;
    return x;
}

constexpr u32 PENALISED = 1, MASKED = 2;

// Tokens are dealt out to the warps of a cluster in order, `segment` to each; its lanes take four tokens at a time.
template <class T, bool CACHED> struct Row {
    const Sample& a;
    const T* logits;
    float* cache;  // the block's scores, later weights
    int number, vocab, first, segment;
    float penalty;
    u32 changes;  // of logits: PENALISED, MASKED
    bool aligned;

    DEVICE Row(const Sample& a, int row, float* shared) : a(a), number(row) {
        logits = (const T*)a.logits + row * a.stride;
        cache = shared, vocab = a.vocab, segment = a.segment;
        first = cluster_rank() * WARPS * segment;
        aligned = a.aligned;
    }
    DEVICE int begin(int warp) const { return first + warp * segment; }
    // Steps of 128 tokens.
    DEVICE int steps(int warp) const { return min(segment, max(vocab - begin(warp), 0) + 127) >> 7; }

    // Prefetches this warp's logits to the L2.
    DEVICE void fetch() const {
        const int from = begin(warp_of()), count = min(segment, max(vocab - from, 0)), line = 128 / int(sizeof(T));
        for (int i = line * lane_of(); i < count; i += 32 * line) prefetch(logits + from + i);
    }

    // Calls f(i, logits) for this lane's tokens i to i + 3 of all steps; a batch of loads is in flight at a time.
    template <class F> DEVICE void each_raw(F f) const {
        constexpr int BATCH = sizeof(T) < 4 ? 8 : 4;
        const int count = steps(warp_of()), at = begin(warp_of()) + 4 * lane_of();
        // Steps in which every lane can load four at once; the others come one by one.
        const int full = aligned ? min(segment, max(vocab - begin(warp_of()), 0)) >> 7 : 0;
        int step = 0;
#pragma unroll 1
        for (; step + BATCH <= full; step += BATCH) {
            float4 x[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) x[j] = load4(logits + at + 128 * (step + j));
#pragma unroll
            for (int j = 0; j < BATCH; ++j) f(at + 128 * (step + j), x[j]);
        }
#pragma unroll 1
        for (; step < full; step += 4) {
            float4 x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = load4(logits + at + 128 * min(step + j, full - 1));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (step + j < full) f(at + 128 * (step + j), x[j]);
        }
#pragma unroll 1
        for (step = full; step < count; ++step) f(at + 128 * step, raw(at + 128 * step));
    }

    // The logits of tokens i to i + 3; -inf beyond the vocabulary.
    DEVICE float4 raw(int i) const {
        if (aligned && i + 3 < vocab) return load4(logits + i);
        return make_float4(raw1(i), raw1(i + 1), raw1(i + 2), raw1(i + 3));
    }
    DEVICE float raw1(int i) const { return i < vocab ? widen(logits[i]) : MINUS_INFINITY; }

    // Whether scores differ from logits.
    DEVICE bool changed() const { return changes; }
    DEVICE float4 change(int i, float4 x) const {
        if (i >= vocab) return x;
        const long long word = (long long)number * a.words + (i >> 5);
        u32 marks = changes & PENALISED ? a.seen[word] >> (i & 31) & 15 : 0;
        if (changes & MASKED) marks |= (~a.allowed[word] >> (i & 31) & 15) << 4;
        return marks ? change_marked(x, marks, penalty) : x;
    }
    DEVICE float4 score(int i) const {
        if (CACHED) return *(const float4*)(cache + (i - first));
        const float4 x = raw(i);
        return changed() ? change(i, x) : x;
    }
    // Calls f(step, i, scores) for this lane's tokens i to i + 3 of all steps.
    template <int UNROLL, class F> DEVICE void each_score(F f) const {
        const int count = steps(warp_of()), at = begin(warp_of()) + 4 * lane_of();
#pragma unroll UNROLL
        for (int step = 0; step < count; ++step) f(step, at + 128 * step, score(at + 128 * step));
    }
    DEVICE void keep(int i, float4 x) const { *(float4*)(cache + (i - first)) = x; }
};

}  // namespace prefixkit
