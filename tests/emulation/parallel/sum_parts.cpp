// Sums of two processes on the CPU, one pair of blocks after the other.
#include "common/ptx.cuh"
#include "parallel/sum_parts.cu"

namespace prefixkit {
static SumParts given[2];

template <class T> void both(int blocks) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < unsigned(blocks); ++blockIdx.x) {
        std::memset(emulation::named, 0, sizeof emulation::named);
        std::memset(shared_word, 0, sizeof shared_word);
        emulation::run(2, [] { sum_parts<T>(given[emulation::process()]); });
    }
}
}  // namespace prefixkit

using namespace prefixkit;
extern "C" int sum_parts_on_cpu(const SumParts* one, const SumParts* other, int type, int blocks, unsigned seed) {
    given[0] = *one, given[1] = *other;
    emulation::random.seed(seed);
    if (type == 0) both<float>(blocks);
    if (type == 1) both<BFloat>(blocks);
    if (type == 2) both<Half>(blocks);
    return sizeof(SumParts);
}
