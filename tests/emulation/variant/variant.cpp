#include "attention/variant_functions.cuh"

// Functions of variants at every (b, h, q, kv): scores changed, and what is visible.
struct Block {
    const int* sizes;
    const long long *q, *kv;
    const int* words;
    float* scores;
    bool* shown;
};

// What is said of queries q[0] to q[1] and keys kv[0] to kv[1]: bit 0, some pair may be shown; bit 1, hidden.
template <class V> static int decide(const long long* q, const long long* kv, const int* words) {
    const auto shown = V::decide({q[0], q[1]}, {kv[0], kv[1]}, words);
    return shown.yes | shown.no << 1;
}

// A score in one of the ways in which kernels compute it, by turns.
template <class V>
static float changed(const Block& a, float score, int b, int h, int q, int kv_base, int kv_offset, int turn) {
    const int kv = kv_base + kv_offset;
    if (V::LINEAR && turn % 2)
        return score + (V::score(0.f, b, h, q, q, 0, a.words) + V::slope(b, h, q, a.words) * float(kv - q));
    prefixkit::LargestTanh largest;
    V::score_by(score, b, h, q, kv_base, kv_offset, a.words, largest);
    prefixkit::NearTanh near;
    if (V::HAS_TANH && turn % 2 && largest.largest < prefixkit::NEAR)
        return V::score_by(score, b, h, q, kv_base, kv_offset, a.words, near);
    return V::score(score, b, h, q, kv_base, kv_offset, a.words);
}

template <class V> static void apply(const Block& a) {
    long long at = 0;
    for (int b = 0; b < a.sizes[0]; ++b)
        for (int h = 0; h < a.sizes[1]; ++h)
            for (int i = 0; i < a.sizes[2]; ++i)
                for (int j = 0; j < a.sizes[3]; ++j, ++at) {
                    const int kv = int(a.kv[j]), offset = j % 4 * 8;  // in two parts, as kernels have it
                    a.scores[at] = changed<V>(a, a.scores[at], b, h, int(a.q[i]), kv - offset, offset, j);
                    a.shown[at] = V::mask(b, h, int(a.q[i]), int(a.kv[j]), a.words);
                }
}

#define APPLY(n) \
    extern "C" void apply_##n(const Block* block) { apply<prefixkit::V##n>(*block); } \
    extern "C" int decide_##n(const long long* q, const long long* kv, const int* words) { \
        return decide<prefixkit::V##n>(q, kv, words); \
    }

#include "variants.cuh"
