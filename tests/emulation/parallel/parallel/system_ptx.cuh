// Memory that two processes see, on the CPU.  Takes the place of csrc/parallel/system_ptx.cuh.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {
inline u32 shared_word[emulation::BLOCKS];  // all that a block shares

inline void release_system(u32* to, u32 x) { emulation::linger(), *to = x; }
inline u32 acquire_system(const u32* from) { emulation::give_way(); return *from; }
inline void release_shared(u32, u32 x) { emulation::linger(), shared_word[emulation::process()] = x; }
inline u32 acquire_shared(u32) {
    emulation::give_way(), emulation::may_linger();
    return shared_word[emulation::process()];
}
inline int4 load_system(const int4* from) { emulation::may_linger(); return *from; }
}  // namespace prefixkit
