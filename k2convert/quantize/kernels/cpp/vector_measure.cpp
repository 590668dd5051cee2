// Measuring INT4 rows with vectors; runs only if the CPU has them.
//
// 16-bit lanes hold d = (w - w') / s times a unit. If b * g is a multiple of s's lowest bit, as under the rules with a
// power of two as global scale, the unit is twice the mantissa of s, and d is exact. Otherwise it is 1024, and d is less
// than one off. A group that this leaves open, or one with a new largest error, is counted by count_group.
#include "measure.hpp"
#include "vectors.hpp"

#if K2_HAS_VECTORS

#include <cmath>

#include "numbers.hpp"

namespace k2::vectors {

namespace {

// The bytes of a group as nibbles in the order of columns 0, 2, .., 30, 1, 3, .., 31: two quarters of each block.
__m256i split(const uint8_t* bytes) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_and_si256(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
}

char doubled(int nibble) {
    const char value = static_cast<char>(2.0 * kCodeValues[nibble & 7]);
    return nibble & 8 ? static_cast<char>(-value) : value;
}

// Sums of bytes below 256 as two numbers, one for each block.
__m128i sum_bytes(__m256i bytes) {
    const __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
    return _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

// Two small positive numbers of 64 bits.
__m128d as_doubles(__m128i numbers) {
    const __m128i magic = _mm_set1_epi64x(0x4330000000000000);
    return _mm_sub_pd(_mm_castsi128_pd(_mm_or_si128(numbers, magic)), _mm_castsi128_pd(magic));
}

int64_t total_of(__m256i bytes) {
    const __m128i sums = sum_bytes(bytes);
    return _mm_extract_epi64(sums, 0) + _mm_extract_epi64(sums, 1);
}

__m256i all(int value) { return _mm256_set1_epi16(static_cast<short>(value)); }

double sum_of(__m128d pair) { return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair))); }

double sum_of(__m256i integers) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return static_cast<double>(_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1))));
}

// The bytes of a group: 8 q and 16 v.
struct Decoded {
    __m256i codes, nibbles, eightfold, sixteenfold;
};

// The largest |d| of which 32 squares fit an integer.
constexpr double kLargest = 4095.0;

// |d| of a block in 16-bit lanes, from 8 q and 16 v in the upper bytes.
__m256i differences(__m256i q, __m256i v, __m256i code_factor, __m256i value_factor) {
    return _mm256_abs_epi16(_mm256_subs_epi16(_mm256_mulhrs_epi16(q, code_factor), _mm256_mulhrs_epi16(v, value_factor)));
}

uint32_t masks_of(__m256i first, __m256i second) {
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(first, second)));
}

// The squared error of both blocks from the sums s**2 A, B and C.
double error_of(__m128d energies, __m128d b, __m128d c, const uint8_t* packed, const uint8_t* values, double scale,
                __m128d steps) {
    __m128d errors = _mm_sub_pd(energies, _mm_mul_pd(_mm_mul_pd(_mm_set1_pd(scale), steps), b));
    errors = _mm_add_pd(errors, _mm_mul_pd(_mm_mul_pd(steps, steps), c));
    const int small = _mm_movemask_pd(_mm_cmplt_pd(errors, _mm_mul_pd(energies, _mm_set1_pd(kLeastShare))));
    if (__builtin_expect(small == 0, 1)) return sum_of(errors);
    double parts[2], step[2];
    _mm_storeu_pd(parts, errors);
    _mm_storeu_pd(step, steps);
    for (int i = 0; i < 2; ++i) {
        if (small >> i & 1) parts[i] = exact_error(packed + 8 * i, values + 8 * i, scale, step[i]);
    }
    return parts[0] + parts[1];
}

double error_from_sums(const Decoded& bytes, const uint8_t* packed, const uint8_t* values, __m128i squares,
                       __m256i value_squares, double scale, __m128d steps) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes.sixteenfold),
                                               _mm256_sign_epi8(bytes.eightfold, bytes.sixteenfold));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_srli_epi64(fours, 32));
    const __m128i products = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
    const __m128d energies = _mm_mul_pd(as_doubles(squares), _mm_set1_pd(scale * scale));
    const __m128d b = _mm_mul_pd(_mm_cvtepi32_pd(_mm_shuffle_epi32(products, 0x08)), _mm_set1_pd(1.0 / 64.0));
    const __m128d c = _mm_mul_pd(as_doubles(sum_bytes(value_squares)), _mm_set1_pd(0.25));
    return error_of(energies, b, c, packed, values, scale, steps);
}

void add_masks(uint32_t is_zero, uint32_t is_equal, uint32_t is_recoverable, Figures& figures) {
    figures.num_nonzero += __builtin_popcount(~is_zero);
    figures.equal_nonzero += __builtin_popcount(is_equal & ~is_zero);
    figures.recoverable_codes += __builtin_popcount(is_recoverable);
    figures.equal_blocks += ((is_equal & 0x00FF00FFu) == 0x00FF00FFu) + ((is_equal & 0xFF00FF00u) == 0xFF00FF00u);
}

}  // namespace

RowSums measure_int4(const Int4& source, const Quantized& written, Figures& figures) {
    const __m256i zero = _mm256_setzero_si256(), eight = _mm256_set1_epi8(8);
    const __m256i eightfold = table_of([](int u) { return static_cast<char>(8 * (u - 8)); });
    const __m256i squares = table_of([](int u) { return static_cast<char>((u - 8) * (u - 8)); });
    const __m256i odd_ones = table_of([](int u) { return static_cast<char>(u == 1 || u == 3 || u == 13 || u == 15); });
    const __m256i sixteenfold = table_of([](int w) { return static_cast<char>(8 * doubled(w)); });
    const __m256i value_squares = table_of([](int w) { return static_cast<char>(doubled(w) * doubled(w)); });
    __m256i num_odd = zero, num_lowest = zero;
    RowSums total;
    for (size_t group = 0; group < source.num_groups; ++group) {
        const uint8_t *packed = source.packed + 16 * group, *values = written.packed + 16 * group;
        const uint32_t bits = source.scale_bits[group];
        const uint8_t* scale_bytes = written.block_scales + 2 * group;
        const double both[2] = {written.block_values[scale_bytes[0]], written.block_values[scale_bytes[1]]};
        const __m128d steps = _mm_setr_pd(both[0], both[1]);
        Decoded bytes{split(packed), split(values), zero, zero};
        bytes.eightfold = _mm256_shuffle_epi8(eightfold, bytes.codes);
        bytes.sixteenfold = _mm256_shuffle_epi8(sixteenfold, bytes.nibbles);
        num_odd = _mm256_add_epi8(num_odd, _mm256_shuffle_epi8(odd_ones, bytes.codes));
        num_lowest = _mm256_sub_epi8(num_lowest, _mm256_cmpeq_epi8(bytes.codes, zero));
        if (group % 128 == 127) {
            figures.num_five_or_seven += total_of(num_odd), figures.num_minus_eight += total_of(num_lowest);
            num_odd = num_lowest = zero;
        }
        const double scale = bits & 0x8000 ? 0.0 : bf16_value(bits);
        const __m128i sums = sum_bytes(_mm256_shuffle_epi8(squares, bytes.codes));
        total.energy += static_cast<double>(_mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4)) * (scale * scale);

        const auto error_of_sums = [&] {
            return error_from_sums(bytes, packed, values, sums, _mm256_shuffle_epi8(value_squares, bytes.nibbles), scale, steps);
        };
        const bool is_normal = bits >= 0x80 && bits < 0x7E00;
        const int mantissa = 128 | (bits & 0x7F);
        // The inverse of the power of two that divides every scale with this exponent.
        const double inverse = bits_as<double>(static_cast<uint64_t>(1157 - (bits >> 7)) << 52);
        const double unit = bits_as<double>(static_cast<uint64_t>(888 + (bits >> 7)) << 52);  // half of it
        const __m128d multiples = _mm_mul_pd(steps, _mm_set1_pd(inverse));
        const __m128i whole = _mm_cvttpd_epi32(_mm_max_pd(_mm_min_pd(multiples, _mm_set1_pd(2047.5)), _mm_set1_pd(-0.5)));
        const bool is_exact = is_normal && _mm_movemask_pd(_mm_cmpeq_pd(_mm_cvtepi32_pd(whole), multiples)) == 3;
        __m128i factors = _mm_slli_epi32(whole, 4);
        int code_factor = 32 * mantissa, half = mantissa, limit = static_cast<int>(std::min(figures.max_error_steps * (2 * mantissa), kLargest));
        if (!is_exact) {
            total.error += error_of_sums();
            const __m128d ratios = _mm_mul_pd(steps, _mm_set1_pd(8192.0 / scale));
            const __m128d fits = _mm_and_pd(_mm_cmpge_pd(ratios, _mm_set1_pd(0.0)), _mm_cmplt_pd(ratios, _mm_set1_pd(32767.0)));
            if (!is_normal || _mm_movemask_pd(fits) != 3) {
                count_group(packed, values, scale, both, figures);
                continue;
            }
            factors = _mm_cvtpd_epi32(ratios);
            code_factor = 1 << 14, half = 512;
            limit = static_cast<int>(std::min(figures.max_error_steps * 1024.0, kLargest)) - 1;
        }
        const __m256i first_factor = _mm256_broadcastw_epi16(factors);
        const __m256i second_factor = _mm256_broadcastw_epi16(_mm_srli_si128(factors, 4));
        const __m256i first = differences(_mm256_unpacklo_epi8(zero, bytes.eightfold), _mm256_unpacklo_epi8(zero, bytes.sixteenfold), all(code_factor), first_factor);
        const __m256i second = differences(_mm256_unpackhi_epi8(zero, bytes.eightfold), _mm256_unpackhi_epi8(zero, bytes.sixteenfold), all(code_factor), second_factor);
        const __m256i halves = all(half), limits = all(limit);
        const __m256i first_tie = _mm256_cmpeq_epi16(first, halves), second_tie = _mm256_cmpeq_epi16(second, halves);
        const __m256i ties = _mm256_or_si256(first_tie, second_tie);
        const __m256i over = _mm256_or_si256(_mm256_cmpgt_epi16(first, limits), _mm256_cmpgt_epi16(second, limits));
        const uint32_t is_zero = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes.codes, eight)));
        const uint32_t is_equal = masks_of(_mm256_cmpeq_epi16(first, zero), _mm256_cmpeq_epi16(second, zero));
        uint32_t is_recoverable = masks_of(_mm256_cmpgt_epi16(halves, first), _mm256_cmpgt_epi16(halves, second));
        if (is_exact) {
            if (__builtin_expect(!_mm256_testz_si256(over, over), 0)) {
                total.error += error_of_sums();
                count_group(packed, values, scale, both, figures);
                continue;
            }
            total.error += sum_of(_mm256_add_epi32(_mm256_madd_epi16(first, first), _mm256_madd_epi16(second, second))) * (unit * unit);
            if (__builtin_expect(!_mm256_testz_si256(ties, ties), 0)) {
                // At half a step the even code is the nearest.
                const __m256i is_even = _mm256_cmpeq_epi8(_mm256_and_si256(bytes.codes, _mm256_set1_epi8(1)), zero);
                is_recoverable |= masks_of(first_tie, second_tie) & static_cast<uint32_t>(_mm256_movemask_epi8(is_even));
            }
        } else {
            const __m256i undecided = _mm256_or_si256(over, ties);
            if (is_equal != is_zero || !_mm256_testz_si256(undecided, undecided)) {
                count_group(packed, values, scale, both, figures);
                continue;
            }
        }
        if (is_zero != 0xFFFFFFFFu) figures.least_scale = std::min(figures.least_scale, scale);
        add_masks(is_zero, is_equal, is_recoverable, figures);
    }
    figures.num_five_or_seven += total_of(num_odd), figures.num_minus_eight += total_of(num_lowest);
    return total;
}

}  // namespace k2::vectors
#endif
