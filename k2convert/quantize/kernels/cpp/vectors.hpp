// Vectors of 32 bytes for vector_*.cpp and mxfp4.cpp: AVX2's intrinsics, or the same for ARM, if K2_HAS_VECTORS.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
// A function for AVX2 in a file that is not.
#define K2_AVX2 __attribute__((target("avx2")))
#define K2_HAS_VECTORS 1
#elif defined(__aarch64__)
#include "neon.hpp"
#define K2_AVX2
#define K2_HAS_VECTORS 1
#else
#define K2_HAS_VECTORS 0
#endif
