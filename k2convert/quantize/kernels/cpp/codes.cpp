#include "codes.hpp"

#include <algorithm>

#include "numbers.hpp"

namespace k2 {

namespace {

constexpr int kQuarters = 4;  // of a block, and the lanes of each

using Lanes = double __attribute__((vector_size(32)));
using Masks = int64_t __attribute__((vector_size(32)));

// What a byte of two codes holds, low nibble first. `counts` has the non-zero codes in its lowest 16 bits, those with
// |q| of 5 or 7 in the next 16, and those of -8 in the next.
struct CodeTables {
    double codes[256][2], are_even[256][2], values[256][2];
    uint64_t counts[256];
    CodeTables() {
        for (int byte = 0; byte < 256; ++byte) {
            counts[byte] = 0;
            for (int high = 0; high < 2; ++high) {
                const int nibble = byte >> (4 * high) & 15, code = nibble - 8, magnitude = code < 0 ? -code : code;
                codes[byte][high] = code;
                are_even[byte][high] = code % 2 == 0;
                values[byte][high] = nibble & 8 ? -kCodeValues[nibble & 7] : kCodeValues[nibble & 7];
                counts[byte] += uint64_t{code != 0} | uint64_t{magnitude == 5 || magnitude == 7} << 16 |
                                uint64_t{magnitude == 8} << 32;
            }
        }
    }
};

const CodeTables kTables;

inline __attribute__((always_inline)) void load(const double (*table)[2], const uint8_t* bytes, Lanes& lanes) {
    lanes = Lanes{table[bytes[0]][0], table[bytes[0]][1], table[bytes[1]][0], table[bytes[1]][1]};
}

inline __attribute__((always_inline)) void load(const double* numbers, Lanes& lanes) {
    std::memcpy(&lanes, numbers, sizeof lanes);
}

inline double sum_of(const Lanes& lanes) { return ((lanes[0] + lanes[1]) + lanes[2]) + lanes[3]; }

inline int64_t count_of(const Masks& masks) { return -(masks[0] + masks[1] + masks[2] + masks[3]); }

}  // namespace

K2_CLONES CodeSums measure_codes(const CodedInt4& weight, size_t row, const double* block_values,
                                 CodeFigures& figures) {
    const Lanes zero{}, infinite = zero + std::numeric_limits<double>::infinity();
    const size_t first = row * weight.blocks_per_row;
    Lanes energy{}, error{}, weighted_energy{}, weighted_error{}, least = infinite;
    Masks recoverable{}, equal_nonzero{};
    double max_error_steps = 0.0;
    for (size_t i = 0; i < weight.blocks_per_row; ++i) {
        const size_t block = first + i;
        const uint8_t *source = weight.source + 8 * block, *packed = weight.packed + 8 * block;
        const double scale = std::max(weight.scales[block / weight.blocks_per_scale], 0.0);
        const double step = block_values[weight.block_scales[block]];
        uint64_t counts = 0;
        for (int byte = 0; byte < 8; ++byte) counts += kTables.counts[source[byte]];
        const int64_t num_nonzero = counts & 0xFFFF;
        Lanes worst{};
        Masks equal = zero == zero, is_recoverable{};
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            const size_t column = kBlock * i + 4 * static_cast<size_t>(quarter);
            Lanes codes, are_even, values, scales = zero + scale, inverses = zero + 1.0;
            load(kTables.codes, source + 2 * quarter, codes);
            load(kTables.are_even, source + 2 * quarter, are_even);
            load(kTables.values, packed + 2 * quarter, values);
            if (weight.powers != nullptr) {
                Lanes powers;
                load(weight.powers + column, powers);
                load(weight.inverses + column, inverses);
                scales *= powers;
            }
            const Lanes wanted = codes * scales, difference = wanted - values * step;
            const Lanes size = difference < zero ? -difference : difference, half = 0.5 * scales;
            const Lanes energies = wanted * wanted, errors = difference * difference;
            energy += energies;
            error += errors;
            if (weight.importance != nullptr) {
                Lanes importance;
                load(weight.importance + column, importance);
                weighted_energy += importance * energies;
                weighted_error += importance * errors;
            }
            const Masks is_equal = difference == zero, is_nonzero = wanted != zero;
            equal &= is_equal;
            equal_nonzero += is_equal & is_nonzero;
            // round(w' / s) == q, ties to even, without a division.
            is_recoverable += (size < half) | ((size == half) & (are_even != zero));
            const Lanes in_steps = size * inverses;
            worst = in_steps > worst ? in_steps : worst;
            const Lanes used = is_nonzero ? scales : infinite;
            least = used < least ? used : least;
        }
        figures.equal_blocks += count_of(equal) == kQuarters;
        figures.num_five_or_seven += static_cast<int64_t>(counts >> 16 & 0xFFFF);
        figures.num_minus_eight += static_cast<int64_t>(counts >> 32);
        if (scale > 0.0) {
            figures.num_nonzero += num_nonzero;
            for (int lane = 0; lane < kQuarters; ++lane) {
                max_error_steps = std::max(max_error_steps, worst[lane] / scale);
            }
            recoverable += is_recoverable;
        } else {
            figures.recoverable_codes += kBlock - num_nonzero;
        }
    }
    figures.equal_nonzero += count_of(equal_nonzero);
    figures.recoverable_codes += count_of(recoverable);
    figures.max_error_steps = std::max(figures.max_error_steps, max_error_steps);
    for (int lane = 0; lane < kQuarters; ++lane) figures.least_scale = std::min(figures.least_scale, least[lane]);
    return {sum_of(energy), sum_of(error), sum_of(weighted_energy), sum_of(weighted_error)};
}

}  // namespace k2
