// Keys and values into pages.
//
// kv_append: token t of key, value goes to slot slots[t] of the pages.
//
// shapes     key, value [tokens, kv_heads, head_dim]; pages [pages, page_size, kv_heads, head_dim]; slots [tokens] int64.
//            Any strides, in units of WIDTH bytes, but a head's elements are adjacent.
// tiling     one thread moves one vector of WIDTH bytes of K and the same of V; consecutive threads take the vectors of a
//            head, then the heads of a token, then the tokens.
// cost       reads and writes each byte once: 4 x tokens x kv_heads x head_dim x itemsize bytes; no arithmetic.
// limits     WIDTH divides a head's bytes, every stride, and every address.  Slots are the contract of kv_append in
//            prefixkit/ops/library.py: a row writes nothing where its slot is not one of the pages'.
#include "layouts/move.h"

namespace prefixkit {

template <int BYTES> struct Vector;
template <> struct Vector<2> { using type = unsigned short; };
template <> struct Vector<4> { using type = unsigned int; };
template <> struct Vector<8> { using type = uint2; };
template <> struct Vector<16> { using type = uint4; };

struct Place { long long k_row, v_row, k_page, v_page; bool exists; };

// Where this thread's vector lies, in each of the four tensors.
__device__ __forceinline__ Place place(const Move& m, long long thread) {
    const int vector = int(thread % m.vectors);
    const long long rest = thread / m.vectors;
    const int head = int(rest % m.kv_heads);
    const long long token = rest / m.kv_heads;
    Place p;
    p.exists = token < m.tokens;
    const long long slot = p.exists ? m.slots[token] : -1;
    p.exists = slot >= 0 && slot < m.num_slots;
    const long long page = slot / m.page_size, within = slot % m.page_size;
    p.k_row = token * m.k_row.token + head * m.k_row.head + vector;
    p.v_row = token * m.v_row.token + head * m.v_row.head + vector;
    p.k_page = page * m.k_page.page + within * m.k_page.slot + head * m.k_page.head + vector;
    p.v_page = page * m.v_page.page + within * m.v_page.slot + head * m.v_page.head + vector;
    return p;
}

template <int WIDTH>
__global__ void __launch_bounds__(256) kv_append(const __grid_constant__ Move m) {
    using V = typename Vector<WIDTH>::type;
#if __CUDA_ARCH__ >= 900
    // Attention follows, and can set itself up meanwhile; it waits for our end before it reads.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const Place p = place(m, (long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (!p.exists) return;
    const V k = static_cast<const V*>(m.k_rows)[p.k_row];
    const V v = static_cast<const V*>(m.v_rows)[p.v_row];
    static_cast<V*>(m.k_pages)[p.k_page] = k;
    static_cast<V*>(m.v_pages)[p.v_page] = v;
}

}  // namespace prefixkit
