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
    static constexpr bool READS_SEQUENCE = false, READS_HEAD = false;  // READS_HEAD: the masks read it
    static constexpr bool DECIDES = false;  // masks can be decided for whole blocks
    static constexpr bool ADDS = false;    // the variant only adds to scores
    static constexpr bool LINEAR = false;  // what it adds grows by `slope` from each key to the next
    using Tanh = AnyTanh;
    static constexpr bool HAS_TANH = false;  // scores are computed with tanh, but not with the hardware's
    // `score` is scale * q . k in natural units; `words` hold the variant's captured values, which are not compiled in.
    // A key's position is kv_base + kv_offset; kernels that unroll their loops know kv_offset at compile time.
    static DEVICE float score(float score, int b, int h, int q_idx, int kv_base, int kv_offset, const int* words) {
        return score;
    }
    // The same score, computed with another tanh.
    template <class By> static DEVICE float score_by(float score, int b, int h, int q_idx, int kv_base, int kv_offset,
                                                     const int* words, By& tanh) {
        return score;
    }
    static DEVICE bool mask(int b, int h, int q_idx, int kv_idx, const int* words) { return true; }
    // What the masks return over these ranges of queries and keys.
    static DEVICE Maybe decide(Range q_idx, Range kv_idx, const int* words) { return {true, true}; }
    static DEVICE float slope(int b, int h, int q_idx, const int* words) { return 0.f; }
};
}  // namespace prefixkit
#endif

namespace prefixkit {
constexpr bool MODIFIED = Variant::HAS_SCORE || Variant::HAS_MASK;
// Flag of a KV tile: the mask must be evaluated.
constexpr int MASKED = 32;

// Each row takes its exponentials relative to a base.  The base starts at LOWEST; when an exponent exceeds it by more
// than HEADROOM, it rises to LIFT below the largest exponent.  Sums of exponentials up to ALLOWED fit float16, whose
// smallest number is 2^-24.  Where the outputs are bfloat16, whose exponentials would go on below that, exponentials
// are LIFTed as far as ALLOWED permits.
constexpr float LOWEST = -1e30f, LIFT = NARROWED ? 3.f : 0.f, HEADROOM = 8.f + LIFT;
constexpr float ALLOWED = NARROWED ? 32768.f : 4096.f;

// Turns q . k into the exponent of 2.  `sequence` matters only where the variant reads it.
DEVICE float exponent(float dot, float scale, float scale_log2, int sequence, int head, int q_position, int kv_base,
                      int kv_offset, const int* words) {
    if constexpr (!Variant::HAS_SCORE) return dot * scale_log2;
    return Variant::score(dot * scale, sequence, head, q_position, kv_base, kv_offset, words) * LOG2E;
}

// Adds the head's sink to a finished log-sum-exp.  Returns the factor for the output, which is a mean so far; for a
// variant that SUMS, the factor is the sum of the weights.
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
