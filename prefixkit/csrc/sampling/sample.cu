// The next token of every row: penalty, temperature, top-k, top-p, min-p, and the sample, as sampling/specification.py
// specifies, bit by bit.
//
// shapes   logits [rows, vocab] of float32, bfloat16 or float16, any row stride; a SamplingRecord for each row; `seen`
//          and `allowed` [rows, words]; tokens [rows] int64, logprobs [rows] float32.
// tiling   a cluster of 1 to 8 blocks of 256 threads takes a row and keeps it in shared memory as float32, so that
//          logits are read once.  Where a row does not fit (CACHED false) every pass reads it again.  Warps own
//          consecutive tokens, so that sums of warps are steps of the cumulative distribution.
// passes   the first pass reads.  With top-k, list the few tokens that may be kept, and go on with these; else
//          weigh; with top-p, add up weights in bins, and list the tokens at the nucleus's border.  A list that
//          overflows is tried again in a narrower range, and in the end replaced by counting digits, three passes.  One
//          block finds the token among those of one warp.
// cost     reads each logit once; some 40 instructions a token, with top-k 10, top-p 6 to 30 more
//          (docs/appendix/kernel_log.md).
// effects  a row whose record is not active is unchanged.  For any other row the token and its log-probability are
//          written, the token's bit in `seen` is set, and the record's step goes up by 1.  A row that holds NaN or
//          +inf, or nothing finite, or whose scores exceed float32, gets token -1 and log-probability NaN; its step
//          goes up, and no bit is set.  A row without a finite logit among its allowed tokens gets -inf instead of NaN.
// limits   vocab <= 2^20; words >= vocab / 32; segment * blocks * 8 >= vocab.
#include "sampling/sample_nucleus.cuh"

namespace prefixkit {

// One thread writes the results of a row.
template <class T> DEVICE void finish(const Sample& a, int row, int step, int token, float top, double sum) {
    const float logit = widen(((const T*)a.logits)[row * a.stride + token]);
    a.tokens[row] = token;
    a.logprobs[row] = float((double(logit) - double(top)) - log(sum));
    atomicOr(a.seen + ((long long)row * a.words + (token >> 5)), 1u << (token & 31));  // not waited for
    a.records[row].step = step + 1;
}

// The sum over the vocabulary of exp(logit - top), by a warp.
DEVICE double exps_total() { return table_reduce(shared().exps, 0.0, add<double>); }

// The first token with the largest score.
template <class T, bool CACHED>
DEVICE void sample_greedy(const Sample& a, int number, const Row<T, CACHED>& row, int step, float top, float raw) {
    Shared& s = shared();
    float exps = 0;
    const u32 first = find_top(row, top, !row.changed(), exps);
    if (row.changed()) exps = exps_of_raw(row, raw);
    publish(s.firsts, warp_reduce(first, least_of<u32>));
    publish(s.exps, warp_sum(exps));
    cluster_sync();
    if (my_number()) return;
    const u32 token = table_reduce(s.firsts, ~0u, least_of<u32>);
    const double sum = exps_total();
    if (lane_of() == 0) finish<T>(a, number, step, int(token), raw, sum);
}

template <class T, bool CACHED>
DEVICE void sample_filtered(const Sample& a, int number, const Row<T, CACHED>& row, const SamplingRecord& params,
                            float top, float raw) {
    Shared& s = shared();
    Filter filter;
    filter.top = top;
    filter.rate = fmaxf(__fdiv_rn(LOG2E, params.temperature), SMALLEST_NORMAL);
    const bool top_k = params.top_k > 0 && params.top_k < a.vocab, top_p = params.top_p < 1, min_p = params.min_p > 0;
    filter.any = top_k || (min_p && !top_p), filter.whole = top_p;
    const float least = min_p ? least_weight(params.min_p) : 0;
    if (!top_p) filter.least = least;
    // Weights without temperature, penalty, mask and filters are the exponentials.
    const bool alike = params.temperature == 1.0f && !row.changed() && !filter.any && !top_p;
    bool sums = !alike && !row.changed();
    float exps = 0;
    if (row.changed()) exps = exps_of_raw(row, raw);
    int all = -1;  // tokens in the lists, where these hold all that top-k keeps
    u32 count = 0;
    if (top_k) {
        float low = MINUS_INFINITY;
        if (params.top_k <= warps() * 32) {
            low = bound(params.top_k);
            count = list_scores(row, low, top, sums, exps);
            sums = false;
            all = gather_lists(count, key_of).all;
        }
        const auto one = [](u32) { return 1u; };
        filter.lowest =
            all >= 0 ? of_key(least_chosen<u32>(all, params.top_k, one).key) : kth_largest(row, params.top_k, low);
    }
    Nucleus n = {0, 0, 0};
    if (all >= 0) {
        if (top_p) n = nucleus_of_chosen(filter, all, count, params.top_p, least);
        u64 weight = 0;
        if (!top_p) each_listed(count, [&](float y) { weight += u64(filter.weight(y)); });
        if (!top_p) publish(s.sums, warp_sum(weight));
    } else {
        publish(s.sums, warp_sum(weigh_row(row, filter, sums, top_p, exps)));
    }
    publish(s.exps, warp_sum(exps));
    cluster_sync();
    if (top_p && all < 0) {
        const u64 total = table_sum(s.sums);
        n = nucleus_of_row(row, filter, share(total, params.top_p), total, least);
    }
    const u64 total = table_sum(s.sums);
    const u64 low_half = s.uniform * total, high_half = __umul64hi(s.uniform, total);
    const u64 target = high_half << 11 | low_half >> 53;
    const Place at = find_sum(warps(), target + 1, [&](int i) { return s.sums[i]; });
    if (at.index / WARPS != cluster_rank()) return;
    const double sum = alike ? double(total) / double(TOP) : exps_total();
    const bool stored = top_p && all < 0;
    const u32 drop = top_p ? s.ties[at.index] : 0;
    const int token = find_token(row, filter, at.index, target - at.before, top_p, stored, n, drop);
    if (token >= 0) finish<T>(a, number, params.step, token, raw, sum);
}

template <class T, bool CACHED>
__global__ void __launch_bounds__(THREADS, 3) sample(const __grid_constant__ Sample a) {
    const int number = int(blockIdx.x) / cluster_size();
    Shared& s = shared();
    Row<T, CACHED> row(a, number, (float*)(&s + 1));
    if (CACHED) row.fetch();
    const SamplingRecord params = a.records[number];
    if (!params.active) return;
    cluster_arrive();
    row.penalty = params.penalty;
    row.changes = (params.penalty != 1.0f ? PENALISED : 0) | (params.masked && a.allowed ? MASKED : 0);
    if (thread_of() == 0) s.uniform = uniform53(params.key, params.step);
    const Tops mine = read_row(row);
    cluster_wait();  // the others have begun, so their memory is there
    publish(s.tops, warp_reduce(mine.score, max_nan));
    publish(s.raws, warp_reduce(mine.raw, max_nan));
    if (params.top_k > 0) chosen()[thread_of()] = key_of(mine.score);
    cluster_sync();
    const float top = table_max(s.tops), raw = table_max(s.raws);
    const bool greedy = params.temperature == 0;
    const float divided = greedy ? top : __fdiv_rn(top, params.temperature);
    const bool whole = fabsf(raw) < -MINUS_INFINITY, nothing = whole && row.changes & MASKED && top == MINUS_INFINITY;
    if (!whole || !(fabsf(divided) < -MINUS_INFINITY) || !(fabsf(top) < -MINUS_INFINITY)) {
        if (my_number() == 0 && lane_of() == 0) {
            a.tokens[number] = -1;
            a.logprobs[number] = nothing ? top : __int_as_float(0x7fffffff);
            a.records[number].step = params.step + 1;
        }
        return;
    }
    if (greedy) return sample_greedy(a, number, row, params.step, top, raw);
    sample_filtered(a, number, row, params, top, raw);
}

}  // namespace prefixkit
