// Converting a batch of groups. A group is 32 INT4 codes in 16 bytes, or two NVFP4 blocks of 8 bytes.
//
// `mse` has three phases with short dependency chains:
//
//     count     16 bytes -> two histograms of |q|, one byte for each magnitude, and the set of magnitudes that occur
//     search    histogram x error table [8, 16] -> the best of 16 candidates (see cpu.py)
//     encode    byte shuffle by the candidate's map, block scale, counts
//
// Some blocks are searched one by one with the full table, as rules/mse.py defines it: blocks of zeros, zero scales,
// a best scale outside the normal range, and a capped error in the least sum (capped sums are at most too small). Under
// `max` the block scale depends only on the source scale and the block's largest |q| (rounding to BF16 is monotone),
// and so does every code. Both are computed once for each such pair, as rules/max.py defines them.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "counts.hpp"

namespace k2 {

constexpr int kLanes = 16;
constexpr int kNumWindows = 9;
constexpr int kNumMantissas = 128;
constexpr int kNumCandidates = 82;
constexpr int kNumOffsets = 26;
constexpr int kWindowBytes = 8 * kLanes * static_cast<int>(sizeof(int16_t));
constexpr int kMantissaBytes = kNumWindows * kWindowBytes;
constexpr int kNumBases = kNumWindows * kLanes;
// Windows from here on mean two adjoining windows.
constexpr int kFirstPair = kNumWindows;
constexpr int kPairs[2][2] = {{0, 5}, {1, 8}};
constexpr int kLowestStep = 6;
constexpr int kLastGridRank = kNumCandidates - 2;
constexpr int kLowestOffset = -6, kHighestOffset = 19;

// The tables that cpu.py builds, aligned to cache lines.
//
//     windows      [256]             window of each set of magnitudes
//     errors       [128, 9, 4, 16, 2]  (ms, window, pair of magnitudes, lane, one of the pair), minus 32768
//     keys         [9, 16]           255 - position of each lane
//     choices      [128, 82]         (ms, rank): the map of the codes; from bit 8 on, which |q| have capped errors
//     maps         [maps, 16]        output nibble of each source nibble
//     full_errors  [128, 9, 82]      (ms, |q|, rank)
//     scale_bytes  [26, 82]          (kg - es, rank)
struct SearchTables {
    alignas(64) int16_t errors[kNumMantissas * kNumWindows * 8 * kLanes];
    alignas(64) int32_t keys[kNumBases];
    alignas(64) uint8_t maps[256 * 16];
    uint8_t windows[256];
    uint16_t choices[kNumMantissas * kNumCandidates];
    uint8_t scale_bytes[kNumOffsets * kNumCandidates];
    double full_errors[kNumMantissas * 9 * kNumCandidates];
};

// Consecutive groups, with the slot of the scale of each.
struct Batch {
    const uint8_t* packed;   // 16 bytes for each group
    const int16_t* slots;    // one for each group
    size_t num_groups;
    uint8_t* out;            // 16 bytes for each group
    uint8_t* scale_bytes;    // 2 for each group
};

// The scale and the index in `choices` of a block that the batch cannot search. search_block counts the block too.
struct BlockChoice {
    int scale_byte, index;
};
BlockChoice search_block(uint16_t bits, uint64_t word, int exponent, const SearchTables& tables, Counts& counts,
                     Totals& totals);

// The same functions in plain C++ and with vectors; the latter take multiples of four groups or blocks. They add to
// the counts and the totals; g = 2**exponent. Words are histograms, see block_word.
namespace portable {
void convert_mse(const Batch& batch, int exponent, const SearchTables& tables, Counts& counts, Totals& totals);
void convert_max(const Batch& batch, Counts& counts, Totals& totals);
}  // namespace portable

namespace vectors {
void convert_mse(const Batch& batch, int exponent, const SearchTables& tables, Counts& counts, Totals& totals);
void convert_max(const Batch& batch, Counts& counts, Totals& totals);
}  // namespace vectors

// The histogram of one block of 8 bytes: the number of |q| = k in byte k - 1.
inline uint64_t block_word(const uint8_t* packed) {
    // A count is at most 16, so no byte overflows. Zeros are not counted.
    uint64_t word = 0, minus_eight = 0;
    for (int i = 0; i < 8; ++i) {
        for (const int nibble : {packed[i] & 15, packed[i] >> 4}) {
            const int magnitude = nibble < 8 ? 8 - nibble : nibble - 8;
            if (magnitude == 8) ++minus_eight;
            else if (magnitude > 0) word += uint64_t{1} << (8 * magnitude - 8);
        }
    }
    return word | minus_eight << 56;
}

// The output nibbles of a choice.
inline const uint8_t* map_of(const SearchTables& tables, int index) {
    return tables.maps + 16 * (tables.choices[index] & 0xFF);
}

// The magnitudes of a block that have capped errors in a choice.
inline int capped_magnitudes(const SearchTables& tables, int index, uint8_t present) {
    return tables.choices[index] >> 8 & present;
}

// Bit k - 1 is set if the histogram has |q| = k.
inline uint8_t present_magnitudes(uint64_t word) {
    uint64_t bits = ((word & 0x7F7F7F7F7F7F7F7Full) + 0x7F7F7F7F7F7F7F7Full) & 0x8080808080808080ull;
    return static_cast<uint8_t>((bits >> 7) * 0x0102040810204080ull >> 56);
}

// The largest |q| of a set.
inline int largest_magnitude(uint8_t present) { return 31 - __builtin_clz(2u * present | 1u); }

}  // namespace k2
