// The portable kernel but for its merge, one block after the other on the CPU.
#pragma once
#define EMULATED_STACK (512 * 1024)
#include "common/ptx.cuh"
#define __align__(bytes) alignas(bytes)
#include "attention/sm80/tree_attention.cu"

static prefixkit::Attention arguments;

extern "C" int portable_on_cpu(const prefixkit::Attention* a, int blocks, int) {
    using namespace prefixkit;
    int counts[8];
    std::memcpy(counts, a->counts, sizeof(counts));
    counts[3] = 0;  // nothing to merge
    arguments = *a, arguments.counts = counts, gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::memset(memory, 0xff, sizeof(memory));  // NaN
        for (auto& groups : copies) groups.clear();
        emulation::run(1, [] {
            if (emulation::current < 32 * BLOCK_WARPS) tree_attention(arguments);
        });
    }
    return sizeof(Attention);
}
