// FP8 weights: their codes, operation by operation as in formats/fp8.py, and their errors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace k2 {

// A weight has a scale for each `group` columns of a row, the last of which may be fewer.
struct Fp8Shape {
    size_t rows, columns, group;
};

struct Fp8Figures {
    int64_t num_nonzero = 0, equal_nonzero = 0;
};

void encode_fp8(const uint16_t* bits, Fp8Shape shape, const float* scales, uint8_t* codes);

// Sums of w**2 and of the squared error by row; the error is NaN if a code is.
Fp8Figures measure_fp8(const uint16_t* bits, const uint8_t* codes, Fp8Shape shape, const float* scales,
                       double* energies, double* errors);

}  // namespace k2
