// Rotary embedding of a step's queries and keys, and keys and values into pages, in one launch.
//
// shapes     q [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], cos and sin [tokens, head_dim]
//            with any strides, in vectors of 16 bytes, but a head contiguous; rotated [tokens, heads, head_dim]
//            contiguous; pages and slots as in append.cu.
// numbers    x_i cos_i - x_j sin_i in the first half of a head, x_i cos_i + x_j sin_i in the second, j being half a
//            head away; float32, rounded once.
// tiling     one thread rotates a vector of a head's first half and the one half a head further; threads of a KV head
//            also move two of V.  Consecutive threads take a head's vectors, then a token's heads, those of KV last.
// cost       reads and writes each byte once: (2 heads + 4 kv_heads + 2) x tokens x head_dim x itemsize bytes.
// limits     16 bytes divide half a head, every stride and every address; there are fewer than 2^32 threads.
#include "kv/narrow.cuh"
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

// Packs float32 numbers into 16 bytes of T.
template <class T> DEVICE uint4 pack_all(const float* x) {
    return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
}
template <> DEVICE uint4 pack_all<float>(const float* x) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

// x cos + sign * away sin, for one half x of a head and the other half `away`.
template <class T>
DEVICE uint4 rotate(const uint4& x, const uint4& away, float sign, const uint4& cos, const uint4& sin) {
    constexpr int EACH = 16 / sizeof(T);
    float a[EACH], b[EACH], c[EACH], s[EACH];
    unpack<T>(x, a), unpack<T>(away, b), unpack<T>(cos, c), unpack<T>(sin, s);
#pragma unroll
    for (int i = 0; i < EACH; ++i) a[i] = a[i] * c[i] + sign * b[i] * s[i];
    return pack_all<T>(a);
}
template <class T> DEVICE Halves rotate(const Halves& x, const Halves& cos, const Halves& sin) {
    return {rotate<T>(x.first, x.second, -1, cos.first, sin.first),
            rotate<T>(x.second, x.first, 1, cos.second, sin.second)};
}

template <class T, bool E4M3> DEVICE void store_pages(void* to, long long at, int half, const Halves& x) {
    if constexpr (E4M3) store_e4m3<T>(to, at, x.first), store_e4m3<T>(to, at + half, x.second);
    else store_halves(to, at, half, x);
}

template <class T, bool E4M3> __global__ void __launch_bounds__(256) rotary_append(const __grid_constant__ Rotary r) {
    pdl_await(), pdl_launch();  // attention follows, and waits for this kernel's end before it reads
    const u32 thread = blockIdx.x * 256 + threadIdx.x, rest = thread / r.half, all = r.heads + r.kv_heads;
    const u32 vector = thread % r.half, head = rest % all;
    const long long token = rest / all;
    if (token >= r.tokens) return;
    const Halves cos = load_halves(r.cos, token * r.cos_token + vector, r.half);
    const Halves sin = load_halves(r.sin, token * r.sin_token + vector, r.half);
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
    const long long k_to = page * r.k_page + within * r.k_slot + h * r.k_page_head + vector;
    store_pages<T, E4M3>(r.k_pages, k_to, r.half, rotate<T>(k, cos, sin));
    const long long v_to = page * r.v_page + within * r.v_slot + h * r.v_page_head + vector;
    store_pages<T, E4M3>(r.v_pages, v_to, r.half, v);
}

}  // namespace prefixkit
