// Products with experts on the CPU, one block after the other.
#include "experts/expert_product.cu"

namespace prefixkit {
static ExpertProduct arguments;
template <bool ALONG_N, int STAGES> void run(int columns, int experts) {
    for (blockIdx.y = 0; blockIdx.y < experts; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x) {
            std::memset(memory, 0xff, sizeof(memory));  // NaN
            for (auto& mine : groups) mine.assign(1, {});
            emulation::run(1, [] { expert_product<ALONG_N, STAGES>(arguments); });
        }
}
}  // namespace prefixkit

extern "C" int experts_on_cpu(const prefixkit::ExpertProduct* a, int along_n, int stages, int columns, int experts) {
    using namespace prefixkit;
    arguments = *a;
    if (along_n) stages == 4 ? run<true, 4>(columns, experts) : run<true, 3>(columns, experts);
    else stages == 4 ? run<false, 4>(columns, experts) : run<false, 3>(columns, experts);
    return sizeof(ExpertProduct);
}
