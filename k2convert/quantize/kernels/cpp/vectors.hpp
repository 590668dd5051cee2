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

#if K2_HAS_VECTORS
namespace k2::vectors {
// A byte for each nibble, twice.
template <class Entry>
__m256i table_of(const Entry& of) {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9),
                                                     of(10), of(11), of(12), of(13), of(14), of(15)));
}
}  // namespace k2::vectors
#endif
