// Rows of KV from pages into tiles of shared memory.
//
// A tile of ROWS rows consists of blocks of 64 columns, 128 bytes a row, with the 128-byte swizzle of TMA, wgmma and
// conflict-free ldmatrix: 16-byte vector c of row r lies at (c / 8) * ROWS * 128 + r * 128 + ((c ^ r) % 8) * 16.
//
// Rows come in groups of 16 tokens that begin at a multiple of 16 slots.  A complete group inside one page is one TMA
// load (Hopper), or 16-byte copies from one address; every other row is looked up by itself.
#pragma once
#include "attention/plan.cuh"

namespace prefixkit {

constexpr int GROUP = 16;
constexpr int COLUMNS = (D + 63) / 64, V_COLUMNS = (V_DIM + 63) / 64;
constexpr int STORED_COLUMNS = (WORDS + 63) / 64;  // column blocks of a row as pages hold it
constexpr bool EVEN = 32 % STORED_VECTORS == 0;  // a warp copies whole rows

template <int ROWS> DEVICE u32 vector_at(int row, int column) {
    return (column >> 3) * (ROWS * 128) + row * 128 + (((column ^ row) & 7) << 4);
}

// Addresses for ldmatrix in a tile of ROWS rows: of row `row`, from vector `column` (0 or 1) on, in steps of 16
// columns.
template <int ROWS> struct MatrixRow {
    u32 base, swizzle;

    DEVICE MatrixRow(u32 tile, int row, int column) : base(tile + row * 128), swizzle(((column ^ row) & 7) << 4) {}
    DEVICE u32 at(int i) const { return base + (i / 4) * (ROWS * 128) + (swizzle ^ ((2 * i & 7) << 4)); }
};

// Whether each group of 16 slots lies in one page.
DEVICE bool pages_are_aligned(const Attention& a) {
    return a.page_size % GROUP == 0 && (a.page_size & (a.page_size - 1)) == 0;
}
// Whether groups can be copied whole; on Hopper the host decides, because TMA copies them.
DEVICE bool holds_groups(const Attention& a) {
    return PREFIXKIT_MAPS ? a.tma_groups : EVEN && pages_are_aligned(a) && a.slot_stride == WORDS;
}
// The index of a slot's page, and the slot's place in that page; page sizes are powers of two here.
DEVICE int page_index(const Attention& a, int slot) { return slot >> (__ffs(a.page_size) - 1); }
DEVICE int place_in_page(const Attention& a, int slot) { return slot & (a.page_size - 1); }

// Copies a complete group in one page, whose slots lie `stride` elements apart, to the tile's rows from `to` on.
template <int ROWS> DEVICE void copy_group(u32 to, const u16* from, long long stride) {
    // A warp copies BLOCK vectors of STEP rows at a time; BLOCK is the largest power of two that divides a row.
    constexpr int BLOCK = STORED_VECTORS & -STORED_VECTORS, STEP = 32 / BLOCK;
    const int lane = lane_anew(), column = lane % BLOCK, sub = lane / BLOCK;
    const u32 base = to + (column >> 3) * (ROWS * 128) + sub * 128, swizzle = ((column ^ sub) & 7) << 4;
    from += sub * stride + column * 8;
    if (STEP > GROUP && sub >= GROUP) return;
#pragma unroll
    for (int row = 0; row < GROUP; row += STEP)
#pragma unroll
        for (int c = 0; c < STORED_VECTORS; c += BLOCK)
            copy16(base + (c >> 3) * (ROWS * 128) + row * 128 + (swizzle ^ (((row ^ c) & 7) << 4)),
                   from + row * stride + c * 8, true);
}

// Copies tokens [low, high) of the group at `slot` of a node whose first page has index `pages`; the other rows become
// zero.  Lane i (and i + 16) looks up where row i begins.
template <int ROWS>
DEVICE void gather_rows(
    const Attention& a, const u16* base, u32 to, int pages, int slot, int low, int high, int head) {
    const int lane = lane_anew(), token = lane & 15;
    const bool mine = token >= low && token < high;
    const u32 index = u32(slot + token) / u32(a.page_size);
    const int page = mine ? a.pages[pages + index] : 0;
    const u32 begin = mine ? row_of(a, page, slot + token - index * a.page_size, head) : 0;
    const u32 present = __ballot_sync(~0u, mine);
    constexpr int VECTORS = GROUP * STORED_VECTORS;
#pragma unroll 1
    for (int i = lane; i < (VECTORS + 31) / 32 * 32; i += 32) {
        const int row = i / STORED_VECTORS, column = i % STORED_VECTORS;
        const long long from = __shfl_sync(~0u, begin, row);
        if (VECTORS % 32 != 0 && i >= VECTORS) continue;  // all lanes shuffle
        copy16(to + vector_at<ROWS>(row, column), base + from * 8 + column * 8, present >> row & 1);
    }
}

}  // namespace prefixkit
