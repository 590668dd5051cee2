// Conversion of INT4 and BF16 weights, byte for byte as rules/ defines it.
#pragma once

#include "groups.hpp"
#include "measure.hpp"

namespace k2 {

// INT4, with the counts from which its figures follow.
Counted convert_mse(const Int4& source, int exponent, const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes);
Counted convert_max(const Int4& source, float global_scale, uint8_t* out, uint8_t* scale_bytes);

// The figures of a conversion from its counts, and its sums: those of measure.hpp, in half the time of the conversion.
Figures figures_of(const Counted& counted, Rule rule, double global_scale, RowSums& sums);

// The largest scale of INT4 weights as BF16 bits, the largest |bf16(q * s)|, and whether every scale is usable.
struct Measured {
    uint32_t largest_bits;
    float amax;
    bool usable;
};
Measured measure(const Int4& source);

// BF16 bits, 16 for each block, block by block; `packed` has 8 bytes for each block, `scale_bytes` one.
//
// Some quotients are FP32 instead of float64. A BF16 weight over a step of four significant bits either equals a
// midpoint or differs from it by at least 2**-13 of it, so rounding to E2M1 gives the same code. Errors are float64,
// with terms and sums in the order of rules/.
void quantize_mse_bf16(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
                       uint8_t* scale_bytes);
void quantize_max_bf16(const uint16_t* source, size_t num_blocks, float global_scale, uint8_t* packed,
                       uint8_t* scale_bytes);

}  // namespace k2
