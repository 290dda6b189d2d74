// Keys and values into pages: token t goes to slot slots[t].
//
// shapes     key, value [tokens, kv_heads, head_dim]; pages [pages, page_size, kv_heads, head_dim]; slots [tokens]
//            int64.  Any strides, counted in vectors V, but a head's elements are adjacent.
// tiling     one thread moves one vector of K and the same of V; consecutive threads take the vectors of a head, then
//            the heads of a token, then the tokens.
// cost       reads and writes each byte once: 4 x tokens x kv_heads x head_dim x itemsize bytes; no arithmetic.
// limits     sizeof(V) divides a head's bytes, every stride, and every address.  Slots are the contract of kv_append in
//            prefixkit/ops/library.py: a row writes nothing where its slot is not one of the pages'.
#include "common/ptx.cuh"
#include "layouts/move.h"

namespace prefixkit {

template <class V> __global__ void __launch_bounds__(256) kv_append(const __grid_constant__ Move m) {
    pdl_launch();  // attention follows, and waits for our end before it reads
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
    const V k = ((const V*)m.k_rows)[k_from], v = ((const V*)m.v_rows)[v_from];
    ((V*)m.k_pages)[k_to] = k, ((V*)m.v_pages)[v_to] = v;
}

}  // namespace prefixkit
