// Rotary embedding of a step's queries and keys, and keys and values into pages, in one launch.
//
// shapes     q [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] with any strides, in vectors of 16 bytes, but a head's
//            elements adjacent; cos, sin [tokens, head_dim] likewise; rotated [tokens, heads, head_dim] contiguous; pages and slots as in
//            append.cu.
// numbers    x_i cos_i - x_j sin_i in the first half of a head, x_i cos_i + x_j sin_i in the second, j being half a head away; float32, rounded
//            once.
// tiling     one thread rotates a vector of a head's first half and the one half a head further; threads of a KV head also move two of V.
//            Consecutive threads take a head's vectors, then a token's heads, those of KV last, then the tokens.
// cost       reads and writes each byte once: (2 heads + 4 kv_heads + 2) x tokens x head_dim x itemsize bytes.
// limits     16 bytes divide half a head, every stride and every address; there are fewer than 2^32 threads.
//            Slots as in append.cu.
#include "kv/rotary_ptx.cuh"
#include "layouts/rotary.h"

namespace prefixkit {

struct Halves { uint4 first, second; };

DEVICE Halves load_halves(const void* from, long long at, int half) {
    const uint4* p = (const uint4*)from + at;
    return {p[0], p[half]};
}
DEVICE void store_halves(void* to, long long at, int half, const Halves& x) {
    uint4* p = (uint4*)to + at;
    p[0] = x.first, p[half] = x.second;
}

template <class T> DEVICE Halves rotate(const Halves& x, const Halves& cos, const Halves& sin) {
    Halves y;
    float a[16 / sizeof(T)], b[16 / sizeof(T)], c[16 / sizeof(T)], s[16 / sizeof(T)];
    unpack<T>(x.first, a), unpack<T>(x.second, b);
    unpack<T>(cos.first, c), unpack<T>(sin.first, s);
    float turned[16 / sizeof(T)];
#pragma unroll
    for (int i = 0; i < int(16 / sizeof(T)); ++i) turned[i] = a[i] * c[i] - b[i] * s[i];
    y.first = pack<T>(turned);
    unpack<T>(cos.second, c), unpack<T>(sin.second, s);
#pragma unroll
    for (int i = 0; i < int(16 / sizeof(T)); ++i) turned[i] = b[i] * c[i] + a[i] * s[i];
    y.second = pack<T>(turned);
    return y;
}

template <class T> __global__ void __launch_bounds__(256) rotary_append(const __grid_constant__ Rotary r) {
    follow_and_lead();
    const u32 thread = blockIdx.x * 256 + threadIdx.x, rest = thread / r.half, all = r.heads + r.kv_heads;
    const u32 vector = thread % r.half, head = rest % all;
    const long long token = rest / all;
    if (token >= r.tokens) return;
    const Halves cos = load_halves(r.cos, token * r.cos_token + vector, r.half), sin = load_halves(r.sin, token * r.sin_token + vector, r.half);
    if (head < r.heads) {
        const Halves x = load_halves(r.q, token * r.q_token + head * r.q_head + vector, r.half);
        store_halves(r.rotated, (token * r.heads + head) * 2 * r.half + vector, r.half, rotate<T>(x, cos, sin));
        return;
    }
    const u32 h = head - r.heads;
    const long long slot = r.slots[token];
    const Halves k = load_halves(r.key, token * r.k_token + h * r.k_head + vector, r.half);
    const Halves v = load_halves(r.value, token * r.v_token + h * r.v_head + vector, r.half);
    if (slot < 0 || slot >= r.num_slots) return;
    const long long page = slot / r.page_size, within = slot % r.page_size;
    store_halves(r.k_pages, page * r.k_page + within * r.k_slot + h * r.k_page_head + vector, r.half, rotate<T>(k, cos, sin));
    store_halves(r.v_pages, page * r.v_page + within * r.v_slot + h * r.v_page_head + vector, r.half, v);
}

}  // namespace prefixkit
