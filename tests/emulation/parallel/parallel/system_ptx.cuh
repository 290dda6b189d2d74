// Memory that two processes see, on the CPU.  Takes the place of csrc/parallel/system_ptx.cuh.
#pragma once
#include <map>
#include "common/ptx.cuh"

namespace prefixkit {
inline std::map<u32, u32> shared_words[emulation::BLOCKS];  // of a block, by address
inline int4 kept[emulation::BLOCKS][4096];
inline int4* block_memory() { return kept[emulation::process()]; }

inline void release_system(u32* to, u32 x) { emulation::linger(), *to = x; }
inline u32 acquire_system(const u32* from) { emulation::give_way(); return *from; }
inline void release_shared(u32 to, u32 x) { emulation::linger(), shared_words[emulation::process()][to] = x; }
inline u32 acquire_shared(u32 from) {
    emulation::give_way(), emulation::may_linger();
    return shared_words[emulation::process()][from];
}
inline void prefetch(const void*) {}
inline int4 load_system(const int4* from) { emulation::may_linger(); return *from; }
}  // namespace prefixkit
