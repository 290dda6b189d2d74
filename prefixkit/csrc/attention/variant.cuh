// The hook for variants of attention.  A variant is a struct like this one; PREFIXKIT_VARIANT names a header that defines
// `struct Variant` in namespace prefixkit instead.
#pragma once
#include "common/ptx.cuh"

#ifdef PREFIXKIT_VARIANT
#include PREFIXKIT_VARIANT
#else
namespace prefixkit {
struct Variant {
    static constexpr bool HAS_SCORE = false, HAS_MASK = false, HAS_SINK = false;
    // `score` is scale * q . k, natural units; `parameters` are the variant's numbers, which are not compiled in.
    static DEVICE float score(float score, int q_position, int kv_position, int head, const float* parameters) { return score; }
    static DEVICE bool mask(int q_position, int kv_position, int head, const float* parameters) { return true; }
    static DEVICE float sink(int head, const float* parameters) { return 0.f; }
};
}  // namespace prefixkit
#endif

namespace prefixkit {
constexpr bool MODIFIED = Variant::HAS_SCORE || Variant::HAS_MASK;

// Exponentials are taken against a base for each row that starts at LOWEST and may trail the row's largest exponent by HEADROOM
// or so: they stay below ALLOWED, well inside float16, and a base that moves seldom costs little.
constexpr float LOWEST = -1e30f, HEADROOM = 8.f, ALLOWED = 4096.f;

// From q . k to the exponent of 2, -inf where hidden.
DEVICE float exponent(
    float dot, float scale, bool visible, int q_position, int kv_position, int head, const float* parameters) {
    if constexpr (Variant::HAS_SCORE) dot = Variant::score(dot * scale, q_position, kv_position, head, parameters) * LOG2E;
    else dot *= scale * LOG2E;
    if constexpr (Variant::HAS_MASK) visible = visible && Variant::mask(q_position, kv_position, head, parameters);
    return visible ? dot : MINUS_INFINITY;
}

// A row's share of a finished softmax once the sink has joined: factor on the output; changes the log-sum-exp.
DEVICE float join_sink(float& lse, int head, const float* parameters) {
    if constexpr (Variant::HAS_SINK) {
        const float sink = Variant::sink(head, parameters), top = fmaxf(lse, sink);
        const float joined = top + LN2 * log2_fast(exp2_fast((lse - top) * LOG2E) + exp2_fast((sink - top) * LOG2E));
        const float factor = exp2_fast((lse - joined) * LOG2E);
        lse = joined;
        return factor;
    }
    return 1.f;
}
}  // namespace prefixkit
