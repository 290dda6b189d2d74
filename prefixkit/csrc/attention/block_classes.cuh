// Classes of KV tiles under a variant's mask.  KV tiles that it hides from all of an item's queries are not read; KV
// tiles that it shows to all of them are not compared.
//
// A class takes 2 bits of a word.  classify_blocks.cu writes a row of `class_words` words for each item of both lists,
// tile items first.  An item's KV tiles are numbered along its segments; those of every segment that is not empty start
// at a multiple of 16 slots.  Where there are no words, classes follow from the position ranges of queries and keys, if
// the masks can be decided from these.  All other KV tiles without a class are compared.
#pragma once
#include "attention/plan.cuh"

namespace prefixkit {

// For KV tiles with BITS, classify_blocks also writes which tokens each query sees.  The bits of a tile item's KV tiles
// lie one after the other; the last word of the item's row says where they begin, in words from the start of the
// classes.  A KV tile has 2 words for each of up to `bit_rows` queries: 16 bits for each lane of a quad, in the pairs
// of tokens that wgmma gives the lane (token_of_bit).  Kernels that read no bits compare such tiles.
enum BlockClass { HIDDEN = 0, COMPARED = 1, SHOWN = 2, BITS = 3 };
DEVICE int bit_rows(const Attention& a) { return max(1, divide_small(128, group_of(a))); }
constexpr u32 NOTHING_VISIBLE = ~0u;  // the last word of an item's row
// After the rows of all items follow: how many KV tiles have bits; how many query rows have an item with visible
// tokens; how often a row had such an item already.  Then come the number of such items for each query row, and the
// bits.
enum ClassCounts { BIT_TILES, SEEN_ROWS, SEEN_AGAIN, CLASS_COUNTS = 4 };
DEVICE u32* class_counts(const Attention& a) {
    return (u32*)a.block_classes + (long long)(a.tile_capacity + a.decode_capacity) * a.class_words;
}
// Whether the masks leave every query row the tokens of only one item.  Items then write outputs themselves, those
// without visible tokens are left out, and nothing is merged.  classify_blocks counts only where the plan has something
// to merge.
DEVICE bool each_alone(const Attention& a) {
    if (!Variant::HAS_MASK || a.class_words == 0) return false;
    const u32* of = class_counts(a);
    const u32 again = of[SEEN_AGAIN], seen = of[SEEN_ROWS];  // loaded together: a test of one would wait for it
    return again == 0 && int(seen) == a.counts[2];
}
DEVICE bool is_merged(const Attention& a) { return a.counts[3] != 0 && !each_alone(a); }
// Item `index` of both lists, where each row sees one item: the item has no partial state, and may be left out.
struct LoneItem {
    bool alone, left_out;

    DEVICE LoneItem(const Attention& a, int index) {
        u32 last = 0;
        if (Variant::HAS_MASK && a.class_words) last = a.block_classes[(long long)(index + 1) * a.class_words - 1];
        alone = each_alone(a), left_out = alone && last == NOTHING_VISIBLE;
    }
};
// The token of bit `bit` of the first word; the tokens of the second word lie 4 further on.
DEVICE constexpr int token_of_bit(int bit) { return 8 * (bit / 2 % 8) + 2 * (bit / 16) + bit % 2; }
// Prefetches `words` words of the classes to the L2, by one lane; KV stays there longer than these do.
DEVICE void prefetch_classes(const Attention& a, int first, int words) {
    const int begin = first & ~3;
    prefetch_l2(a.block_classes + begin, u32(first + words - begin + 3) / 4 * 16);
}
constexpr int CLASSES_PER_WORD = 16, WORDS_AT_ONCE = 16, TILES_AT_ONCE = CLASSES_PER_WORD * WORDS_AT_ONCE;
constexpr u32 ALL_COMPARED = 0x55555555;

DEVICE int first_slot_of(const Span& span) { return span.slot & ~15; }
// The number of KV tiles of `kv` tokens in a span.
DEVICE int tiles_of(const Span& span, int kv) {
    return span.slot < span.end ? (span.end - first_slot_of(span) + kv - 1) / kv : 0;
}

// An item's classes, read by a walk over its KV tiles of KV tokens, one KV tile after the other.  `queries` returns the
// position range of the item's queries, where classes follow from it.
template <int KV, bool = Variant::HAS_MASK> struct BlockClasses {
    int words;  // where the item's words begin
    u32 tile;   // number of the next KV tile
    u32 word;   // the word with the class of the next KV tile
    u32 held;   // lane i of each half warp: word i of the 16 words among which `word` is

    // Begins item `index` of both lists; `skip` then finds its first KV tile.  In an item without tokens no mask is
    // compared.
    DEVICE void begin(const Attention& a, int index) {
        words = index * a.class_words, tile = 0;
        word = held = 0;
    }
    // Where the bits of the item's first KV tile with BITS lie.
    DEVICE int first_bits(const Attention& a) const {
        return a.class_words ? int(a.block_classes[words + a.class_words - 1]) : 0;
    }
    DEVICE u32 place() const { return 2 * (tile % CLASSES_PER_WORD); }
    DEVICE int current() const { return word >> place() & 3; }
    // The class of the KV tile `count` after the next one, in the same word.
    DEVICE int ahead(int count) const { return word >> 2 * ((tile + count) % CLASSES_PER_WORD) & 3; }
    // How many KV tiles are read in a row from the next one on, at most `most`, within one word.
    DEVICE int run(int most) const {
        const u32 left = word >> place();
        const u32 hidden = ~(left | left >> 1) & ALL_COMPARED;  // zeros that were shifted in count too
        return max(1, min(most, hidden ? (__ffs(hidden) - 1) / 2 : CLASSES_PER_WORD));
    }
    // Advances by `count` KV tiles; then `next` or `skip` finds the next one.
    DEVICE void step(int count = 1) { tile += count; }
    // Advances by `count` KV tiles from the one at `slot` on, or by those that are left; returns the slot after them.
    DEVICE int jump(int count, int slot, int end) {
        count = min(count, (end - slot + KV - 1) / KV);
        tile += count;
        return slot + count * KV;
    }
    // The slot of the next KV tile that is read, from `slot` on; the span's end or later if there is none.
    template <class Queries>
    DEVICE int next(const Attention& a, const Span& span, int slot, Queries queries, bool entered = false) {
        for (; slot < span.end; entered = false) {
            if (entered || tile % CLASSES_PER_WORD == 0) slot = look_up(a, span, slot, queries, entered);
            const u32 left = word >> place();  // of this KV tile and those after it in the word
            if (left & 3) break;
            slot = jump(left ? (__ffs(left) - 1) / 2 : CLASSES_PER_WORD - tile % CLASSES_PER_WORD, slot, span.end);
        }
        return slot;
    }
    // Finds the word of the KV tile at `slot`.  If that KV tile is the first of its word, words in which all are hidden
    // are passed over.  Returns the slot that is reached.  16 words are read at once.
    template <class Queries>
    DEVICE int look_up(const Attention& a, const Span& span, int slot, Queries queries, bool entered) {
        if (Variant::DECIDES && a.class_words == 0) {
            word = decided(a, span.position + slot, queries());
            return slot;
        }
        const int lane = lane_anew(), half = lane & 16, mine = lane % WORDS_AT_ONCE;
        if (entered || tile % TILES_AT_ONCE == 0) {
            const int at = int(tile / TILES_AT_ONCE) * WORDS_AT_ONCE + mine;
            const int behind = (tile + (span.end - slot + KV - 1) / KV + CLASSES_PER_WORD - 1) / CLASSES_PER_WORD;
            held = at >= behind ? 0 : at < a.class_words - 1 ? a.block_classes[words + at] : ALL_COMPARED;
        }
        const u32 place = tile / CLASSES_PER_WORD % WORDS_AT_ONCE, lanes = 0xffffu << half;
        const u32 found = (__ballot_sync(lanes, held != 0) >> half & 0xffff) >> place;
        int count = found ? __ffs(found) - 1 : WORDS_AT_ONCE - 1 - place;
        if (tile % CLASSES_PER_WORD) count = 0;
        word = __shfl_sync(lanes, held, place + count + half);
        return jump(count * CLASSES_PER_WORD, slot, span.end);
    }
    // Decides the classes in the word of the next KV tile, which is at `position`; each lane of a half warp decides
    // one.
    DEVICE u32 decided(const Attention& a, int position, QueryRange queries) const {
        const int lane = lane_anew(), mine = lane % CLASSES_PER_WORD;
        const int first = position + (mine - int(tile % CLASSES_PER_WORD)) * KV;
        const Maybe shown = Variant::decide({queries.low, queries.high}, {first, first + KV - 1}, a.words);
        u32 found = u32(!shown.yes ? HIDDEN : shown.no ? COMPARED : SHOWN) << 2 * mine;
#pragma unroll
        for (int d = 1; d < CLASSES_PER_WORD; d <<= 1) found |= __shfl_xor_sync(0xffffu << (lane & 16), found, d);
        return found;
    }
    // Passes over a span's hidden KV tiles, and over empty spans and segments.  `entered`: no KV tile of the span has
    // been read yet.
    template <class Queries> DEVICE void skip(const Attention& a, Span& span, int& seg, const int& seg_end,
                                              const VisibleRange& range, Queries queries, bool entered) {
        while (true) {
            if (span.slot < span.end) {  // an empty span may end past the multiple of 16 before its slot
                const int slot = first_slot_of(span), found = next(a, span, slot, queries, entered);
                if (found != slot) span.slot = found;
            }
            if (span.slot < span.end || seg >= seg_end) return;
            span = load_segment(a, seg++, range), entered = true;
        }
    }
};

// Without a mask, all KV tiles are read, and none is compared because of a mask.
template <int KV> struct BlockClasses<KV, false> {
    DEVICE void begin(const Attention&, int) {}
    DEVICE int first_bits(const Attention&) const { return 0; }
    DEVICE int current() const { return SHOWN; }
    DEVICE int ahead(int) const { return SHOWN; }
    DEVICE int run(int most) const { return most; }
    DEVICE void step(int = 1) {}
    template <class Queries> DEVICE int next(const Attention&, const Span&, int slot, Queries) const { return slot; }
    template <class Queries> DEVICE void skip(const Attention& a, Span& span, int& seg, const int& seg_end,
                                              const VisibleRange& range, Queries, bool) const {
        skip_empty(a, span, seg, seg_end, range);
    }
};

}  // namespace prefixkit
