// KV from pages into shared memory by TMA: boxes of 64 columns, of 16 rows or of one, with the 128-byte swizzle.
#pragma once
#include "attention/gather.cuh"

namespace prefixkit {

// One row of a node, as a TMA box of its own; zeros, which lie outside every tensor, where it is not `there`.
DEVICE void copy_row(const Attention& a, const TensorMap* map, u32 to, const Span& span, int slot, bool there, int head, int column, u32 barrier, u64 policy) {
    const u32 index = there ? u32(slot) / u32(a.page_size) : 0;
    const int page = there ? a.pages[span.pages + index] : -1;
    tma_copy(to, map, column * 64, slot - index * a.page_size, head, page, barrier, policy);
}

}  // namespace prefixkit
