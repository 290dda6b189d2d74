// What the functions of variants use besides C++'s own operators: reads of captured tensors, and arithmetic as Python
// and torch define it.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

DEVICE long long long_word(const int* words) { return (long long)(u32)words[0] | (long long)words[1] << 32; }

// An index into a dimension of `size`; negative indices count from its end.  Torch refuses other indices outside the
// dimension; here they read the nearest element.  They occur because rows that pad a batch have arbitrary positions,
// and because slots of a KV tile that no token owns have positions -15 to -1 before a root that begins inside a page.
template <class T> DEVICE int index_of(T index, int size) {
    const T from_start = index < 0 ? index + size : index;
    return from_start < 0 ? 0 : from_start < size ? int(from_start) : size - 1;
}
DEVICE int index_from_start(int index, int size) { return max(min(index, size - 1), 0); }  // for a position
template <class T> DEVICE T element(const T* tensor, long long at) { return tensor[at]; }
DEVICE float element(const double* tensor, long long at) { return float(tensor[at]); }
DEVICE float element(const BFloat* tensor, long long at) { return widen(tensor[at]); }
DEVICE float element(const Half* tensor, long long at) { return widen(tensor[at]); }

// Divides by a positive number among the variant's words, rounding down as Python does.  The words hold the number in
// two words, then m, s and t, with which (n m >> 32) + (n & t) >> s is the quotient of any n of 31 bits that is not
// negative.
DEVICE int divide_by(int n, const int* words) {
    return int(__umulhi(u32(n), u32(words[2])) + u32(n & words[4]) >> words[3]);
}
DEVICE int modulo_by(int n, const int* words) { return n - divide_by(n, words) * words[0]; }
// For any n; ~n mirrors a negative n.
DEVICE int floor_divide_by(int n, const int* words) { return n < 0 ? ~divide_by(~n, words) : divide_by(n, words); }
DEVICE int floor_modulo_by(int n, const int* words) { return n - floor_divide_by(n, words) * words[0]; }
template <class T> DEVICE T floor_divide(T x, T y) {
    if (y == 0) return 0;
    const T quotient = x / y;
    return quotient - (x % y != 0 && (x < 0) != (y < 0) ? 1 : 0);
}
template <class T> DEVICE T floor_modulo(T x, T y) { return y == 0 ? 0 : x - floor_divide(x, y) * y; }

DEVICE float float_mod(float x, float y) {
    const float rest = fmodf(x, y);
    return rest != 0.f && (rest < 0.f) != (y < 0.f) ? rest + y : rest;
}
DEVICE float float_floordiv(float x, float y) {
    if (y == 0.f) return x / y;
    const float rest = fmodf(x, y), quotient = (x - rest) / y - (rest != 0.f && (rest < 0.f) != (y < 0.f) ? 1.f : 0.f);
    if (quotient == 0.f) return copysignf(0.f, x / y);
    const float whole = floorf(quotient);
    return quotient - whole > 0.5f ? whole + 1.f : whole;
}

DEVICE float round_to_bfloat16(float x) { return widen(BFloat{u16(pack<BFloat>(x, 0.f))}); }
DEVICE float round_to_float16(float x) { return widen(Half{u16(pack<Half>(x, 0.f))}); }
// Divides by a number among the variant's words, with its reciprocal, which follows it.
DEVICE float divide_by_number(float x, const int* words) { return x * __int_as_float(words[1]); }

// Within 5e-8 of its value where |x| < NEAR: an odd polynomial.
constexpr float NEAR = 0.6f;
DEVICE float near_tanh(float x) {
    const float square = x * x;
    float y = -0.00574201f;
    y = y * square + 0.02067023f, y = y * square - 0.05374856f;
    y = y * square + 0.13331538f, y = y * square - 0.33333285f;
    return y * square * x + x;
}
// Elsewhere 1 - 2 / (1 + exp(2 |x|)), within 2.4e-7 of its value, by the bounds of ex2.approx and rcp.approx; 2e-8 in
// the root mean square.
DEVICE float variant_tanh(float x) {
    const float far = copysignf(1.f - 2.f * reciprocal(1.f + exp2_fast(2.f * LOG2E * fabsf(x))), x);
    return fabsf(x) < NEAR ? near_tanh(x) : far;
}
DEVICE float variant_log_sigmoid(float x) {
    return fminf(x, 0.f) - LN2 * log2_fast(1.f + exp2_fast(-LOG2E * fabsf(x)));
}
DEVICE float variant_sigmoid(float x) { return reciprocal(1.f + exp2_fast(-LOG2E * x)); }
// The hardware's own tanh, whose relative error is up to 2^-11.
DEVICE float hardware_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float hardware_sigmoid(float x) { return 0.5f * hardware_tanh(0.5f * x) + 0.5f; }

// The tanh with which score functions compute: for any argument, for arguments near 0, and the hardware's.  LargestTanh
// also tells whether all arguments are near 0.
struct AnyTanh {
    DEVICE float operator()(float x) const { return variant_tanh(x); }
};
struct NearTanh {
    DEVICE float operator()(float x) const { return near_tanh(x); }
};
struct HardwareTanh {
    DEVICE float operator()(float x) const { return hardware_tanh(x); }
};
struct LargestTanh {
    float largest = 0.f;  // magnitude of the arguments
    DEVICE float operator()(float x) {
        largest = fmaxf(largest, fabsf(x));
        return variant_tanh(x);
    }
};

}  // namespace prefixkit
