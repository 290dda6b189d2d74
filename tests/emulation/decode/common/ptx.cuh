// Hopper's decode path on the CPU: shared memory as an array, barriers, products of a warp, and TMA loads that land in
// any order.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 192
#define EMULATED_BLOCKS 1
#include "fibers.cuh"
#include <cstdlib>
#include <map>
#include <vector>

struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float __int_as_float(unsigned x) { return emulation::as<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulation::as<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulation::as<unsigned>(x); }
static inline int __float_as_int(float x) { return emulation::as<int>(x); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    const uint64_t bytes = a | uint64_t(b) << 32;
    unsigned x = 0;
    for (int i = 0; i < 4; ++i) x |= unsigned(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return x;
}
static inline bool __any_sync(unsigned, bool mine) { return __ballot_sync(~0u, mine) != 0; }
static inline bool __all_sync(unsigned, bool mine) { return __ballot_sync(~0u, mine) == ~0u; }
struct Dim { int x; };
static Dim blockIdx, gridDim;
struct Thread { struct { operator unsigned() const { return emulation::current; } } x; };
static Thread threadIdx;

#include "numbers.cuh"
#include "products.cuh"

namespace prefixkit {
#ifndef PREFIXKIT_HALF
#define PREFIXKIT_HALF 0
#endif
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define MINUS_INFINITY (-INFINITY)

static unsigned char memory[384 * 1024];     // shared memory, by address
DEVICE unsigned char* at_address(u32 a) { if (a >= sizeof(memory)) std::abort(); return memory + a; }
DEVICE int lane_anew() { return emulation::current % 32; }
DEVICE u32 shared_address(const void* p) { return u32((const unsigned char*)p - memory); }
DEVICE u32 swizzled(u32 a) { return a ^ (a >> 7 & 7) << 4; }

// ---- barriers: threads arrive, bytes land ----
struct Barrier { int count = 0, pending = 0; long long bytes = 0; u32 phase = 0; };
static std::map<u32, Barrier> barriers;
DEVICE void end_phase(Barrier& b) { if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1; }
DEVICE void barrier_init(u32 a, u32 count) { barriers[a] = Barrier{int(count), int(count), 0, 0}; }
DEVICE void barrier_arrive(u32 a) { Barrier& b = barriers.at(a); if (--b.pending < 0) std::abort(); end_phase(b); }
DEVICE void barrier_arrive_expect(u32 a, u32 bytes) { barriers.at(a).bytes += bytes; barrier_arrive(a); }
DEVICE void bytes_landed(u32 a, u32 bytes) {
    Barrier& b = barriers.at(a);
    if ((b.bytes -= bytes) < 0) std::abort();
    end_phase(b);
}
static long long spins;
void land_one();
DEVICE void barrier_wait(u32 a, u32 parity) {
    while (barriers.at(a).phase == parity) {
        if (++spins > 20000000) std::abort();   // a deadlock
        land_one();
        emulation::give_way();
    }
}

DEVICE bool barrier_ended(u32 a, u32 parity) {
    land_one();
    return __all_sync(~0u, barriers.at(a).phase != parity);
}

// Threads that wait for each other.
template <int ID, int THREADS> DEVICE void named_barrier() {
    static int arrived = 0, turns = 0;
    const int turn = turns;
    if (++arrived == THREADS) arrived = 0, ++turns;
    while (turns == turn) {
        if (++spins > 20000000) std::abort();
        emulation::give_way();
    }
}

// ---- copies ----
struct FakeMap { const u16* base; long long size[5], stride[5]; int box[5]; };  // elements, innermost first
// Loads land in any order, some time after they are issued.
struct Flying { u32 to; FakeMap map; int at[5]; u32 barrier; };
static std::vector<Flying> flying;
DEVICE void land(const Flying& f) {
    const auto& [to, m, at, barrier] = f;
    const int total = m.box[0] * m.box[1] * m.box[2] * m.box[3] * m.box[4];
    if (to % 128) std::abort();
    int of_box[5] = {};  // the element in the box, innermost first
    for (int e = 0; e < total; ++e) {
        long long from = 0;
        bool there = true;
        for (int d = 0; d < 5; ++d) {
            const long long x = at[d] + of_box[d];
            there = there && x >= 0 && x < m.size[d], from += x * m.stride[d];
        }
        for (int d = 0; d < 5 && ++of_box[d] == m.box[d]; ++d) of_box[d] = 0;
        const u16 value = there ? m.base[from] : 0;
        std::memcpy(at_address(swizzled(to + 2 * e)), &value, 2);
    }
    bytes_landed(barrier, 2 * total);
}
inline void land_one() {
    if (flying.empty() || std::rand() % 4) return;
    const size_t one = std::rand() % flying.size();
    const Flying f = flying[one];
    flying.erase(flying.begin() + one);
    land(f);
}
DEVICE void tma_copy_of(u32 to, const void* map, const int (&at)[5], u32 barrier) {
    Flying f{to, {}, {at[0], at[1], at[2], at[3], at[4]}, barrier};
    std::memcpy(&f.map, map, sizeof(f.map));
    flying.push_back(f);
}
DEVICE void tma_copy(u32 to, const void* map, int x, int y, int z, int w, u32 barrier, u64) {
    tma_copy_of(to, map, {x, y, z, w, 0}, barrier);
}
DEVICE void tma_copy(u32 to, const void* map, int x, int y, int z, int w, int v, u32 barrier, u64) {
    tma_copy_of(to, map, {x, y, z, w, v}, barrier);
}
// Copies of 16 bytes land when their thread waits for them, no earlier.
struct Copy { u32 to; const void* from; bool valid; };
static std::vector<std::vector<Copy>> copies[EMULATED_THREADS];  // in groups; the last one is open
DEVICE std::vector<std::vector<Copy>>& copies_of_thread() {
    auto& groups = copies[emulation::current];
    if (groups.empty()) groups.emplace_back();
    return groups;
}
DEVICE void copy16(u32 to, const void* from, bool valid) { copies_of_thread().back().push_back({to, from, valid}); }
DEVICE void copy_commit() { copies_of_thread().emplace_back(); }
template <int PENDING> DEVICE void copy_wait() {
    auto& groups = copies_of_thread();
    for (; groups.size() > PENDING + 1; groups.erase(groups.begin()))
        for (const Copy& c : groups.front()) {
            if (c.valid) std::memcpy(at_address(c.to), c.from, 16);
            else std::memset(at_address(c.to), 0, 16);
        }
}
DEVICE u64 policy_stream() { return 0; }
DEVICE u64 policy_keep() { return 0; }
DEVICE void prefetch_l2(const void* p, u32 bytes) {
    if (uintptr_t(p) % 16 || bytes % 16 || bytes == 0) std::abort();
    volatile char x = *(const char*)p;
    (void)x;
}
DEVICE void store_zeros(u32 to) { std::memset(at_address(to), 0, 16); }
template <class T> DEVICE T load_address(u32 a) { T x; std::memcpy(&x, at_address(a), sizeof(x)); return x; }
DEVICE int4 load_shared_int4(u32 a) { return load_address<int4>(a); }
DEVICE void store_shared16(u32 to, int4 x) { std::memcpy(at_address(to), &x, 16); }
DEVICE int load_shared_int(u32 a) { return load_address<int>(a); }
DEVICE void store_shared_int(u32 to, int x) { std::memcpy(at_address(to), &x, 4); }
DEVICE u32 swap_shared(u32 a, u32 from, u32 to) {
    const u32 x = load_address<u32>(a);
    if (x == from) store_shared_int(a, to);
    return x;
}
DEVICE u32 read_shared_word(u32 from) { return load_address<u32>(from); }
DEVICE void write_shared_word(u32 to, u32 x) { std::memcpy(at_address(to), &x, 4); }
DEVICE void rest_a_little() { emulation::give_way(); }
constexpr u32 WARP_ARRIVALS = 1;
DEVICE void barrier_arrive_elected(u32 a) {
    if (lane_anew() == 0) barrier_arrive(a);
}
DEVICE void barrier_arrive_warp(u32 a) {
    __syncwarp();
    barrier_arrive_elected(a);
}
DEVICE bool elected() { return lane_anew() == 0; }
DEVICE u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }
DEVICE void async_fence() {}
DEVICE void fence_device() {}
DEVICE u32 load_acquire(const u32* p) { return *p; }
DEVICE float4 load_global(const float* p) { return {p[0], p[1], p[2], p[3]}; }
DEVICE float load_global1(const float* p) { return *p; }
DEVICE u32 kept(u32 x) { return x; }

// ---- numbers ----
DEVICE u32 scaled_pair(u32 x, u32 factor) {
    const float by = widen(Operand{u16(factor)});
    return pack<Operand>(widen(Operand{u16(x)}) * by, widen(Operand{u16(x >> 16)}) * by);
}
DEVICE void store_two(float* to, float x, float y) { to[0] = x, to[1] = y; }
DEVICE void store_two(u16* to, float x, float y) { *(u32*)to = pack(x, y); }
DEVICE void store_four(float* to, const float4& x) { *(float4*)to = x; }
DEVICE void store_four(u16* to, const float4& x) { store_two(to, x.x, x.y), store_two(to + 2, x.z, x.w); }
DEVICE u32 pack_rounded(float low, float high) { return pack<Operand>(low, high); }
DEVICE void round_pair(float& low, float& high) {
    const u32 x = pack<Operand>(low, high);
    low = widen(Operand{u16(x)}), high = widen(Operand{u16(x >> 16)});
}
DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float log2_fast(float x) { return std::log2(x); }
DEVICE float log2_rounded(float x) { return std::log2(x); }
DEVICE float reciprocal(float x) { return 1.f / x; }
DEVICE int divide_small(int a, int b) { return a / b; }

// ---- products of a warp, whose lanes hold what the PTX manual says ----
struct Lanes {
    uint64_t of[32];
    DEVICE u32 operator()(int lane, int high = 0) const { return u32(of[lane] >> 32 * high); }
};
DEVICE Lanes of_lanes(u32 low, u32 high = 0) {
    Lanes copy;
    std::memcpy(copy.of, emulation::exchange(low | uint64_t(high) << 32), sizeof(copy.of));
    return copy;
}
DEVICE u32 half_of(u32 x, int high) { return high ? x >> 16 : x & 0xffff; }
// Lane i says where row i % 8 of matrix i / 8 is.
DEVICE void load_matrix(u32 (&a)[4], u32 address) {
    const Lanes rows = of_lanes(address);
    for (int i = 0; i < 4; ++i) a[i] = load_address<u32>(rows(8 * i + lane_anew() / 4) + 4 * (lane_anew() % 4));
}
DEVICE void load_matrix_transposed(u32 (&a)[4], u32 address) {
    const Lanes rows = of_lanes(address);
    const int column = lane_anew() / 4, row = 2 * (lane_anew() % 4);
    for (int i = 0; i < 4; ++i) {
        const u32 low = load_address<u16>(rows(8 * i + row) + 2 * column);
        a[i] = low | u32(load_address<u16>(rows(8 * i + row + 1) + 2 * column)) << 16;
    }
}
DEVICE u32 transpose8(u32 x) {
    const Lanes all = of_lanes(x);
    const int column = lane_anew() / 4, row = 2 * (lane_anew() % 4);
    return half_of(all(4 * row + column / 2), column % 2) | half_of(all(4 * (row + 1) + column / 2), column % 2) << 16;
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<Operand>(d, a, b0, b1); }
}  // namespace prefixkit
#define fmaxf(...) std::fmax(__VA_ARGS__)
