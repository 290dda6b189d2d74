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

template <class V> static void apply(const Block& a) {
    long long at = 0;
    for (int b = 0; b < a.sizes[0]; ++b)
        for (int h = 0; h < a.sizes[1]; ++h)
            for (int i = 0; i < a.sizes[2]; ++i)
                for (int j = 0; j < a.sizes[3]; ++j, ++at) {
                    const int kv = int(a.kv[j]), offset = j % 4 * 8;  // in two parts, as kernels have it
                    const int q = int(a.q[i]);
                    // As tiles have it, and as every other place has it.
                    const bool line = V::LINEAR && j % 2;
                    const float bias = V::score(0.f, b, h, q, q, 0, a.words) + V::slope(b, h, q, a.words) * (kv - q);
                    a.scores[at] = line ? a.scores[at] + bias : V::score(a.scores[at], b, h, q, kv - offset, offset, a.words);
                    a.shown[at] = V::mask(b, h, int(a.q[i]), int(a.kv[j]), a.words);
                }
}

#define APPLY(n) \
    extern "C" void apply_##n(const Block* block) { apply<prefixkit::V##n>(*block); } \
    extern "C" int decide_##n(const long long* q, const long long* kv, const int* words) { \
        return decide<prefixkit::V##n>(q, kv, words); \
    }

#include "variants.cuh"
