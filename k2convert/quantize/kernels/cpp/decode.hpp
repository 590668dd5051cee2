// Measuring written NVFP4 bytes against their source, with a decoder that shares nothing with the code that wrote them.
//
// Element by element in float64: w' = v * b * g against w = q * s, both exact. The decoder assumes no rule, so it
// measures any NVFP4 checkpoint, and it detects a single flipped bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k2 {

// Twice the value of an E2M1 nibble: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
inline int8_t doubled_value(uint8_t nibble) {
    const int code = nibble & 7;
    const int value = code + (code >= 5) + (code >= 6) + 3 * (code >= 7);
    return static_cast<int8_t>(nibble & 8 ? -value : value);
}

// Of one row: sum w**2, sum (w - w')**2, the largest |w - w'| / s (INT4 only), non-zero and unchanged weights.
struct RowError {
    double energy, error, max_error_steps;
    int64_t num_nonzero, equal_nonzero;
};

// A group has 16 bytes of `source` and of `packed`, one scale and two block scales; `block_values` is b * g for each of
// the 256 bytes of a block scale.
RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                          const uint8_t* block_scales, size_t num_groups, const double* block_values);
// `weights` are BF16 bits, 16 for each block.
RowError measure_row_bf16(const uint16_t* weights, const uint8_t* packed, const uint8_t* block_scales,
                          size_t num_blocks, const double* block_values);

// A row of weights whose columns have exponents and importance.
struct ColumnError {
    RowError row;
    double weighted_energy, weighted_error;
};

// Of each column: `powers` 2**-a and `inverses` 2**a, where an INT4 weight is q * s * 2**-a, and `shares`, its weight in
// the weighted sums.
ColumnError measure_columns_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                                 const uint8_t* block_scales, size_t num_groups, const double* block_values,
                                 const double* powers, const double* inverses, const double* shares);
ColumnError measure_columns_bf16(const uint16_t* weights, const uint8_t* packed, const uint8_t* block_scales,
                                 size_t num_blocks, const double* block_values, const double* shares);

// The same in plain C++ and with AVX2, equal to the last bit.
namespace portable {
RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                          const uint8_t* block_scales, size_t num_groups, const double* block_values);
}  // namespace portable

namespace avx2 {
RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                          const uint8_t* block_scales, size_t num_groups, const double* block_values);
}  // namespace avx2

}  // namespace k2
