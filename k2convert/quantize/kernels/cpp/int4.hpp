// INT4 weights: conversion with its figures, and magnitude.
#pragma once

#include "groups.hpp"
#include "measure.hpp"

namespace k2 {

Counted convert_mse(const Int4& source, int exponent, const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes);
Counted convert_max(const Int4& source, float global_scale, uint8_t* out, uint8_t* scale_bytes);

// The figures of a conversion from its counts, and its sums: those of measure.hpp, in half the time of the conversion.
Figures figures_of(const Counted& counted, Rule rule, double global_scale, RowSums& sums);

// The output nibble of each source nibble under `max`, apart from that of zero.
void plain_map(float scale, int byte, float global_scale, uint8_t* map);

struct Measured {
    uint32_t largest_bits;
    float amax;
    bool usable;
};
// The largest scale as BF16 bits, the largest |bf16(q * s)|, and whether every scale is usable.
Measured measure(const Int4& source);

}  // namespace k2
