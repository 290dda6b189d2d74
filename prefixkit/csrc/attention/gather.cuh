// Rows of KV from pages into tiles of shared memory.
//
// A tile of ROWS rows is kept in columns of 64 elements, 128 bytes a row, with the 128-byte swizzle that wgmma and conflict-free
// ldmatrix want: piece c (16 bytes) of row r lies at (c / 8) * ROWS * 128 + r * 128 + ((c ^ r) % 8) * 16.
//
// Rows come in groups of 16 tokens that begin at a multiple of 16 slots.  Where such a group lies in one page (page sizes that
// 16 divides) and is complete, it comes as a TMA box (Hopper), or its copies take one instruction and no arithmetic
// each; else every row is looked up.
#pragma once
#include "attention/plan.cuh"

namespace prefixkit {

constexpr int GROUP = 16;
constexpr int COLUMNS = (D + 63) / 64;
constexpr bool EVEN = 32 % ROW_VECTORS == 0;      // a warp copies whole rows

template <int ROWS> DEVICE u32 piece_at(int row, int kv_tile) {
    return (kv_tile >> 3) * (ROWS * 128) + row * 128 + (((kv_tile ^ row) & 7) << 4);
}

// Whether groups of 16 come as TMA boxes, which the host decides, or at least lie in one page each.
DEVICE bool by_boxes(const Attention& a) { return PREFIXKIT_MAPS && a.tma_groups; }
DEVICE bool holds_groups(const Attention& a) {
    if (PREFIXKIT_MAPS) return a.tma_groups;
    return EVEN && a.page_size % GROUP == 0 && (a.page_size & (a.page_size - 1)) == 0 && a.slot_stride == D;
}
// The page of a slot, and its place there; page sizes are powers of two here.
DEVICE int page_index(const Attention& a, int slot) { return slot >> (__ffs(a.page_size) - 1); }
DEVICE int place_in_page(const Attention& a, int slot) { return slot & (a.page_size - 1); }

// A complete group, whose row 0 begins at `from`.  `to`: row 0 of the group in the tile.
template <int ROWS> DEVICE void copy_group(u32 to, const u16* from) {
    constexpr int STEP = EVEN ? 32 / ROW_VECTORS : 1;  // rows at a time
    const int lane = lane_anew(), column = lane % ROW_VECTORS, sub = lane / ROW_VECTORS;
    const u32 base = to + (column >> 3) * (ROWS * 128) + sub * 128, turn = ((column ^ sub) & 7) << 4;
    from += sub * D + column * 8;
#pragma unroll
    for (int i = 0; i < GROUP / STEP; ++i) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(base + i * STEP * 128 + (turn ^ ((i * STEP & 7) << 4))),
                     "l"(from + i * STEP * D) : "memory");
    }
}

// Any 16 rows: lane i (and i + 16) knows where row i begins, in 16-byte vectors, and whether it is there; absent rows become zero.
template <int ROWS> DEVICE void copy_rows(u32 to, const u16* base, u32 row_begin, u32 present) {
    const int lane = lane_anew();
#pragma unroll 1
    for (int piece = lane; piece < GROUP * ROW_VECTORS; piece += 32) {
        const int row = piece / ROW_VECTORS, column = piece % ROW_VECTORS;
        const u32 begin = __shfl_sync(~0u, row_begin, row);
        copy16(to + piece_at<ROWS>(row, column), base + (long long)begin * 8 + column * 8, present >> row & 1);
    }
}

// Tokens [low, high) of the group at `slot`, the others zero.
template <int ROWS>
DEVICE void gather_rows(const Attention& a, const u16* base, u32 to, const Span& span, int slot, int low, int high, int head) {
    const int token = lane_anew() & 15;
    const bool mine = token >= low && token < high;
    const u32 index = u32(slot + token) / u32(a.page_size);
    const int page = mine ? a.pages[span.pages + index] : 0;
    const u32 begin = mine ? row_of(a, page, slot + token - index * a.page_size, head) : 0;
    copy_rows<ROWS>(to, base, begin, __ballot_sync(~0u, mine) & 0xffff);
}

}  // namespace prefixkit
