// Partial attention states merged, row by row, in the order given.
//
// shapes     out [partial rows, heads, head_dim], lse [partial rows, heads] float32, natural logarithm; row r merges partial
//            rows indices[indptr[r] .. indptr[r + 1]).  Results [rows, heads, head_dim] and [rows, heads], contiguous.
// tiling     one warp per (row, head); a lane owns every 32nd vector of the head.
// cost       reads every partial once and writes every row once: memory-bound.
// limits     any head_dim; vectors of four floats where head_dim and the strides allow, else single floats.
//
// Weights are divided by their own sum, not by the exponential of the rounded log-sum-exp, so they add up to 1.  A row without
// partials, or with empty ones only, comes out empty: 0 and -infinity.

namespace prefixkit {

template <int FLOATS> struct Floats;
template <> struct Floats<1> {
    float x;
    __device__ void add(float w, const Floats& o) { x = fmaf(w, o.x, x); }
    __device__ void scale(float w) { x *= w; }
};
template <> struct alignas(16) Floats<4> {
    float x, y, z, w;
    __device__ void add(float s, const Floats& o) {
        x = fmaf(s, o.x, x); y = fmaf(s, o.y, y); z = fmaf(s, o.z, z); w = fmaf(s, o.w, w);
    }
    __device__ void scale(float s) { x *= s; y *= s; z *= s; w *= s; }
};

struct Merge {
    const float* out;
    const float* lse;
    const int* indptr;
    const int* indices;
    float* merged_out;
    float* merged_lse;
    long long out_row, out_head;  // strides in floats
    long long lse_row, lse_head;
    int rows, heads, head_dim, num_partials;
};

template <int FLOATS>
__global__ void __launch_bounds__(128) merge_states(const __grid_constant__ Merge m) {
    using V = Floats<FLOATS>;
    const long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    const long long row = warp / m.heads;
    const int head = int(warp % m.heads);
    if (row >= m.rows) return;
    const int begin = m.indptr[row], end = m.indptr[row + 1];
    const float minus_infinity = -__int_as_float(0x7f800000);

    float top = minus_infinity;
    for (int i = begin + lane; i < end; i += 32)
        top = fmaxf(top, m.lse[m.indices[i] * m.lse_row + head * m.lse_head]);
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float base = top == minus_infinity ? 0.f : top;

    float total = 0.f;
    for (int i = begin; i < end; ++i) total += expf(m.lse[m.indices[i] * m.lse_row + head * m.lse_head] - base);
    const float inverse = total > 0.f ? 1.f / total : 0.f;
    if (lane == 0) m.merged_lse[row * m.heads + head] = base + logf(total);

    V* result = reinterpret_cast<V*>(m.merged_out + (row * m.heads + head) * m.head_dim);
    for (int vector = lane; vector < m.head_dim / FLOATS; vector += 32) {
        V sum{};
        for (int i = begin; i < end; ++i) {
            const long long partial = m.indices[i];
            const float weight = expf(m.lse[partial * m.lse_row + head * m.lse_head] - base);
            if (weight > 0.f)  // an empty partial's output may hold anything
                sum.add(weight, reinterpret_cast<const V*>(m.out + partial * m.out_row + head * m.out_head)[vector]);
        }
        sum.scale(inverse);
        result[vector] = sum;
    }
}

}  // namespace prefixkit
