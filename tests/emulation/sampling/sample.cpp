// The sampling kernel as a function on the CPU.
#include "sampling/sample.cu"

namespace prefixkit {
static Sample arguments;
template <class T> void run(bool cached, int blocks, int rows) {
    for (int row = 0; row < rows; ++row) {
        if (cached) emulation::run(blocks, row * blocks, [] { sample<T, true>(arguments); });
        else emulation::run(blocks, row * blocks, [] { sample<T, false>(arguments); });
    }
}
}  // namespace prefixkit

// `dtype`: 0 float32, 1 bfloat16, 2 float16.
extern "C" void sample_on_cpu(const prefixkit::Sample* a, int dtype, int cached, int blocks, int rows) {
    using namespace prefixkit;
    arguments = *a;
    if (dtype == 0) run<float>(cached, blocks, rows);
    else if (dtype == 1) run<BFloat>(cached, blocks, rows);
    else run<Half>(cached, blocks, rows);
}
extern "C" int head_bytes() { return sizeof(prefixkit::Shared); }
extern "C" void weigh_on_cpu(const float* scores, float* weights, int count, float top, float rate) {
    for (int i = 0; i < count; ++i) weights[i] = prefixkit::weigh(scores[i], top, rate);
}
