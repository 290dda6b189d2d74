// Attention of few query rows (at most 8) to long KV: the bandwidth path.  Each warp works alone.
//
// shapes     an item has up to 8 rows, (query, head of the group) pairs of one KV head.
// tiling     KV comes in tiles of 16 tokens through a warp's own ring of KV tiles, filled by TMA (on Hopper) or by
//            16-byte copies that run a ring ahead, across items.  Operands are swapped: S^T[16 x 8] = K Q^T and O^T[D x 8] = V^T P^T, so rows cost
//            an eighth of a tile and the output takes D / 4 registers.
// cost       2 x 2 D bytes per token; D / 8 matrix instructions per 16 tokens.
// limits     rows of any page size and stride; each row's page is looked up by one lane.
#pragma once
#include "attention/gather.cuh"
#include "attention/merge.cuh"

namespace prefixkit {

constexpr int DECODE_KV_TILE = 16;
constexpr int DECODE_KV_TILE_BYTES = DECODE_KV_TILE * COLUMNS * 128;  // of K, and of V
constexpr int STAGE_BYTES = 2 * DECODE_KV_TILE_BYTES;

struct DecodeKVTile {  // what the computing side must know of a KV tile; 32 bytes
    int q_begin, rows, partial, head;
    int flags;     // FIRST, LAST of its item; CAUSAL: compare positions; STOP: no more work
    int low, high; // tokens [low, high) count
    int position;  // of token 0
};
enum { FIRST = 1, LAST = 2, CAUSAL = 4, STOP = 8 };


constexpr int BATCH = 8, DECODE_WARPS = 4;

struct Resolved {  // an item and its first segment
    int q_begin, partial;
    u32 rows_head;            // rows, and KV head << 8
    int flags, seg, seg_end;  // segments after the first
    VisibleRange range;
    Span span;
    int page;                 // of the segment's first group, where pages hold groups

    DEVICE int rows() const { return rows_head & 255; }
    DEVICE int head() const { return rows_head >> 8; }
};
constexpr int RESOLVED_BYTES = 52;
static_assert(sizeof(Resolved) == RESOLVED_BYTES, "what a launch reserves");

// Entry `entry` of the decode list, or STOP behind its end.
DEVICE Resolved resolve_item(const Attention& a, int entry) {
    Resolved r = {};
    r.flags = STOP;
    const Item item = load_item(a.decode_items, entry, a.kv_heads, a.decode_capacity);  // does not wait for counts
    if (entry >= a.counts[1] * a.kv_heads) return r;
    r.q_begin = item.q_begin, r.partial = item.partial;
    r.rows_head = u32((item.q_end - item.q_begin) * group_of(a)) | u32(item.head) << 8;
    int first = 0x7fffffff;
    if (a.window > 0) {
#pragma unroll 1
        for (int i = item.q_begin; i < item.q_end; ++i) first = min(first, int(a.q_positions[i]));
    }
    r.range = visible_range(a, item.causal, first, item.causal ? int(a.q_positions[item.q_end - 1]) : 0);
    // A single query needs no comparison: the segment's end says it all.
    r.flags = FIRST | (item.causal && item.q_end - item.q_begin > 1 ? CAUSAL : 0);
    r.seg = item.seg_begin + 1, r.seg_end = item.seg_end;
    r.span = load_span(a, item.node, item.begin, item.end, r.range);
    if (holds_groups(a) && r.span.slot < r.span.end) r.page = a.pages[r.span.pages + page_index(a, r.span.slot)];
    return r;
}

// The state of up to 8 rows; a lane holds columns (rows of the item) 2 (lane % 4) and + 1, and dims lane / 4 (+ 8) of each 16.
struct DecodeState {
    u32 q[D / 16][2];
    float o[D / 16][4];
    float base[2], sum[2], weight[2];
    int position[2], q_head[2];
};

// An item's queries, early: registers for them are free once the last item's scores are there.
DEVICE void decode_queries(const Attention& a, const DecodeKVTile& c, DecodeState& s) {
    const int lane = lane_anew(), group = group_of(a);
    const int n = lane / 4, query = divide_small(n, group);
    const u16* q = a.q + ((long long)(c.q_begin + query) * a.heads + c.head * group + n - query * group) * D + 2 * (lane & 3);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        s.q[k][0] = n < c.rows ? *(const u32*)(q + 16 * k) : 0;
        s.q[k][1] = n < c.rows ? *(const u32*)(q + 16 * k + 8) : 0;
    }
}

DEVICE void decode_begin(const Attention& a, const DecodeKVTile& c, DecodeState& s) {
    const int lane = lane_anew(), group = group_of(a);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.o[k][i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        s.base[i] = LOWEST, s.sum[i] = s.weight[i] = 0.f;
        if (MODIFIED || (c.flags & CAUSAL)) {
            const int row = min(2 * (lane & 3) + i, c.rows - 1);
            const int of = divide_small(row, group);
            s.position[i] = int(a.q_positions[c.q_begin + of]);
            s.q_head[i] = c.head * group + row - of * group;
        }
    }
}

// Zeros for the values that a KV tile lacks: TMA brought whatever lay there, and 0 * NaN is NaN.
DEVICE void clear_absent(u32 values, int low, int high) {
    const int lane = lane_anew();
#pragma unroll 1
    for (int piece = lane; piece < DECODE_KV_TILE * ROW_VECTORS; piece += 32) {
        const int row = piece / ROW_VECTORS;
        if (row < low || row >= high) store_zeros(values + piece_at<DECODE_KV_TILE>(row, piece % ROW_VECTORS));
    }
    async_fence();  // the copy engine writes here next
    __syncwarp();
}

DEVICE void decode_compute(const Attention& a, const DecodeKVTile& c, DecodeState& s, u32 stage) {
    const int lane = lane_anew();
    float dot[4][4] = {};  // on Hopper, products that wait for each other would each wait for the tile warps' too
    const int k_row = lane & 15, k_column = lane >> 4;
    const u32 k_base = stage + k_row * 128, k_turn = ((k_column ^ k_row) & 7) << 4;
#pragma unroll
    for (int first = 0; first < D / 16; first += 4) {  // four loads under way at a time
        u32 m[4][4];
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k)
            load_matrix(m[k - first], k_base + (k / 4) * (DECODE_KV_TILE * 128) + (k_turn ^ ((2 * k & 7) << 4)));
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k) mma(dot[k & 3], m[k - first], s.q[k][0], s.q[k][1]);
    }
    const int low = c.low, high = c.high, flags = c.flags;
    if (by_boxes(a) && (low > 0 || high < DECODE_KV_TILE)) clear_absent(stage + DECODE_KV_TILE_BYTES, low, high);
    const int v_row = (lane & 7) + 8 * (lane >> 4), v_column = (lane >> 3) & 1;
    const u32 v_base = stage + DECODE_KV_TILE_BYTES + v_row * 128, v_turn = ((v_column ^ v_row) & 7) << 4;
    u32 v[4][4];  // the first of them while exponentials are taken
#pragma unroll
    for (int k = 0; k < 4 && k < D / 16; ++k) load_matrix_transposed(v[k], v_base + (v_turn ^ ((2 * k & 7) << 4)));
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = lane / 4 + 8 * (i / 2), position = c.position + token;
        bool visible = token >= low && token < high;
        if (flags & CAUSAL) visible = visible && position <= s.position[i & 1];
        x[i] = exponent((dot[0][i] + dot[1][i]) + (dot[2][i] + dot[3][i]), a.scale, visible, s.position[i & 1], position, s.q_head[i & 1], a.parameters);
    }
    // The base rises only when a score passes it by more than HEADROOM; see tile.cuh.
    float top[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
    if (__any_sync(~0u, top[0] > s.base[0] + HEADROOM || top[1] > s.base[1] + HEADROOM)) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            top[0] = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], d));
            top[1] = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], d));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float base = fmaxf(s.base[i], top[i]), shrink = exp2_fast(s.base[i] - base);
            s.base[i] = base, s.sum[i] *= shrink, s.weight[i] *= shrink;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) s.o[k][i] *= shrink, s.o[k][i + 2] *= shrink;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = exp2_fast(x[i] - s.base[i & 1]);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        s.sum[0] += x[i], s.sum[1] += x[i + 1];
        round_pair(x[i], x[i + 1]);
        s.weight[0] += x[i], s.weight[1] += x[i + 1];
    }
    const u32 p0 = transpose8(pack_rounded(x[0], x[1])), p1 = transpose8(pack_rounded(x[2], x[3]));
#pragma unroll
    for (int first = 0; first < D / 16; first += 4) {
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k) {
            if (first > 0) load_matrix_transposed(v[k - first], v_base + (k / 4) * (DECODE_KV_TILE * 128) + (v_turn ^ ((2 * k & 7) << 4)));
        }
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k) mma(s.o[k], v[k - first], p0, p1);
    }
}

DEVICE void decode_finish(const Attention& a, const DecodeKVTile& c, DecodeState& s) {
    const int lane = lane_anew(), group = group_of(a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = s.sum[i], weight = s.weight[i];
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) sum += __shfl_xor_sync(~0u, sum, d), weight += __shfl_xor_sync(~0u, weight, d);
        const int row = 2 * (lane & 3) + i;
        if (row >= c.rows) continue;
        const int query = divide_small(row, group), head = c.head * group + row - query * group;
        float lse = sum > 0.f ? (s.base[i] + log2_fast(sum)) * LN2 : MINUS_INFINITY;
        float factor = weight > 0.f ? reciprocal(weight) : 0.f;
        if (c.partial >= 0) {
            const long long at = (long long)(c.partial + query) * a.heads + head;
            float* to = a.partial_out + at * D + lane / 4;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) to[16 * k] = s.o[k][i] * factor, to[16 * k + 8] = s.o[k][i + 2] * factor;
            if (lane < 4) a.partial_lse[at] = lse;
        } else {
            factor *= join_sink(lse, head, a.parameters);
            const long long at = (long long)(c.q_begin + query) * a.heads + head;
            u16* to = a.out + at * D + lane / 4;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                const u32 both = pack(s.o[k][i] * factor, s.o[k][i + 2] * factor);
                to[16 * k] = u16(both), to[16 * k + 8] = u16(both >> 16);
            }
            if (lane < 4) a.lse[at] = lse;
        }
    }
}

}  // namespace prefixkit
