#include "measure.hpp"

#include <cstring>
#include <vector>

#include "instructions.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

constexpr int kQuarters = 4;  // of a block, and the lanes of each

using Lanes = double __attribute__((vector_size(32)));
using Masks = int64_t __attribute__((vector_size(32)));

// What a byte of two codes holds, low nibble first. `counts` has sum q**2 in its lowest 16 bits, the codes with |q| of 5
// or 7 in the next 16, and those of -8 in the next.
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
                counts[byte] += static_cast<uint64_t>(code * code) | uint64_t{magnitude == 5 || magnitude == 7} << 16 |
                                uint64_t{magnitude == 8} << 32;
            }
        }
    }
};

const CodeTables kTables;

#define K2_INLINE inline __attribute__((always_inline))

K2_INLINE void load(const double (*table)[2], const uint8_t* bytes, Lanes& lanes) {
    lanes = Lanes{table[bytes[0]][0], table[bytes[0]][1], table[bytes[1]][0], table[bytes[1]][1]};
}

K2_INLINE void load(const double* numbers, Lanes& lanes) { std::memcpy(&lanes, numbers, sizeof lanes); }

inline double sum_of(const Lanes& lanes) { return ((lanes[0] + lanes[1]) + lanes[2]) + lanes[3]; }

inline int64_t count_of(const Masks& masks) { return -(masks[0] + masks[1] + masks[2] + masks[3]); }

// Channel j of a row is in lane j % 4.
struct LaneSums {
    Lanes energy{}, error{};

    RowSums total() const { return {sum_of(energy), sum_of(error)}; }
};

// The masks of a block, and what they add to the figures.
struct BlockMasks {
    const Lanes zero{};
    Masks equal = zero == zero, nonzero{}, equal_nonzero{};

    K2_INLINE void finish(Figures& figures) const {
        figures.equal_blocks += count_of(equal) == kQuarters;
        figures.num_nonzero += count_of(nonzero);
        figures.equal_nonzero += count_of(equal_nonzero);
    }
};

// Add four weights.
K2_INLINE void add_quarter(const Lanes& wanted, const Lanes& difference, LaneSums& sums, BlockMasks& masks) {
    sums.energy += wanted * wanted;
    sums.error += difference * difference;
    const Masks is_equal = difference == masks.zero, is_nonzero = wanted != masks.zero;
    masks.equal &= is_equal;
    masks.nonzero += is_nonzero;
    masks.equal_nonzero += is_equal & is_nonzero;
}

// Add an INT4 block, element by element; `powers` are those of its columns, or null.
K2_INLINE void add_int4_block(const uint8_t* source, const uint8_t* packed, double scale, double step,
                              const double* powers, LaneSums& sums, Figures& figures) {
    const Lanes zero{}, infinite = zero + std::numeric_limits<double>::infinity();
    Lanes worst{}, least = infinite;
    Masks is_recoverable{};
    BlockMasks masks;
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
        Lanes codes, are_even, values, factors = zero + 1.0;
        load(kTables.codes, source + 2 * quarter, codes);
        load(kTables.are_even, source + 2 * quarter, are_even);
        load(kTables.values, packed + 2 * quarter, values);
        if (powers != nullptr) load(powers + 4 * quarter, factors);
        const Lanes scales = scale * factors, wanted = codes * scales, difference = wanted - values * step;
        add_quarter(wanted, difference, sums, masks);
        // round(w' / s) == q, ties to even, without a division.
        const Lanes size = difference < zero ? -difference : difference, half = 0.5 * scales;
        is_recoverable += (size < half) | ((size == half) & (are_even != zero));
        const Lanes in_steps = size / factors;
        worst = in_steps > worst ? in_steps : worst;
        const Lanes used = wanted != zero ? scales : infinite;
        least = used < least ? used : least;
    }
    masks.finish(figures);
    for (int lane = 0; lane < kQuarters; ++lane) figures.least_scale = std::min(figures.least_scale, least[lane]);
    if (scale > 0.0) {
        figures.recoverable_codes += count_of(is_recoverable);
        const double most = std::max(std::max(worst[0], worst[1]), std::max(worst[2], worst[3]));
        figures.max_error_steps = std::max(figures.max_error_steps, most / scale);
    } else {
        for (int byte = 0; byte < 8; ++byte) {
            figures.recoverable_codes += ((source[byte] & 15) == 8) + (source[byte] >> 4 == 8);
        }
    }
}

double scale_of(const Int4& source, size_t group) {
    return std::max(static_cast<double>(bf16_value(source.scale_bits[group])), 0.0);
}

// Add the rare codes of a block to the figures, and return its sum of q**2.
inline int64_t count_codes(const uint8_t* packed, Figures& figures) {
    uint64_t counts = 0;
    for (int byte = 0; byte < 8; ++byte) counts += kTables.counts[packed[byte]];
    figures.num_five_or_seven += static_cast<int64_t>(counts >> 16 & 0xFFFF);
    figures.num_minus_eight += static_cast<int64_t>(counts >> 32);
    return static_cast<int64_t>(counts & 0xFFFF);
}

// Error of a block from the sums A, 2 B and 4 C of measure.hpp.
double error_of(double energy, double products, double squares, double scale, double step) {
    const double error = energy - scale * step * products;
    return error + step * step * (0.25 * squares);
}

// A row without exponents, in the order of vectors::measure_int4.
RowSums measure_groups(const Int4& source, const Quantized& written, Figures& figures) {
    RowSums sums;
    for (size_t group = 0; group < source.num_groups; ++group) {
        const double scale = scale_of(source, group), square = scale * scale;
        double steps[2], errors[2];
        int64_t code_squares = 0;
        for (size_t half = 0; half < 2; ++half) {
            const uint8_t *packed = source.packed + 16 * group + 8 * half, *values = written.packed + 16 * group + 8 * half;
            const double step = steps[half] = written.block_values[written.block_scales[2 * group + half]];
            const int64_t own_squares = count_codes(packed, figures);
            int products = 0, squares = 0;
            for (int i = 0; i < kBlock; ++i) {
                const int code = (packed[i / 2] >> (4 * (i & 1)) & 15) - 8, nibble = values[i / 2] >> (4 * (i & 1)) & 15;
                const int doubled = static_cast<int>(2.0 * kCodeValues[nibble & 7]);
                products += code * (nibble & 8 ? -doubled : doubled);
                squares += doubled * doubled;
            }
            const double energy = static_cast<double>(own_squares) * square;
            errors[half] = error_of(energy, products, squares, scale, step);
            if (errors[half] < energy * kLeastShare) errors[half] = exact_error(packed, values, scale, step);
            code_squares += own_squares;
        }
        sums.energy += static_cast<double>(code_squares) * square;
        sums.error += errors[0] + errors[1];
        count_group(source.packed + 16 * group, written.packed + 16 * group, scale, steps, figures);
    }
    return sums;
}

// A row with exponents.
K2_CLONES RowSums measure_elements(const Int4& source, const Quantized& written, const double* powers, Figures& figures) {
    LaneSums sums;
    for (size_t block = 0; block < 2 * source.num_groups; ++block) {
        const uint8_t* packed = source.packed + 8 * block;
        const double step = written.block_values[written.block_scales[block]];
        add_int4_block(packed, written.packed + 8 * block, scale_of(source, block / 2), step, powers + kBlock * block, sums,
                       figures);
        count_codes(packed, figures);
    }
    return sums.total();
}

}  // namespace

void count_bytes(const uint8_t* bytes, size_t size, int64_t* counts) {
    // Four tables, because the same byte often comes twice in a row.
    std::vector<int64_t> tables(4 * 256);
    for (size_t i = 0; i < size; ++i) ++tables[256 * (i & 3) + bytes[i]];
    for (size_t i = 0; i < tables.size(); ++i) counts[i & 255] += tables[i];
}

double exact_error(const uint8_t* source, const uint8_t* packed, double scale, double step) {
    double error = 0.0;
    for (int byte = 0; byte < 8; ++byte) {
        for (int high = 0; high < 2; ++high) {
            const double difference = kTables.codes[source[byte]][high] * scale - kTables.values[packed[byte]][high] * step;
            error += difference * difference;
        }
    }
    return error;
}

K2_CLONES void count_group(const uint8_t* source, const uint8_t* packed, double scale, const double steps[2],
                           Figures& figures) {
    LaneSums unused;
    for (int half = 0; half < 2; ++half) {
        add_int4_block(source + 8 * half, packed + 8 * half, scale, steps[half], nullptr, unused, figures);
    }
}

RowSums measure_int4(const Int4& source, const Quantized& written, const double* powers, Figures& figures) {
    if (powers != nullptr) return measure_elements(source, written, powers, figures);
    return uses_vectors() ? vectors::measure_int4(source, written, figures) : measure_groups(source, written, figures);
}

K2_CLONES RowSums measure_bf16(const uint16_t* source, const Quantized& written, size_t num_blocks, Figures& figures) {
    LaneSums sums;
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock) {
        const double step = written.block_values[written.block_scales[block]];
        BlockMasks masks;
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            Lanes wanted, values;
            for (int i = 0; i < 4; ++i) wanted[i] = bf16_value(source[4 * quarter + i]);
            load(kTables.values, written.packed + 8 * block + 2 * quarter, values);
            add_quarter(wanted, wanted - values * step, sums, masks);
        }
        masks.finish(figures);
    }
    return sums.total();
}

}  // namespace k2
