// The hook for variants of attention: PREFIXKIT_VARIANT names a header that defines a `struct Variant` like this one.
#pragma once
#include "attention/narrow_queries.cuh"
#include "attention/variant_functions.cuh"

#ifdef PREFIXKIT_VARIANT
#include PREFIXKIT_VARIANT
#else
#include "attention/variant_ranges.cuh"
namespace prefixkit {
struct Variant {
    static constexpr bool HAS_SCORE = false, HAS_MASK = false, HAS_SINK = false, LOOKS_AHEAD = false, SUMS = false;
    static constexpr bool READS_SEQUENCE = false, READS_HEAD = false;  // the latter: the masks
    static constexpr bool DECIDES = false;  // masks may be known for whole blocks
    static constexpr bool ADDS = false;    // scores are changed, by nothing but what is added to them
    static constexpr bool LINEAR = false;  // which grows by `slope` from each key to the next
    using Tanh = AnyTanh;
    static constexpr bool HAS_TANH = false;  // scores are changed by it, and not by the hardware's
    // `score` is scale * q . k in natural units; `words` hold the variant's values, which are not compiled in.
    // A key's position is kv_base + kv_offset, of which kernels that unroll their loops know the second part.
    static DEVICE float score(float score, int b, int h, int q_idx, int kv_base, int kv_offset, const int* words) {
        return score;
    }
    // The same by another tanh.
    template <class By> static DEVICE float score_by(float score, int b, int h, int q_idx, int kv_base, int kv_offset,
                                                     const int* words, By& tanh) {
        return score;
    }
    static DEVICE bool mask(int b, int h, int q_idx, int kv_idx, const int* words) { return true; }
    // What the masks say of all these queries and keys.
    static DEVICE Maybe decide(Range q_idx, Range kv_idx, const int* words) { return {true, true}; }
    static DEVICE float slope(int b, int h, int q_idx, const int* words) { return 0.f; }
};
}  // namespace prefixkit
#endif

namespace prefixkit {
constexpr bool MODIFIED = Variant::HAS_SCORE || Variant::HAS_MASK;
// A flag of KV tiles: the mask is evaluated.
constexpr int MASKED = 32;

// Each row takes exponentials against a base that starts at LOWEST and rises, to LIFT below the largest exponent, when
// one passes it by more than HEADROOM; sums of exponentials up to ALLOWED are inside float16.  Its smallest number is
// 2^-24: where the outputs are bfloat16, whose exponentials would go on below that, they are LIFTed as far as ALLOWED
// lets them.
constexpr float LOWEST = -1e30f, LIFT = NARROWED ? 3.f : 0.f, HEADROOM = 8.f + LIFT;
constexpr float ALLOWED = NARROWED ? 32768.f : 4096.f;

// From q . k to the exponent of 2.  `sequence` counts where the variant reads it.
DEVICE float exponent(float dot, float scale, float scale_log2, int sequence, int head, int q_position, int kv_base,
                      int kv_offset, const int* words) {
    if constexpr (!Variant::HAS_SCORE) return dot * scale_log2;
    return Variant::score(dot * scale, sequence, head, q_position, kv_base, kv_offset, words) * LOG2E;
}

// Adds the head's sink to a finished log-sum-exp; returns the factor for the output, which is a mean: of a variant that
// SUMS, the sum of its weights.
DEVICE float finish_sum(float& lse, int head, const u16* sinks) {
    if constexpr (Variant::HAS_SINK) {
        const float sink = widen(Storage{sinks[head]}), top = fmaxf(lse, sink);
        const float joined = top + LN2 * log2_fast(exp2_fast((lse - top) * LOG2E) + exp2_fast((sink - top) * LOG2E));
        const float factor = exp2_fast((lse - joined) * LOG2E);
        lse = joined;
        return factor;
    }
    return Variant::SUMS ? exp2_fast(lse * LOG2E) : 1.f;
}
}  // namespace prefixkit
