// Classes of KV tiles under a variant's mask (block_classes.cuh), for every item of a plan.
//
// shapes     items of up to 128 queries, KV tiles of PREFIXKIT_KV_TILE tokens (tile items) and 16 (decode items).
// tiling     a block takes one item, a warp one word of 16 KV tiles, and two lanes one KV tile: each lane evaluates the
//            mask for every query and every second token, until it has seen a hidden and a visible pair.
// cost       queries x tokens evaluations of the mask for each item, times the heads if the mask reads them; few bytes.
//            Where no mask reads heads, a warp then writes bits for the compared KV tiles of tile items, two tokens for
//            each lane.
// limits     KV tiles past the last word of an item get no class.  An item whose bits do not fit gets none.
#include "attention/block_classes.cuh"

namespace prefixkit {

constexpr int CLASSIFY_WARPS = 8, DECODE_KV = 16;

// Slots [low, high) of a KV tile that begins at slot `begin`, and the position of slot 0.
struct Block { int begin, low, high, position; };

// Finds KV tile `tile` of an item; returns false past its last.
DEVICE bool find_block(
    const Attention& a, const Item& item, const VisibleRange& range, int kv, int tile, Block& found) {
    Span span = load_span(a, item.node, item.begin, item.end, range);
    for (int seg = item.seg_begin + 1;; span = load_segment(a, seg++, range)) {
        const int tiles = tiles_of(span, kv);
        if (tile < tiles) {
            const int slot = first_slot_of(span) + tile * kv;
            found = {slot, max(slot, span.slot), min(slot + kv, span.end), span.position};
            return true;
        }
        tile -= tiles;
        if (seg >= item.seg_end) return false;
    }
}

// What one lane finds in its half of a KV tile.  Bit 0: a visible pair (query, token); bit 1: a hidden pair.
DEVICE int look(const Attention& a, const Item& item, const Block& block, int half) {
    int seen = 0;
    for (int row = item.q_begin; row < item.q_end && seen != 3; ++row) {
        const int q = int(a.q_positions[row]), b = sequence_of(a, row);
        // Tokens from `end` on are hidden whatever the mask returns, and do not affect the class.
        const int end = end_seen(a, item.kind, item.q_begin, item.partial, row - item.q_begin) - block.position;
        for (int slot = block.low + half; slot < min(block.high, end); slot += 2) {
            const int kv = block.position + slot;
            for (int h = 0; h < (Variant::READS_HEAD ? a.heads : 1); ++h)
                seen |= Variant::mask(b, h, q, kv, a.words) ? 1 : 2;
        }
    }
    return seen;
}

// Where the bits with index `number` begin, in words from the start of the classes.
DEVICE int bits_at(const Attention& a, int number) {
    const int counts = CLASS_COUNTS + (a.rows + 1) / 2 * 2;
    return (a.tile_capacity + a.decode_capacity) * a.class_words + counts + 2 * number * bit_rows(a);
}

// Counts the item's rows as rows with visible tokens, by all threads.  Rows of items with limits count as seen again,
// because they need their partial rows.
DEVICE void count_rows(const Attention& a, const Item& item) {
    u32* const counts = class_counts(a);
    for (int row = item.q_begin + threadIdx.x; row < item.q_end; row += 32 * CLASSIFY_WARPS) {
        const bool again = atomicAdd(counts + CLASS_COUNTS + row, 1u) > 0 || item.kind == LIMIT;
        atomicAdd(counts + (again ? SEEN_AGAIN : SEEN_ROWS), 1u);
    }
}

constexpr bool WRITES_BITS = PREFIXKIT_KV_TILE == 64 && !Variant::READS_HEAD;
DEVICE u32 compared_in(u32 word) { return word & ~(word >> 1) & ALL_COMPARED; }

// Writes which tokens of a KV tile each query of an item sees under the masks; by all lanes of a warp.
DEVICE void write_block(const Attention& a, const Item& item, const Block& block, uint2* to) {
    const int lane = threadIdx.x & 31;
    for (int row = item.q_begin; row < item.q_end; ++row, ++to) {
        const int q = int(a.q_positions[row]), b = sequence_of(a, row);
        const int kv = block.position + block.begin + token_of_bit(lane);
        const u32 x = __ballot_sync(~0u, kv >= 0 && Variant::mask(b, 0, q, kv, a.words));
        const u32 y = __ballot_sync(~0u, kv + 4 >= 0 && Variant::mask(b, 0, q, kv + 4, a.words));
        if (lane == 0) *to = make_uint2(x, y);
    }
}

// Writes the bits of an item's compared KV tiles and sets their class to BITS, if the bits of all of them fit; by all
// warps.  `used`: the number of words up to the last one that this warp has looked at.
DEVICE void write_bits(const Attention& a, const Item& item, const VisibleRange& range, u32* words, int used) {
    __shared__ int most, tiles, base;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) most = tiles = 0;
    __syncthreads();
    if (lane == 0) atomicMax(&most, used);
    __syncthreads();
    for (int at = threadIdx.x; at < most; at += 32 * CLASSIFY_WARPS) {
        const u32 compared = compared_in(words[at]);
        if (compared) atomicAdd(&tiles, __popc(compared));
    }
    __syncthreads();
    if (threadIdx.x == 0) base = int(atomicAdd(class_counts(a) + BIT_TILES, u32(tiles)));
    __syncthreads();
    if (tiles == 0 || (long long)(base + tiles) * bit_rows(a) * 2 > a.bits_capacity) return;
    int rank = 0;
    for (int at = 0; at < most; ++at) {
        for (u32 left = compared_in(words[at]); left; left &= left - 1, ++rank) {
            if (rank % CLASSIFY_WARPS != warp) continue;
            Block block;
            const int tile = at * CLASSES_PER_WORD + (__ffs(left) - 1) / 2;
            if (find_block(a, item, range, PREFIXKIT_KV_TILE, tile, block))
                write_block(a, item, block, (uint2*)(a.block_classes + bits_at(a, base + rank)));
        }
    }
    __syncthreads();  // all warps have read the words
    for (int at = threadIdx.x; at < most; at += 32 * CLASSIFY_WARPS) words[at] |= compared_in(words[at]) << 1;
    if (threadIdx.x == 0) words[a.class_words - 1] = u32(bits_at(a, base));
}

extern "C" __global__ void __launch_bounds__(32 * CLASSIFY_WARPS) classify_blocks(const __grid_constant__ Attention a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int index = blockIdx.x; index < a.tile_capacity + a.decode_capacity; index += gridDim.x) {
        const bool decodes = index >= a.tile_capacity;
        const int number = decodes ? index - a.tile_capacity : index, kv = decodes ? DECODE_KV : PREFIXKIT_KV_TILE;
        u32* words = (u32*)a.block_classes + (long long)index * a.class_words;
        if (number >= a.counts[decodes]) {
            if (threadIdx.x == 0) words[a.class_words - 1] = 0;  // attention reads it before it knows the counts
            continue;
        }
        const Item item = load_item(decodes ? a.decode_items : a.tile_items, number, 1, number + 1);
        const VisibleRange range = visible_range(a, item, query_range(a, item).low);
        bool reads = false;
        u32 first = 0;
        int used = 1;  // words up to this warp's last one
        for (int at = warp; at < a.class_words - 1; at += CLASSIFY_WARPS) {
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
            used = at + 1;
        }
        // An item without visible tokens still reads one KV tile; its rows come out empty.
        reads = __syncthreads_or(reads);
        if (threadIdx.x == 0) {
            words[0] = reads ? first : u32(COMPARED);
            words[a.class_words - 1] = reads ? 0 : NOTHING_VISIBLE;
        }
        if (WRITES_BITS && reads && !decodes) write_bits(a, item, range, words, used);
        if (reads && a.counts[3] != 0) count_rows(a, item);
        __syncthreads();
    }
}

}  // namespace prefixkit
