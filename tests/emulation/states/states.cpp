// Steps of states on the CPU, one block after the other.
#include "states/conv_step.cu"
#include "states/delta_rule.cu"
#include "states/mamba2_step.cu"
#include "states/rms_norm.cu"

namespace prefixkit {
static ConvStep convolution;
static Mamba2Step recurrence;
static DeltaRule rule;
static RmsNorm norm;

void each(int blocks, void (*kernel)()) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) emulation::run(1, kernel);
}
template <class T> void convolve(int width, int blocks) {
    if (width == 2) each(blocks, [] { conv_step<T, 2>(convolution); });
    if (width == 3) each(blocks, [] { conv_step<T, 3>(convolution); });
    if (width == 4) each(blocks, [] { conv_step<T, 4>(convolution); });
}
template <class T> void recur(int size, int blocks) {
    if (size == 16) each(blocks, [] { mamba2_step<T, 16>(recurrence); });
    if (size == 32) each(blocks, [] { mamba2_step<T, 32>(recurrence); });
    if (size == 64) each(blocks, [] { mamba2_step<T, 64>(recurrence); });
    if (size == 128) each(blocks, [] { mamba2_step<T, 128>(recurrence); });
    if (size == 256) each(blocks, [] { mamba2_step<T, 256>(recurrence); });
}
template <class T> void apply(int size, int blocks) {
    if (size == 32) each(blocks, [] { delta_rule<T, 32>(rule); });
    if (size == 64) each(blocks, [] { delta_rule<T, 64>(rule); });
    if (size == 128) each(blocks, [] { delta_rule<T, 128>(rule); });
    if (size == 256) each(blocks, [] { delta_rule<T, 256>(rule); });
}
template <class T> void normalize(int lanes, int blocks) {
    if (lanes == 32) each(blocks, [] { rms_norm<T, 32>(norm); });
    if (lanes == 256) each(blocks, [] { rms_norm<T, 256>(norm); });
}
template <class F> void of_type(int type, F f) {
    if (type == 0) f(float{});
    if (type == 1) f(BFloat{});
    if (type == 2) f(Half{});
}
}  // namespace prefixkit

using namespace prefixkit;
extern "C" int conv_on_cpu(const ConvStep* a, int type, int width, int blocks) {
    convolution = *a;
    of_type(type, [&](auto x) { convolve<decltype(x)>(width, blocks); });
    return sizeof(ConvStep);
}
extern "C" int mamba2_on_cpu(const Mamba2Step* a, int type, int size, int blocks) {
    recurrence = *a;
    of_type(type, [&](auto x) { recur<decltype(x)>(size, blocks); });
    return sizeof(Mamba2Step);
}
extern "C" int delta_on_cpu(const DeltaRule* a, int type, int size, int blocks) {
    rule = *a;
    of_type(type, [&](auto x) { apply<decltype(x)>(size, blocks); });
    return sizeof(DeltaRule);
}
extern "C" int rms_on_cpu(const RmsNorm* a, int type, int lanes, int blocks) {
    norm = *a;
    of_type(type, [&](auto x) { normalize<decltype(x)>(lanes, blocks); });
    return sizeof(RmsNorm);
}
