// Measuring written NVFP4 bytes against their source, with a decoder that shares nothing with the code that wrote them.
//
// Element by element in float64: w' = v * b * g against w = q * s, both exact. The decoder assumes no rule, so it
// measures any NVFP4 checkpoint, and it detects a single flipped bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k2 {

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
