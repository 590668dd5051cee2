// Measuring quantized weights against their source, from the values alone: w' = v * b * g against w = q * s * 2**-a, or
// a BF16 number. No rule is assumed, so any NVFP4 weight can be measured, and one changed bit is noticed.
//
// The squared error of an INT4 block without exponents is s**2 A - s b g B + (b g)**2 C, with the integers A = sum q**2,
// B = sum q * 2v and C = sum v**2. If so little is left that rounding could be seen in it, the differences are squared
// one by one. Weights with exponents are measured element by element. Counts are exact. Everything is equal to the last bit
// with and without vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace k2 {

// NVFP4 bytes, 8 of `packed` and one of `block_scales` for each block; `block_values` is b * g for each of the 256 bytes.
struct Quantized {
    const uint8_t *packed, *block_scales;
    const double* block_values;
};

// Packed INT4 weights: for each group of 32 of them 16 bytes and the BF16 bits of one scale.
struct Int4 {
    const uint8_t* packed;
    const uint16_t* scale_bits;
    size_t num_groups;
};

// Of one row: sum w**2 and sum (w - w')**2.
struct RowSums {
    double energy = 0.0, error = 0.0;
};

// Of many rows; the fields are those of WeightMetrics. `least_scale` is the least s * 2**-a of a weight that is not
// zero, infinite without one. Only the first three have a meaning for BF16 weights.
struct Figures {
    int64_t num_nonzero = 0, equal_nonzero = 0, equal_blocks = 0;
    int64_t recoverable_codes = 0, num_five_or_seven = 0, num_minus_eight = 0;
    double max_error_steps = 0.0, least_scale = std::numeric_limits<double>::infinity();
};

// Measure one row of whole groups, or of blocks, and add to the figures. `powers` are 2**-a of the columns, or null.
RowSums measure_int4(const Int4& source, const Quantized& written, const double* powers, Figures& figures);
RowSums measure_bf16(const uint16_t* source, const Quantized& written, size_t num_blocks, Figures& figures);

// Add the number of times that each byte occurs to 256 counts.
void count_bytes(const uint8_t* bytes, size_t size, int64_t* counts);

// What the figures of MXFP4 weights follow from. Add to counts[256][4], by the scale byte: groups with a code that is not
// zero, such codes, and the sum of (2v)**2; the last is the largest code.
void count_mxfp4(const uint8_t* packed, const uint8_t* scale_bytes, size_t num_groups, int64_t* counts);

// Squared error s**2 A of a block below which it is added up element by element.
constexpr double kLeastShare = 0x1p-20;
// The squared error of a block, element by element.
double exact_error(const uint8_t* source, const uint8_t* packed, double scale, double step);
// Add the exact counts of a group without exponents to the figures. Sums are not touched.
void count_group(const uint8_t* source, const uint8_t* packed, double scale, const double steps[2], Figures& figures);

namespace vectors {
// A row without exponents.
RowSums measure_int4(const Int4& source, const Quantized& written, Figures& figures);
}  // namespace vectors

}  // namespace k2
