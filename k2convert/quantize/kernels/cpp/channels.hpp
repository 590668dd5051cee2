// INT4 weights whose columns differ: by importance, by a power of two, or by both (rules/mse.py).
//
// A block's elements fall into groups with equal exponent a, which see the scale s * 2**-a, and there into fields with
// equal |q|. Its error under a candidate is a sum over fields of summed importance times the error of |q|, and a group
// with the exponent a sees the candidate that is 8 a places further up. So one table of errors serves all groups.
//
// The grid index of a candidate is 8 j + mb - 8. With gi(ms) that of the first step with t >= 1, no candidate wins
//
//     below gi - 8 - 8 * (largest a)      t * 2**a <= 4/7 for every group: twice the step is at least as good for every
//                                         |q|, because no nearest value is .5 or 1.5, and ties go to the larger scale
//     above gi + 32 - 8 * (smallest a)    the first step with t * 2**a >= 16 for every group is better: 0 or half a step
//                                         is nearest to every |q| <= 8, and half a step is closer, or every code is zero
//
// whatever the importances are. From t * 2**a = 16/7 on for every group, half the step is at least as good (no |q| needs
// more than the value 3). So a search that ends one octave later finds the winner, unless it is in that octave: then a
// larger one can tie, and all candidates up to the bound are looked at. The bounds do not depend on
// which scales are normal E4M3 numbers. A winner that is not one is replaced by the best that is, among all candidates.
#pragma once

#include <cstdint>

#include "int4.hpp"

namespace k2 {

// What is known of the input columns: exponents in -4..4 and importances 1..255, each null if there are none.
struct Columns {
    const int8_t* exponents;
    const uint8_t* importance;
    size_t size;
};

// Convert whole rows; return the blocks that a scale outside the normal range would serve strictly better. g =
// 2**exponent under `mse`, the FP32 number `global_scale` under `max`.
int64_t convert_columns(const Int4& source, const Columns& columns, bool is_max, int exponent, float global_scale,
                        const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes);

// The largest |s * 2**-a| of a column and the largest |bf16(q * s * 2**-a)|; every scale must be usable.
struct MeasuredColumns {
    float scale_max, amax;
};
MeasuredColumns measure_columns(const Int4& source, const Columns& columns);

constexpr int kMaxExponent = 4;
constexpr int kNumExponents = 2 * kMaxExponent + 1;
// The search starts this far below the first step with t >= 1, and looks at this many candidates in one group.
constexpr int kBelowOne = 8;
constexpr int kSearched = 48;
constexpr int kMaxSearched = kSearched + 8 * 2 * kMaxExponent;
// The same without the last two octaves, and where the octave begins that decides about them (t >= 2).
constexpr int kSearchedFirst = 32;
constexpr int kLastOctave = 8;
constexpr int kNumGrid = kNumCandidates - 2;

// The grid index of the first step with t >= 1.
inline int grid_index_of_one(int mantissa) { return 24 + (mantissa + 15) / 16; }

// The rank in the tables of `mse` of a grid index, which may be beyond them.
inline int rank_of(int grid_index) {
    return grid_index < 0 ? kNumCandidates - 1 : grid_index >= kNumGrid ? 0 : kLastGridRank - grid_index;
}

// Errors of one group for AVX2: int16 [128, 6, 4, 8, 2] (ms, vector, pair of |q|, lane, one of the pair), in units of
// (s / ms)**2, capped at 65,535 and minus 32,768. Vector and lane of a candidate: see channels_avx2.cpp.
struct alignas(64) PackedErrors {
    int16_t errors[kNumMantissas * kSearched * 8];
};
const PackedErrors& packed_errors(const SearchTables& tables);

// A block's columns for byte shuffles: even columns, then odd ones.
struct alignas(16) SplitImportance {
    uint8_t values[16];
};

// Room for pairs of groups.
constexpr int kGroupRoom = kNumExponents + 1;
struct alignas(32) SplitGroups {
    // 255 where a column belongs to the group.
    uint8_t masks[kGroupRoom][16];
};

// The fields of a block: summed importance by group and |q| = 1..8; bit k - 1 is set if some |q| is k.
struct alignas(32) Fields {
    uint16_t sums[kGroupRoom][8];
    uint8_t present[kGroupRoom];
};

// What happens to the elements of a group: the output nibble of each source nibble.
struct alignas(16) Mapping {
    uint8_t map[16];
};

// The summed importance of a field and the errors of its elements under consecutive candidates, also as float32.
struct Term {
    double weight;
    const double* errors;
    const float* rounded_errors;
};

// The winner of a block of one group.
struct Found {
    int32_t position;  // from the first searched candidate on
    uint8_t present;   // bit k - 1 is set if some |q| is k
};

namespace avx2 {
// Find the best candidate of both blocks of a group of 32 weights.
void search_imatrix(const uint8_t* packed, const SplitImportance* importance, const int16_t* errors, Found* found);
// Replace the nibbles of a block of 8 bytes.
void encode_block(const uint8_t* packed, const uint8_t* map, uint8_t* out);
// The same functions as in channels.cpp.
void count_fields(const uint8_t* packed, const SplitGroups& groups, const SplitImportance& importance, int num_groups,
                  Fields& fields);
int last_least(const Term* terms, int num_terms, int count);
void encode_groups(const uint8_t* packed, const SplitGroups& groups, const Mapping* mappings, int num_groups,
                   uint8_t* out);
}  // namespace avx2

}  // namespace k2
