// Classes of KV tiles under a variant's mask (block_classes.cuh), for every item of a plan.
//
// shapes     items of up to 128 queries, KV tiles of PREFIXKIT_KV_TILE tokens (tile items) and 16 (decode items).
// tiling     a block takes an item, a warp a word of 16 KV tiles, two lanes one KV tile: each evaluates the mask for every
//            query and every second token, until it has seen a hidden and a visible one.
// cost       queries x tokens evaluations of the mask for each item, of all heads if it reads them; bytes are few.
// limits     KV tiles behind an item's `class_words` words get no class.
#include "attention/block_classes.cuh"

namespace prefixkit {

constexpr int CLASSIFY_WARPS = 8, DECODE_KV = 16;

// Slots [low, high) of a KV tile, and the position of slot 0.
struct Block { int low, high, position; };

// KV tile `tile` of an item; false behind its last.
DEVICE bool find_block(const Attention& a, const Item& item, const VisibleRange& range, int kv, int tile, Block& found) {
    Span span = load_span(a, item.node, item.begin, item.end, range);
    for (int seg = item.seg_begin + 1;; span = load_segment(a, seg++, range)) {
        const int tiles = tiles_of(span, kv);
        if (tile < tiles) {
            const int slot = first_slot_of(span) + tile * kv;
            found = {max(slot, span.slot), min(slot + kv, span.end), span.position};
            return true;
        }
        tile -= tiles;
        if (seg >= item.seg_end) return false;
    }
}

// What one lane finds in its half of a KV tile: bit 0, a visible pair; bit 1, a hidden one.
DEVICE int look(const Attention& a, const Item& item, const Block& block, int half) {
    int seen = 0;
    for (int row = item.q_begin; row < item.q_end && seen != 3; ++row) {
        const int q = int(a.q_positions[row]), b = sequence_of(a, row);
        // Tokens behind are hidden whatever the mask says, and are no matter to the class.
        const int end = end_seen(a, item.kind, item.q_begin, item.partial, row - item.q_begin) - block.position;
        for (int slot = block.low + half; slot < min(block.high, end); slot += 2) {
            const int kv = block.position + slot;
            for (int h = 0; h < (Variant::READS_HEAD ? a.heads : 1); ++h)
                seen |= Variant::mask(b, h, q, kv, a.words) ? 1 : 2;
        }
    }
    return seen;
}

extern "C" __global__ void __launch_bounds__(32 * CLASSIFY_WARPS) classify_blocks(const __grid_constant__ Attention a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int index = blockIdx.x; index < a.tile_capacity + a.decode_capacity; index += gridDim.x) {
        const bool decodes = index >= a.tile_capacity;
        const int number = decodes ? index - a.tile_capacity : index, kv = decodes ? DECODE_KV : PREFIXKIT_KV_TILE;
        if (number >= a.counts[decodes]) continue;
        const Item item = load_item(decodes ? a.decode_items : a.tile_items, number, 1, number + 1);
        const VisibleRange range = visible_range(a, item, query_range(a, item).low);
        u32* words = (u32*)a.block_classes + (long long)index * a.class_words;
        bool reads = false;
        u32 first = 0;
        for (int at = warp; at < a.class_words; at += CLASSIFY_WARPS) {
            Block block;
            const bool there = find_block(a, item, range, kv, at * CLASSES_PER_WORD + lane / 2, block);
            int seen = there ? look(a, item, block, lane & 1) : 0;
            seen |= __shfl_xor_sync(~0u, seen, 1);
            const u32 found = !(seen & 1) ? HIDDEN : seen & 2 ? COMPARED : SHOWN;
            u32 word = found << (lane & ~1);
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) word |= __shfl_xor_sync(~0u, word, d);
            reads = reads || word;
            if (at == 0) first = word;
            if (lane == 0 && at > 0) words[at] = word;
            if (!__any_sync(~0u, there)) break;
        }
        // An item of which nothing is visible reads one KV tile all the same: its rows come out empty.
        reads = __syncthreads_or(reads);
        if (threadIdx.x == 0) words[0] = reads ? first : u32(COMPARED);
        __syncthreads();
    }
}

}  // namespace prefixkit
