// INT4 weights whose columns differ: by importance, by a power of two, or by both (rules/search_int4.py).
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
#include "numbers.hpp"

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

// The tables of the search with vectors, see vector_channels.cpp. Place p is the candidate with the grid index gi - 31 + p as
// the block's group with the lowest exponent sees it.
constexpr int kShifts = 6, kWindow = 24, kStarts = 32, kPlaces = 64, kFirstPlace = -31;
struct PackedErrors {
    // Bit k - 1 is set if the error of |q| = k is capped, bit k + 7 if it is not exactly that of half the step; and the map
    // of the codes.
    struct Marks {
        uint16_t flags;
        uint8_t map;
    };
    // For the group whose exponent is `shift` larger than the lowest.
    struct alignas(64) Shifted {
        // Of |q| = 1..8 in units of (s * 2**-lowest / ms)**2, rounded down, capped at 65,535, minus 32,768: (pair of |q|,
        // place, one of the pair).
        int16_t errors[4][kPlaces][2];
        // The least of them at any place below a start.
        int16_t below[kStarts][8];
        Marks marks[kPlaces];
    } shifted[kShifts];
    // Where the window starts for the largest |q| = k: 16 places below the first step with t >= 2/7 k, or a larger one. None
    // for k = 0.
    int8_t starts[9];
};

// A block's columns for byte shuffles: even columns, then odd ones.
struct alignas(16) SplitImportance {
    uint8_t values[16];
};

// Room for pairs of groups.
constexpr int kGroupRoom = kNumExponents + 1;
// The fields of a block: summed importance by group and |q| = 1..8; bit k - 1 is set if some |q| is k.
struct alignas(32) Fields {
    uint16_t sums[kGroupRoom][8];
    uint8_t present[kGroupRoom];
};

// The summed importance of a field and the errors of its elements under consecutive candidates.
struct Term {
    double weight;
    const double* errors;
};

// How a block of 16 columns falls into groups with equal exponents.
struct Plan {
    int num_groups = 0;
    int8_t exponents[kNumExponents];  // ascending
    int total = 0;                    // importance
    // For each column.
    uint8_t groups[kBlock], importance[kBlock];
    // 255 where a column belongs to the group, in the order of the importance.
    alignas(32) uint8_t masks[kGroupRoom][16] = {};
    SplitImportance split_importance{};
};

// What a block's search found. Bit i of `near` is set if the candidate at place start + i can be the winner; none is if
// others can. `lowest` is the exponent that tells the place; with one below those of the block, next to no error is capped.
struct Seen {
    Fields fields;
    int lowest, start;
    uint64_t near;
};
inline int last_of(uint64_t candidates) { return 63 - __builtin_clzll(candidates); }

namespace vectors {
// The winners' places in both blocks of a group of 32 weights, as columns with the block's only exponent see them; -1 where
// a search of all candidates must decide.
void search_even(const uint8_t* packed, const SplitImportance* importance, const PackedErrors& errors,
                 const uint8_t* is_wanted, int* places);
// The same of one block; if it is -1, what was seen.
int search_block(const uint8_t* packed, const Plan& plan, const PackedErrors& errors, Seen& seen);
// Replace the nibbles of two blocks of 8 bytes.
void encode_both(const uint8_t* packed, const uint8_t* first_map, const uint8_t* second_map, uint8_t* out);
// The same functions as in channels.cpp.
void count_fields(const uint8_t* packed, const Plan& plan, Fields& fields);
void encode_groups(const uint8_t* packed, const Plan& plan, const uint8_t* const* maps, uint8_t* out);
}  // namespace vectors

}  // namespace k2
