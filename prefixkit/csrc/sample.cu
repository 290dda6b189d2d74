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
#include "sample_find.cuh"

namespace prefixkit {

// Written by one thread.
template <class T> DEVICE void finish(const Sample& a, int row, int step, int token, float top, double sum) {
    const float logit = widen(((const T*)a.logits)[row * a.stride + token]);
    a.tokens[row] = token;
    a.logprobs[row] = float((double(logit) - double(top)) - log_exact(sum));
    atomicOr(a.seen + ((long long)row * a.words + (token >> 5)), 1u << (token & 31));  // not waited for
    a.laws[row].step = step + 1;
}

// The sum over the vocabulary of exp(logit - top), by a warp.
DEVICE double exps_total() {
    double x = 0;
    for (int i = lane_of(); i < warps(); i += 32) x += double(shared().exps[i]);
    return warp_sum(x);
}

// Which tokens as light as the lightest of the nucleus are dropped: the first by id; into the tables, by a warp.
DEVICE void settle_ties(Nucleus n) {
    Shared& s = shared();
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
        if ((step & 127) == 127) above += sum.take();
        const float4 w = weight_at(row, filter, begin + 128 * step, true);
        if (fmaxf(fmaxf(w.x, w.y), fmaxf(w.z, w.w)) < n.border) continue;
        each(w, [&](float y) {
            ties += y == n.border;
            if (y > n.border && y >= n.least) sum.add(y);
        });
    }
    tell(s.sums, warp_sum(above + sum.take()));
    tell(s.ties, warp_sum(ties));
    cluster_sync();
    if (warp_of() == 0) settle_ties(n);
    __syncthreads();
}

// The first of the largest.
template <class T, bool CACHED> DEVICE void take_top(const Sample& a, int number, const Row<T, CACHED>& row, int step, float top, float raw) {
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
    if (lane_of() == 0) finish<T>(a, number, step, int(token), raw, sum);
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
    const u64 total = table_sum(s.sums);
    const u64 low_half = s.uniform * total, high_half = __umul64hi(s.uniform, total);
    const u64 target = high_half << 11 | low_half >> 53;
    const Place at = reach(warps(), target + 1, [&](int i) { return s.sums[i]; });
    if (at.index / WARPS != cluster_rank()) return;
    const double sum = alike ? double(total) / double(TOP) : exps_total();
    const int token = find_token(row, filter, at.index, target - at.before, top_p, top_p, n, top_p ? s.ties[at.index] : 0);
    if (token >= 0) finish<T>(a, number, law.step, token, raw, sum);
}

template <class T, bool CACHED> __global__ void __launch_bounds__(THREADS, 3) sample(const __grid_constant__ Sample a) {
    const int number = block_of() / cluster_size();
    Shared& s = shared();
    Row<T, CACHED> row(a, number, (float*)(&s + 1));
    if (CACHED) row.fetch();
    const Law law = a.laws[number];
    if (!law.active) return;
    cluster_arrive();
    row.obey(law);
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
            a.laws[number].step = law.step + 1;
        }
        return;
    }
    if (greedy) return take_top(a, number, row, law.step, top, raw);
    // At least as many tokens as there are warps, or threads, reach the least of their largest: what is below is not among as many largest.
    const bool few = law.top_k <= warps(), many = law.top_k <= warps() * 32;
    const float low = few ? table_min(s.tops) : many ? table_min(s.lows) : MINUS_INFINITY;
    draw(a, number, row, law, top, raw, low);
}

}  // namespace prefixkit
