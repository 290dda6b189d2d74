// The tensor-core tile path on Hopper: attention of many tile rows to shared KV.
//
// shapes     an item has up to 128 tile rows (64 where D is 256), pairs (query, head of the group) of one KV head, and
//            any length of KV.
// tiling     two warpgroups of 64 rows share KV tiles of 64 tokens, which two warps load (tile_load.cuh).  Q and P stay
//            in registers: with Q in shared memory, wgmma would read its 2 KB again with every 2 KB of K.  A warpgroup
//            issues Q K^T of a KV tile before P V of the one before; the exponentials of one warpgroup overlap the
//            products of the other, without taking turns.
// uniform    stages, flags and counts go through `uniform`: descriptors in ordinary registers cost each product some 30
//            cycles, as many as the product itself takes.
// cost       2 (D + V_DIM) flops per row and token against 790 TFLOP/s (dense bf16), and 2 (D + V_DIM) bytes of KV per
//            token and tile.
// limits     D 64 to 128, 192 with V_DIM 128, or 256, whose 64 rows take one warpgroup, and KV tiles of 32 tokens;
//            sizes between 64 and 128 are padded with zeros in shared memory; items of at most 64 rows leave the
//            second warpgroup idle.
#pragma once
#include "attention/sm90/wgmma.cuh"
#include "attention/sm90/exponentials.cuh"

namespace prefixkit {

DEVICE void scores(TileState& w, u32 tile) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
        wgmma_rows(w.s, w.q + 4 * i, tile + (i / 4) * (KV_TILE * 8) + (i % 4) * 2, i != 0);
    wgmma_commit();
}

// Adds P V to the outputs, and the weights to their sums, by a column of ones next to V.
DEVICE void add_values(TileState& w, u32 tile, u32 ones) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KV_TILE / 16; ++i) {
        wgmma_columns(w.o, w.p + 4 * i, tile + i * 128, 1);
        wgmma_ones(w.weight, w.p + 4 * i, ones);
    }
    wgmma_commit();
}

// Called by one thread, before any warp of the warpgroups multiplies.
DEVICE void write_ones(u32 at) {
    constexpr int ONES = PREFIXKIT_HALF_OPERANDS ? 0x3c003c00 : 0x3f803f80;
    for (int i = 0; i < 8; ++i) store_shared16(at + 16 * i, make_int4(ONES, ONES, ONES, ONES));
    async_fence();
}

// Whether all arguments of tanh in a warp are near 0.
DEVICE bool all_near(const Attention& a, const ScoredRows& rows, int position, const TileState& w) {
    LargestTanh tanh;
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; ++i) rows.changed_by(a, w.s[i], i >> 1 & 1, position, token_of(i), tanh);
    return !__any_sync(~0u, tanh.largest >= NEAR);
}

template <class Tanh> DEVICE void change(const Attention& a, const ScoredRows& rows, int position, TileState& w) {
    Tanh tanh;
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; ++i) {
        const float score = rows.changed_by(a, w.s[i], i >> 1 & 1, position, token_of(i), tanh);
        w.s[i] = exp2_fast(score * LOG2E - w.base[i >> 1 & 1]);
    }
}

// The common case, without a search for the largest score.  Returns false, the same in all lanes of a warp, if an
// exponential was too large: the scores are then lost, and nothing else has changed.
DEVICE bool exponentials_at_once(const Attention& a, const TileShared& s, const Cursor& at, int place, int half,
                                 const BiasLines& lines, bool masked, u32 shown, TileState& w) {
    float sum[2] = {};
    const float factor[2] = {score_factor(a, w, 0), score_factor(a, w, 1)};
    if constexpr (Variant::LINEAR) {
        const int position = load_shared_int(s.kv_tiles + 16 * at.stage + 12) + 2 * (threadIdx.x & 3);
        const float begin[2] = {lines.at(0, position) - w.base[0], lines.at(1, position) - w.base[1]};
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) {
            const int row = i >> 1 & 1;
            w.s[i] = exp2_fast(fmaf(w.s[i], factor[row], fmaf(lines.slope[row], float(token_of(i)), begin[row])));
        }
    } else if constexpr (Variant::HAS_SCORE) {
        const ScoredRows rows(a, read_item(s, place), first_row(half));
        const int position = load_shared_int(s.kv_tiles + 16 * at.stage + 12) + 2 * (threadIdx.x & 3);
        unscale_scores(w);
        if (Variant::HAS_TANH && all_near(a, rows, position, w)) change<NearTanh>(a, rows, position, w);
        else change<Variant::Tanh>(a, rows, position, w);
    } else {
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) w.s[i] = exp2_fast(w.s[i] * factor[i >> 1 & 1] - w.base[i >> 1 & 1]);
    }
    if (Variant::HAS_MASK && masked) {
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i)
            if (!is_shown(shown, i)) w.s[i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; ++i) sum[i >> 1 & 1] += w.s[i];
    if (__any_sync(~0u, sum[0] > ALLOWED || sum[1] > ALLOWED)) return false;
    w.sum[0] += sum[0], w.sum[1] += sum[1];
    return true;
}

// Whether a row of this warp that has no base yet sees a token of a MASKED KV tile.
DEVICE bool lacks_base(const TileState& w, u32 shown) {
    return __any_sync(~0u, (w.base[0] == LOWEST && shown & 0xffff) || (w.base[1] == LOWEST && shown >> 16));
}

// Computes the lost scores again, each warp for itself: wgmma's operands in registers are also operands of mma.
DEVICE void scores_again(TileState& w, u32 k) {
    const int lane = lane_anew();
#pragma unroll
    for (int j = 0; j < KV_TILE / 8; ++j) {
        float dot[4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i += 2) {
            u32 m[4];
            load_matrix(m, k + vector_at<KV_TILE>(8 * j + (lane & 7), 2 * i + (lane >> 3)));
            mma(dot, {w.q[4 * i], w.q[4 * i + 1], w.q[4 * i + 2], w.q[4 * i + 3]}, m[0], m[1]);
            mma(dot, {w.q[4 * i + 4], w.q[4 * i + 5], w.q[4 * i + 6], w.q[4 * i + 7]}, m[2], m[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) w.s[4 * j + i] = dot[i];
    }
}

// Passes over an item with no rows for this warpgroup.
DEVICE void tile_skip(const TileShared& s, Cursor& at) {
    for (bool last = false; !last; at.next(s)) {
        last = wait_kv_tile(s, at) & LAST;
        free_stage(s.k_empty, at.stage);
        free_stage(s.v_empty, at.stage);
    }
}

// What the next products need, looked up while scores are computed.
struct Lookahead {
    u32 keys, values;  // descriptors: of the next KV tile's keys, of this one's values
    bool landed;       // whether the next KV tile has landed
    int flags;         // of the next KV tile, if it has landed

    DEVICE Lookahead(const TileShared& s, const Cursor& at) {
        Cursor next = at;
        next.next(s);
        landed = barrier_ended(s.full + 8 * next.stage, next.phase);
        flags = landed ? kv_tile_flags(s, next) : 0;
        keys = uniform(keys_at(s, next.stage)), values = uniform(values_at(s, at.stage));
    }
};

// Tensor cores truncate their sums towards zero: over 134,000 tokens, sums of weights, all of one sign, lose 5e-4, and
// sums of values a quarter of that.  So every FLUSH KV tiles the weights are added to an ordinary sum, which rounds to
// nearest.
constexpr int FLUSH = 32;
DEVICE void flush_weights(TileState& w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) w.rest[i] += w.weight[2 * i], w.weight[2 * i] = w.weight[2 * i + 1] = 0.f;
}

// Waits until the values of the previous KV tile, if `any`, have been added, and frees their stage.
DEVICE void finish_values(const TileShared& s, TileState& w, const Cursor& at, bool any = true) {
    wgmma_wait<0>();
    pin(w.o), pin(w.weight);
    if (any) free_stage(s.v_empty, at.before);
}

// Items, one after the other.  The next item is polled before the last values of this one are added: if it is published
// by then, its queries are read while this one ends.
struct Items {
    int number = 0;
    int rows;  // of this item; 0: no more
    int next;  // rows of the next item, if `published`
    bool published = false;

    DEVICE int place() const { return number & 1; }
    DEVICE void begin(const TileShared& s) {
        if (!published) barrier_wait(s.item_full + 8 * place(), number >> 1 & 1);
        rows = uniform(load_shared_int(s.items + 16 * place() + 4));
    }
    DEVICE void poll(const TileShared& s) {
        published = barrier_ended(s.item_full + 8 * (place() ^ 1), number + 1 >> 1 & 1);
        if (published) next = uniform(load_shared_int(s.items + 16 * (place() ^ 1) + 4));
    }
};

// The item is read again wherever it is needed, because registers are short.
DEVICE void tile_item(const Attention& a, const TileShared& s, TileState& w, Cursor& at, int half, Items& items) {
    const int place = items.place();
    int kv_tiles = 0;  // since weights were flushed
    const u32 places = Variant::HAS_MASK ? places_of_bits(a, read_item(s, place), first_row(half)) : 0;
    BiasLines lines;
    if constexpr (Variant::LINEAR) lines.read(a, read_item(s, place), first_row(half));
    float shrink[2];
    int flags = wait_kv_tile(s, at) | COMPARE | FIRST;  // the first KV tile finds a base
    // Set once a variant's scores have risen from one KV tile to the next: then all KV tiles are compared.
    bool wary = false;
    scores(w, keys_at(s, at.stage));
    wgmma_wait<0>();  // no values yet
    pin(w.s);
    Lookahead next(s, at);
    for (;;) {
        const bool masked = Variant::HAS_MASK && (flags & MASKED);
        u32 shown = ~0u;
        if (masked) {  // while scores are computed
            const KVTileInfo kv_tile = load_record<KVTileInfo>(s.kv_tiles + 16 * at.stage);
            shown = shown_scores(a, kv_tile, read_item(s, place), first_row(half), places);
        }
        wgmma_wait<1>();
        pin(w.s);
        bool compare = (flags & COMPARE) || wary;
        // The first two KV tiles are compared: a base is then a row's maximum more often.
        if (masked) compare = compare || kv_tiles < 2 || lacks_base(w, shown);
        if (!compare && exponentials_at_once(a, s, at, place, half, lines, masked, shown, w)) {
            finish_values(s, w, at);
        } else {
            if (!compare) scores_again(w, s.k + at.stage * K_TILE_BYTES);
            if (Variant::HAS_SCORE) wary = wary || !compare;
            const KVTileInfo kv_tile = load_record<KVTileInfo>(s.kv_tiles + 16 * at.stage);
            const bool rose = exponentials(a, kv_tile, read_item(s, place), first_row(half), lines, shown, w, shrink);
            finish_values(s, w, at, !(flags & FIRST));
            if (rose) {
#pragma unroll
                for (int i = 0; i < V_PAD / 2; ++i) w.o[i] *= shrink[i >> 1 & 1];
#pragma unroll
                for (int i = 0; i < 4; ++i) w.weight[i] *= shrink[i >> 1];
                w.rest[0] *= shrink[0], w.rest[1] *= shrink[1];
            }
        }
        pack_exponentials(w);
        if (++kv_tiles == FLUSH) flush_weights(w), kv_tiles = 0;
        if (flags & LAST) break;
        at.next(s);
        flags = next.landed ? next.flags : wait_kv_tile(s, at);
        const u32 values = next.values;
        scores(w, next.keys);
        free_stage(s.k_empty, at.before);  // while the tensor cores are busy
        next = Lookahead(s, at);
        add_values(w, values, s.ones);
    }
    add_values(w, values_at(s, at.stage), s.ones);
    free_stage(s.k_empty, at.stage);
    at.next(s);
    items.poll(s);
    if (items.published && 64 * half < items.next) read_queries(a, read_item(s, place ^ 1), w, first_row(half));
    finish_values(s, w, at);
    const TileItem item = read_item(s, place);
    free_item(s, place);
    tile_finish(a, item, w, first_row(half));
}

// Where masks make items short and a block has many, the second warpgroup begins this number of cycles late, the time
// of some three KV tiles: one warpgroup then multiplies while the other ends an item and begins the next.
constexpr int STAGGER = Variant::HAS_MASK ? 3000 : 0;
DEVICE void begin_late(const Attention& a, const TileShared& s) {
    if constexpr (STAGGER > 0) {
        const bool many = a.counts[0] * a.kv_heads >= 8 * int(gridDim.x);
        if (s.stages < 6 || !many || each_alone(a)) return;  // where each row sees one item, a block may have none
        barrier_wait(s.full, 0);
        for (const u32 began = clock_low(); int(clock_low() - began) < STAGGER;) {}
    }
}

// One warpgroup: rows 64 `half`... of every item of this block.
DEVICE void tile_role(const Attention& a, const TileShared& s, int half) {
    TileState w;
    Cursor at;
    for (Items items;; ++items.number) {
        const bool published = items.published;
        items.begin(s);
        if (items.rows == 0) break;
        if (64 * half < items.rows) {
            if (!published) read_queries(a, read_item(s, items.place()), w, first_row(half));
            make_operands(w);
            tile_begin(w);
            tile_item(a, s, w, at, half, items);
        } else {
            tile_skip(s, at);
            free_item(s, items.place());
            items.published = false;
        }
    }
}

}  // namespace prefixkit
