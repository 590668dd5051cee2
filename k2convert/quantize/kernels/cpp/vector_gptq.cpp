// The same code as in gptq.cpp with fused multiply-adds, for AVX2 or NEON. It runs only if the CPU has both.
#if defined(__x86_64__) || defined(__aarch64__)
#define K2_LEVEL vectors
#include "gptq_tile.hpp"
#endif
