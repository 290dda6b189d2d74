// Hopper's loads of the tile path, and consumers that compute attention as its definition says: in double, one row
// after the other.
#pragma once
#include "attention/sm90/tile_load.cuh"
#include <vector>

namespace prefixkit {
struct alignas(1024) TileRings {
    unsigned char k[TILE_STAGES * K_TILE_BYTES], v[TILE_STAGES * V_TILE_BYTES];
    unsigned char staged[2 * STAGED * STAGED_BYTES + 1024];
    u64 barriers[TILE_BARRIERS];
    int4 items[2], slices, kv_tiles[TILE_STAGES + STAGED];
};
static_assert(sizeof(TileRings) <= sizeof(memory));

static TileShared tile_shared() {
    TileRings& r = *(TileRings*)memory;
    TileShared s = {};
    s.k = shared_address(r.k), s.v = shared_address(r.v), s.stages = ring_stages;
    s.full = shared_address(r.barriers), s.k_empty = s.full + 8 * TILE_STAGES, s.v_empty = s.k_empty + 8 * TILE_STAGES;
    s.item_full = s.v_empty + 8 * TILE_STAGES, s.item_empty = s.item_full + 16, s.staged_full = s.item_empty + 16;
    s.items = shared_address(r.items), s.kv_tiles = shared_address(r.kv_tiles);
    s.staged = shared_address(r.staged), s.staged_kv_tiles = s.kv_tiles + 16 * TILE_STAGES;
    s.staged_empty = s.staged_full + 8 * (2 * STAGED), s.slices = shared_address(&r.slices);
    return s;
}

struct ExactRow {
    double sum = 0, o[D] = {};
};

static double number_at(u32 tile, int row, int column) {
    return widen(Operand{load_address<u16>(tile + vector_at<KV_TILE>(row, column / 8) + 2 * (column % 8))});
}

static void add_kv_tile(const Attention& a, const TileShared& s, int stage, const int4& item,
                        std::vector<ExactRow>& rows) {
    const int4 raw = load_shared_int4(s.kv_tiles + 16 * stage);
    const KVTileInfo info = {raw.x, raw.y, raw.z, raw.w};
    // Read once for all rows; of V, what tensor cores make of the values of other rows, which they multiply by 0.
    static double k[KV_TILE][D], v[KV_TILE][D], hidden[D];
    for (int i = 0; i < D; ++i) hidden[i] = 0;
    for (int token = 0; token < KV_TILE; ++token) {
        const bool shown = token >= info.low() && token < info.high();
        for (int i = 0; i < D; ++i) {
            v[token][i] = number_at(s.v + stage * V_TILE_BYTES, token, i);
            if (shown) k[token][i] = number_at(s.k + stage * K_TILE_BYTES, token, i);
            else hidden[i] += 0 * v[token][i];
        }
    }
    for (int r = 0; r < item.y; ++r) {
        const TileRow row(a, item.w, r);
        const u16* q = a.q + row.index(a, item.x) * D;
        const int kind = !(info.flags & CLIPPED) ? ALL : info.flags & LIMITED ? LIMIT : OWN;
        const int end = end_seen(a, kind, item.x, item.z, row.query), query = item.x + row.query;
        double numbers[D];
        for (int i = 0; i < D; ++i) numbers[i] = from_bfloat16(q[i]);
        double* o = rows[r].o;
        for (int token = info.low(); token < info.high() && info.position + token < end; ++token) {
            const int position = int(a.q_positions[query]), kv = info.position + token;
            const bool masks = info.flags & MASKED;
            if (masks && !Variant::mask(sequence_of(a, query), row.head, position, kv, a.words)) continue;
            double score = 0;
            for (int i = 0; i < D; ++i) score += numbers[i] * k[token][i];
            const double weight = std::exp(score * a.scale);
            rows[r].sum += weight;
            for (int i = 0; i < D; ++i) o[i] += weight * v[token][i];
        }
        for (int i = 0; i < D; ++i) o[i] += hidden[i];
    }
}

static void consume_items(const Attention& a, const TileShared& s) {
    const auto arrive = [](u32 barrier) { for (int i = 0; i < CONSUMER_WARPS; ++i) barrier_arrive(barrier); };
    int stage = 0, phase = 0;
    for (int number = 0;; ++number) {
        const int place = number & 1;
        barrier_wait(s.item_full + 8 * place, number >> 1 & 1);
        const int4 item = load_shared_int4(s.items + 16 * place);  // q_begin, rows, partial, head
        if (item.y == 0) return;
        std::vector<ExactRow> rows(item.y);
        for (bool last = false; !last;) {
            barrier_wait(s.full + 8 * stage, phase);
            last = load_address<int>(s.kv_tiles + 16 * stage) & LAST;
            add_kv_tile(a, s, stage, item, rows);
            arrive(s.k_empty + 8 * stage), arrive(s.v_empty + 8 * stage);
            if (++stage == ring_stages) stage = 0, phase ^= 1;
        }
        for (int r = 0; r < item.y; ++r) {
            float factor = rows[r].sum > 0 ? float(1 / rows[r].sum) : 0.f;
            const float lse = rows[r].sum > 0 ? float(std::log(rows[r].sum)) : MINUS_INFINITY;
            const long long at = finish_row(a, item.x, item.z, TileRow(a, item.w, r), lse, factor, true) * D;
            for (int i = 0; i < D; ++i) {
                const float x = float(rows[r].o[i] * factor);
                if (item.z >= 0) a.partial_out[at + i] = x;
                else outputs(a)[at + i] = Out(to_bfloat16(x));
            }
        }
        arrive(s.item_empty + 8 * place);
    }
}
}  // namespace prefixkit

// stages: of each ring.
extern "C" int tiles_on_cpu(const prefixkit::Attention* a, int blocks, int stages) {
    using namespace prefixkit;
    arguments = *a, ring_stages = stages, gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::memset(memory, 0xff, sizeof(memory));  // NaN
        barriers.clear(), flying.clear(), spins = 0;
        tile_barriers(tile_shared());
        emulation::run(1, [] {
            const int warp = emulation::current / 32;
            const Item first = load_item(arguments.tile_items, blockIdx.x, arguments.kv_heads, arguments.tile_capacity);
            if (warp < 2) tile_load(arguments, tile_shared(), warp == 1, first);
            else if (emulation::current == 64) consume_items(arguments, tile_shared());
            else if (FP8 && warp > 2 && blockIdx.x % 2 == 0)
                Slices{tile_shared(), warp % 2 == 1}.help();  // of K one, of V two
        });
    }
    if (!flying.empty()) std::abort();
    return sizeof(Attention);
}
