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
    Lanes energy{}, error{}, weighted_energy{}, weighted_error{};

    RowSums total() const { return {sum_of(energy), sum_of(error), sum_of(weighted_energy), sum_of(weighted_error)}; }
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

// Add four weights; `importance` is that of their channels or null.
K2_INLINE void add_quarter(const Lanes& wanted, const Lanes& difference, const double* importance, LaneSums& sums,
                           BlockMasks& masks) {
    const Lanes energies = wanted * wanted, errors = difference * difference;
    sums.energy += energies;
    sums.error += errors;
    if (importance != nullptr) {
        Lanes factors;
        load(importance, factors);
        sums.weighted_energy += factors * energies;
        sums.weighted_error += factors * errors;
    }
    const Masks is_equal = difference == masks.zero, is_nonzero = wanted != masks.zero;
    masks.equal &= is_equal;
    masks.nonzero += is_nonzero;
    masks.equal_nonzero += is_equal & is_nonzero;
}

// Add an INT4 block, element by element; `channels` begin at its columns.
K2_INLINE void add_int4_block(const uint8_t* source, const uint8_t* packed, double scale, double step,
                              const ChannelFactors& channels, LaneSums& sums, Figures& figures) {
    const Lanes zero{}, infinite = zero + std::numeric_limits<double>::infinity();
    Lanes worst{}, least = infinite;
    Masks is_recoverable{};
    BlockMasks masks;
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
        Lanes codes, are_even, values, scales = zero + scale, inverses = zero + 1.0;
        load(kTables.codes, source + 2 * quarter, codes);
        load(kTables.are_even, source + 2 * quarter, are_even);
        load(kTables.values, packed + 2 * quarter, values);
        if (channels.powers != nullptr) {
            Lanes powers;
            load(channels.powers + 4 * quarter, powers);
            load(channels.inverses + 4 * quarter, inverses);
            scales *= powers;
        }
        const Lanes wanted = codes * scales, difference = wanted - values * step;
        add_quarter(wanted, difference, channels.importance ? channels.importance + 4 * quarter : nullptr, sums, masks);
        // round(w' / s) == q, ties to even, without a division.
        const Lanes size = difference < zero ? -difference : difference, half = 0.5 * scales;
        is_recoverable += (size < half) | ((size == half) & (are_even != zero));
        const Lanes in_steps = size * inverses;
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

// Error of a block from the sums A, 2 B and 4 C of measure.hpp.
double error_of(double energy, double products, double squares, double scale, double step) {
    const double error = energy - scale * step * products;
    return error + step * step * (0.25 * squares);
}

// A row, in the order of vectors::measure_int4.
RowSums measure_groups(const Int4& source, const Quantized& written, const ChannelFactors& channels, Figures& figures) {
    RowSums sums;
    const double* importance = channels.importance;
    for (size_t group = 0; group < source.num_groups; ++group) {
        const double scale = scale_of(source, group), square = scale * scale;
        double steps[2], errors[2], weighted_errors[2] = {};
        int64_t code_squares = 0, weighted_code_squares = 0;
        const bool is_scaled = channels.groups != nullptr && channels.groups[group].is_scaled;
        for (size_t half = 0; half < 2; ++half) {
            const uint8_t *packed = source.packed + 16 * group + 8 * half, *values = written.packed + 16 * group + 8 * half;
            const double step = steps[half] = written.block_values[written.block_scales[2 * group + half]];
            uint64_t counts = 0;
            for (int byte = 0; byte < 8; ++byte) counts += kTables.counts[packed[byte]];
            figures.num_five_or_seven += static_cast<int64_t>(counts >> 16 & 0xFFFF);
            figures.num_minus_eight += static_cast<int64_t>(counts >> 32);
            if (is_scaled) continue;
            int products = 0, squares = 0, weighted_codes = 0, weighted_products = 0, weighted_squares = 0;
            const double* factors = importance == nullptr ? nullptr : importance + 32 * group + kBlock * half;
            for (int i = 0; i < kBlock; ++i) {
                const int code = (packed[i / 2] >> (4 * (i & 1)) & 15) - 8, nibble = values[i / 2] >> (4 * (i & 1)) & 15;
                const int doubled = static_cast<int>(2.0 * kCodeValues[nibble & 7]);
                products += code * (nibble & 8 ? -doubled : doubled);
                squares += doubled * doubled;
                if (factors == nullptr) continue;
                const int factor = static_cast<int>(factors[i]);
                weighted_codes += factor * code * code;
                weighted_products += factor * code * (nibble & 8 ? -doubled : doubled);
                weighted_squares += factor * doubled * doubled;
            }
            const double energy = static_cast<double>(counts & 0xFFFF) * square, weighted_energy = weighted_codes * square;
            errors[half] = error_of(energy, products, squares, scale, step);
            if (errors[half] < energy * kLeastShare) errors[half] = exact_error(packed, values, scale, step, nullptr);
            code_squares += static_cast<int64_t>(counts & 0xFFFF);
            if (factors == nullptr) continue;
            weighted_errors[half] = error_of(weighted_energy, weighted_products, weighted_squares, scale, step);
            if (weighted_errors[half] < weighted_energy * kLeastShare) {
                weighted_errors[half] = exact_error(packed, values, scale, step, factors);
            }
            weighted_code_squares += weighted_codes;
        }
        if (is_scaled) {
            measure_scaled(source.packed + 16 * group, written.packed + 16 * group, source.scale_bits[group], steps,
                           channels.from(32 * group), sums, figures);
            continue;
        }
        sums.energy += static_cast<double>(code_squares) * square;
        sums.error += errors[0] + errors[1];
        sums.weighted_energy += static_cast<double>(weighted_code_squares) * square;
        sums.weighted_error += weighted_errors[0] + weighted_errors[1];
        count_group(source.packed + 16 * group, written.packed + 16 * group, scale, steps, figures);
    }
    return sums;
}

}  // namespace

void count_bytes(const uint8_t* bytes, size_t size, int64_t* counts) {
    // Four tables, because the same byte often comes twice in a row.
    std::vector<int64_t> tables(4 * 256);
    for (size_t i = 0; i < size; ++i) ++tables[256 * (i & 3) + bytes[i]];
    for (size_t i = 0; i < tables.size(); ++i) counts[i & 255] += tables[i];
}

double exact_error(const uint8_t* source, const uint8_t* packed, double scale, double step, const double* importance) {
    double error = 0.0;
    for (int byte = 0; byte < 8; ++byte) {
        for (int high = 0; high < 2; ++high) {
            const double difference = kTables.codes[source[byte]][high] * scale - kTables.values[packed[byte]][high] * step;
            error += difference * difference * (importance == nullptr ? 1.0 : importance[2 * byte + high]);
        }
    }
    return error;
}

K2_CLONES void count_group(const uint8_t* source, const uint8_t* packed, double scale, const double steps[2],
                           Figures& figures) {
    LaneSums unused;
    for (int half = 0; half < 2; ++half) {
        add_int4_block(source + 8 * half, packed + 8 * half, scale, steps[half], {}, unused, figures);
    }
}

std::vector<ChannelGroup> channel_groups(const double* powers, size_t num_groups) {
    std::vector<ChannelGroup> groups(powers == nullptr ? 0 : num_groups);
    for (ChannelGroup& group : groups) {
        const auto [least, most] = std::minmax_element(powers, powers + 32);
        group.power = *least;
        group.is_scaled = *least != 1.0 || *most != 1.0;
        group.is_narrow = *most <= 8.0 * *least;
        for (int i = 0; i < 32 && group.is_narrow; ++i) {
            group.multipliers[i / 16][i % 16 / 2 + 8 * (i & 1)] = static_cast<int16_t>(powers[i] / *least);
        }
        powers += 32;
    }
    return groups;
}

K2_CLONES void measure_scaled(const uint8_t* source, const uint8_t* packed, uint16_t scale_bits, const double steps[2],
                              const ChannelFactors& channels, RowSums& sums, Figures& figures) {
    const double scale = scale_of({source, &scale_bits, 1}, 0), own_scale = scale * channels.groups->power;
    LaneSums lanes;
    for (int half = 0; half < 2; ++half) {
        add_int4_block(source + 8 * half, packed + 8 * half, scale, steps[half], channels.from(16 * half), lanes, figures);
    }
    const int mantissa = 128 | (scale_bits & 0x7F);
    const double bit = own_scale / mantissa, multiples[2] = {steps[0] / bit, steps[1] / bit};
    const auto is_whole = [](double x) { return x >= 0.0 && x < 2048.0 && x == static_cast<int>(x); };
    RowSums own = lanes.total();
    if (scale_bits >= 0x80 && scale_bits < 0x7E00 && channels.groups->is_narrow && is_whole(multiples[0]) && is_whole(multiples[1])) {
        int64_t energy = 0, error = 0, weighted_energy = 0, weighted_error = 0;
        for (int i = 0; i < 32; ++i) {
            const int code = (source[i / 2] >> (4 * (i & 1)) & 15) - 8, half = i / kBlock;
            const int multiplied = code * channels.groups->multipliers[half][i % 16 / 2 + 8 * (i & 1)];
            const int value = static_cast<int>(2.0 * kTables.values[packed[i / 2]][i & 1]);
            const int64_t difference = 2 * multiplied * mantissa - value * static_cast<int>(multiples[half]);
            const int64_t factor = channels.importance == nullptr ? 0 : static_cast<int64_t>(channels.importance[i]);
            energy += multiplied * multiplied, error += difference * difference;
            weighted_energy += factor * (multiplied * multiplied), weighted_error += factor * (difference * difference);
        }
        const double square = own_scale * own_scale, unit = 0.25 * bit * bit;
        own = {static_cast<double>(energy) * square, static_cast<double>(error) * unit,
               static_cast<double>(weighted_energy) * square, static_cast<double>(weighted_error) * unit};
    }
    sums.energy += own.energy, sums.error += own.error;
    sums.weighted_energy += own.weighted_energy, sums.weighted_error += own.weighted_error;
}

RowSums measure_int4(const Int4& source, const Quantized& written, const ChannelFactors& channels, Figures& figures) {
    if (uses_vectors()) return vectors::measure_int4(source, written, channels, figures);
    return measure_groups(source, written, channels, figures);
}

K2_CLONES RowSums measure_bf16(const uint16_t* source, const Quantized& written, size_t num_blocks,
                               const double* importance, Figures& figures) {
    LaneSums sums;
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock) {
        const double step = written.block_values[written.block_scales[block]];
        BlockMasks masks;
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            Lanes wanted, values;
            for (int i = 0; i < 4; ++i) wanted[i] = bf16_value(source[4 * quarter + i]);
            load(kTables.values, written.packed + 8 * block + 2 * quarter, values);
            const double* factors = importance == nullptr ? nullptr : importance + kBlock * block + 4 * quarter;
            add_quarter(wanted, wanted - values * step, factors, sums, masks);
        }
        masks.finish(figures);
    }
    return sums.total();
}

}  // namespace k2
