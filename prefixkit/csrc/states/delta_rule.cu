// Tokens of a row through the gated delta rule, one after another.  Of each head, with the state S [K, V]:
// S = exp(g) S;  d = beta (v - k . S);  S = S + k (outer) d;  y = q . S.
//
// shapes   query, key [rows, tokens, key_heads, K] and value [rows, tokens, heads, V] of any strides; decay (g) float32
//          and beta [rows, tokens, heads]; states [slots, heads, K, V] float32; source, target [rows] int64 slots; out
//          [rows, tokens, heads, V].
// tiling   columns of S do not depend on one another.  A block of 4 warps takes 32 columns of a head, a warp 8 of them:
//          8 lanes share two columns, and hold them in registers from the first token to the last.  TOKENS tokens are
//          staged in shared memory at a time, as float32, normalised and scaled.  Both products of a token are taken of
//          the state before it, since q . S = exp(g) q . S_before + (q . k) d; so they are summed over lanes together.
// cost     reads and writes each state once: rows x heads x K x V x 8 bytes; four operations of a token on each element.
//          One row waits for its own sums, some 150 cycles a token.
// numbers  float32; what a token returns is rounded once.
// limits   the row of S is padded to SIZE elements, V is even; states lie at multiples of 8 bytes.  Slots are the
//          contract of delta_rule in prefixkit/ops/state_ops.py; a row whose slots do not exist gets zeros.
#include "states/numbers.cuh"
#include "layouts/delta_rule.h"

namespace prefixkit {

constexpr int RULE_THREADS = 128, RULE_WARPS = RULE_THREADS / 32, LANES = 8, COLUMNS = 32, TOKENS = 16;

struct alignas(8) Pair { float x, y; };

template <int SIZE> struct Staged {
    float4 keys[TOKENS][SIZE / 4], queries[TOKENS][SIZE / 4];
    float values[TOKENS][COLUMNS], decays[TOKENS], betas[TOKENS], products[TOKENS];  // products: q . k
};

template <int LANES> DEVICE float sum_over(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

// One warp stages token ``token`` of the row as number t.
template <class T, int SIZE>
DEVICE void stage(Staged<SIZE>& to, const DeltaRule& a, int t, int row, long long token, int head, int first, int lane) {
    const int key_head = head / a.heads_per_key;
    const T* query = (const T*)a.query + row * a.query_row + token * a.query_token + key_head * a.query_head;
    const T* key = (const T*)a.key + row * a.key_row + token * a.key_token + key_head * a.key_head;
    const T* value = (const T*)a.value + row * a.value_row + token * a.value_token + head * a.value_head;
    float q[SIZE / 32], k[SIZE / 32], of_query = 0, of_key = 0, product = 0;
#pragma unroll
    for (int i = 0; i < SIZE / 32; ++i) {
        const int at = i * 32 + lane;
        q[i] = at < a.size ? widen(query[at * a.query_step]) : 0.0f;
        k[i] = at < a.size ? widen(key[at * a.key_step]) : 0.0f;
        of_query += q[i] * q[i], of_key += k[i] * k[i], product += q[i] * k[i];
    }
    of_query = sum_over<32>(of_query), of_key = sum_over<32>(of_key), product = sum_over<32>(product);
    const float by_key = a.normalize ? 1.0f / sqrtf(of_key + 1e-6f) : 1.0f;
    const float by_query = (a.normalize ? 1.0f / sqrtf(of_query + 1e-6f) : 1.0f) / sqrtf((float)a.size);
#pragma unroll
    for (int i = 0; i < SIZE / 32; ++i) {
        ((float*)to.keys[t])[i * 32 + lane] = by_key * k[i];
        ((float*)to.queries[t])[i * 32 + lane] = by_query * q[i];
    }
    to.values[t][lane] = first + lane < a.dim ? widen(value[(first + lane) * a.value_step]) : 0.0f;
    if (lane) return;
    const long long at = (row * (long long)a.tokens + token) * a.heads + head;
    to.decays[t] = expf(a.decay[at]), to.betas[t] = number(a.beta, at, a.beta_kind);
    to.products[t] = by_query * by_key * product;
}

template <class T, int SIZE>
__global__ void __launch_bounds__(RULE_THREADS) delta_rule(const __grid_constant__ DeltaRule a) {
    constexpr int PARTS = SIZE / (4 * LANES);
    __shared__ Staged<SIZE> staged;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, part = lane % LANES;
    const int blocks = (a.dim + COLUMNS - 1) / COLUMNS, first = int(blockIdx.x) % blocks * COLUMNS;
    const int head = int(blockIdx.x) / blocks % a.heads, row = int(blockIdx.x) / blocks / a.heads;
    const int mine = warp * (COLUMNS / RULE_WARPS) + lane / LANES * 2, column = first + mine;
    const long long source = a.source[row], target = a.target[row];
    const bool there = target && source >= 0 && source < a.slots && target < a.slots, inside = column < a.dim;
    T* out = (T*)a.out + (row * (long long)a.tokens * a.heads + head) * a.dim + column;
    const long long next = (long long)a.heads * a.dim;  // token's part of out
    if (!there) {
        for (int t = part; t < a.tokens && inside; t += LANES) out[t * next] = out[t * next + 1] = narrow<T>(0);
        return;
    }
    const long long states = (long long)a.heads * a.size * a.dim, of_head = (long long)head * a.size * a.dim + column;
    Pair h[PARTS][4];
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int k = (p * LANES + part) * 4 + e;
            h[p][e] = Pair{0, 0};
            if (k < a.size && inside) h[p][e] = *(const Pair*)(a.states + source * states + of_head + (long long)k * a.dim);
        }
    for (int begin = 0; begin < a.tokens; begin += TOKENS) {
        const int count = min(TOKENS, a.tokens - begin);
        __syncthreads();
        for (int t = warp; t < count; t += RULE_WARPS) stage<T>(staged, a, t, row, begin + t, head, first, lane);
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            float4 key[PARTS];
            Pair read = {0, 0}, y = {0, 0};  // k . S and q . S
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const float4 k = key[p] = staged.keys[t][p * LANES + part], q = staged.queries[t][p * LANES + part];
                const Pair *s = h[p];
                read.x += k.x * s[0].x + k.y * s[1].x + (k.z * s[2].x + k.w * s[3].x);
                read.y += k.x * s[0].y + k.y * s[1].y + (k.z * s[2].y + k.w * s[3].y);
                y.x += q.x * s[0].x + q.y * s[1].x + (q.z * s[2].x + q.w * s[3].x);
                y.y += q.x * s[0].y + q.y * s[1].y + (q.z * s[2].y + q.w * s[3].y);
            }
            read.x = sum_over<LANES>(read.x), read.y = sum_over<LANES>(read.y);
            y.x = sum_over<LANES>(y.x), y.y = sum_over<LANES>(y.y);
            const float decay = staged.decays[t], beta = staged.betas[t], product = staged.products[t];
            const float x0 = beta * (staged.values[t][mine] - decay * read.x);
            const float x1 = beta * (staged.values[t][mine + 1] - decay * read.y);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const float k[4] = {key[p].x, key[p].y, key[p].z, key[p].w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    h[p][e].x = decay * h[p][e].x + k[e] * x0;
                    h[p][e].y = decay * h[p][e].y + k[e] * x1;
                }
            }
            if (part == 0 && inside) {
                T* at = out + (begin + t) * next;
                at[0] = narrow<T>(decay * y.x + product * x0), at[1] = narrow<T>(decay * y.y + product * x1);
            }
        }
    }
    if (target < 0 || !inside) return;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int k = (p * LANES + part) * 4 + e;
            if (k < a.size) *(Pair*)(a.states + target * states + of_head + (long long)k * a.dim) = h[p][e];
        }
}

}  // namespace prefixkit
