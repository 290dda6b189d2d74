// Classes of KV tiles under a variant's mask: those that it hides from all of an item's queries are not read, those that
// it shows to all are not compared.
//
// A class takes 2 bits of a word; classify_blocks.cu writes `class_words` words for each item of both lists, tile items
// first.  An item's KV tiles are numbered along its segments, those of every segment that is not empty from a multiple
// of 16 slots on.  KV tiles without a class, behind an item's last word, are compared.
#pragma once
#include "attention/plan.cuh"

namespace prefixkit {

enum BlockClass { HIDDEN = 0, COMPARED = 1, SHOWN = 2 };
constexpr int CLASSES_PER_WORD = 16;

DEVICE int first_slot_of(const Span& span) { return span.slot & ~15; }
// KV tiles of `kv` tokens in a span.
DEVICE int tiles_of(const Span& span, int kv) {
    return span.slot < span.end ? (span.end - first_slot_of(span) + kv - 1) / kv : 0;
}

// An item's classes, as what walks over its KV tiles of KV tokens reads them.
template <int KV, bool = Variant::HAS_MASK> struct BlockClasses {
    int index;   // of the item in both lists
    int base;    // number of the segment's first KV tile
    int origin;  // its first slot
    int tiles;   // of the segment
    int at;      // number of the word in `word`
    u32 word;

    // Begins an item whose first span this is.
    DEVICE void begin(int item, const Span& span) {
        index = item, base = 0, at = -1, origin = first_slot_of(span), tiles = tiles_of(span, KV);
    }
    // Passes to the next segment.
    DEVICE void enter(const Span& span) { base += tiles, origin = first_slot_of(span), tiles = tiles_of(span, KV); }
    DEVICE int of_tile(const Attention& a, int tile) {
        const int wanted = tile / CLASSES_PER_WORD;
        if (wanted >= a.class_words) return COMPARED;
        if (wanted != at) word = a.block_classes[(long long)index * a.class_words + wanted], at = wanted;
        return word >> 2 * (tile % CLASSES_PER_WORD) & 3;
    }
    // Of the KV tile at `slot` of the segment.
    DEVICE int of(const Attention& a, int slot) { return of_tile(a, base + (slot - origin) / KV); }
    // The first slot from `slot` on, a KV tile's first, whose KV tile is read; `end` or behind if there is none.
    DEVICE int next(const Attention& a, int slot, int end) {
        int tile = base + (slot - origin) / KV;
        const int behind = base + tiles;
        while (tile < behind && of_tile(a, tile) == HIDDEN) {
            const u32 read = word >> 2 * (tile % CLASSES_PER_WORD);  // of this KV tile and those behind it in the word
            tile += read ? (__ffs(read) - 1) / 2 : CLASSES_PER_WORD - tile % CLASSES_PER_WORD;
        }
        return tile < behind ? origin + (tile - base) * KV : end;
    }
    // Passes over a span's hidden KV tiles, and over empty spans and segments.
    DEVICE void skip(const Attention& a, Span& span, int& seg, const int& seg_end, const VisibleRange& range) {
        while (true) {
            if (span.slot < span.end) {
                const int first = first_slot_of(span), slot = next(a, first, span.end);
                if (slot != first) span.slot = slot;
            }
            if (span.slot < span.end || seg >= seg_end) return;
            span = load_segment(a, seg++, range);
            enter(span);
        }
    }
};

// Without a mask all KV tiles are read, and none is compared for its sake.
template <int KV> struct BlockClasses<KV, false> {
    DEVICE void begin(int, const Span&) {}
    DEVICE int of(const Attention&, int) const { return SHOWN; }
    DEVICE int next(const Attention&, int slot, int) const { return slot; }
    DEVICE void skip(const Attention& a, Span& span, int& seg, const int& seg_end, const VisibleRange& range) const {
        skip_empty(a, span, seg, seg_end, range);
    }
};

}  // namespace prefixkit
