// BF16 -> NVFP4: rules/, block by block.
//
// Some quotients are FP32 instead of float64. A BF16 weight over a step of four significant bits either equals a
// midpoint or differs from it by at least 2**-13 of it, so rounding to E2M1 gives the same code. Errors are float64,
// with terms and sums in the order of rules/.
//
// Weights are BF16 bits, 16 for each block; `packed` has 8 bytes for each block, `scale_bytes` one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k2 {

void quantize_mse_bf16(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
                           uint8_t* scale_bytes);
void quantize_max_bf16(const uint16_t* source, size_t num_blocks, float global_scale, uint8_t* packed,
                         uint8_t* scale_bytes);

// `mse` with each term of a block's error times the factor of its column; `factors` for the columns of a row.
void quantize_imatrix_bf16(const uint16_t* source, size_t num_blocks, double global_scale, const double* factors,
                            size_t blocks_per_row, uint8_t* packed, uint8_t* scale_bytes);

}  // namespace k2
