// Attention of many query rows to shared KV with mma.sync, for any GPU from sm_80 on: the matrix path.
//
// shapes     an item has any number of rows, (query, head of the group) pairs of one KV head; a tile takes TILE of them, so a group
//            larger than a tile is cut into slices, each an entry of its own in the walk.
// tiling     a block of four warps shares units of UNIT tokens.  A warp has 16 rows of each 64: scores, exponentials (rounded to the
//            operand of the second product) and output stay in its registers, queries in shared memory.  Keys and values of the units
//            come alternately through a ring of SLOTS tiles, filled by 16-byte copies that run SLOTS - 1 tiles ahead, across items.
// cost       4 D flops per row and token; of shared memory 512 bytes for 4 matrix instructions (2 where a tile has 64 rows).
// limits     head sizes that 16 divides, up to 256: above 128 a tile has 64 rows, for registers are short.
#pragma once
#include "gather.cuh"
#include "merge.cuh"
#include "narrow.cuh"

namespace prefixkit {

constexpr int BLOCK_WARPS = 4;
constexpr int STRIPES = D <= 128 ? 2 : 1;        // of 64 rows in a tile
constexpr int TILE = 64 * STRIPES;
#ifndef PREFIXKIT_SHARED
#define PREFIXKIT_SHARED 101376                  // 99 KB are what the smallest of these GPUs gives a block
#endif
// Tokens of a unit, where three tiles of so many fit beside the queries.
constexpr int UNIT = (TILE + 3 * 64) * COLUMNS * 128 + 1024 <= PREFIXKIT_SHARED ? 64 : 32;
constexpr int PARTS = UNIT / GROUP;              // groups of a unit, one for each warp that copies
constexpr int Q_BYTES = TILE * COLUMNS * 128, SLOT_BYTES = UNIT * COLUMNS * 128;
constexpr int AHEAD = 4;                         // items and units that are known at once
constexpr int WALK_BYTES = 80;
constexpr int NOTHING = -1;

struct WideItem { int q_begin, rows, partial, head, row0, pad[3]; };  // rows of this tile; row0: its first row in the item
struct WideUnit { int flags, low, high, position; };                  // as in Chunk

constexpr int WIDE_EXTRA = TILE * 4 + AHEAD * int(sizeof(WideItem) + sizeof(WideUnit)) + BLOCK_WARPS * WALK_BYTES;
constexpr int FITTING = (PREFIXKIT_SHARED - Q_BYTES - WIDE_EXTRA) / SLOT_BYTES;
// Odd, so that a step on keys always fetches keys.
constexpr int SLOTS = FITTING >= 5 ? 5 : 3;
constexpr int WIDE_BYTES = Q_BYTES + SLOTS * SLOT_BYTES + WIDE_EXTRA;

struct Walk;

struct WideShared {
    u32 q, ring;
    Walk* walks;                                 // one for each warp
    int* positions;                              // of the tile's rows
    WideItem* items;
    WideUnit* units;
};

// ---- loading ----

constexpr int COPIES = D / 16;                   // instructions that fetch a group, and steps of a product over D

// A complete group in one page, fetched between the steps of a product, so that the memory pipe and the matrix units take turns.
struct Fetch {
    const u16* from;                             // this lane's first piece
    u32 to;                                      // row 0 of the group in the tile
    bool whole;

    static constexpr int STEP = EVEN ? 32 / ROW_CHUNKS : 1;  // rows at a time

    DEVICE void begin(const u16* first, u32 tile, long long stride) {
        const int lane = lane_anew();
        whole = true, from = first, to = tile;
        if constexpr (EVEN) {
            const int column = lane % ROW_CHUNKS, sub = lane / ROW_CHUNKS;
            from += sub * stride + column * 8;
            to += (column >> 3) * (UNIT * 128) + sub * 128 + (((column ^ sub) & 7) << 4);
        }
    }

    // Step `i` of COPIES.
    DEVICE void step(int i, long long stride) {
        if (!whole) return;
        if constexpr (EVEN) {
            copy16((to ^ ((i * STEP & 7) << 4)) + i * STEP * 128, from, true);
            from += STEP * stride;
        } else {
            const int piece = lane_anew() + 32 * i, row = piece / ROW_CHUNKS, column = piece % ROW_CHUNKS;
            copy16(to + piece_at<UNIT>(row, column), from + row * stride + column * 8, true);
        }
    }

    DEVICE void all(long long stride) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) step(i, stride);
    }
};

// Where a warp is in this block's share of the wide list.  Kept in shared memory between steps: registers are short, and what spills
// leaves the little L1 that is left.
struct __align__(16) Walk {
    int round, items, units, slot;
    int flags, head, seg, seg_end;
    Span span;                                   // what is left of the item's segment
    int first, last;                             // positions of the item's queries
    int page;                                    // of this warp's group of the unit that comes next, once its values were asked for
    // the unit whose keys were fetched last
    int here_pages, here_slot, here_page;
    int here;                                    // low, high << 8, head << 16; or NOTHING
};

static_assert(sizeof(Walk) == WALK_BYTES, "room for a walk");

// Every warp walks alike and copies groups of its own.
struct WideLoader {
    const Attention& a;
    const WideShared& s;
    Walk w;

    DEVICE WideLoader(const Attention& a, const WideShared& s) : a(a), s(s), w(s.walks[threadIdx.x >> 5]) {}

    DEVICE void keep() {
        __syncwarp();
        if (lane_anew() == 0) s.walks[threadIdx.x >> 5] = w;
        __syncwarp();
    }

    DEVICE static bool begin(const Attention& a, const WideShared& s) {
        WideLoader l(a, s);
        l.w.round = l.w.items = l.w.units = l.w.slot = 0;
        l.next_item();
        l.look_up();
        l.keep();
        return !(l.w.flags & STOP);
    }

    DEVICE bool whole() const { return a.page_size % GROUP == 0 && (a.page_size & (a.page_size - 1)) == 0; }
    DEVICE static int part() { return (threadIdx.x >> 5) & (PARTS - 1); }

    DEVICE void next_item() {
        const int group = group_of(a), slices = (group + TILE - 1) / TILE, sharing = a.kv_heads * slices;
        const int entries = a.counts[0] * sharing;
        int entry;
        do {
            if (w.round * int(gridDim.x) >= entries) { w.flags = STOP; return; }
            entry = entry_of(w.round++, blockIdx.x, gridDim.x);
        } while (entry >= entries);
        const Item item = load_item(a.wide, entry, sharing);
        w.head = item.head / slices;
        const int row0 = (item.head - w.head * slices) * TILE;
        w.first = w.last = 0;
        if (item.causal) w.first = int(a.q_positions[item.q_begin]), w.last = int(a.q_positions[item.q_end - 1]);
        w.flags = FIRST | (item.causal ? CLIP : 0);
        w.seg = item.seg_begin + 1, w.seg_end = item.seg_end;
        w.span = load_span(a, item.node, item.begin, item.end, item.causal, w.last);
        skip_empty();
        if (threadIdx.x == 0) {
            WideItem* to = s.items + w.items % AHEAD;
            to->q_begin = item.q_begin, to->rows = min(TILE, (item.q_end - item.q_begin) * group - row0);
            to->partial = item.partial, to->head = w.head, to->row0 = row0;
        }
        ++w.items;
    }

    DEVICE void skip_empty() {
        while (w.span.slot >= w.span.end && w.seg < w.seg_end) {
            w.span = load_span(a, a.segments[3 * w.seg], a.segments[3 * w.seg + 1], a.segments[3 * w.seg + 2], w.flags & CLIP, w.last);
            ++w.seg;
        }
    }

    DEVICE void look_up() {
        if (w.flags & STOP) return;
        const int at = (w.span.slot & ~15) + part() * GROUP;
        w.page = whole() && at < w.span.end ? a.pages[w.span.pages + page_index(a, at)] : 0;
    }

    // This warp's part of the unit: tokens [low, high), the others zero.
    DEVICE Fetch copy(const u16* base, int slot) {
        const int at = part() * GROUP, low = w.here & 255, high = w.here >> 8 & 255, head = w.here >> 16;
        const u32 to = s.ring + slot * SLOT_BYTES + at * 128;
        Fetch fetch = {};
        if (whole() && at >= low && at + GROUP <= high) {
            const u32 row = row_of(a, w.here_page, place_in_page(a, w.here_slot + at), head);
            fetch.begin(base + (long long)row * 8, to, a.slot_stride);
        } else {
            Span there;
            there.pages = w.here_pages;
            gather_rows<UNIT>(a, base, to, there, w.here_slot + at, low - at, high - at, head);
        }
        return fetch;
    }

    // Sends for the keys of the next unit, but for what it leaves to be fetched, and finds out about the one after it.
    DEVICE Fetch keys() {
        Fetch fetch = {};
        WideUnit* to = s.units + w.units++ % AHEAD;
        const int slot = w.slot;
        w.slot = slot + 1 == SLOTS ? 0 : slot + 1;
        if (w.flags & STOP) {
            if (threadIdx.x == 0) to->flags = STOP;
            w.here = NOTHING;
        } else {
            const int low = w.span.slot & 15, high = max(0, min(UNIT, w.span.end - w.span.slot + low));
            w.here_pages = w.span.pages, w.here_slot = w.span.slot - low, w.here_page = w.page;
            w.here = low | high << 8 | w.head << 16;
            if (PARTS == BLOCK_WARPS || threadIdx.x < 64) fetch = copy(a.k, slot);
            const int position = w.span.position + w.here_slot;
            w.span.slot = w.here_slot + UNIT;
            skip_empty();
            const bool done = w.span.slot >= w.span.end;
            // Where the first query sees the whole unit, so do the others.
            const bool compare = (w.flags & CLIP) && position + UNIT - 1 > w.first;
            if (threadIdx.x == 0)
                *(int4*)to = make_int4((w.flags & FIRST) | (compare ? CAUSAL : 0) | (done ? LAST : 0), low, high, position);
            w.flags &= ~FIRST;
            if (done) next_item();
        }
        keep();
        return fetch;
    }

    // The same for the values that belong to the last keys.
    DEVICE Fetch values() {
        Fetch fetch = {};
        look_up();  // its answer comes meanwhile
        const int slot = w.slot;
        if (w.here != NOTHING && (PARTS == BLOCK_WARPS || threadIdx.x >= 64)) fetch = copy(a.v, slot);
        w.slot = slot + 1 == SLOTS ? 0 : slot + 1;
        return fetch;
    }
    DEVICE void values_kept() {
        __syncwarp();
        Walk& to = s.walks[threadIdx.x >> 5];
        if (lane_anew() == 0) to.slot = w.slot, to.page = w.page;
        __syncwarp();
    }
};

// Query rows and their positions; rows that the item lacks keep what was there, and nobody reads their results.
DEVICE void wide_queries(const Attention& a, const WideItem& item, const WideShared& s) {
    const int group = group_of(a), rows = item.rows;
#pragma unroll 4
    for (int piece = threadIdx.x; piece < rows * ROW_CHUNKS; piece += 32 * BLOCK_WARPS) {
        const int row = piece / ROW_CHUNKS, column = piece % ROW_CHUNKS;
        const int query = divide_small(item.row0 + row, group), of = item.row0 + row - query * group;
        const long long from = ((long long)(item.q_begin + query) * a.heads + item.head * group + of) * D + column * 8;
        store_shared16(s.q + piece_at<TILE>(row, column), *(const int4*)(a.q + from));
    }
    for (int row = threadIdx.x; row < rows; row += 32 * BLOCK_WARPS)
        s.positions[row] = int(a.q_positions[item.q_begin + divide_small(item.row0 + row, group)]);
}

// ---- computing ----

// A lane has rows lane / 4 (+ 8) of its warp's 16 in each stripe, and columns 2 (lane % 4) (+ 1) of every 8.
struct WideState {
    u32 p[STRIPES][UNIT / 16][4];                // exponentials, rounded, as operand
    float o[STRIPES][D / 8][4];
    float top[STRIPES][2], sum[STRIPES][2];      // `sum` over this lane's columns
};

using Scores = float[STRIPES][UNIT / 8][4];

// `S`: stripes that have rows.
template <int S> DEVICE void wide_scores(Scores& x, u32 q, u32 k, Fetch& fetch, long long stride) {
    const int lane = lane_anew();
    const int q_row = 16 * (threadIdx.x >> 5) + (lane & 15), k_row = (lane & 7) + (lane >> 4) * 8;
    const u32 q_base = q + q_row * 128, q_turn = (((lane >> 4) ^ q_row) & 7) << 4;
    const u32 k_base = k + k_row * 128, k_turn = (((lane >> 3 & 1) ^ k_row) & 7) << 4;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int n = 0; n < UNIT / 8; ++n) x[s][n][0] = x[s][n][1] = x[s][n][2] = x[s][n][3] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        u32 mq[S][4], mk[UNIT / 16][4];
#pragma unroll
        for (int s = 0; s < S; ++s) load_matrix(mq[s], q_base + s * 64 * 128 + (i / 4) * (TILE * 128) + (q_turn ^ ((2 * i & 7) << 4)));
#pragma unroll
        for (int n = 0; n < UNIT / 16; ++n) load_matrix(mk[n], k_base + n * 2048 + (i / 4) * (UNIT * 128) + (k_turn ^ ((2 * i & 7) << 4)));
#pragma unroll
        for (int n = 0; n < UNIT / 16; ++n)
#pragma unroll
            for (int s = 0; s < S; ++s) {
                mma(x[s][2 * n], mq[s], mk[n][0], mk[n][1]);
                mma(x[s][2 * n + 1], mq[s], mk[n][2], mk[n][3]);
            }
        fetch.step(i, stride);
    }
}

template <int S> DEVICE void wide_values(WideState& w, u32 v, Fetch& fetch, long long stride) {
    const int lane = lane_anew(), v_row = lane & 15;
    const u32 v_base = v + v_row * 128, v_turn = (((lane >> 4) ^ v_row) & 7) << 4;
#pragma unroll
    for (int n = 0; n < UNIT / 16; ++n)
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            u32 m[4];
            load_matrix_transposed(m, v_base + n * 2048 + (i / 4) * (UNIT * 128) + (v_turn ^ ((2 * i & 7) << 4)));
#pragma unroll
            for (int s = 0; s < S; ++s) {
                mma(w.o[s][2 * i], w.p[s][n], m[0], m[1]);
                mma(w.o[s][2 * i + 1], w.p[s][n], m[2], m[3]);
            }
            const int done = n * COPIES + i + 1;
            if (done % (UNIT / 16) == 0) fetch.step(done / (UNIT / 16) - 1, stride);
        }
}

DEVICE int stripe_row(int stripe, int half) { return 64 * stripe + 16 * (threadIdx.x >> 5) + lane_anew() / 4 + 8 * half; }

// Scores to exponents of 2, -inf where hidden.
template <int S> DEVICE void wide_exponents(const Attention& a, const WideItem& item, const WideUnit& unit, const int* positions, Scores& x) {
    const int column = 2 * (lane_anew() & 3), group = group_of(a);
    const int low = unit.low, high = unit.high, position = unit.position;
    const bool compare = unit.flags & CAUSAL;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(stripe_row(s, half), item.rows - 1), mine = positions[row];
            const int of = item.row0 + row, q_head = item.head * group + of - divide_small(of, group) * group;
#pragma unroll
            for (int n = 0; n < UNIT / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int token = 8 * n + column + j;
                    const bool visible = token >= low && token < high && (!compare || position + token <= mine);
                    float& y = x[s][n][2 * half + j];
                    y = exponent(y, a.scale, visible, mine, position + token, q_head, a.parameters);
                }
        }
}

// Exponents, or plain scores, to probabilities relative to the largest so far; older sums and outputs shrink to it.
template <bool PLAIN, int S> DEVICE void wide_softmax(float scale, WideState& w, Scores& x) {
    const float factor = PLAIN ? scale * LOG2E : 1.f;
    float base[S][2], shrink[S][2];
    bool changed = false;
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = x[s][0][2 * half];
#pragma unroll
            for (int n = 0; n < UNIT / 8; ++n) top = fmaxf(top, fmaxf(x[s][n][2 * half], x[s][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * factor;
            changed = changed || top > w.top[s][half];
            top = fmaxf(top, w.top[s][half]);
            base[s][half] = top == MINUS_INFINITY ? 0.f : top;
            shrink[s][half] = exp2_fast(w.top[s][half] - base[s][half]);
            w.top[s][half] = top;
            w.sum[s][half] *= shrink[s][half];
        }
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
        for (int n = 0; n < UNIT / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float one = exp2_fast(x[s][n][2 * half] * factor - base[s][half]);
                const float two = exp2_fast(x[s][n][2 * half + 1] * factor - base[s][half]);
                w.sum[s][half] += one + two;
                w.p[s][n / 2][2 * (n & 1) + half] = pack(one, two);
            }
    if (__any_sync(~0u, changed))
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
                w.o[s][i][0] *= shrink[s][0], w.o[s][i][1] *= shrink[s][0];
                w.o[s][i][2] *= shrink[s][1], w.o[s][i][3] *= shrink[s][1];
            }
}

template <int S> DEVICE void wide_keys(const Attention& a, const WideItem& item, const WideUnit& unit, const WideShared& s, WideState& w, u32 k, Fetch& fetch) {
    Scores x;
    wide_scores<S>(x, s.q, k, fetch, a.slot_stride);
    if (MODIFIED || (unit.flags & CAUSAL) || unit.low > 0 || unit.high < UNIT) {
        wide_exponents<S>(a, item, unit, s.positions, x);
        wide_softmax<false, S>(a.scale, w, x);
    } else {
        wide_softmax<true, S>(a.scale, w, x);
    }
}

DEVICE void wide_begin(WideState& w) {
#pragma unroll
    for (int s = 0; s < STRIPES; ++s) {
        w.top[s][0] = w.top[s][1] = MINUS_INFINITY, w.sum[s][0] = w.sum[s][1] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) w.o[s][i][0] = w.o[s][i][1] = w.o[s][i][2] = w.o[s][i][3] = 0.f;
    }
}

DEVICE void wide_finish(const Attention& a, const WideItem& item, WideState& w) {
    const int group = group_of(a), column = 2 * (lane_anew() & 3);
#pragma unroll
    for (int s = 0; s < STRIPES; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = w.sum[s][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int row = stripe_row(s, half);
            if (row >= item.rows) continue;
            const int query = divide_small(item.row0 + row, group), head = item.head * group + item.row0 + row - query * group;
            float lse = sum > 0.f ? (w.top[s][half] + log2_fast(sum)) * LN2 : MINUS_INFINITY;
            float factor = sum > 0.f ? 1.f / sum : 0.f;
            if (item.partial >= 0) {
                const long long at = (long long)(item.partial + query) * a.heads + head;
                float* to = a.partial_out + at * D + column;
#pragma unroll
                for (int i = 0; i < D / 8; ++i)
                    *(float2*)(to + 8 * i) = make_float2(w.o[s][i][2 * half] * factor, w.o[s][i][2 * half + 1] * factor);
                if (column == 0) a.partial_lse[at] = lse;
            } else {
                factor *= join_sink(lse, head, a.parameters);
                const long long at = (long long)(item.q_begin + query) * a.heads + head;
                u16* to = a.out + at * D + column;
#pragma unroll
                for (int i = 0; i < D / 8; ++i)
                    *(u32*)(to + 8 * i) = pack(w.o[s][i][2 * half] * factor, w.o[s][i][2 * half + 1] * factor);
                if (column == 0) a.lse[at] = lse;
            }
        }
}

// The block's whole share of the wide list.  A step waits for its tile of the ring, sends for the tile that takes the place of the
// one before, and computes.
DEVICE void wide_role(const Attention& a, const WideShared& s) {
    if (!WideLoader::begin(a, s)) return;  // all warps alike
    WideState w = {};  // else the compiler keeps registers for it outside of this role
    const int first_row = 16 * (threadIdx.x >> 5);
    int at = 0, items = -1, units = 0, early = SLOTS / 2;
    while (true) {
        if (early == 0) copy_wait<SLOTS - 2>(), __syncthreads();
        Fetch fetch = WideLoader(a, s).keys();
        const WideUnit& unit = s.units[units % AHEAD];
        if (early == 0) {
            const int flags = unit.flags;
            if (flags & STOP) break;
            if (flags & FIRST) {
                wide_queries(a, s.items[++items % AHEAD], s);
                wide_begin(w);
                __syncthreads();
            }
            const WideItem& item = s.items[items % AHEAD];
            const u32 k = s.ring + at * SLOT_BYTES;
            if (STRIPES > 1 && first_row + 64 < item.rows) wide_keys<STRIPES>(a, item, unit, s, w, k, fetch);
            else if (first_row < item.rows) wide_keys<1>(a, item, unit, s, w, k, fetch);
            else fetch.all(a.slot_stride);
            at = at + 1 == SLOTS ? 0 : at + 1;
            copy_commit();
            copy_wait<SLOTS - 2>(), __syncthreads();
        } else {
            fetch.all(a.slot_stride);
            copy_commit();
        }
        WideLoader loader(a, s);
        fetch = loader.values();
        if (early == 0) {
            const WideItem& item = s.items[items % AHEAD];
            const u32 v = s.ring + at * SLOT_BYTES;
            if (STRIPES > 1 && first_row + 64 < item.rows) wide_values<STRIPES>(w, v, fetch, a.slot_stride);
            else if (first_row < item.rows) wide_values<1>(w, v, fetch, a.slot_stride);
            else fetch.all(a.slot_stride);
            at = at + 1 == SLOTS ? 0 : at + 1;
            if ((unit.flags & LAST) && first_row < item.rows) wide_finish(a, item, w);
            ++units;
        } else {
            fetch.all(a.slot_stride);
            --early;
        }
        copy_commit();
        loader.values_kept();
    }
    copy_wait<0>();
    __syncthreads();
}

}  // namespace prefixkit
