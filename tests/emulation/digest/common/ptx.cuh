// What a digest takes of a GPU, on the CPU.  Takes the place of csrc/common/ptx.cuh.
#pragma once
#define EMULATED_THREADS 256
#define EMULATED_BLOCKS 1
#include "fibers.cuh"

#define threadIdx (emulation::thread_index())
struct Dim { int x; };
static Dim blockIdx;
