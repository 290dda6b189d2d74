// Attention of few query rows (at most 8) to long KV: the bandwidth path.  Each warp works alone.
//
// shapes     an item has up to 8 rows, (query, head of the group) pairs of one KV head.
// tiling     KV comes in chunks of 16 tokens through a warp's own ring of STAGES chunks, filled by 16-byte copies that run
//            STAGES chunks ahead, across items.  Operands are swapped: S^T[16 x 8] = K Q^T and O^T[D x 8] = V^T P^T, so rows cost
//            an eighth of a tile and the output takes D / 4 registers.
// cost       2 x 2 D bytes per token; D / 4 matrix instructions per 16 tokens, a quarter of what memory leaves time for.
// limits     rows of any page size and stride; each row's page is looked up by one lane.
#pragma once
#include "merge.cuh"

namespace prefixkit {

constexpr int CHUNK = 16;
constexpr int CHUNK_BYTES = CHUNK * ROW_PITCH;   // of K, and of V
constexpr int STAGE_BYTES = 2 * CHUNK_BYTES;
constexpr int MAX_STAGES = 6;

struct Chunk {  // what the computing side must know of a chunk; 32 bytes
    int q_begin, rows, partial, head;
    int flags;     // FIRST, LAST of its item; CAUSAL: compare positions; STOP: no more work
    int valid;     // tokens
    int position;  // of token 0
    int pad;
};
enum { FIRST = 1, LAST = 2, CAUSAL = 4, STOP = 8 };

DEVICE u32 swizzled(u32 base, int row, int chunk) { return base + row * ROW_PITCH + ((chunk ^ (row & 7)) << 4); }

constexpr int BATCH = 8;
struct Resolved {  // an item and its first segment; 48 bytes
    int q_begin, rows, partial, head;
    int flags, seg, left, last;  // segments after the first; position of the last query
    Span span;
};
enum { CLIP = 16 };  // segments end at `last`

// Walks a worker's list and issues its loads.  BATCH items are resolved at once, one by each lane, into shared memory: each is
// a chain of dependent reads.
struct Loader {
    const Attention& a;
    Resolved* batch;
    const int worker, workers, entries;
    int round = 0, taken = BATCH;
    // the current item and segment
    int q_begin, rows, partial, head, seg, left, last, flags;
    Span span;
    int page = 0;                    // of token lane % 16 of the next chunk

    DEVICE Loader(const Attention& a, Resolved* batch, int worker, int workers, int entries)
        : a(a), batch(batch), worker(worker), workers(workers), entries(entries) {
        begin_item();
    }

    DEVICE void resolve() {
        const int lane = threadIdx.x & 31, group = a.heads / a.kv_heads;
        if (lane < BATCH) {
            Resolved r;
            const int entry = entry_of(round + lane, worker, workers);
            r.flags = STOP;
            if (entry < entries) {
                const Item item = load_item(a.narrow, entry, a.kv_heads);
                r.q_begin = item.q_begin, r.rows = (item.q_end - item.q_begin) * group;
                r.partial = item.partial, r.head = item.head;
                r.last = item.causal ? int(a.q_positions[item.q_end - 1]) : 0;
                // A single query needs no comparison: the segment's end says it all.
                r.flags = FIRST | (item.causal ? CLIP : 0) | (item.causal && item.q_end - item.q_begin > 1 ? CAUSAL : 0);
                r.seg = item.seg_begin + 1, r.left = item.seg_end - item.seg_begin - 1;
                r.span = load_span(a, item.node, item.begin, item.end, item.causal, r.last);
            }
            batch[lane] = r;
        }
        __syncwarp();
        round += BATCH, taken = 0;
    }

    DEVICE void begin_item() {
        if (taken == BATCH) resolve();
        const Resolved& r = batch[taken];
        q_begin = r.q_begin, rows = r.rows, partial = r.partial, head = r.head;
        flags = r.flags, seg = r.seg, left = r.left, last = r.last, span = r.span;
        ++taken;
        if (taken == BATCH) __syncwarp();
        if (flags & STOP) return;
        skip_empty();
        look_up();
    }

    DEVICE void skip_empty() {
        while (span.slot >= span.end && left > 0) {
            span = load_span(a, a.segments[3 * seg], a.segments[3 * seg + 1], a.segments[3 * seg + 2], flags & CLIP, last);
            ++seg, --left;
        }
    }

    DEVICE void look_up() {
        const int slot = span.slot + (threadIdx.x & 15);
        page = slot < span.end ? a.pages[span.pages + u32(slot) / u32(a.page_size)] : 0;
    }

    // Fills a stage with the next chunk.
    DEVICE void issue(u32 stage, Chunk* info) {
        const int lane = threadIdx.x & 31, group = a.heads / a.kv_heads;
        if (flags & STOP) {
            if (lane == 0) info->flags = STOP;
            copy_commit();
            return;
        }
        const int valid = max(0, min(CHUNK, span.end - span.slot));
        const int slot = span.slot + (lane & 15);
        const u32 in_page = u32(slot) % u32(a.page_size);
        const u32 mine = row_of(a, page, in_page, head);
#pragma unroll
        for (int i = 0; i < (CHUNK * ROW_CHUNKS + 31) / 32; ++i) {
            const int piece = lane + 32 * i;
            const int row = piece / ROW_CHUNKS, column = piece % ROW_CHUNKS;
            const long long from = (long long)(__shfl_sync(~0u, mine, row & 15)) * 8 + column * 8;
            const u32 to = swizzled(stage, row, column);
            if (CHUNK * ROW_CHUNKS % 32 == 0 || row < CHUNK) {
                copy16(to, a.k + from, row < valid);
                copy16(to + CHUNK_BYTES, a.v + from, row < valid);
            }
        }
        copy_commit();
        const int position = span.position + span.slot;
        if (flags & FIRST) {  // its queries are read a few chunks later, from L1
            const u16* q = a.q + ((long long)q_begin * a.heads + head * group) * D;
            const int bytes = group * D * 2;
            for (int r = lane * 64; r < rows / group * bytes; r += 32 * 64)
                touch((const char*)q + (long long)(r / bytes) * a.heads * D * 2 + r % bytes);
        }
        span.slot += CHUNK;
        skip_empty();
        const bool done = span.slot >= span.end;
        if (lane == 0) {
            int4* to = (int4*)info;
            to[0] = make_int4(q_begin, rows, partial, head);
            to[1] = make_int4((flags & (FIRST | CAUSAL)) | (done ? LAST : 0), valid, position, 0);
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
    const int lane = threadIdx.x & 31, group = a.heads / a.kv_heads;
    const int n = lane / 4;
    const u16* q = a.q + ((long long)(c.q_begin + n / group) * a.heads + c.head * group + n % group) * D + 2 * (lane & 3);
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
            s.position[i] = int(a.q_positions[c.q_begin + row / group]);
            s.q_head[i] = c.head * group + row % group;
        }
    }
}

DEVICE void narrow_compute(const Attention& a, const Chunk& c, NarrowState& s, u32 stage) {
    const int lane = threadIdx.x & 31;
    float dot[2][4] = {};
    const int k_row = (lane & 7) + 8 * ((lane >> 3) & 1), k_column = lane >> 4;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 m[4];
        load_matrix(m, swizzled(stage, k_row, 2 * k + k_column));
        mma(dot[k & 1], m, s.q[k][0], s.q[k][1]);
    }
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = lane / 4 + 8 * (i / 2), position = c.position + token;
        bool visible = token < c.valid;
        if (c.flags & CAUSAL) visible = visible && position <= s.position[i & 1];
        x[i] = exponent(dot[0][i] + dot[1][i], a.scale, visible, s.position[i & 1], position, s.q_head[i & 1]);
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
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 m[4];
        load_matrix_transposed(m, swizzled(stage + CHUNK_BYTES, v_row, 2 * k + v_column));
        mma(s.o[k], m, p0, p1);
    }
}

DEVICE void narrow_finish(const Attention& a, const Chunk& c, NarrowState& s) {
    const int lane = threadIdx.x & 31, group = a.heads / a.kv_heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = s.sum[i];
        for (int d = 4; d < 32; d <<= 1) sum += __shfl_xor_sync(~0u, sum, d);
        const int row = 2 * (lane & 3) + i;
        if (row >= c.rows) continue;
        const int query = row / group, head = c.head * group + row % group;
        float lse = sum > 0.f ? (s.top[i] + log2_fast(sum)) * LN2 : MINUS_INFINITY;
        float factor = sum > 0.f ? 1.f / sum : 0.f;
        if (c.partial >= 0) {
            const long long at = (long long)(c.partial + query) * a.heads + head;
            float* to = a.partial_out + at * D + lane / 4;
#pragma unroll
            for (int k = 0; k < D / 16; ++k) to[16 * k] = s.o[k][i] * factor, to[16 * k + 8] = s.o[k][i + 2] * factor;
            if (lane < 4) a.partial_lse[at] = lse;
        } else {
            factor *= join_sink(lse, head);
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
        case 2: return copy_wait<2>();
        case 3: return copy_wait<3>();
        case 5: return copy_wait<5>();
        default: return copy_wait<0>();
    }
}

// A warp's whole share of the narrow list, through a ring of `stages`: 3, 4 or 6.
DEVICE void narrow_role(const Attention& a, u32 ring, int stages, Chunk* infos, Resolved* batch, int worker, int workers) {
    const int entries = a.counts[1] * a.kv_heads;
    if (worker >= entries) return;
    Loader loader(a, batch, worker, workers, entries);
    NarrowState state;
    for (int i = 0; i < stages; ++i) loader.issue(ring + i * STAGE_BYTES, infos + i);
    for (int stage = 0;; stage = stage + 1 == stages ? 0 : stage + 1) {
        ring_wait(stages - 1);
        __syncwarp();
        const int4 x = ((const int4*)(infos + stage))[0], y = ((const int4*)(infos + stage))[1];
        const Chunk c = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, 0};
        if (c.flags & STOP) break;
        if (c.flags & FIRST) narrow_begin(a, c, state);
        narrow_compute(a, c, state, ring + stage * STAGE_BYTES);
        __syncwarp();
        loader.issue(ring + stage * STAGE_BYTES, infos + stage);
        if (c.flags & LAST) narrow_finish(a, c, state);
    }
    copy_wait<0>();
}

}  // namespace prefixkit
