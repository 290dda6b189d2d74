// The instructions of clusters on the CPU.  Takes the place of csrc/sampling/sample_ptx.cuh.
#pragma once
#include "common/warp.cuh"

#define dynamic_shared (emulation::memory[prefixkit::cluster_rank()])

namespace prefixkit {
constexpr int THREADS = emulation::THREADS, WARPS = THREADS / 32;
inline int cluster_rank() { return emulation::current / THREADS; }
inline int cluster_size() { return emulation::blocks; }
inline void cluster_sync() { emulation::meet(emulation::cluster, emulation::blocks * THREADS); }
inline void cluster_arrive() {}
inline void cluster_wait() { cluster_sync(); }
template <class V> inline V* peer(V* p, int rank) {
    using Byte = std::conditional_t<std::is_const_v<V>, const char, char>;
    return (V*)((Byte*)p + (rank - cluster_rank()) * emulation::SHARED);
}

inline float max_nan(float a, float b) { return std::isnan(a) ? a : std::isnan(b) ? b : a < b ? b : a; }
inline void prefetch(const void*) {}
template <class V> inline float4 load4(const V* p) {
    return make_float4(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]));
}
}  // namespace prefixkit
