// Hopper's warpgroup matrix instructions (sm_90a), one function for each shape that the tile role uses.
//
// d[64 x N] += a[64 x 16] b[16 x N].  A warpgroup's thread t holds rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 2 (t
// % 4) (+ 1) of every 8: of the 8 columns from 8 j on, d[4 j + 0, 1] in the first row, d[4 j + 2, 3] in the second. a
// comes from registers, as packed pairs in the same order, and b from shared memory.  `keep` = 0 starts from zero.
#pragma once
#include "common/ptx.cuh"

namespace prefixkit {

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int COUNT> DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// Tells the compiler that a value may change here, so that it cannot move uses of the value across.
template <int N> DEVICE void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// The lower half of the descriptor of a tile in shared memory with rows of 128 bytes and the 128-byte swizzle.
// `leading` is the number of bytes from one block of 64 columns to the next; 16 more bytes of address add 1.  The upper
// half says that groups of 8 rows lie 1,024 bytes apart. wgmma_ones has another upper half, all zero: no swizzle, and
// all rows at one address.
DEVICE u32 descriptor(u32 address, u32 leading) { return (address & 0x3ffff) >> 4 | (leading >> 4) << 16; }
#define DESCRIPTOR_HIGH "0x40000040"

#define WGMMA_TYPES "f32." OPERAND "." OPERAND

// Operands of inline assembly: N accumulators d from index i on, and their names.
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_FROM(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_16 SUMS_FROM(0)
#define SUMS_32 SUMS_16, SUMS_FROM(16)
#define SUMS_64 SUMS_32, SUMS_FROM(32), SUMS_FROM(48)
#define SUMS_128 SUMS_64, SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96), SUMS_FROM(112)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
                  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
                  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, " \
                  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
                  "%124, %125, %126, %127"

// Defines a function for N accumulators.  A, B and KEEP name the operands after them; TRANSPOSED: b's columns lie along
// the rows of shared memory.
#define WGMMA(FUNCTION, N, SHAPE, A, B, KEEP, TRANSPOSED)                                                            \
    DEVICE void FUNCTION(float (&d)[N], const u32* a, u32 b, int keep) {                                             \
        asm volatile("{.reg .pred p;\n .reg .b64 b;\n mov.b64 b, {" B ", " DESCRIPTOR_HIGH "};\n"                    \
                     "setp.ne.b32 p, " KEEP ", 0;\n wgmma.mma_async.sync.aligned." SHAPE "." WGMMA_TYPES             \
                     " {" NAMES_##N "}, {" A "}, b, p, 1, 1, " TRANSPOSED ";\n}"                                     \
                     : SUMS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));                    \
    }
WGMMA(wgmma_rows, 16, "m64n32k16", "%16, %17, %18, %19", "%20", "%21", "0")             // K as stored
WGMMA(wgmma_rows, 32, "m64n64k16", "%32, %33, %34, %35", "%36", "%37", "0")
WGMMA(wgmma_columns, 32, "m64n64k16", "%32, %33, %34, %35", "%36", "%37", "1")          // V as stored
WGMMA(wgmma_columns, 64, "m64n128k16", "%64, %65, %66, %67", "%68", "%69", "1")
WGMMA(wgmma_columns, 128, "m64n256k16", "%128, %129, %130, %131", "%132", "%133", "1")  // 128 of 168 entry registers

// K as stored; a lies in shared memory too, laid out as b is.
DEVICE void wgmma_shared_rows(float (&d)[32], u32 a, u32 b, int keep) {
    asm volatile("{.reg .pred p;\n .reg .b64 a, b;\n mov.b64 a, {%32, " DESCRIPTOR_HIGH "};\n"
                 "mov.b64 b, {%33, " DESCRIPTOR_HIGH "};\n setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {" NAMES_32 "}, a, b, p, 1, 1, 0, 0;\n}"
                 : SUMS_32 : "r"(a), "r"(b), "r"(keep));
}

// 4 accumulators, 8 columns. b is 128 bytes of ones, which both halves of the sum and all columns read.
DEVICE void wgmma_ones(float (&d)[4], const u32* a, u32 b) {
    asm volatile(
        "{.reg .b64 b;\n mov.b64 b, {%8, 0};\n"
        "wgmma.mma_async.sync.aligned.m64n8k16." WGMMA_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, b, 1, 1, 1, 0;\n}"
        : SUMS_4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

}  // namespace prefixkit
