// rotary_append as a function on the CPU: one thread after the other.
#include "kv/rotary_append.cu"

namespace prefixkit {
template <class T> void run(const Rotary& r, unsigned blocks, unsigned threads) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) rotary_append<T>(r);
}
}  // namespace prefixkit

extern "C" void rotary_float32(const prefixkit::Rotary* r, unsigned blocks, unsigned threads) { prefixkit::run<float>(*r, blocks, threads); }
extern "C" void rotary_bfloat16(const prefixkit::Rotary* r, unsigned blocks, unsigned threads) { prefixkit::run<prefixkit::BFloat>(*r, blocks, threads); }
extern "C" void rotary_float16(const prefixkit::Rotary* r, unsigned blocks, unsigned threads) { prefixkit::run<prefixkit::Half>(*r, blocks, threads); }
extern "C" int rotary_bytes() { return sizeof(prefixkit::Rotary); }
