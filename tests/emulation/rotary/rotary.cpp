// rotary_append, and kv_append where pages hold e4m3, as functions on the CPU: one thread after the other.
#include "kv/append.cu"
#include "kv/rotary_append.cu"

namespace prefixkit {
template <class Argument> void run(void (*kernel)(Argument), const Argument& a, unsigned blocks, unsigned threads) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(a);
}
}  // namespace prefixkit

using namespace prefixkit;
#define KERNEL(name, Argument, ...)                                             \
    extern "C" void name(const Argument* a, unsigned blocks, unsigned threads) { \
        run<Argument>([](const Argument a) { __VA_ARGS__(a); }, *a, blocks, threads);  \
    }
#define KERNELS(dtype, T, EACH)                                \
    KERNEL(rotary_##dtype, Rotary, rotary_append<T, false>)    \
    KERNEL(rotary_##dtype##_e4m3, Rotary, rotary_append<T, true>) \
    KERNEL(append_##dtype##_1, Move, kv_append_e4m3<T, 1>)     \
    KERNEL(append_##dtype##_##EACH, Move, kv_append_e4m3<T, EACH>)
KERNELS(float32, float, 4)
KERNELS(bfloat16, BFloat, 8)
KERNELS(float16, Half, 8)
extern "C" int rotary_bytes() { return sizeof(Rotary); }
extern "C" int append_bytes() { return sizeof(Move); }
extern "C" void round_to_e4m3(const float* from, unsigned char* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = to_e4m3(from[i]);
}
