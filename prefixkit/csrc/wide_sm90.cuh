// Attention of many query rows to shared KV on Hopper: the matrix path.
//
// shapes     an item has up to 128 rows, (query, head of the group) pairs of one KV head, and any KV.
// tiling     two warpgroups of 64 rows share units of UNIT tokens: K and V each in two stages.  Two warps gather the rows of K and two those
//            of V, with 16-byte copies (any page size, any begin; the copies go where the 128-byte swizzle wants them).
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
constexpr int LOADERS = 64;                      // threads that copy K, and as many for V
constexpr int WIDE_BYTES = Q_BYTES + 4 * UNIT_BYTES;

struct WideShared {
    u32 q, k, v;                                 // tiles; k, v: two stages each
    u32 q_full, q_empty, k_full, k_empty, v_full, v_empty;  // barriers, one per stage, 8 bytes apart
    Chunk* infos;                                // one per K stage
};

// ---- loading ----

// Half of the query tile by each loading warp; rows that the item lacks become zero.
DEVICE void load_queries(const Attention& a, const Item& item, u32 to, int rows) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 1, group = group_of(a);
#pragma unroll 1
    for (int first = warp * (TILE / 2); first < (warp + 1) * (TILE / 2); first += GROUP) {
        const int row = first + (lane & 15);
        const int at = min(row, rows - 1);
        const u32 begin = u32((((long long)(item.q_begin + at / group) * a.heads + item.head * group + at % group) * D) >> 3);
        copy_rows<TILE>(to + first * 128, a.q, begin, __ballot_sync(~0u, row < rows) & 0xffff);
    }
}

constexpr int MY_GROUPS = UNIT / GROUP / 2;      // of a unit, by each loading warp
static_assert(UNIT % (2 * GROUP) == 0, "each loading warp takes whole groups");

// Tokens [low, high) of the unit at `slot`, this warp's groups.  `page`: lane i knows the page of group i.
DEVICE void load_unit(const Attention& a, const u16* base, u32 to, const Span& span, int slot, int low, int high, int head, int page) {
    const int warp = threadIdx.x >> 5 & 1;
    const bool fast = pages_hold_groups(a);
#pragma unroll 1
    for (int i = warp * MY_GROUPS; i < (warp + 1) * MY_GROUPS; ++i) {
        const int first = i * GROUP, group_slot = slot + first;
        const int group_page = __shfl_sync(~0u, page, i);
        if (fast && first >= low && first + GROUP <= high)
            copy_group<UNIT>(to + first * 128, base + (long long)row_of(a, group_page, place_in_page(a, group_slot), head) * 8);
        else
            gather_rows<UNIT>(a, base, to + first * 128, span, group_slot, low - first, high - first, head);
    }
}

// Lane i: the page of group i of the unit at `slot`.
DEVICE int look_up_groups(const Attention& a, const Span& span, int slot) {
    const int mine = slot + (threadIdx.x & 31) * GROUP;
    const bool there = pages_hold_groups(a) && (threadIdx.x & 31) < UNIT / GROUP && mine < span.end;
    return there ? a.pages[span.pages + page_index(a, mine)] : 0;
}

DEVICE void skip_empty(const Attention& a, const Item& item, int last, int& seg, Span& span) {
    while (span.slot >= span.end && seg < item.seg_end) {
        span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], item.causal, last);
        ++seg;
    }
}

// A loading warp, 0 and 1 for K and queries, 2 and 3 for V: every unit of this block's items.
DEVICE void wide_load(const Attention& a, const WideShared& s) {
    const int group = group_of(a), entries = a.counts[0] * a.kv_heads;
    const bool is_k = threadIdx.x < LOADERS;
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
        skip_empty(a, item, last, seg, span);
        int page = look_up_groups(a, span, span.slot & ~15);
        while (true) {
            const Span here = span;
            const int low = span.slot & 15, slot = span.slot - low, high = max(0, min(UNIT, span.end - slot));
            const int here_page = page;
            span.slot = slot + UNIT;
            skip_empty(a, item, last, seg, span);  // whoever reads LAST must be right
            const bool done = span.slot >= span.end;
            page = look_up_groups(a, span, span.slot & ~15);
            const int stage = unit & 1, phase = unit >> 1 & 1;
            if (is_k) {
                barrier_wait(s.k_empty + 8 * stage, phase ^ 1);
                if (threadIdx.x == 0) {
                    int4* to = (int4*)(s.infos + stage);
                    to[0] = make_int4(item.q_begin, rows, item.partial, item.head);
                    to[1] = make_int4(flags | (done ? LAST : 0), low, high, here.position + slot);
                    barrier_arrive(s.k_full + 8 * stage);
                }
            } else {
                barrier_wait(s.v_empty + 8 * stage, phase ^ 1);
            }
            load_unit(a, is_k ? a.k : a.v, (is_k ? s.k : s.v) + stage * UNIT_BYTES, here, slot, low, high, item.head, here_page);
            barrier_arrive_after_copies((is_k ? s.k_full : s.v_full) + 8 * stage);
            if (is_k && (flags & FIRST)) {
                barrier_wait(s.q_empty, (items & 1) ^ 1);
                load_queries(a, item, s.q, rows);
                barrier_arrive_after_copies(s.q_full);
                ++items;
            }
            flags &= ~FIRST;
            ++unit;
            if (done) break;
        }
    }
    copy_wait<0>();
    if (!is_k) return;
    const int stage = unit & 1, phase = unit >> 1 & 1;
    barrier_wait(s.k_empty + 8 * stage, phase ^ 1);
    if (threadIdx.x == 0) {
        s.infos[stage].flags = STOP;
        barrier_arrive(s.k_full + 8 * stage);
    }
    barrier_arrive(s.k_full + 8 * stage);
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
            const bool visible = token >= c.low && token < c.high && (!(c.flags & CAUSAL) || position <= w.position[row]);
            w.s[i] = exponent(w.s[i], a.scale, visible, w.position[row], position, w.head[row], a.parameters);
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
    const bool compare = c.low > 0 || c.high < UNIT || (c.flags & CAUSAL);
    if (MODIFIED || compare) exponentials<false>(a, c, w, shrink);
    else exponentials<true>(a, c, w, shrink);
}

DEVICE void round_exponentials(WideState& w) {
#pragma unroll
    for (int i = 0; i < UNIT / 4; ++i) w.p[i] = pack(w.s[2 * i], w.s[2 * i + 1]);
}

DEVICE void wide_begin(const Attention& a, const Chunk& c, WideState& w, int row0) {
    const int group = group_of(a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        w.top[i] = MINUS_INFINITY, w.sum[i] = 0.f;
        const int row = min(row0 + 8 * i, c.rows - 1);
        w.head[i] = c.head * group + row % group;
        if (MODIFIED || (c.flags & CAUSAL)) w.position[i] = int(a.q_positions[c.q_begin + row / group]);
    }
}

DEVICE void wide_finish(const Attention& a, const Chunk& c, WideState& w, int row0) {
    const int group = group_of(a), column = 2 * (threadIdx.x & 3);
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
            factor *= join_sink(lse, w.head[i], a.parameters);
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
    return {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
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
