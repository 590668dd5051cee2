#include "decode.hpp"

#include <algorithm>
#include <cmath>

#include "instructions.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

inline double sum_of(const double (&lanes)[4]) { return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]); }

}  // namespace

namespace portable {

K2_CLONES RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                                    const uint8_t* block_scales, size_t num_groups, const double* block_values) {
    // Low and high nibbles have four sums each, as many as a vector of float64 holds.
    double errors[2][4] = {};
    RowError row{};
    for (size_t group = 0; group < num_groups; ++group, source += 16, packed += 16) {
        const double scale = scales[group];
        double worst = 0.0;
        int squared = 0, num_nonzero = 0;
        for (int i = 0; i < 16; ++i) {
            const double half_step = 0.5 * block_values[block_scales[2 * group + static_cast<size_t>(i / 8)]];
            for (int high = 0; high < 2; ++high) {
                const int code = (source[i] >> (4 * high) & 15) - 8;
                const double weight = static_cast<double>(code) * scale;
                const double value = static_cast<double>(doubled_value(packed[i] >> (4 * high) & 15));
                const double difference = weight - value * half_step;
                errors[high][i % 4] += difference * difference;
                worst = std::max(worst, std::fabs(difference));
                row.equal_nonzero += weight != 0.0 && difference == 0.0;
                squared += code * code;
                num_nonzero += code != 0;
            }
        }
        row.energy += static_cast<double>(squared) * (scale * scale);
        if (scale != 0.0) row.num_nonzero += num_nonzero;
        if (scale > 0.0) row.max_error_steps = std::max(row.max_error_steps, worst / scale);
    }
    row.error = sum_of(errors[0]) + sum_of(errors[1]);
    return row;
}

}  // namespace portable

RowError measure_row_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                          const uint8_t* block_scales, size_t num_groups, const double* block_values) {
    const auto measure = uses_avx2() ? avx2::measure_row_int4 : portable::measure_row_int4;
    return measure(source, scales, packed, block_scales, num_groups, block_values);
}

K2_CLONES RowError measure_row_bf16(const uint16_t* weights, const uint8_t* packed, const uint8_t* block_scales,
                                    size_t num_blocks, const double* block_values) {
    double energy[4] = {}, error[4] = {};
    RowError row{};
    for (size_t block = 0; block < num_blocks; ++block, weights += kBlock, packed += kBlock / 2) {
        const double half_step = 0.5 * block_values[block_scales[block]];
        for (int i = 0; i < kBlock; ++i) {
            const double weight = bf16_value(weights[i]);
            const uint8_t nibble = packed[i / 2] >> (4 * (i & 1)) & 15;
            const double difference = weight - static_cast<double>(doubled_value(nibble)) * half_step;
            energy[i % 4] += weight * weight;
            error[i % 4] += difference * difference;
            row.num_nonzero += weight != 0.0;
            row.equal_nonzero += weight != 0.0 && difference == 0.0;
        }
    }
    row.energy = sum_of(energy);
    row.error = sum_of(error);
    return row;
}

}  // namespace k2
