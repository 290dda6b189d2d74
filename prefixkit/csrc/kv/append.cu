// Keys and values into pages: token t goes to slot slots[t].
//
// shapes     key, value [tokens, kv_heads, head_dim]; pages [pages, page_size, kv_heads, head_dim]; slots [tokens]
//            int64.  Any strides, counted in vectors V, but a head's elements are adjacent.  kv_append_e4m3: rows of T,
//            pages of e4m3; a vector is EACH elements of both.
// tiling     one thread moves one vector of K and the same of V; consecutive threads take the vectors of a head, then
//            the heads of a token, then the tokens.
// cost       reads and writes each byte once: 4 x tokens x kv_heads x head_dim x itemsize bytes; no arithmetic.
// limits     sizeof(V) divides a head's bytes, every stride, and every address; where EACH is not 1, so do 16 bytes.
//            Slots are the contract of kv_append in prefixkit/ops/library.py: a row writes nothing where its slot is
//            not one of the pages'.
#include "kv/narrow.cuh"
#include "layouts/move.h"

namespace prefixkit {

// Calls move with the offsets of this thread's vectors of K and of V, in rows and in pages.
template <class Of> DEVICE void move_vectors(const Move& m, Of move) {
    pdl_launch();  // attention follows, and waits for this kernel's end before it reads
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, rest = thread / m.vectors;
    const long long token = rest / m.kv_heads;
    const int vector = int(thread % m.vectors), head = int(rest % m.kv_heads);
    const long long slot = token < m.tokens ? m.slots[token] : -1;
    const long long page = slot / m.page_size, within = slot % m.page_size;
    const long long k_from = token * m.k_row.token + head * m.k_row.head + vector;
    const long long v_from = token * m.v_row.token + head * m.v_row.head + vector;
    const long long k_to = page * m.k_page.page + within * m.k_page.slot + head * m.k_page.head + vector;
    const long long v_to = page * m.v_page.page + within * m.v_page.slot + head * m.v_page.head + vector;
    if (slot < 0 || slot >= m.num_slots) return;
    move(k_from, v_from, k_to, v_to);
}

template <class V> __global__ void __launch_bounds__(256) kv_append(const __grid_constant__ Move m) {
    move_vectors(m, [&](long long k_from, long long v_from, long long k_to, long long v_to) {
        const V k = ((const V*)m.k_rows)[k_from], v = ((const V*)m.v_rows)[v_from];
        ((V*)m.k_pages)[k_to] = k, ((V*)m.v_pages)[v_to] = v;
    });
}

template <class T, int EACH> __global__ void __launch_bounds__(256) kv_append_e4m3(const __grid_constant__ Move m) {
    move_vectors(m, [&](long long k_from, long long v_from, long long k_to, long long v_to) {
        if constexpr (EACH == 1) {
            ((unsigned char*)m.k_pages)[k_to] = to_e4m3(widen(((const T*)m.k_rows)[k_from]));
            ((unsigned char*)m.v_pages)[v_to] = to_e4m3(widen(((const T*)m.v_rows)[v_from]));
        } else {
            const uint4 k = ((const uint4*)m.k_rows)[k_from], v = ((const uint4*)m.v_rows)[v_from];
            store_e4m3<T>(m.k_pages, k_to, k), store_e4m3<T>(m.v_pages, v_to, v);
        }
    });
}

}  // namespace prefixkit
