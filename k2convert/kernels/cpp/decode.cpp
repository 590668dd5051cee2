#include "decode.hpp"

#include <cmath>

#include "numbers.hpp"

namespace k2 {

namespace {

// Four sums of every fourth element: what a vector of float64 holds, and the same order on every CPU.
constexpr int kSums = 4;

struct Sums {
    double energy[kSums] = {}, error[kSums] = {};

    double total(const double (&sums)[kSums]) const { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }
};

// Twice the value of an E2M1 nibble: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
inline int8_t doubled_value(uint8_t nibble) {
    const int code = nibble & 7;
    const int value = code + (code >= 5) + (code >= 6) + 3 * (code >= 7);
    return static_cast<int8_t>(nibble & 8 ? -value : value);
}

}  // namespace

K2_CLONES RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                                    const uint8_t* block_scales, size_t num_blocks, const double* block_values) {
    Sums sums;
    RowError row{};
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock / 2, packed += kBlock / 2) {
        const double scale = scales[block / 2], half_step = 0.5 * block_values[block_scales[block]];
        int8_t codes[kBlock], values[kBlock];
        for (int i = 0; i < kBlock / 2; ++i) {
            codes[i] = static_cast<int8_t>((source[i] & 15) - 8);
            codes[i + kBlock / 2] = static_cast<int8_t>((source[i] >> 4) - 8);
            values[i] = doubled_value(packed[i] & 15);
            values[i + kBlock / 2] = doubled_value(packed[i] >> 4);
        }
        double worst[kSums] = {};
        int64_t nonzero[kSums] = {}, equal[kSums] = {};
        for (int i = 0; i < kBlock; i += kSums) {
            for (int lane = 0; lane < kSums; ++lane) {
                const double weight = static_cast<double>(codes[i + lane]) * scale;
                const double difference = weight - static_cast<double>(values[i + lane]) * half_step;
                sums.energy[lane] += weight * weight;
                sums.error[lane] += difference * difference;
                const double size = difference < 0.0 ? -difference : difference;
                worst[lane] = size > worst[lane] ? size : worst[lane];
                nonzero[lane] += weight != 0.0;
                equal[lane] += weight != 0.0 && difference == 0.0;
            }
        }
        row.num_nonzero += nonzero[0] + nonzero[1] + nonzero[2] + nonzero[3];
        row.equal_nonzero += equal[0] + equal[1] + equal[2] + equal[3];
        const double largest = std::max(std::max(worst[0], worst[1]), std::max(worst[2], worst[3]));
        if (scale > 0.0) row.max_error_steps = std::max(row.max_error_steps, largest / scale);
    }
    row.energy = sums.total(sums.energy);
    row.error = sums.total(sums.error);
    return row;
}

K2_CLONES RowError measure_row_bf16(const uint16_t* weights, const uint8_t* packed, const uint8_t* block_scales,
                                    size_t num_blocks, const double* block_values) {
    Sums sums;
    RowError row{};
    for (size_t block = 0; block < num_blocks; ++block, weights += kBlock, packed += kBlock / 2) {
        const double half_step = 0.5 * block_values[block_scales[block]];
        for (int i = 0; i < kBlock; ++i) {
            const double weight = bf16_value(weights[i]);
            const uint8_t nibble = packed[i / 2] >> (4 * (i & 1)) & 15;
            const double difference = weight - static_cast<double>(doubled_value(nibble)) * half_step;
            sums.energy[i % kSums] += weight * weight;
            sums.error[i % kSums] += difference * difference;
            row.num_nonzero += weight != 0.0;
            row.equal_nonzero += weight != 0.0 && difference == 0.0;
        }
    }
    row.energy = sums.total(sums.energy);
    row.error = sums.total(sums.error);
    return row;
}

}  // namespace k2
