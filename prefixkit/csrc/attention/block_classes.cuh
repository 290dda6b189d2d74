// Classes of KV tiles under a variant's mask: those that it hides from all of an item's queries are not read, those that
// it shows to all are not compared.
//
// A class takes 2 bits of a word; classify_blocks.cu writes a row of `class_words` words for each item of both lists, tile
// items first.  An item's KV tiles are numbered along its segments, those of every segment that is not empty from a multiple
// of 16 slots on.  Where there are no words, or behind an item's last, classes come of the ranges of positions of queries
// and keys, if the masks can be known by these; else KV tiles are compared.
#pragma once
#include "attention/plan.cuh"

namespace prefixkit {

// For KV tiles with BITS it has also written which tokens each query sees: for a tile item's n-th KV tile of this class
// the bits number `n` behind the one that the last word of the item's row names, 2 words for each of up to `bit_rows`
// queries: 16 bits for each lane of a quad, whose tokens wgmma deals out in pairs (token_of_bit).  Kernels that read no
// bits compare such tiles.
enum BlockClass { HIDDEN = 0, COMPARED = 1, SHOWN = 2, BITS = 3 };
DEVICE int bit_rows(const Attention& a) { return max(1, divide_small(128, group_of(a))); }
// Behind the rows of all items: a counter of two words, then bits.
DEVICE u32* bits_counter(const Attention& a) {
    return (u32*)a.block_classes + (long long)(a.tile_capacity + a.decode_capacity) * a.class_words;
}
// Where the bits with a number begin, in words from the classes on.
DEVICE int bits_at(const Attention& a, int number) {
    return (a.tile_capacity + a.decode_capacity) * a.class_words + 2 + 2 * number * bit_rows(a);
}
// The token of bit `bit` of the first word; those of the second one are 4 tokens behind.
DEVICE constexpr int token_of_bit(int bit) { return 8 * (bit / 2 % 8) + 2 * (bit / 16) + bit % 2; }
// Brings the first classes of item `index` of both lists near, before the item is known.
DEVICE void touch_classes(const Attention& a, int index) {
    if (Variant::HAS_MASK && a.class_words) touch(a.block_classes + (long long)index * a.class_words);
}
constexpr int CLASSES_PER_WORD = 16;
constexpr u32 ALL_COMPARED = 0x55555555;

DEVICE int first_slot_of(const Span& span) { return span.slot & ~15; }
// KV tiles of `kv` tokens in a span.
DEVICE int tiles_of(const Span& span, int kv) {
    return span.slot < span.end ? (span.end - first_slot_of(span) + kv - 1) / kv : 0;
}

// An item's classes, as what walks over its KV tiles of KV tokens reads them: one KV tile after the other.
template <int KV, bool = Variant::HAS_MASK> struct BlockClasses {
    const u32* words;  // of the item
    int tile, behind;  // number of the next KV tile; of the first one behind the segment
    u32 word;          // with the class of the next KV tile
    QueryRange queries;
    int origin;        // the position of KV tile 0, counted back from the segment's first

    // Begins item `index` of both lists, whose first span this is.
    DEVICE void begin(const Attention& a, int index, const Span& span, QueryRange of) {
        words = a.block_classes + (long long)index * a.class_words, tile = 0, behind = tiles_of(span, KV);
        queries = of, origin = span.position + first_slot_of(span);
        look_up(a);
    }
    DEVICE void look_up(const Attention& a) {
        const int at = tile / CLASSES_PER_WORD;
        word = at < a.class_words - 1 ? words[at] : Variant::DECIDES ? decided(a, at) : ALL_COMPARED;
    }
    // Word `at` of KV tiles of this segment, a lane of each half warp for a KV tile.
    DEVICE u32 decided(const Attention& a, int at) const {
        const int lane = lane_anew(), mine = lane % CLASSES_PER_WORD;
        const int first = origin + (at * CLASSES_PER_WORD + mine) * KV;
        const Maybe shown = Variant::decide({queries.low, queries.high}, {first, first + KV - 1}, a.words);
        u32 found = u32(!shown.yes ? HIDDEN : shown.no ? COMPARED : SHOWN) << 2 * mine;
#pragma unroll
        for (int d = 1; d < CLASSES_PER_WORD; d <<= 1) found |= __shfl_xor_sync(0xffffu << (lane & 16), found, d);
        return found;
    }
    DEVICE int current() const { return word >> 2 * (tile % CLASSES_PER_WORD) & 3; }
    // Number of the bits of the item's first KV tile that has some.
    DEVICE int first_bits(const Attention& a) const { return a.class_words ? int(words[a.class_words - 1]) : 0; }
    // Of the KV tile `ahead` of the next one, in the same word.
    DEVICE int ahead(int count) const { return word >> 2 * ((tile + count) % CLASSES_PER_WORD) & 3; }
    DEVICE void step(const Attention& a, int count = 1) {
        tile += count;
        if (tile % CLASSES_PER_WORD == 0) look_up(a);
    }
    // How many KV tiles from the next one on, of `most`, are read; those of one word.
    DEVICE int run(int most) const {
        const u32 left = word >> 2 * (tile % CLASSES_PER_WORD);
        const u32 hidden = ~(left | left >> 1) & ALL_COMPARED;  // zeros that were shifted in count too
        return max(1, min(most, hidden ? (__ffs(hidden) - 1) / 2 : CLASSES_PER_WORD));
    }
    // The slot of the next KV tile that is read, from the next one, at `slot`, on; `end` or behind if there is none.
    DEVICE int next(const Attention& a, int slot, int end) {
        while (slot < end && current() == HIDDEN) {
            const u32 left = word >> 2 * (tile % CLASSES_PER_WORD);  // of this KV tile and those behind it in the word
            const int count = left ? (__ffs(left) - 1) / 2 : CLASSES_PER_WORD - tile % CLASSES_PER_WORD;
            tile += count, slot += count * KV;
            if (!left) look_up(a);
        }
        return slot;
    }
    // Passes to the next segment.
    DEVICE void enter(const Attention& a, const Span& span) {
        const int before = tile / CLASSES_PER_WORD;
        tile = behind, behind += tiles_of(span, KV), origin = span.position + first_slot_of(span) - tile * KV;
        if (Variant::DECIDES || tile / CLASSES_PER_WORD != before) look_up(a);
    }
    // Passes over a span's hidden KV tiles, and over empty spans and segments.
    DEVICE void skip(const Attention& a, Span& span, int& seg, const int& seg_end, const VisibleRange& range) {
        while (true) {
            if (span.slot < span.end && current() == HIDDEN) span.slot = next(a, first_slot_of(span), span.end);
            if (span.slot < span.end || seg >= seg_end) return;
            span = load_segment(a, seg++, range);
            enter(a, span);
        }
    }
};

// Without a mask all KV tiles are read, and none is compared for its sake.
template <int KV> struct BlockClasses<KV, false> {
    DEVICE void begin(const Attention&, int, const Span&, QueryRange) {}
    DEVICE int current() const { return SHOWN; }
    DEVICE int first_bits(const Attention&) const { return 0; }
    DEVICE int ahead(int) const { return SHOWN; }
    DEVICE void step(const Attention&, int = 1) {}
    DEVICE int run(int most) const { return most; }
    DEVICE int next(const Attention&, int slot, int) const { return slot; }
    DEVICE void skip(const Attention& a, Span& span, int& seg, const int& seg_end, const VisibleRange& range) const {
        skip_empty(a, span, seg, seg_end, range);
    }
};

}  // namespace prefixkit
