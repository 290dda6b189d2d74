// Sums and gathers of two processes on the CPU, one pair of blocks after the other.
#include "common/ptx.cuh"
#include "parallel/shared_parts.cu"

namespace prefixkit {
template <class Given> static Given given[2];

template <class Given> int both(const void* one, const void* other, int blocks, void (*kernel)()) {
    std::memcpy(&given<Given>[0], one, sizeof(Given));
    std::memcpy(&given<Given>[1], other, sizeof(Given));
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < unsigned(blocks); ++blockIdx.x) {
        std::memset(emulation::named, 0, sizeof emulation::named);
        for (auto& words : shared_words) words.clear();
        emulation::run(2, kernel);
    }
    return sizeof(Given);
}
template <class T> void sum() { sum_parts<T>(given<SumParts>[emulation::process()]); }
void gather() { gather_parts(given<GatherParts>[emulation::process()]); }
}  // namespace prefixkit

using namespace prefixkit;
// `kernel`: the type of sums, or 3.
extern "C" int run_on_cpu(const void* one, const void* other, int kernel, int blocks, unsigned seed) {
    emulation::random.seed(seed);
    if (kernel == 0) return both<SumParts>(one, other, blocks, sum<float>);
    if (kernel == 1) return both<SumParts>(one, other, blocks, sum<BFloat>);
    if (kernel == 2) return both<SumParts>(one, other, blocks, sum<Half>);
    return both<GatherParts>(one, other, blocks, gather);
}
