// Attention of many query rows to shared KV on Hopper: the matrix path.
//
// shapes     an item has up to 128 rows, (query, head of the group) pairs of one KV head, and any KV.
// tiling     two warpgroups of 64 rows share KV tiles of 64 tokens, which two warps load (tile_load.cuh).  Q lives in registers:
//            with Q in shared memory, wgmma would read its 2 KB again with every 2 KB of K, more than shared memory gives.  S = Q K^T,
//            P stays in registers.  Each warpgroup issues Q K^T of a KV tile before P V of the last, and what it needs for the next KV tile it
//            looks up meanwhile; the exponents of one hide behind the products of the other, without taking turns.
// uniform    all that says where a KV tile lies is in the uniform registers of a warp: descriptors from ordinary ones cost each product
//            some 30 cycles, as much as it takes.  So flags and counts that decide over branches go through `uniform`.
// cost       4 D flops per row and token against 790 TFLOP/s (dense bf16); 4 D bytes of KV per token and tile.
// limits     D 64 or 128; items of at most 64 rows leave the second warpgroup idle.
#pragma once
#include "attention/sm90/wgmma.cuh"
#include "attention/sm90/tile_rows.cuh"

namespace prefixkit {

constexpr int TILE = 128;                        // rows: two warpgroups of 64

DEVICE void scores(TileState& w, u32 tile) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) wgmma_rows(w.s, w.q + 4 * i, tile + (i / 4) * (KV_TILE * 8) + (i % 4) * 2, i != 0);
    wgmma_commit();
}

// Outputs, and the sums of the weights that they are made of: a column of ones beside V.
DEVICE void add_values(TileState& w, u32 tile, u32 ones) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KV_TILE / 16; ++i) {
        wgmma_columns(w.o, w.p + 4 * i, tile + i * 128, 1);
        wgmma_ones(w.weight, w.p + 4 * i, ones);
    }
    wgmma_commit();
}

// By one thread, before any warp of both warpgroups multiplies.
DEVICE void write_ones(u32 at) {
    constexpr int ONES = PREFIXKIT_HALF ? 0x3c003c00 : 0x3f803f80;
    for (int i = 0; i < 8; ++i) store_shared16(at + 16 * i, make_int4(ONES, ONES, ONES, ONES));
    async_fence();
}

// Exponentials are taken against a base for each row, which need not be the largest exponent: it starts at LOWEST and rises only when
// one passes it by too much, for then lanes must agree on a new one, and older sums and outputs shrink (as in FlashAttention-4).
// Outputs are divided by the sum of exponentials as the product with V sees them, rounded: else the largest, which is not 1 here,
// would weigh too much or too little by its rounding.  The log-sum-exp is of the exponentials themselves.

// The common case: no mask, no search for the largest.  Returns false, the same in all lanes of a warp, if an exponential was too
// large: then the scores are lost, and nothing else has changed.
DEVICE bool exponentials_at_once(const Attention& a, TileState& w) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; ++i) w.s[i] = exp2_fast(w.s[i] * a.scale_log2 - w.base[i >> 1 & 1]), sum[i >> 1 & 1] += w.s[i];
    if (__any_sync(~0u, sum[0] > ALLOWED || sum[1] > ALLOWED)) return false;
    w.sum[0] += sum[0], w.sum[1] += sum[1];
    return true;
}

// The scores that were lost, by each warp for itself: its operands of wgmma are those of mma too.
DEVICE void scores_again(TileState& w, u32 k) {
    const int lane = lane_anew();
#pragma unroll
    for (int j = 0; j < KV_TILE / 8; ++j) {
        float dot[4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i += 2) {
            u32 m[4];
            load_matrix(m, k + piece_at<KV_TILE>(8 * j + (lane & 7), 2 * i + (lane >> 3)));
            mma(dot, {w.q[4 * i], w.q[4 * i + 1], w.q[4 * i + 2], w.q[4 * i + 3]}, m[0], m[1]);
            mma(dot, {w.q[4 * i + 4], w.q[4 * i + 5], w.q[4 * i + 6], w.q[4 * i + 7]}, m[2], m[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) w.s[4 * j + i] = dot[i];
    }
}

// Any case.  Returns whether the base rose, the same in all lanes of a warp; then `shrink` holds the factors for outputs.
DEVICE bool exponentials(const Attention& a, const KVTileInfo& c, const TileItem& item, int row0, TileState& w, float (&shrink)[2]) {
    const int column = 2 * (threadIdx.x & 3), group = group_of(a);
    if (MODIFIED || (c.flags & COMPARE)) {
        int head[2], q_position[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = min(row0 + 8 * i, item.rows - 1), query = row / group;
            head[i] = item.head * group + row - query * group;
            q_position[i] = MODIFIED || (c.flags & CAUSAL) ? int(a.q_positions[item.q_begin + query]) : 0;
        }
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) {
            const int row = i >> 1 & 1, token = 8 * (i / 4) + column + (i & 1), position = c.position + token;
            const bool visible = token >= c.low && token < c.high && (!(c.flags & CAUSAL) || position <= q_position[row]);
            w.s[i] = exponent(w.s[i], a.scale, visible, q_position[row], position, head[row], a.parameters);
        }
    } else {
#pragma unroll
        for (int i = 0; i < KV_TILE / 2; ++i) w.s[i] *= a.scale_log2;
    }
    float top[2] = {w.s[0], w.s[2]};
#pragma unroll
    for (int i = 0; i < KV_TILE / 8; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) top[row] = fmaxf(top[row], fmaxf(w.s[4 * i + 2 * row], w.s[4 * i + 2 * row + 1]));
    }
    const bool rose = __any_sync(~0u, top[0] > w.base[0] + HEADROOM || top[1] > w.base[1] + HEADROOM);
    if (rose) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            top[row] = fmaxf(top[row], __shfl_xor_sync(~0u, top[row], 1));
            top[row] = fmaxf(top[row], __shfl_xor_sync(~0u, top[row], 2));
            const float base = fmaxf(w.base[row], top[row]);
            shrink[row] = exp2_fast(w.base[row] - base);
            w.base[row] = base;
            w.sum[row] *= shrink[row];
        }
    }
#pragma unroll
    for (int i = 0; i < KV_TILE / 2; ++i) w.s[i] = exp2_fast(w.s[i] - w.base[i >> 1 & 1]), w.sum[i >> 1 & 1] += w.s[i];
    return rose;
}

DEVICE void pack_exponentials(TileState& w) {
#pragma unroll
    for (int i = 0; i < KV_TILE / 4; ++i) w.p[i] = pack(w.s[2 * i], w.s[2 * i + 1]);
}

// Where a warpgroup is in the rings.
struct Place {
    u32 stage = 0, phase = 0;
    u32 before = 0;          // the stage of the KV tile before
    DEVICE void next(const TileShared& s) {
        before = stage;
        if (++stage == s.stages) stage = 0, phase ^= 1;
    }
};

DEVICE u32 keys_at(const TileShared& s, u32 stage) { return descriptor(s.k, 16) + stage * (KV_TILE_BYTES / 16); }
DEVICE u32 values_at(const TileShared& s, u32 stage) { return descriptor(s.v, KV_TILE * 128) + stage * (KV_TILE_BYTES / 16); }
DEVICE void wait_unit(const TileShared& s, const Place& at) { barrier_wait(s.full + 8 * at.stage, at.phase); }
DEVICE int kv_tile_flags(const TileShared& s, const Place& at) { return uniform(load_shared_int(s.kv_tiles + 16 * at.stage)); }

DEVICE KVTileInfo read_unit(const TileShared& s, const Place& at) {
    const int4 x = load_shared_int4(s.kv_tiles + 16 * at.stage);
    return {x.x, x.y, x.z, x.w};
}

// Each warp tells the loaders that it has read a stage.
DEVICE void free_stage(u32 empty, u32 stage) { barrier_arrive_warp(empty + 8 * stage); }

// An item with no rows for this warpgroup: only keeps the count.
DEVICE void tile_skip(const TileShared& s, Place& at) {
    for (bool last = false; !last; at.next(s)) {
        wait_unit(s, at);
        last = kv_tile_flags(s, at) & LAST;
        free_stage(s.k_empty, at.stage);
        free_stage(s.v_empty, at.stage);
    }
}

// The row of a thread's first scores; it has those of 8 rows further too.
DEVICE int first_row(int half) { return 64 * half + 16 * (threadIdx.x >> 5 & 3) + (threadIdx.x & 31) / 4; }

DEVICE TileItem read_item(const TileShared& s, int place) {
    const int4 x = load_shared_int4(s.items + 16 * place);
    return {x.x, x.y, x.z, x.w};
}

// What the next products need, looked up while scores are computed; `flags` only mean something if the KV tile is `there`.
struct Coming {
    u32 keys, values;        // descriptors: of the next KV tile's keys, of this one's values
    int flags;
    bool there;
};
DEVICE Coming look_ahead(const TileShared& s, const Place& at) {
    Place next = at;
    next.next(s);
    Coming c;
    c.there = barrier_ended(s.full + 8 * next.stage, next.phase);
    c.flags = c.there ? kv_tile_flags(s, next) : 0;
    c.keys = uniform(keys_at(s, next.stage)), c.values = uniform(values_at(s, at.stage));
    return c;
}

// Tensor cores cut their sums off where a float32 ends, always towards zero: weights, all of one sign, lose 5e-4 in 134,000 tokens, and
// values a quarter of that.  So what weights there are is added to the rest of them every so often, rounded to nearest.
constexpr int BRING_OVER = 32;                   // KV tiles
DEVICE void bring_over(TileState& w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) w.rest[i] += w.weight[2 * i], w.weight[2 * i] = w.weight[2 * i + 1] = 0.f;
}

// When the values of the KV tile before have been added: their stage is free, and weights can be replaced.
DEVICE void finish_values(const TileShared& s, TileState& w, const Place& at, bool any = true) {
    wgmma_wait<0>();
    pin(w.o), pin(w.weight);
    if (any) free_stage(s.v_empty, at.before);
}

// Items one after the other.  The next one is asked for before the last values of this one: if it is there by then, its queries come while
// this one ends.
struct Items {
    int number = 0;
    int rows;                // of this item; 0: no more
    int next;                // of the next one, if `asked`
    bool asked = false;

    DEVICE int place() const { return number & 1; }
    DEVICE void begin(const TileShared& s) {
        if (!asked) barrier_wait(s.item_full + 8 * place(), number >> 1 & 1);
        rows = uniform(load_shared_int(s.items + 16 * place() + 4));
    }
    DEVICE void ask(const TileShared& s) {
        asked = barrier_ended(s.item_full + 8 * (place() ^ 1), number + 1 >> 1 & 1);
        if (asked) next = uniform(load_shared_int(s.items + 16 * (place() ^ 1) + 4));
    }
};

// The item is read again where it is needed: registers are short.
DEVICE void tile_item(const Attention& a, const TileShared& s, TileState& w, Place& at, int half, Items& items) {
    const int place = items.place();
    int kv_tiles = 0;                            // since weights were brought over
    float shrink[2];
    wait_unit(s, at);
    int flags = kv_tile_flags(s, at) | COMPARE;  // the first KV tile finds a base
    scores(w, keys_at(s, at.stage));
    wgmma_wait<0>();                          // no values yet
    pin(w.s);
    Coming next = look_ahead(s, at);
    for (bool first = true;; first = false) {
        wgmma_wait<1>();
        pin(w.s);
        const bool compare = MODIFIED || (flags & COMPARE);
        if (!compare && exponentials_at_once(a, w)) {
            finish_values(s, w, at);
        } else {
            if (!compare) scores_again(w, s.k + at.stage * KV_TILE_BYTES);
            const bool rose = exponentials(a, read_unit(s, at), read_item(s, place), first_row(half), w, shrink);
            finish_values(s, w, at, !first);
            if (rose) {
#pragma unroll
                for (int i = 0; i < D / 2; ++i) w.o[i] *= shrink[i >> 1 & 1];
#pragma unroll
                for (int i = 0; i < 4; ++i) w.weight[i] *= shrink[i >> 1];
                w.rest[0] *= shrink[0], w.rest[1] *= shrink[1];
            }
        }
        pack_exponentials(w);
        if (++kv_tiles == BRING_OVER) bring_over(w), kv_tiles = 0;
        if (flags & LAST) break;
        at.next(s);
        if (next.there) {
            flags = next.flags;
        } else {
            wait_unit(s, at);
            flags = kv_tile_flags(s, at);
        }
        const u32 values = next.values;
        scores(w, next.keys);
        free_stage(s.k_empty, at.before);      // while the tensor cores have more than enough to do
        next = look_ahead(s, at);
        add_values(w, values, s.ones);
    }
    add_values(w, values_at(s, at.stage), s.ones);
    free_stage(s.k_empty, at.stage);
    at.next(s);
    items.ask(s);
    if (items.asked && 64 * half < items.next) read_queries(a, read_item(s, place ^ 1), w, first_row(half));
    finish_values(s, w, at);
    const TileItem item = read_item(s, place);
    free_stage(s.item_empty, place);
    tile_finish(a, item, w, first_row(half));
}

// One warpgroup: rows 64 `half`... of every item of this block.
DEVICE void tile_role(const Attention& a, const TileShared& s, int half) {
    TileState w;
    Place at;
    for (Items items;; ++items.number) {
        const bool asked = items.asked;
        items.begin(s);
        if (items.rows == 0) break;
        if (64 * half < items.rows) {
            if (!asked) read_queries(a, read_item(s, items.place()), w, first_row(half));
            tile_begin(w);
            tile_item(a, s, w, at, half, items);
        } else {
            tile_skip(s, at);
            free_stage(s.item_empty, items.place());
            items.asked = false;
        }
    }
}

}  // namespace prefixkit
