// A variant's functions at every (b, h, q, kv): scores changed, and what is visible.
#include PREFIXKIT_VARIANT

// What is said of queries q[0] to q[1] and keys kv[0] to kv[1]: bit 0, some pair may be shown; bit 1, hidden.
extern "C" int decide(const long long* q, const long long* kv, const int* words) {
    const prefixkit::Maybe shown = prefixkit::Variant::decide({q[0], q[1]}, {kv[0], kv[1]}, words);
    return shown.yes | shown.no << 1;
}

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
