// Attention of few query rows (at most 8) to long KV: the bandwidth path.  Each warp works alone.
//
// shapes     an item has up to 8 rows, (query, head of the group) pairs of one KV head.
// tiling     KV comes in chunks of 16 tokens through a warp's own ring of STAGES chunks, filled by 16-byte copies that run
//            STAGES chunks ahead, across items.  Operands are swapped: S^T[16 x 8] = K Q^T and O^T[D x 8] = V^T P^T, so rows cost
//            an eighth of a tile and the output takes D / 4 registers.
// cost       2 x 2 D bytes per token; D / 4 matrix instructions per 16 tokens, a quarter of what memory leaves time for.
// limits     rows of any page size and stride; each row's page is looked up by one lane.
#pragma once
#include "gather.cuh"
#include "merge.cuh"

namespace prefixkit {

constexpr int CHUNK = 16;
constexpr int CHUNK_BYTES = CHUNK * COLUMNS * 128;  // of K, and of V
constexpr int STAGE_BYTES = 2 * CHUNK_BYTES;
constexpr int MAX_STAGES = 6;

struct Chunk {  // what the computing side must know of a chunk; 32 bytes
    int q_begin, rows, partial, head;
    int flags;     // FIRST, LAST of its item; CAUSAL: compare positions; STOP: no more work
    int low, high; // tokens [low, high) count
    int position;  // of token 0
};
enum { FIRST = 1, LAST = 2, CAUSAL = 4, STOP = 8 };


constexpr int BATCH = 8, NARROW_WARPS = 4;

#ifndef PREFIXKIT_NARROW_FIRST
#define PREFIXKIT_NARROW_FIRST 4  // the first of a block's narrow warps
#endif
// Neighbours in the list go to different blocks.
DEVICE int narrow_worker() { return ((threadIdx.x >> 5) - PREFIXKIT_NARROW_FIRST) * gridDim.x + blockIdx.x; }

struct Resolved {  // an item and its first segment; 48 bytes
    int q_begin, rows, partial, head;
    int flags, seg, seg_end, last;  // segments after the first; position of the last query
    Span span;
};
enum { CLIP = 16 };  // segments end at `last`

// Walks a worker's list and issues its loads.  BATCH items are resolved at once, one by each lane, into shared memory: each is
// a chain of dependent reads.
struct Loader {
    const Attention& a;
    Resolved* batch;
    int taken = 0;                   // items begun
    // the current item and segment
    int seg, flags;
    Span span;
    int page = 0;                    // of the next chunk

    DEVICE Loader(const Attention& a, Resolved* batch) : a(a), batch(batch) { begin_item(); }

    DEVICE void resolve() {
        const int lane = lane_anew(), group = group_of(a);
        __syncwarp();
        if (lane < BATCH) {
            Resolved r = {};
            const int entries = a.counts[1] * a.kv_heads;
            const int entry = entry_of(taken + lane, narrow_worker(), NARROW_WARPS * gridDim.x);
            r.flags = STOP;
            if (entry < entries) {
                const Item item = load_item(a.narrow, entry, a.kv_heads);
                r.q_begin = item.q_begin, r.rows = (item.q_end - item.q_begin) * group;
                r.partial = item.partial, r.head = item.head;
                r.last = item.causal ? int(a.q_positions[item.q_end - 1]) : 0;
                // A single query needs no comparison: the segment's end says it all.
                r.flags = FIRST | (item.causal ? CLIP : 0) | (item.causal && item.q_end - item.q_begin > 1 ? CAUSAL : 0);
                r.seg = item.seg_begin + 1, r.seg_end = item.seg_end;
                r.span = load_span(a, item.node, item.begin, item.end, item.causal, r.last);
            }
            batch[lane] = r;
        }
        __syncwarp();
    }

    DEVICE const Resolved& current() const { return batch[(taken - 1) % BATCH]; }

    DEVICE void begin_item() {
        if (taken % BATCH == 0) resolve();
        const Resolved& r = batch[taken % BATCH];
        flags = r.flags, seg = r.seg, span = r.span;
        ++taken;
        if (flags & STOP) return;
        skip_empty();
        look_up();
    }

    DEVICE void skip_empty() {
        while (span.slot >= span.end && seg < current().seg_end) {
            span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], flags & CLIP, current().last);
            ++seg;
        }
    }

    DEVICE void look_up() {
        if (pages_hold_groups(a)) page = span.slot < span.end ? a.pages[span.pages + page_index(a, span.slot)] : 0;
    }

    // Fills a stage with the next chunk.
    DEVICE void issue(u32 stage, Chunk* info) {
        const int lane = lane_anew();
        if (flags & STOP) {
            if (lane == 0) info->flags = STOP;
            copy_commit();
            return;
        }
        const Resolved& item = current();
        const int head = item.head;
        const int low = span.slot & 15, slot = span.slot - low;
        const int high = max(0, min(CHUNK, span.end - slot));
        if (pages_hold_groups(a) && low == 0 && span.end - slot >= CHUNK) {
            const long long from = (long long)row_of(a, page, place_in_page(a, slot), head) * 8;
            copy_group<CHUNK>(stage, a.k + from);
            copy_group<CHUNK>(stage + CHUNK_BYTES, a.v + from);
        } else {
            gather_rows<CHUNK>(a, a.k, stage, span, slot, low, high, head);
            gather_rows<CHUNK>(a, a.v, stage + CHUNK_BYTES, span, slot, low, high, head);
        }
        copy_commit();
        const int position = span.position + slot;
        if (flags & FIRST) {  // its queries are read a few chunks later, from L1
            const int group = group_of(a);
            const char* q = (const char*)(a.q + ((long long)item.q_begin * a.heads + head * group) * D);
            for (int row = 0; row < item.rows; row += group, q += (long long)a.heads * D * 2)
                for (int at = lane * 32; at < group * D * 2; at += 32 * 32) touch(q + at);
        }
        span.slot = slot + CHUNK;
        skip_empty();
        const bool done = span.slot >= span.end;
        if (lane == 0) {
            int4* to = (int4*)info;
            to[0] = make_int4(item.q_begin, item.rows, item.partial, head);
            to[1] = make_int4((flags & (FIRST | CAUSAL)) | (done ? LAST : 0), low, high, position);
        }
        flags &= ~FIRST;
        if (done) begin_item();
        else look_up();
    }
};

// The state of up to 8 rows; a lane holds columns (rows of the item) 2 (lane % 4) and + 1, and dims lane / 4 (+ 8) of each 16.
struct NarrowState {
    u32 q[D / 16][2];
    float o[D / 16][4];
    float top[2], sum[2];
    int position[2], q_head[2];
};

DEVICE void narrow_begin(const Attention& a, const Chunk& c, NarrowState& s) {
    const int lane = lane_anew(), group = group_of(a);
    const int n = lane / 4, query = divide_small(n, group);
    const u16* q = a.q + ((long long)(c.q_begin + query) * a.heads + c.head * group + n - query * group) * D + 2 * (lane & 3);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        s.q[k][0] = n < c.rows ? *(const u32*)(q + 16 * k) : 0;
        s.q[k][1] = n < c.rows ? *(const u32*)(q + 16 * k + 8) : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) s.o[k][i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        s.top[i] = MINUS_INFINITY, s.sum[i] = 0.f;
        if (MODIFIED || (c.flags & CAUSAL)) {
            const int row = min(2 * (lane & 3) + i, c.rows - 1);
            const int of = divide_small(row, group);
            s.position[i] = int(a.q_positions[c.q_begin + of]);
            s.q_head[i] = c.head * group + row - of * group;
        }
    }
}

DEVICE void narrow_compute(const Attention& a, const Chunk& c, NarrowState& s, u32 stage) {
    const int lane = lane_anew();
    float dot[2][4] = {};
    const int k_row = lane & 15, k_column = lane >> 4;
    const u32 k_base = stage + k_row * 128, k_turn = ((k_column ^ k_row) & 7) << 4;
#pragma unroll
    for (int first = 0; first < D / 16; first += 4) {  // four loads under way at a time
        u32 m[4][4];
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k)
            load_matrix(m[k - first], k_base + (k / 4) * (CHUNK * 128) + (k_turn ^ ((2 * k & 7) << 4)));
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k) mma(dot[k & 1], m[k - first], s.q[k][0], s.q[k][1]);
    }
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = lane / 4 + 8 * (i / 2), position = c.position + token;
        bool visible = token >= c.low && token < c.high;
        if (c.flags & CAUSAL) visible = visible && position <= s.position[i & 1];
        x[i] = exponent(dot[0][i] + dot[1][i], a.scale, visible, s.position[i & 1], position, s.q_head[i & 1], a.parameters);
    }
    float top[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) {
        top[0] = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], d));
        top[1] = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], d));
    }
    if (__any_sync(~0u, top[0] > s.top[0] || top[1] > s.top[1])) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float now = fmaxf(s.top[i], top[i]);
            const float shrink = now == MINUS_INFINITY ? 1.f : exp2_fast(s.top[i] - now);
            s.top[i] = now, s.sum[i] *= shrink;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) s.o[k][i] *= shrink, s.o[k][i + 2] *= shrink;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float base = s.top[i & 1] == MINUS_INFINITY ? 0.f : s.top[i & 1];
        x[i] = exp2_fast(x[i] - base);
        s.sum[i & 1] += x[i];
    }
    const u32 p0 = transpose8(pack(x[0], x[1])), p1 = transpose8(pack(x[2], x[3]));
    const int v_row = (lane & 7) + 8 * (lane >> 4), v_column = (lane >> 3) & 1;
    const u32 v_base = stage + CHUNK_BYTES + v_row * 128, v_turn = ((v_column ^ v_row) & 7) << 4;
#pragma unroll
    for (int first = 0; first < D / 16; first += 4) {
        u32 m[4][4];
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k)
            load_matrix_transposed(m[k - first], v_base + (k / 4) * (CHUNK * 128) + (v_turn ^ ((2 * k & 7) << 4)));
#pragma unroll
        for (int k = first; k < first + 4 && k < D / 16; ++k) mma(s.o[k], m[k - first], p0, p1);
    }
}

DEVICE void narrow_finish(const Attention& a, const Chunk& c, NarrowState& s) {
    const int lane = lane_anew(), group = group_of(a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = s.sum[i];
        for (int d = 4; d < 32; d <<= 1) sum += __shfl_xor_sync(~0u, sum, d);
        const int row = 2 * (lane & 3) + i;
        if (row >= c.rows) continue;
        const int query = divide_small(row, group), head = c.head * group + row - query * group;
        float lse = sum > 0.f ? (s.top[i] + log2_fast(sum)) * LN2 : MINUS_INFINITY;
        float factor = sum > 0.f ? 1.f / sum : 0.f;
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

// Waits until at most `pending` of the latest chunks are under way.
DEVICE void ring_wait(int pending) {
    switch (pending) {
        case 1: return copy_wait<1>();
        case 2: return copy_wait<2>();
        case 5: return copy_wait<5>();
        default: return copy_wait<0>();
    }
}

// A warp's whole share of the narrow list, through a ring of `stages`: 3 or 6.
DEVICE void narrow_role(const Attention& a, u32 ring, int stages, Chunk* infos, Resolved* batch) {
    if (narrow_worker() >= a.counts[1] * a.kv_heads) return;
    Loader loader(a, batch);
    NarrowState state = {};  // else the compiler keeps registers for it outside of this role
    for (int i = 0; i < stages; ++i) loader.issue(ring + i * STAGE_BYTES, infos + i);
    for (int stage = 0;; stage = stage + 1 == stages ? 0 : stage + 1) {
        ring_wait(stages - 1);
        __syncwarp();
        const Chunk& c = infos[stage];  // read from shared memory where needed: registers are short
        const int flags = c.flags;
        if (flags & STOP) break;
        if (flags & FIRST) narrow_begin(a, c, state);
        narrow_compute(a, c, state, ring + stage * STAGE_BYTES);
        if (flags & LAST) narrow_finish(a, c, state);
        __syncwarp();
        loader.issue(ring + stage * STAGE_BYTES, infos + stage);
    }
    copy_wait<0>();
}

}  // namespace prefixkit
