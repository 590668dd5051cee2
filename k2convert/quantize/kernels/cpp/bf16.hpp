// BF16 -> NVFP4 under both rules, and its error: rules/ and metrics/bf16_error.py, block by block.
//
// Some quotients are FP32 instead of float64. A BF16 weight over a step of four significant bits either equals a
// midpoint or differs from it by at least 2**-13 of it, so rounding to E2M1 gives the same code. Errors are float64,
// with terms and sums in the order of rules/ and metrics/.
//
// Weights are BF16 bits, 16 for each block; `packed` has 8 bytes for each block, `scale_bytes` one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k2 {

void quantize_optimal_bf16(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
                           uint8_t* scale_bytes);
void quantize_plain_bf16(const uint16_t* source, size_t num_blocks, float global_scale, uint8_t* packed,
                         uint8_t* scale_bytes);

// `optimal` with each term of a block's error times the factor of its column; `factors` for the columns of a row.
void quantize_weighted_bf16(const uint16_t* source, size_t num_blocks, double global_scale, const double* factors,
                            size_t blocks_per_row, uint8_t* packed, uint8_t* scale_bytes);
// Sums of importance * w**2 and importance * (w - w')**2 of each row.
void weigh_rows_bf16(const uint16_t* source, const uint8_t* packed, const uint8_t* scale_bytes, double global_scale,
                     const uint8_t* importance, size_t num_rows, size_t blocks_per_row, double* energies,
                     double* errors);

struct Bf16Totals {
    int64_t num_nonzero = 0, equal_nonzero = 0, equal_blocks = 0;
};
// Sums of w**2 and (w - w')**2 of each row.
Bf16Totals measure_rows_bf16(const uint16_t* source, const uint8_t* packed, const uint8_t* scale_bytes,
                             double global_scale, size_t num_rows, size_t blocks_per_row, double* energies,
                             double* errors);
// The squared error of each block, and the bound on it (see metrics/bf16_error.py).
void block_errors_bf16(const uint16_t* source, const uint8_t* packed, const uint8_t* scale_bytes, size_t num_blocks,
                       double global_scale, double* errors);
void block_bounds_bf16(const uint16_t* source, size_t num_blocks, double* bounds);
// The bounds of INT4 blocks of 8 bytes with one scale and 16 exponents each, bit by bit the bound of their magnitudes.
void bounds_of_columns(const uint8_t* packed, const float* scales, const int8_t* exponents, size_t num_blocks,
                       double* bounds);

}  // namespace k2
