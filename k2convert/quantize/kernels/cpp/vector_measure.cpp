// Measuring INT4 rows with vectors; runs only if the CPU has them.
//
// 16-bit lanes hold d = (w - w') / s times a unit. If b * g is a multiple of s's lowest bit, as under the rules with a
// power of two as global scale, the unit is twice the mantissa of s, and d is exact. Otherwise it is 1024, and d is less
// than one off. A group for which this leaves a doubt, or with a new largest error, is counted by count_group.
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
                __m128d steps, const double* importance) {
    __m128d errors = _mm_sub_pd(energies, _mm_mul_pd(_mm_mul_pd(_mm_set1_pd(scale), steps), b));
    errors = _mm_add_pd(errors, _mm_mul_pd(_mm_mul_pd(steps, steps), c));
    const int small = _mm_movemask_pd(_mm_cmplt_pd(errors, _mm_mul_pd(energies, _mm_set1_pd(kLeastShare))));
    if (__builtin_expect(small == 0, 1)) return sum_of(errors);
    double parts[2], step[2];
    _mm_storeu_pd(parts, errors);
    _mm_storeu_pd(step, steps);
    for (int i = 0; i < 2; ++i) {
        const double* factors = importance == nullptr ? nullptr : importance + kBlock * i;
        if (small >> i & 1) parts[i] = exact_error(packed + 8 * i, values + 8 * i, scale, step[i], factors);
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
    return error_of(energies, b, c, packed, values, scale, steps, nullptr);
}

// A sum of each block, [first, second], over the 32-bit lanes of two vectors for each.
__m128i sum_lanes(__m256i first, __m256i second) {
    const __m256i pairs = _mm256_hadd_epi32(first, second), fours = _mm256_hadd_epi32(pairs, pairs);
    return _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
}

// Of each block the weighted A, B and C, from q and 2v in 16 bits and the importance in the order of `split`.
struct WeightedSums {
    __m128d a, b, c;
};
__attribute__((always_inline)) inline WeightedSums weighted_sums(const __m256i* q, const __m256i* v, __m256i importance) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i codes[2], products[2], squares[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i w = i == 0 ? _mm256_unpacklo_epi8(importance, zero) : _mm256_unpackhi_epi8(importance, zero);
        const __m256i wq = _mm256_mullo_epi16(w, q[i]);
        codes[i] = _mm256_madd_epi16(wq, q[i]);
        products[i] = _mm256_madd_epi16(wq, v[i]);
        squares[i] = _mm256_madd_epi16(_mm256_mullo_epi16(w, v[i]), v[i]);
    }
    return {_mm_cvtepi32_pd(sum_lanes(codes[0], codes[1])), _mm_cvtepi32_pd(sum_lanes(products[0], products[1])),
            _mm_mul_pd(_mm_cvtepi32_pd(sum_lanes(squares[0], squares[1])), _mm_set1_pd(0.25))};
}

void add_masks(uint32_t is_zero, uint32_t is_equal, uint32_t is_recoverable, Figures& figures) {
    figures.num_nonzero += __builtin_popcount(~is_zero);
    figures.equal_nonzero += __builtin_popcount(is_equal & ~is_zero);
    figures.recoverable_codes += __builtin_popcount(is_recoverable);
    figures.equal_blocks += ((is_equal & 0x00FF00FFu) == 0x00FF00FFu) + ((is_equal & 0xFF00FF00u) == 0xFF00FF00u);
}

// As k2::measure_scaled if its sums are integers and no error is a new largest one; false otherwise.
__attribute__((noinline)) bool add_scaled(const Decoded& bytes, uint32_t scale_bits, __m128d steps, const ChannelGroup& group,
                const uint8_t* split_importance, RowSums& sums, Figures& figures) {
    if (scale_bits < 0x80 || scale_bits >= 0x7E00 || !group.is_narrow) return false;
    const __m256i zero = _mm256_setzero_si256();
    const int mantissa = 128 | (scale_bits & 0x7F);
    const double scale = bf16_value(scale_bits) * group.power;
    // The power of two that is the scale's lowest bit, from its exponent.
    const double bit = bits_as<double>(bits_as<uint64_t>(scale) & 0x7FF0000000000000) * 0x1p-7;
    const __m128d multiples = _mm_mul_pd(steps, _mm_set1_pd(1.0 / bit));
    const __m128i whole = _mm_cvttpd_epi32(_mm_max_pd(_mm_min_pd(multiples, _mm_set1_pd(2047.5)), _mm_set1_pd(-0.5)));
    if (_mm_movemask_pd(_mm_cmpeq_pd(_mm_cvtepi32_pd(whole), multiples)) != 3) return false;
    const int limit = static_cast<int>(std::min(figures.max_error_steps * (2 * mantissa), kLargest));
    __m256i codes[2], values[2], multipliers[2], errors[2], ties[2], near[2], absent[2], over = zero;
    for (int i = 0; i < 2; ++i) {
        const auto wide = [&](__m256i x) { return i == 0 ? _mm256_unpacklo_epi8(zero, x) : _mm256_unpackhi_epi8(zero, x); };
        multipliers[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.multipliers[i]));
        const __m256i code = _mm256_srai_epi16(wide(bytes.eightfold), 11), step = all(_mm_extract_epi16(whole, 0));
        codes[i] = _mm256_mullo_epi16(code, multipliers[i]);
        values[i] = _mm256_srai_epi16(wide(bytes.sixteenfold), 11);
        const __m256i steps_i = i == 0 ? step : all(_mm_extract_epi16(whole, 2));
        errors[i] = _mm256_abs_epi16(_mm256_subs_epi16(_mm256_mullo_epi16(codes[i], all(2 * mantissa)), _mm256_mullo_epi16(values[i], steps_i)));
        const __m256i halves = _mm256_mullo_epi16(multipliers[i], all(mantissa));
        const __m256i limits = _mm256_min_epi16(_mm256_mullo_epi16(multipliers[i], all(limit)), all(static_cast<int>(kLargest)));
        over = _mm256_or_si256(over, _mm256_subs_epu16(errors[i], limits));  // a saturated |-32,768| too
        near[i] = _mm256_cmpgt_epi16(halves, errors[i]);
        ties[i] = _mm256_cmpeq_epi16(errors[i], halves);
        absent[i] = _mm256_cmpeq_epi16(codes[i], zero);
    }
    if (!_mm256_testz_si256(over, over)) return false;
    const uint32_t is_zero = masks_of(absent[0], absent[1]);
    const uint32_t is_even = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(bytes.codes, _mm256_set1_epi8(1)), zero)));
    add_masks(is_zero, masks_of(_mm256_cmpeq_epi16(errors[0], zero), _mm256_cmpeq_epi16(errors[1], zero)),
              masks_of(near[0], near[1]) | (masks_of(ties[0], ties[1]) & is_even), figures);
    if (scale < figures.least_scale && is_zero != 0xFFFFFFFFu) {
        const __m256i used = _mm256_min_epu16(_mm256_or_si256(multipliers[0], absent[0]), _mm256_or_si256(multipliers[1], absent[1]));
        const __m128i least = _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(used), _mm256_extracti128_si256(used, 1)));
        figures.least_scale = std::min(figures.least_scale, scale * _mm_extract_epi16(least, 0));
    }
    const auto squares = [](const __m256i* x) { return _mm256_add_epi32(_mm256_madd_epi16(x[0], x[0]), _mm256_madd_epi16(x[1], x[1])); };
    sums.energy += sum_of(squares(codes)) * (scale * scale);
    sums.error += sum_of(squares(errors)) * (0.25 * bit * bit);
    if (split_importance == nullptr) return true;
    const __m256i factors = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(split_importance));
    const WeightedSums weighted = weighted_sums(codes, values, factors);
    const __m128d energies = _mm_mul_pd(weighted.a, _mm_set1_pd(scale * scale));
    const __m128d errors_i = _mm_sub_pd(energies, _mm_mul_pd(_mm_mul_pd(_mm_set1_pd(scale), steps), weighted.b));
    sums.weighted_energy += sum_of(weighted.a) * (scale * scale);
    sums.weighted_error += sum_of(_mm_add_pd(errors_i, _mm_mul_pd(_mm_mul_pd(steps, steps), weighted.c)));
    return true;
}

// Add the weighted sums of both blocks, for the importance of their channels in the order of `split`.
void add_weighted(const Decoded& bytes, const uint8_t* packed, const uint8_t* values, const uint8_t* split_importance,
                  const double* importance, double scale, __m128d steps, RowSums& sums) {
    const __m256i zero = _mm256_setzero_si256();
    const auto small = [&](__m256i x, __m256i* out) {
        out[0] = _mm256_srai_epi16(_mm256_unpacklo_epi8(zero, x), 11);
        out[1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(zero, x), 11);
    };
    __m256i q[2], v[2];
    small(bytes.eightfold, q), small(bytes.sixteenfold, v);
    const WeightedSums found = weighted_sums(q, v, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(split_importance)));
    const __m128d energies = _mm_mul_pd(found.a, _mm_set1_pd(scale * scale));
    sums.weighted_energy += sum_of(found.a) * (scale * scale);
    sums.weighted_error += error_of(energies, found.b, found.c, packed, values, scale, steps, importance);
}

}  // namespace

RowSums measure_int4(const Int4& source, const Quantized& written, const ChannelFactors& channels, Figures& figures) {
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
        const uint8_t* split_importance = channels.importance == nullptr ? nullptr : channels.split_importance + 32 * group;
        if (channels.groups != nullptr && channels.groups[group].is_scaled) {
            if (!add_scaled(bytes, bits, steps, channels.groups[group], split_importance, total, figures)) {
                measure_scaled(packed, values, source.scale_bits[group], both, channels.from(32 * group), total, figures);
            }
            continue;
        }
        const __m128i sums = sum_bytes(_mm256_shuffle_epi8(squares, bytes.codes));
        total.energy += static_cast<double>(_mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4)) * (scale * scale);

        const auto error_of_sums = [&] {
            return error_from_sums(bytes, packed, values, sums, _mm256_shuffle_epi8(value_squares, bytes.nibbles), scale, steps);
        };
        if (split_importance != nullptr) {
            add_weighted(bytes, packed, values, split_importance, channels.importance + 32 * group, scale, steps, total);
        }
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
            const __m256i doubt = _mm256_or_si256(over, ties);
            if (is_equal != is_zero || !_mm256_testz_si256(doubt, doubt)) {
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
