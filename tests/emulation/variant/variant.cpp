// A variant's functions at every (b, h, q, kv): scores changed, and what is visible.
#include PREFIXKIT_VARIANT

extern "C" void apply(const int* sizes, const long long* q, const long long* kv, const int* words, float* scores, bool* shown) {
    long long at = 0;
    for (int b = 0; b < sizes[0]; ++b)
        for (int h = 0; h < sizes[1]; ++h)
            for (int i = 0; i < sizes[2]; ++i)
                for (int j = 0; j < sizes[3]; ++j, ++at) {
                    scores[at] = prefixkit::Variant::score(scores[at], b, h, int(q[i]), int(kv[j]), words);
                    shown[at] = prefixkit::Variant::mask(b, h, int(q[i]), int(kv[j]), words);
                }
}
