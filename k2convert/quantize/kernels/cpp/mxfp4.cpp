#include "measure.hpp"

#include <algorithm>

#include "instructions.hpp"
#include "vectors.hpp"

namespace k2 {

namespace {

constexpr uint8_t kSquares[8] = {0, 1, 4, 9, 16, 36, 64, 144};  // (2v)**2 by code

void count_portable(const uint8_t* packed, const uint8_t* scale_bytes, size_t num_groups, int64_t* counts) {
    for (size_t group = 0; group < num_groups; ++group, packed += 16) {
        int64_t nonzero = 0, sum = 0, largest = 0;
        for (int i = 0; i < 32; ++i) {
            const int64_t code = packed[i / 2] >> i % 2 * 4 & 7;
            nonzero += code != 0, sum += kSquares[code], largest = std::max(largest, code);
        }
        int64_t* group_counts = counts + 4 * scale_bytes[group];
        group_counts[0] += nonzero != 0, group_counts[1] += nonzero, group_counts[2] += sum;
        group_counts[3] = std::max(group_counts[3], largest);
    }
}

#if K2_HAS_VECTORS
K2_AVX2 void count_vectors(const uint8_t* packed, const uint8_t* scale_bytes, size_t num_groups, int64_t* counts) {
    const __m256i squares = _mm256_set1_epi64x(static_cast<long long>(0x9040241009040100u)), zero = _mm256_setzero_si256();
    static thread_local __m256i largest[256];
    std::fill_n(largest, 256, zero);
    for (size_t group = 0; group < num_groups; ++group, packed += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
        const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
        const __m256i codes = _mm256_and_si256(both, _mm256_set1_epi8(7));
        const __m256i sums = _mm256_sad_epu8(_mm256_shuffle_epi8(squares, codes), zero);
        const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        const uint32_t empty = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes, zero)));
        __m256i& top = largest[scale_bytes[group]];
        top = _mm256_max_epu8(top, codes);
        int64_t* group_counts = counts + 4 * scale_bytes[group];
        group_counts[0] += empty != 0xFFFFFFFFu;
        group_counts[1] += 32 - __builtin_popcount(empty);
        group_counts[2] += _mm_extract_epi64(half, 0) + _mm_extract_epi64(half, 1);
    }
    for (int scale = 0; scale < 256; ++scale) {
        const auto* codes = reinterpret_cast<const uint8_t*>(&largest[scale]);
        counts[4 * scale + 3] = std::max<int64_t>(counts[4 * scale + 3], *std::max_element(codes, codes + 32));
    }
}
#endif

}  // namespace

void count_mxfp4(const uint8_t* packed, const uint8_t* scale_bytes, size_t num_groups, int64_t* counts) {
#if K2_HAS_VECTORS
    if (uses_vectors()) return count_vectors(packed, scale_bytes, num_groups, counts);
#endif
    count_portable(packed, scale_bytes, num_groups, counts);
}

}  // namespace k2
