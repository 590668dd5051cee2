// One row with AVX2; runs only if the CPU has it. Every operation and its order are the same as in portable::.
#include "decode.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

namespace k2::avx2 {

namespace {

// Four elements at a time: sums of squared differences, the largest difference, and elements unchanged.
struct Lanes {
    __m256d error = _mm256_setzero_pd();
    __m256i equal = _mm256_setzero_si256();

    void add(__m128i code, __m128i value, __m256d scale, __m256d half_step, __m256d& worst) {
        const __m256d zero = _mm256_setzero_pd();
        const __m256d weight = _mm256_mul_pd(_mm256_cvtepi32_pd(code), scale);
        const __m256d difference = _mm256_sub_pd(weight, _mm256_mul_pd(_mm256_cvtepi32_pd(value), half_step));
        error = _mm256_add_pd(error, _mm256_mul_pd(difference, difference));
        // If the difference is NaN, the result is the second operand.
        worst = _mm256_max_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), difference), worst);
        const __m256d unchanged = _mm256_and_pd(_mm256_cmp_pd(difference, zero, _CMP_EQ_OQ),
                                                _mm256_cmp_pd(weight, zero, _CMP_NEQ_UQ));
        equal = _mm256_sub_epi64(equal, _mm256_castpd_si256(unchanged));
    }

    void add_eight(__m128i codes, __m128i values, __m256d scale, __m256d half_step, __m256d& worst) {
        const __m256i wide_codes = _mm256_cvtepi8_epi32(codes), wide_values = _mm256_cvtepi8_epi32(values);
        add(_mm256_castsi256_si128(wide_codes), _mm256_castsi256_si128(wide_values), scale, half_step, worst);
        add(_mm256_extracti128_si256(wide_codes, 1), _mm256_extracti128_si256(wide_values, 1), scale, half_step, worst);
    }
};

// Low and high nibbles of 16 bytes.
struct Nibbles {
    __m128i low, high;

    explicit Nibbles(const uint8_t* bytes) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)), mask = _mm_set1_epi8(15);
        low = _mm_and_si128(both, mask);
        high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    }
};

int64_t sum_of(__m256i lanes) {
    alignas(32) int64_t parts[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

double sum_of(__m256d lanes) {
    alignas(32) double parts[4];
    _mm256_store_pd(parts, lanes);
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

}  // namespace

RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                          const uint8_t* block_scales, size_t num_groups, const double* block_values) {
    const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i eight = _mm_set1_epi8(8), no_code = _mm_setzero_si128();
    Lanes low, high;
    __m256d worst_steps = _mm256_setzero_pd();
    RowError row{};
    for (size_t group = 0; group < num_groups; ++group, source += 16, packed += 16) {
        const Nibbles codes(source), written(packed);
        const __m128i low_codes = _mm_sub_epi8(codes.low, eight), high_codes = _mm_sub_epi8(codes.high, eight);
        const __m128i low_values = _mm_shuffle_epi8(doubled, written.low);
        const __m128i high_values = _mm_shuffle_epi8(doubled, written.high);
        const __m256d scale = _mm256_broadcast_sd(scales + group);
        const __m256d first = _mm256_set1_pd(0.5 * block_values[block_scales[2 * group]]);
        const __m256d second = _mm256_set1_pd(0.5 * block_values[block_scales[2 * group + 1]]);
        __m256d worst = _mm256_setzero_pd(), worst_too = worst;
        low.add_eight(low_codes, low_values, scale, first, worst);
        high.add_eight(high_codes, high_values, scale, first, worst_too);
        low.add_eight(_mm_unpackhi_epi64(low_codes, low_codes), _mm_unpackhi_epi64(low_values, low_values), scale,
                      second, worst);
        high.add_eight(_mm_unpackhi_epi64(high_codes, high_codes), _mm_unpackhi_epi64(high_values, high_values), scale,
                       second, worst_too);
        const double s = scales[group];
        if (s > 0.0) {
            worst_steps = _mm256_max_pd(_mm256_div_pd(_mm256_max_pd(worst, worst_too), scale), worst_steps);
        }
        // Eight sums of four squares, each at most 256.
        const __m128i low_sizes = _mm_abs_epi8(low_codes), high_sizes = _mm_abs_epi8(high_codes);
        const __m128i squares = _mm_add_epi16(_mm_maddubs_epi16(low_sizes, low_sizes),
                                              _mm_maddubs_epi16(high_sizes, high_sizes));
        const __m128i pairs = _mm_madd_epi16(squares, _mm_set1_epi16(1));
        const __m128i fours = _mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0x4E));
        const int squared = _mm_cvtsi128_si32(fours) + _mm_extract_epi32(fours, 1);
        row.energy += static_cast<double>(squared) * (s * s);
        const int zeros = _mm_movemask_epi8(_mm_cmpeq_epi8(low_codes, no_code)) |
                          _mm_movemask_epi8(_mm_cmpeq_epi8(high_codes, no_code)) << 16;
        if (s != 0.0) row.num_nonzero += 32 - __builtin_popcount(static_cast<unsigned>(zeros));
    }
    row.error = sum_of(low.error) + sum_of(high.error);
    row.equal_nonzero = sum_of(low.equal) + sum_of(high.equal);
    alignas(32) double steps[4];
    _mm256_store_pd(steps, worst_steps);
    row.max_error_steps = std::max(std::max(steps[0], steps[1]), std::max(steps[2], steps[3]));
    return row;
}

}  // namespace k2::avx2

#else

namespace k2::avx2 {

RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                          const uint8_t* block_scales, size_t num_groups, const double* block_values) {
    return portable::measure_row_int4(source, scales, packed, block_scales, num_groups, block_values);
}

}  // namespace k2::avx2
#endif
