// Attention of many query rows to shared KV on Hopper: the matrix path.
//
// shapes     an item has up to 128 rows, (query, head of the group) pairs of one KV head, and any KV.
// tiling     two warpgroups of 64 rows share units of UNIT tokens: K and V each in two stages.  Two warps gather the rows of a unit
//            with 16-byte copies (any page size, any begin; the copies go where the 128-byte swizzle wants them).
//            S = Q K^T from shared memory, P stays in registers; while a warpgroup takes exponents of unit i, its
//            P V of unit i - 1 and the other warpgroup's products keep the tensor cores busy.
// cost       4 D flops per row and token against 790 TFLOP/s (dense bf16); 4 D bytes of KV per token and tile.
// limits     D 64 or 128; items of at most 64 rows leave the second warpgroup idle.
#pragma once
#include "merge.cuh"
#include "narrow.cuh"
#include "wgmma.cuh"

namespace prefixkit {

constexpr int TILE = 128;                        // rows: two warpgroups of 64
constexpr int UNIT = 96;                         // tokens: as many as registers hold beside the output (scores 48, operand 24, output 64)
constexpr int UNIT_BYTES = UNIT * D * 2;
constexpr int Q_BYTES = TILE * D * 2;
constexpr int HALVES = D / 64;                   // columns of 64 elements: 128 bytes, the swizzle's width
constexpr int LOADERS = 64;                      // threads that copy
constexpr int WIDE_BYTES = Q_BYTES + 4 * UNIT_BYTES;

struct WideShared {
    u32 q, k, v;                                 // tiles; k, v: two stages each
    u32 q_full, q_empty, k_full, k_empty, v_full, v_empty;  // barriers, one per stage, 8 bytes apart
    Chunk* infos;                                // one per K stage
};

// ---- loading ----

// Copies a tile of ROWS rows, half of them by each loading warp; lane i knows its warp's rows i and i + 32, in 16-byte pieces.
template <int ROWS>
DEVICE void copy_tile(u32 to, const u16* base, u32 row_a, u32 row_b, int valid) {
    constexpr int PER_ROW = D / 8, STEP = 32 / PER_ROW;  // lanes to a row, rows at a time
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int column = lane % PER_ROW, sub = lane / PER_ROW;
    const u32 half = to + (column >> 3) * (ROWS * 128);
#pragma unroll 4
    for (int i = 0; i < ROWS / 2; i += STEP) {
        const u32 from = __shfl_sync(~0u, i < 32 ? row_a : row_b, (i + sub) & 31);
        const int row = warp * (ROWS / 2) + i + sub;
        copy16(half + row * 128 + (((column ^ row) & 7) << 4), base + (long long)from * 8 + column * 8, row < valid);
    }
}

// One of the two loading warps: every unit of this block's items.
DEVICE void wide_load(const Attention& a, const WideShared& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = a.heads / a.kv_heads;
    const int entries = a.counts[0] * a.kv_heads;
    int unit = 0, items = 0;
    for (int round = 0;; ++round) {
        const int entry = entry_of(round, blockIdx.x, gridDim.x);
        if (round * int(gridDim.x) >= entries) break;
        if (entry >= entries) continue;
        const Item item = load_item(a.wide, entry, a.kv_heads);
        const int last = item.causal ? int(a.q_positions[item.q_end - 1]) : 0;
        const int rows = (item.q_end - item.q_begin) * group;
        Span span = load_span(a, item.node, item.begin, item.end, item.causal, last);
        int seg = item.seg_begin + 1;
        int flags = FIRST | (item.causal ? CAUSAL : 0);
        while (true) {
            while (span.slot >= span.end && seg < item.seg_end) {
                span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], item.causal, last);
                ++seg;
            }
            const int valid = max(0, min(UNIT, span.end - span.slot));
            u32 at[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int slot = span.slot + warp * (UNIT / 2) + i * 32 + lane;
                const u32 index = u32(slot) / u32(a.page_size);
                const int page = slot < span.end ? a.pages[span.pages + index] : 0;
                at[i] = row_of(a, page, slot - index * a.page_size, item.head);
            }
            const int position = span.position + span.slot;
            span.slot += UNIT;
            // Empty segments may follow; whoever reads LAST must be right, so look ahead.
            while (span.slot >= span.end && seg < item.seg_end) {
                span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], item.causal, last);
                ++seg;
            }
            const bool done = span.slot >= span.end;
            const int stage = unit & 1, phase = unit >> 1 & 1;
            barrier_wait(s.k_empty + 8 * stage, phase ^ 1);
            if (threadIdx.x == 0) {
                int4* to = (int4*)(s.infos + stage);
                to[0] = make_int4(item.q_begin, rows, item.partial, item.head);
                to[1] = make_int4(flags | (done ? LAST : 0), valid, position, 0);
                barrier_arrive(s.k_full + 8 * stage);
            }
            copy_tile<UNIT>(s.k + stage * UNIT_BYTES, a.k, at[0], at[1], valid);
            barrier_arrive_after_copies(s.k_full + 8 * stage);
            if (flags & FIRST) {
                u32 from[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = min(warp * 64 + i * 32 + lane, rows - 1);
                    from[i] = u32((((long long)(item.q_begin + row / group) * a.heads + item.head * group + row % group) * D) >> 3);
                }
                barrier_wait(s.q_empty, (items & 1) ^ 1);
                copy_tile<TILE>(s.q, a.q, from[0], from[1], rows);
                barrier_arrive_after_copies(s.q_full);
                ++items;
            }
            barrier_wait(s.v_empty + 8 * stage, phase ^ 1);
            copy_tile<UNIT>(s.v + stage * UNIT_BYTES, a.v, at[0], at[1], valid);
            barrier_arrive_after_copies(s.v_full + 8 * stage);
            flags &= ~FIRST;
            ++unit;
            if (done) break;
        }
    }
    const int stage = unit & 1, phase = unit >> 1 & 1;
    barrier_wait(s.k_empty + 8 * stage, phase ^ 1);
    if (threadIdx.x == 0) {
        s.infos[stage].flags = STOP;
        barrier_arrive(s.k_full + 8 * stage);
    }
    barrier_arrive(s.k_full + 8 * stage);
    copy_wait<0>();
}

// ---- computing ----

struct WideState {
    float s[UNIT / 2];    // scores, then exponentials, of two rows
    u32 p[UNIT / 4];      // the same, rounded, as operand
    float o[D / 2];
    float top[2], sum[2]; // of the two rows; `sum` over this thread's columns
    int position[2], head[2];
};

DEVICE void scores(WideState& w, u32 q, u32 k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const u32 q_at = q + (i / 4) * (TILE * 128) + (i % 4) * 32, k_at = k + (i / 4) * (UNIT * 128) + (i % 4) * 32;
        wgmma_shared(w.s, descriptor(q_at, 16, 1024), descriptor(k_at, 16, 1024), i != 0);
    }
    wgmma_commit();
}

DEVICE void add_values(WideState& w, u32 v, bool first) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < UNIT / 16; ++i)
        wgmma_registers(w.o, w.p + 4 * i, descriptor(v + i * 2048, UNIT * 128, 1024), i != 0 || !first);
    wgmma_commit();
}

// Turns scores into exponentials; returns in `shrink` the factors that older sums and outputs need.
template <bool PLAIN>
DEVICE void exponentials(const Attention& a, const Chunk& c, WideState& w, float (&shrink)[2]) {
    const int column = 2 * (threadIdx.x & 3);
    const float scale = a.scale * LOG2E;
    if constexpr (!PLAIN) {
#pragma unroll
        for (int i = 0; i < UNIT / 2; ++i) {
            const int row = i >> 1 & 1, token = 8 * (i / 4) + column + (i & 1), position = c.position + token;
            const bool visible = token < c.valid && (!(c.flags & CAUSAL) || position <= w.position[row]);
            w.s[i] = exponent(w.s[i], a.scale, visible, w.position[row], position, w.head[row]);
        }
    }
    float base[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float top = w.s[2 * row];
#pragma unroll
        for (int i = 0; i < UNIT / 8; ++i) top = fmaxf(top, fmaxf(w.s[4 * i + 2 * row], w.s[4 * i + 2 * row + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if constexpr (PLAIN) top *= scale;
        top = fmaxf(top, w.top[row]);
        base[row] = top == MINUS_INFINITY ? 0.f : top;
        shrink[row] = exp2_fast(w.top[row] - base[row]);
        w.top[row] = top;
        w.sum[row] *= shrink[row];
    }
#pragma unroll
    for (int i = 0; i < UNIT / 2; ++i) {
        const int row = i >> 1 & 1;
        w.s[i] = exp2_fast(PLAIN ? w.s[i] * scale - base[row] : w.s[i] - base[row]);
        w.sum[row] += w.s[i];
    }
}

DEVICE void softmax(const Attention& a, const Chunk& c, WideState& w, float (&shrink)[2]) {
    const bool compare = c.valid < UNIT || (c.flags & CAUSAL);
    if (MODIFIED || compare) exponentials<false>(a, c, w, shrink);
    else exponentials<true>(a, c, w, shrink);
}

DEVICE void round_exponentials(WideState& w) {
#pragma unroll
    for (int i = 0; i < UNIT / 4; ++i) w.p[i] = pack(w.s[2 * i], w.s[2 * i + 1]);
}

DEVICE void wide_begin(const Attention& a, const Chunk& c, WideState& w, int row0) {
    const int group = a.heads / a.kv_heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w.top[i] = MINUS_INFINITY, w.sum[i] = 0.f;
        const int row = min(row0 + 8 * i, c.rows - 1);
        w.head[i] = c.head * group + row % group;
        if (MODIFIED || (c.flags & CAUSAL)) w.position[i] = int(a.q_positions[c.q_begin + row / group]);
    }
}

DEVICE void wide_finish(const Attention& a, const Chunk& c, WideState& w, int row0) {
    const int group = a.heads / a.kv_heads, column = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = w.sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = row0 + 8 * i;
        if (row >= c.rows) continue;
        float lse = sum > 0.f ? (w.top[i] + log2_fast(sum)) * LN2 : MINUS_INFINITY;
        float factor = sum > 0.f ? 1.f / sum : 0.f;
        if (c.partial >= 0) {
            const long long at = (long long)(c.partial + row / group) * a.heads + w.head[i];
            float* to = a.partial_out + at * D + column;
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *(float2*)(to + 8 * j) = make_float2(w.o[4 * j + 2 * i] * factor, w.o[4 * j + 2 * i + 1] * factor);
            if (column == 0) a.partial_lse[at] = lse;
        } else {
            factor *= join_sink(lse, w.head[i]);
            const long long at = (long long)(c.q_begin + row / group) * a.heads + w.head[i];
            u16* to = a.out + at * D + column;
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *(u32*)(to + 8 * j) = pack(w.o[4 * j + 2 * i] * factor, w.o[4 * j + 2 * i + 1] * factor);
            if (column == 0) a.lse[at] = lse;
        }
    }
}

DEVICE void warpgroup_sync(int half) {
    if (half) named_barrier<3, 128>();
    else named_barrier<2, 128>();
}

DEVICE Chunk read_info(const WideShared& s, int stage) {
    const int4 x = ((const int4*)(s.infos + stage))[0], y = ((const int4*)(s.infos + stage))[1];
    return {x.x, x.y, x.z, x.w, y.x, y.y, y.z, 0};
}

// One warpgroup: rows 64 `half`... of every item of this block.
DEVICE void wide_role(const Attention& a, const WideShared& s, int half) {
    const int thread = threadIdx.x & 127;
    const int row0 = 64 * half + 16 * (thread / 32) + (thread & 31) / 4;
    const bool leader = thread == 0;
    const u32 q = s.q + half * 64 * 128;
    WideState w;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) w.o[i] = 0.f;
    for (int unit = 0, items = 0;; ++items) {
        int stage = unit & 1, phase = unit >> 1 & 1;
        barrier_wait(s.k_full + 8 * stage, phase);
        Chunk c = read_info(s, stage);
        if (c.flags & STOP) break;
        const bool busy = 64 * half < c.rows;
        barrier_wait(s.q_full, items & 1);
        async_fence();
        wide_begin(a, c, w, row0);
        if (!busy) {  // only keep the count
            while (true) {
                if (leader) barrier_arrive(s.k_empty + 8 * stage);
                barrier_wait(s.v_full + 8 * stage, phase);
                if (leader) barrier_arrive(s.v_empty + 8 * stage);
                ++unit;
                if (c.flags & LAST) break;
                stage = unit & 1, phase = unit >> 1 & 1;
                barrier_wait(s.k_full + 8 * stage, phase);
                c = read_info(s, stage);
            }
            if (leader) barrier_arrive(s.q_empty);
            continue;
        }
        float shrink[2];
        bool first = true;
        scores(w, q, s.k + stage * UNIT_BYTES);
        wgmma_wait<0>();
        pin(w.s);
        warpgroup_sync(half);
        if (leader) barrier_arrive(s.k_empty + 8 * stage);
        softmax(a, c, w, shrink);
        round_exponentials(w);
        while (!(c.flags & LAST)) {
            const int v_stage = stage, v_phase = phase;
            ++unit;
            stage = unit & 1, phase = unit >> 1 & 1;
            barrier_wait(s.k_full + 8 * stage, phase);
            c = read_info(s, stage);
            async_fence();
            scores(w, q, s.k + stage * UNIT_BYTES);
            barrier_wait(s.v_full + 8 * v_stage, v_phase);
            async_fence();
            add_values(w, s.v + v_stage * UNIT_BYTES, first);
            first = false;
            wgmma_wait<1>();
            pin(w.s);
            warpgroup_sync(half);
            if (leader) barrier_arrive(s.k_empty + 8 * stage);
            softmax(a, c, w, shrink);
            wgmma_wait<0>();
            pin(w.o);
            warpgroup_sync(half);
            if (leader) barrier_arrive(s.v_empty + 8 * v_stage);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) w.o[i] *= shrink[i >> 1 & 1];
            round_exponentials(w);
        }
        if (leader) barrier_arrive(s.q_empty);
        barrier_wait(s.v_full + 8 * stage, phase);
        async_fence();
        add_values(w, s.v + stage * UNIT_BYTES, first);
        wgmma_wait<0>();
        pin(w.o);
        warpgroup_sync(half);
        if (leader) barrier_arrive(s.v_empty + 8 * stage);
        ++unit;
        wide_finish(a, c, w, row0);
    }
}

}  // namespace prefixkit
