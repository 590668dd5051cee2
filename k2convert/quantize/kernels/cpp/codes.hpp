// The figures of NVFP4 codes that no rule gives: element by element, from the values alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace k2 {

// An INT4 weight with its codes, by block: 8 bytes of `source` and of `packed` and one byte of `block_scales`; a number
// of `scales` for each `blocks_per_scale` blocks. Column j is divided by 2**a: `powers` has 2**-a and `inverses` 2**a
// for each column, or both are null. `importance` is null or has a number for each column.
struct CodedInt4 {
    const uint8_t* source;
    const double* scales;
    const uint8_t* packed;
    const uint8_t* block_scales;
    const double* powers;
    const double* inverses;
    const double* importance;
    size_t blocks_per_row, blocks_per_scale;
};

// Of one row: sum w**2 and sum (w - w')**2, and the same times the importance.
struct CodeSums {
    double energy, error, weighted_energy, weighted_error;
};

// Of many rows; the fields are those of WeightMetrics. `least_scale` is the least s * 2**-a of a weight that is not
// zero, infinite without one.
struct CodeFigures {
    int64_t num_nonzero = 0, equal_nonzero = 0, equal_blocks = 0;
    int64_t recoverable_codes = 0, num_five_or_seven = 0, num_minus_eight = 0;
    double max_error_steps = 0.0, least_scale = std::numeric_limits<double>::infinity();
};

// Measure one row and add to the figures. `block_values` is b * g for each of the 256 bytes of a block scale. The sums
// of a row are in four lanes, column j in lane j % 4; the lanes are added in order.
CodeSums measure_codes(const CodedInt4& weight, size_t row, const double* block_values, CodeFigures& figures);

}  // namespace k2
