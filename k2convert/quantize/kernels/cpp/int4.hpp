// INT4 weights: conversion with its counts, measuring, and the figures of the counts.
#pragma once

#include <cstdint>
#include <vector>

#include "groups.hpp"

namespace k2 {

// A packed INT4 weight: for each group 16 bytes and the BF16 bits of one scale.
struct Int4 {
    const uint8_t* packed;
    const uint16_t* scale_bits;
    size_t num_groups;
};

Counted convert_optimal(const Int4& source, int exponent, const SearchTables& tables, uint8_t* out,
                        uint8_t* scale_bytes);
Counted convert_plain(const Int4& source, float global_scale, uint8_t* out, uint8_t* scale_bytes);

struct Measured {
    uint32_t largest_bits;
    float amax;
    bool usable;
};
// The largest scale as BF16 bits, the largest |bf16(q * s)|, and whether every scale is usable.
Measured measure(const Int4& source);

// PairFigures of metrics/int4_error.py.
struct Figures {
    double energy = 0, squared_error = 0;
    int64_t num_nonzero = 0, equal_nonzero = 0, recoverable_codes = 0;
    double max_error_steps = 0;
};
// Evaluate pairs: `keys` [P], `counts` [P, 9].
Figures figures_of_pairs(const int64_t* keys, const int64_t* counts, size_t num_pairs, Rule rule, double global_scale);

// Products k * v of six assignments of codes to |q| = 1..8, then their v * v (see search_tables.BOUND_ASSIGNMENTS).
using Assignments = double[8][12];

struct Sampled {
    double achieved, plain, bound;
};
// The three squared errors of metrics/sampled_error.py on every `stride`th block from `first` on.
Sampled sample(const Int4& source, const uint8_t* scale_bytes, size_t first, size_t stride, Rule rule,
               double global_scale, float plain_scale, const Assignments& assignments);

}  // namespace k2
