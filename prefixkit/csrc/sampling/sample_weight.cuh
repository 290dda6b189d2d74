// Weights of tokens in whole numbers, and uniform numbers: sampling/specification.py, bit by bit.
#pragma once
#include "sampling/sample_ptx.cuh"

namespace prefixkit {

constexpr int TOP_BITS = 39;  // the likeliest token weighs 2^39
constexpr float TOP = 549755813888.0f;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// 2^39 exp((score - top) / temperature), not yet a whole number.  No operation may be fused with another.
DEVICE float weigh(float score, float top, float rate) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: ones are in the lowest bit
    const float power = fmaxf(__fmul_rn(__fsub_rn(score, top), rate), -64.0f);
    const float moved = __fadd_rd(power, MAGIC);
    const float f = __fsub_rn(power, __fsub_rn(moved, MAGIC));
    float g = __fmul_rn(f, TOP * 0x1.eca6e2p-10f);
    g = __fmul_rn(__fadd_rn(g, TOP * 0x1.269dfcp-7f), f);
    g = __fmul_rn(__fadd_rn(g, TOP * 0x1.c9442ap-5f), f);
    g = __fmul_rn(__fadd_rn(g, TOP * 0x1.ebd8a8p-3f), f);
    g = __fmul_rn(__fadd_rn(g, TOP * 0x1.62e4c8p-1f), f);
    g = __fadd_rn(g, TOP);
    // Times 2^floor(power): the exponent field moves by the lowest bits of `moved`, the others fall off.
    return __int_as_float(int(u32(__float_as_int(g)) + (u32(__float_as_int(moved)) << 23)));
}

// The sum of up to 1,023 weights, each rounded down to a whole number: multiples of 2^17, and the rest.
struct Sum {
    u32 high = 0, low = 0;

    DEVICE void add(float weight) {
        constexpr float MANY = 1099511627776.0f, FEW = 8388608.0f;  // 2^40 counts in steps of 2^17, 2^23 in ones
        const float moved = __fadd_rd(weight, MANY);
        const float rest = __fsub_rn(weight, __fsub_rn(moved, MANY));
        high += u32(__float_as_int(moved)) - u32(__float_as_int(MANY));
        low += u32(__float_as_int(__fadd_rd(rest, FEW))) - u32(__float_as_int(FEW));
    }
    // Returns the sum and resets it to 0.
    DEVICE u64 take() {
        const u64 sum = (u64(high) << 17) + low;
        high = low = 0;
        return sum;
    }
};

// The weight that top-p keeps, out of `total`.
DEVICE u64 share(u64 total, double top_p) {
    const u64 wanted = __double2ull_rz(ceil(__dmul_rn(top_p, __ull2double_rn(total))));
    return max(1ull, min(wanted, total));
}

// The least weight that min-p keeps, or the next float if it is no float: no weight lies between the two.
DEVICE float least_weight(double min_p) { return __double2float_ru(ceil(min_p * double(TOP))); }

// 53 random bits: sampling/rng.py.
DEVICE u64 uniform53(u64 key, u32 step) {
    u32 c0 = step, c1 = 0, c2 = 0, c3 = 0, k0 = u32(key), k1 = u32(key >> 32);
#pragma unroll 1
    for (int turn = 0; turn < 10; ++turn) {
        const u64 first = u64(c0) * 0xD2511F53u, second = u64(c2) * 0xCD9E8D57u;
        c0 = u32(second >> 32) ^ c1 ^ k0, c1 = u32(second);
        c2 = u32(first >> 32) ^ c3 ^ k1, c3 = u32(first);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return u64(c0 >> 5) << 26 | c1 >> 6;
}

}  // namespace prefixkit
