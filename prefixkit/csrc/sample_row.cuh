// One row of logits: what a block has of it, and who reads what.
#pragma once
#include "sample_weight.cuh"

namespace prefixkit {

// Parameters of a row, which the host or other kernels write; 48 bytes.
struct Law {
    double top_p, min_p;
    u64 key;
    float temperature, penalty;
    int top_k, step, active, unused;
};

struct Sample {
    const void* logits;  // [rows, vocab]
    Law* laws;           // [rows]
    u32* seen;           // [rows, words], bit t % 32 of word t / 32: the sequence holds token t
    long long* tokens;   // [rows]
    float* logprobs;     // [rows]
    long long stride;    // of a row of logits, in elements
    int vocab, words;
    int segment;         // tokens of a warp, a multiple of 128
    int aligned;         // four logits can be loaded at once
};

// Tokens are dealt out to the warps of a cluster in order, `segment` to each; its lanes take four tokens at a time.
template <class T, bool CACHED> struct Row {
    const T* logits;
    const u32* seen;
    float* cache;  // the block's scores, later weights
    int vocab, first, segment;
    float penalty;
    bool penalised, aligned;

    DEVICE Row(const Sample& a, int row, float* room, const Law& law) {
        logits = (const T*)a.logits + row * a.stride;
        seen = a.seen + (long long)row * a.words;
        cache = room, vocab = a.vocab, segment = a.segment;
        first = cluster_rank() * WARPS * segment;
        penalty = law.penalty, penalised = law.penalty != 1.0f, aligned = a.aligned;
    }
    DEVICE int begin(int warp) const { return first + warp * segment; }
    // Steps of 128 tokens.
    DEVICE int steps(int warp) const { return min(segment, max(vocab - begin(warp), 0) + 127) >> 7; }

    // The logits of tokens i to i + 3; -inf beyond the vocabulary.
    DEVICE float4 raw(int i) const {
        if (aligned && i + 3 < vocab) return load4(logits + i);
        return make_float4(raw1(i), raw1(i + 1), raw1(i + 2), raw1(i + 3));
    }
    DEVICE float raw1(int i) const { return i < vocab ? widen(logits[i]) : MINUS_INFINITY; }

    DEVICE float penalise1(float x, bool held) const {
        return !held ? x : x < 0 ? __fmul_rn(x, penalty) : __fdiv_rn(x, penalty);
    }
    DEVICE float4 penalise(int i, float4 x) const {
        if (i >= vocab) return x;
        const u32 held = seen[i >> 5] >> (i & 31);
        // Beyond the vocabulary -inf would become NaN under a penalty of 0.
        return make_float4(penalise1(x.x, held & 1), penalise1(x.y, held & 2 && i + 1 < vocab),
                           penalise1(x.z, held & 4 && i + 2 < vocab), penalise1(x.w, held & 8 && i + 3 < vocab));
    }
    DEVICE float4 score(int i) const {
        if (CACHED) return *(const float4*)(cache + (i - first));
        const float4 x = raw(i);
        return penalised ? penalise(i, x) : x;
    }
    DEVICE void keep(int i, float4 x) const { *(float4*)(cache + (i - first)) = x; }
};

}  // namespace prefixkit
