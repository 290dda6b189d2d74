// The next token of every row: penalty, temperature, top-k, top-p, min-p, and the draw, as generation/sampling.py specifies, bit by bit.
//
// shapes   logits [rows, vocab] of float32, bfloat16 or float16, any row stride; a Law for each row; `seen` [rows, words];
//          tokens [rows] int64, logprobs [rows] float32.
// tiling   a cluster of 1 to 8 blocks of 256 threads takes a row and keeps it in shared memory as float32, so that logits are read once.
//          Where a row does not fit (CACHED false) every pass reads it again.  Warps own consecutive tokens, so that sums of
//          warps are steps of the cumulative distribution.
// passes   read; (top-k: three counts;) weigh; (top-p: three counts and a sum;) and one warp finds the token in one warp's tokens.
// cost     reads each logit once; some 26 instructions a token, top-k some 10 more, top-p some 30.  docs/kernels.md has times.
// effects  A row whose law is not active is left alone.  Others: the token and its log-probability are written, the token's bit in `seen` is
//          set, and the law's step goes up by 1.  A row that holds NaN or +inf, or nothing finite, or whose scores leave float32, gets
//          token -1 and NaN, no bit, and a step more.
// limits   vocab <= 2^20; words >= vocab / 32; segment * blocks * 8 >= vocab.
#include "sample_passes.cuh"

namespace prefixkit {

// Written by one thread.
template <class T> DEVICE void finish(const Sample& a, int row, int token, float top, double sum) {
    const float logit = widen(((const T*)a.logits)[row * a.stride + token]);
    a.tokens[row] = token;
    a.logprobs[row] = float((double(logit) - double(top)) - log_exact(sum));
    a.seen[(long long)row * a.words + (token >> 5)] |= 1u << (token & 31);
    ++a.laws[row].step;
}

// The sum over the vocabulary of exp(logit - top), by a warp.
DEVICE double exps_total() {
    double x = 0;
    for (int i = lane_of(); i < warps(); i += 32) x += double(shared().exps[i]);
    return warp_sum(x);
}

// Finds the token at which the kept weights of warp number `owner` exceed `target`; by a warp.  -1 in all lanes but one.
template <class T, bool CACHED>
DEVICE int find_token(const Row<T, CACHED>& row, const Filter& filter, int owner, u64 target, bool top_p, Nucleus n, u32 drop) {
    const int warp = owner % WARPS, steps = row.steps(warp);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int i = row.begin(warp) + 128 * step + 4 * lane_of();
        const float4 x = weight_at(row, filter, i, top_p);
        float w[4] = {floorf(x.x), floorf(x.y), floorf(x.z), floorf(x.w)};
        if (top_p) {
            u32 ties = 0;
            for (float y : w) ties += y == n.border;
            const u32 sum = warp_sums(ties);
            u32 tie = sum - ties;
            for (float& y : w)
                if (y < n.border || y < n.least || (y == n.border && tie++ < drop)) y = 0;
            drop -= min(drop, __shfl_sync(~0u, sum, 31));
        }
        u64 mine = 0;
        for (float y : w) mine += u64(y);
        const u64 all = warp_sums(mine);
        const u32 beyond = __ballot_sync(~0u, all > target);
        if (beyond) {
            if (lane_of() != __ffs(int(beyond)) - 1) return -1;
            u64 sum = all - mine;
            for (int j = 0; j < 4; ++j) {
                sum += u64(w[j]);
                if (sum > target) return i + j;
            }
        }
        target -= __shfl_sync(~0u, all, 31);
    }
    return -1;
}

// What each warp's tokens of the nucleus weigh, and how many of the lightest are to be dropped, into the tables.
template <class T, bool CACHED> DEVICE void weigh_nucleus(const Row<T, CACHED>& row, const Filter& filter, Nucleus n) {
    Shared& s = shared();
    Sum sum;
    u64 above = 0;
    u32 ties = 0;
    const int steps = row.steps(warp_of()), begin = row.begin(warp_of()) + 4 * lane_of();
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
        const float4 w = weight_at(row, filter, begin + 128 * step, true);
        if (fmaxf(fmaxf(w.x, w.y), fmaxf(w.z, w.w)) < n.border) continue;
        each(w, [&](float y) {
            ties += y == n.border;
            if (y > n.border && y >= n.least) sum.add(y);
        });
        if ((step & 127) == 127) above += sum.take();
    }
    tell(s.sums, warp_sum(above + sum.take()));
    tell(s.ties, warp_sum(ties));
    cluster_sync();
    if (warp_of()) return;
    const u32 surplus = table_sum(s.ties) - n.count;
    u32 before = 0;
    for (int part = 0; part < warps(); part += 32) {
        const int i = part + lane_of();
        const u32 here = i < warps() ? s.ties[i] : 0, sums = warp_sums(here), first = before + sums - here;
        const u32 drop = surplus > first ? min(surplus - first, here) : 0;
        __syncwarp();
        if (i < warps()) {
            s.ties[i] = drop;
            if (n.border >= n.least) s.sums[i] += u64(here - drop) * u64(n.border);
        }
        before += __shfl_sync(~0u, sums, 31);
    }
    __syncwarp();
}

// The first of the largest.
template <class T, bool CACHED> DEVICE void take_top(const Sample& a, int number, const Row<T, CACHED>& row, float top, float raw) {
    Shared& s = shared();
    float exps = 0;
    const u32 first = find_top(row, top, !row.penalised, exps);
    if (row.penalised) exps = exps_of_raw(row, raw);
    tell(s.firsts, warp_min(first));
    tell(s.exps, warp_sum(exps));
    cluster_sync();
    if (my_number()) return;
    u32 token = ~0u;
    for (int i = lane_of(); i < warps(); i += 32) token = min(token, s.firsts[i]);
    token = warp_min(token);
    const double sum = exps_total();
    if (lane_of() == 0) finish<T>(a, number, int(token), raw, sum);
}

template <class T, bool CACHED>
DEVICE void draw(const Sample& a, int number, const Row<T, CACHED>& row, const Law& law, float top, float raw, float low) {
    Shared& s = shared();
    Filter filter;
    filter.top = top;
    filter.rate = fmaxf(__fdiv_rn(LOG2E, law.temperature), SMALLEST_NORMAL);
    const bool top_k = law.top_k > 0 && law.top_k < a.vocab, top_p = law.top_p < 1, min_p = law.min_p > 0;
    filter.any = top_k || top_p || min_p;
    if (top_k) filter.lowest = kth_largest(row, law.top_k, low);
    const float least = min_p ? least_weight(law.min_p) : 0;
    if (!top_p) filter.least = least;
    // Weights without temperature, penalty and filters are the exponentials.
    const bool alike = law.temperature == 1.0f && !row.penalised && !filter.any;
    float exps = 0;
    const u64 weight = weigh_row(row, filter, !alike && !row.penalised, top_p, exps);
    if (row.penalised) exps = exps_of_raw(row, raw);
    tell(s.sums, warp_sum(weight));
    tell(s.exps, warp_sum(exps));
    cluster_sync();
    Nucleus n = {0, 0, 0};
    if (top_p) {
        const u64 total = table_sum(s.sums);
        n = nucleus(row, filter, share(total, law.top_p), total);
        n.least = least;
        weigh_nucleus(row, filter, n);
    }
    if (warp_of()) return;
    const u64 total = table_sum(s.sums);
    const u64 low_half = s.uniform * total, high_half = __umul64hi(s.uniform, total);
    const u64 target = high_half << 11 | low_half >> 53;
    const Place at = reach(warps(), target + 1, [&](int i) { return s.sums[i]; });
    if (at.index / WARPS != cluster_rank()) return;
    const double sum = alike ? double(total) / double(TOP) : exps_total();
    const int token = find_token(row, filter, at.index, target - at.before, top_p, n, top_p ? s.ties[at.index] : 0);
    if (token >= 0) finish<T>(a, number, token, raw, sum);
}

template <class T, bool CACHED> __global__ void __launch_bounds__(THREADS, 3) sample(const __grid_constant__ Sample a) {
    const int number = block_of() / cluster_size();
    const Law law = a.laws[number];
    if (!law.active) return;
    cluster_arrive();
    Shared& s = shared();
    const Row<T, CACHED> row(a, number, (float*)(&s + 1), law);
    if (thread_of() == 0) s.uniform = uniform53(law.key, law.step);
    const Tops mine = read_row(row);
    cluster_wait();  // the others have begun, so their memory is there
    tell(s.tops, warp_max(mine.score));
    tell(s.raws, warp_max(mine.raw));
    tell(s.lows, warp_min(mine.low));
    cluster_sync();
    const float top = table_max(s.tops), raw = table_max(s.raws);
    const bool greedy = law.temperature == 0;
    const float divided = greedy ? top : __fdiv_rn(top, law.temperature);
    if (!(fabsf(divided) < -MINUS_INFINITY) || !(fabsf(top) < -MINUS_INFINITY)) {
        if (my_number() == 0 && lane_of() == 0) {
            a.tokens[number] = -1, a.logprobs[number] = not_a_number();
            ++a.laws[number].step;
        }
        return;
    }
    if (greedy) return take_top(a, number, row, top, raw);
    // At least as many tokens as there are warps, or threads, reach the least of their largest: what is below is not among as many largest.
    const bool few = law.top_k <= warps(), many = law.top_k <= warps() * 32;
    const float low = few ? table_min(s.tops) : many ? table_min(s.lows) : MINUS_INFINITY;
    draw(a, number, row, law, top, raw, low);
}

}  // namespace prefixkit
