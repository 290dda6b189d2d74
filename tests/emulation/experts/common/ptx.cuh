// What products with experts take of a GPU, on the CPU: copies that land when they are waited for and not before, and
// products of a warp.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 256
#define EMULATED_BLOCKS 1
#include "fibers.cuh"
#include "products.cuh"
#include <cstdlib>
#include <vector>

#undef __shared__
#define __shared__ static  // one block after the other
#define threadIdx (emulation::thread_index())
struct Dim { int x, y; };
static Dim blockIdx;

namespace prefixkit {
struct Half { u16 bits; };
struct BFloat { u16 bits; };
inline float widen(BFloat x) { return emulation::as<float>(u32(x.bits) << 16); }
inline float widen(Half x) { return float(emulation::as<_Float16>(x.bits)); }
inline u32 round_to(Half, float x) { return emulation::as<u16>(_Float16(x)); }
inline u32 round_to(BFloat, float x) {
    const u32 bits = emulation::as<u32>(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#if PREFIXKIT_HALF
using Storage = Half;
#else
using Storage = BFloat;
#endif
inline u32 pack(float low, float high) { return round_to(Storage{}, low) | round_to(Storage{}, high) << 16; }

alignas(128) static unsigned char memory[128 * 1024];  // shared memory, by address
DEVICE unsigned char* at_address(u32 a) { if (a >= sizeof(memory)) std::abort(); return memory + a; }
DEVICE u32 shared_address(const void* p) { return u32((const unsigned char*)p - memory); }
DEVICE int lane_anew() { return emulation::current % 32; }

// ---- copies: each thread's groups ----
struct Copy { u32 to; const void* from; bool valid; };
static std::vector<std::vector<Copy>> groups[EMULATED_THREADS];
DEVICE void copy16(u32 to, const void* from, bool valid) {
    if (to % 16 || u64(from) % 16) std::abort();
    groups[emulation::current].back().push_back({to, from, valid});
}
DEVICE void copy_commit() { groups[emulation::current].emplace_back(); }
template <int PENDING> DEVICE void copy_wait() {
    auto& mine = groups[emulation::current];  // the last one is open
    while (int(mine.size()) - 1 > PENDING) {
        for (const Copy& c : mine.front())
            if (c.valid) std::memcpy(at_address(c.to), c.from, 16);
            else std::memset(at_address(c.to), 0, 16);
        mine.erase(mine.begin());
    }
}

// ---- products of a warp, whose lanes hold what the PTX manual says ----
struct Lanes { uint64_t of[32]; };
DEVICE Lanes of_lanes(uint64_t mine) {
    Lanes copy;
    std::memcpy(copy.of, emulation::exchange(mine), sizeof(copy.of));
    return copy;
}
DEVICE u16 element(u32 address) { u16 x; std::memcpy(&x, at_address(address), 2); return x; }
// Lane i says where row i % 8 of matrix i / 8 is.
DEVICE void load_matrix(u32 (&a)[4], u32 address) {
    const Lanes rows = of_lanes(address);
    for (int i = 0; i < 4; ++i) {
        const u32 at = u32(rows.of[8 * i + lane_anew() / 4]) + 4 * (lane_anew() % 4);
        a[i] = element(at) | u32(element(at + 2)) << 16;
    }
}
DEVICE void load_matrix_transposed(u32 (&a)[4], u32 address) {
    const Lanes rows = of_lanes(address);
    const int column = lane_anew() / 4, row = 2 * (lane_anew() % 4);
    for (int i = 0; i < 4; ++i)
        a[i] = element(u32(rows.of[8 * i + row]) + 2 * column) |
               u32(element(u32(rows.of[8 * i + row + 1]) + 2 * column)) << 16;
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<Storage>(d, a, b0, b1); }
}  // namespace prefixkit
