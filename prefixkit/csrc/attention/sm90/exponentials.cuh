// From scores to exponentials on Hopper, for the warpgroups whose accumulators hold the scores of a KV tile.
//
// A row's base (variant.cuh) rises seldom, because each rise makes lanes agree on a new base and shrink older sums and
// outputs (as in FlashAttention-4).  Outputs are divided by the sum of the rounded exponentials, which the product with
// V uses: here the largest exponential is not 1, so it is rounded like the others.  The log-sum-exp uses the
// exponentials before they are rounded.
#pragma once
#include "attention/sm90/tile_ring.cuh"

namespace prefixkit {

// The token of a thread's score i, counted from the thread's first token.
DEVICE constexpr int token_of(int i) { return 8 * (i / 4) + (i & 1); }

// The factor that turns a row's scores, as the products leave them, into exponents of 2.
template <class State> DEVICE float score_factor(const Attention& a, const State& w, int row) {
    if constexpr (NARROWED) return a.scale_log2 * one_power(w.unscale, row);
    return a.scale_log2;
}
// Takes the factor of NARROWED queries out of the scores, before a variant sees them.
template <class State> DEVICE void unscale_scores(State& w) {
    if constexpr (NARROWED)
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) w.s[i] *= one_power(w.unscale, i >> 1 & 1);
}

// What a variant reads about a thread's two rows.
struct ScoredRows {
    int sequence[2], head[2], position[2];

    DEVICE ScoredRows(const Attention& a, const TileItem& item, int row0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const TileRow row(a, item.head, min(row0 + 8 * i, item.rows - 1));
            head[i] = row.head, sequence[i] = sequence_of(a, item.q_begin + row.query);
            position[i] = int(a.q_positions[item.q_begin + row.query]);
        }
    }
    // The variant's score of a row, in natural units, from q . k.
    DEVICE float changed(const Attention& a, float dot, int row, int kv_base, int kv_offset) const {
        return Variant::score(dot * a.scale, sequence[row], head[row], position[row], kv_base, kv_offset, a.words);
    }
    template <class Tanh>
    DEVICE float changed_by(const Attention& a, float dot, int row, int kv_base, int kv_offset, Tanh& tanh) const {
        const int b = sequence[row], h = head[row];
        return Variant::score_by(dot * a.scale, b, h, position[row], kv_base, kv_offset, a.words, tanh);
    }
    DEVICE bool shown(const Attention& a, int row, int kv_position) const {
        return Variant::mask(sequence[row], head[row], position[row], kv_position, a.words);
    }
};

// What a LINEAR variant adds to the exponents of 2 of a thread's two rows: a value where the key is the row's own
// token, and a slope.
struct BiasLines {
    float own[2], slope[2];
    int position[2];

    DEVICE void read(const Attention& a, const TileItem& item, int row0) {
        const ScoredRows rows(a, item, row0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int b = rows.sequence[i], h = rows.head[i], q = position[i] = rows.position[i];
            own[i] = Variant::score(0.f, b, h, q, q, 0, a.words) * LOG2E;
            slope[i] = Variant::slope(b, h, q, a.words) * LOG2E;
        }
    }
    // The bias of a row for the key at a position.
    DEVICE float at(int row, int kv_position) const {
        return fmaf(slope[row], float(kv_position - position[row]), own[row]);
    }
};

// One past the last position that a row of a CLIPPED KV tile sees.
DEVICE int end_of_row(const Attention& a, const TileItem& item, int flags, int row) {
    const int query = TileRow(a, item.head, min(row, item.rows - 1)).query;
    return end_seen(a, flags & LIMITED ? LIMIT : OWN, item.q_begin, item.partial, query);
}

// Where the bits for a thread's two rows lie among a KV tile's bits, in units of 16 bits: the first row's offset in the
// lower half, the second row's in the upper half.  Each row has 16 bits.
DEVICE u32 places_of_bits(const Attention& a, const TileItem& item, int row0) {
    const int last = item.rows - 1, column = threadIdx.x & 3;
    const TileRow first(a, item.head, min(row0, last)), second(a, item.head, min(row0 + 8, last));
    return u32(4 * first.query + column) | u32(4 * second.query + column) << 16;
}

// Which of a thread's scores the masks show in a MASKED KV tile: 16 bits for its first row and 16 for its second, in
// the order of the tokens.
DEVICE u32 shown_scores(const Attention& a, const KVTileInfo& c, const TileItem& item, int row0, u32 places) {
    if (c.bits >= 0) {
        const u16* bits = (const u16*)(a.block_classes + c.bits);
        return u32(bits[places & 0xffff]) | u32(bits[places >> 16]) << 16;
    }
    const ScoredRows rows(a, item, row0);
    const int position = c.position + 2 * (threadIdx.x & 3);
    u32 shown = 0;
#pragma unroll 1  // unrolled, a long mask takes the registers of the scores
    for (int i = 0; i < KV_TILE / 4; ++i) {
        const int kv_position = position + 8 * (i / 2) + i % 2;
        shown |= u32(rows.shown(a, 0, kv_position)) << i | u32(rows.shown(a, 1, kv_position)) << (16 + i);
    }
    return shown;
}
DEVICE constexpr bool is_shown(u32 shown, int i) { return shown >> (16 * (i >> 1 & 1) + 2 * (i / 4) + (i & 1)) & 1; }

// Computes exponentials in the general case; `shown` matters in a MASKED KV tile.  Returns whether the base rose, which
// is the same in all lanes of a warp; `shrink` then holds the factors for outputs.
template <class State> DEVICE bool exponentials(const Attention& a, const KVTileInfo& c, const TileItem& item, int row0,
                                                const BiasLines& lines, u32 shown, State& w, float (&shrink)[2]) {
    const int column = 2 * (threadIdx.x & 3), position = c.position + column;
    const float factor[2] = {score_factor(a, w, 0), score_factor(a, w, 1)};
    if constexpr (Variant::LINEAR) {
        const float begin[2] = {lines.at(0, position), lines.at(1, position)};
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) {
            const int row = i >> 1 & 1;
            w.s[i] = fmaf(w.s[i], factor[row], fmaf(lines.slope[row], float(token_of(i)), begin[row]));
        }
    } else if constexpr (Variant::HAS_SCORE) {
        const ScoredRows rows(a, item, row0);
        unscale_scores(w);
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i)
            w.s[i] = rows.changed(a, w.s[i], i >> 1 & 1, position, token_of(i)) * LOG2E;
    } else {
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) w.s[i] *= factor[i >> 1 & 1];
    }
    if (c.flags & COMPARE) {
        const ScoredRows rows(a, item, row0);
        int end[2];  // of the tokens that each row sees, counted from this thread's first
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            end[i] = rows.position[i] + 1;
            if (Variant::LOOKS_AHEAD || (c.flags & LIMITED)) end[i] = end_of_row(a, item, c.flags, row0 + 8 * i);
            end[i] = (c.flags & CLIPPED ? min(c.high(), end[i] - c.position) : c.high()) - column;
        }
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i)
            if (token_of(i) < c.low() - column || token_of(i) >= end[i >> 1 & 1]) w.s[i] = MINUS_INFINITY;
    }
    if (Variant::HAS_MASK && (c.flags & MASKED)) {
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i)
            if (!is_shown(shown, i)) w.s[i] = MINUS_INFINITY;
    }
    float top[2] = {w.s[0], w.s[2]};
#pragma unroll
    for (int i = 0; i < KV_TILE / 8; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row)
            top[row] = fmaxf(top[row], fmaxf(w.s[4 * i + 2 * row], w.s[4 * i + 2 * row + 1]));
    }
    // Where masks leave few tokens, the largest weight is a large part of the output, and it rounds to itself if it is
    // 1.
    constexpr float headroom = Variant::HAS_MASK ? LIFT : HEADROOM;
    const bool rose = __any_sync(~0u, top[0] > w.base[0] + headroom || top[1] > w.base[1] + headroom);
    if (rose) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float base = fmaxf(w.base[row], lanes_max<1, 4>(top[row]) - LIFT);
            shrink[row] = exp2_fast(w.base[row] - base);
            w.base[row] = base;
            w.sum[row] *= shrink[row];
        }
    }
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; ++i)
        w.s[i] = exp2_fast(w.s[i] - w.base[i >> 1 & 1]), w.sum[i >> 1 & 1] += w.s[i];
    return rose;
}

template <class State> DEVICE void pack_exponentials(State& w) {
#pragma unroll
    for (int i = 0; i < KV_TILE / 4; ++i) w.p[i] = pack<Operand>(w.s[2 * i], w.s[2 * i + 1]);
}

}  // namespace prefixkit
