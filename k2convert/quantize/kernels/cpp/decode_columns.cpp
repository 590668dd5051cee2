// The decoder of decode.cpp for weights whose columns have exponents or importance.
//
// Each of the 16 places of a block has its own sums, so the loops over a block become vectors.
#include <algorithm>
#include <cmath>

#include "decode.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

struct Sums {
    double energy[kBlock] = {}, error[kBlock] = {}, weighted_energy[kBlock] = {}, weighted_error[kBlock] = {};
    int64_t num_nonzero = 0, equal_nonzero = 0;
};

inline double sum_of(const double (&lanes)[kBlock]) {
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    return sum;
}

inline ColumnError total(const Sums& sums, double max_error_steps) {
    return {{sum_of(sums.energy), sum_of(sums.error), max_error_steps, sums.num_nonzero, sums.equal_nonzero},
            sum_of(sums.weighted_energy),
            sum_of(sums.weighted_error)};
}

// Add a block of weights; write their differences from the stored values.
inline __attribute__((always_inline)) void add_block(const double (&weights)[kBlock], const uint8_t* packed,
                                                     double step, const double* shares, double (&differences)[kBlock],
                                                     Sums& sums) {
    double values[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        values[i] = static_cast<double>(doubled_value(packed[i / 2] >> (4 * (i & 1)) & 15));
    }
    const double half_step = 0.5 * step;
    int num_nonzero = 0, equal_nonzero = 0;
    for (int i = 0; i < kBlock; ++i) {
        const double weight = weights[i], difference = weight - values[i] * half_step;
        sums.energy[i] += weight * weight;
        sums.error[i] += difference * difference;
        sums.weighted_energy[i] += shares[i] * (weight * weight);
        sums.weighted_error[i] += shares[i] * (difference * difference);
        differences[i] = difference;
        num_nonzero += weight != 0.0;
        equal_nonzero += (weight != 0.0) & (difference == 0.0);
    }
    sums.num_nonzero += num_nonzero;
    sums.equal_nonzero += equal_nonzero;
}

}  // namespace

K2_CLONES ColumnError measure_columns_int4(const uint8_t* source, const double* scales, const uint8_t* packed,
                                           const uint8_t* block_scales, size_t num_groups, const double* block_values,
                                           const double* powers, const double* inverses, const double* shares) {
    Sums sums;
    double max_error_steps = 0.0;
    for (size_t block = 0; block < 2 * num_groups; ++block) {
        const double scale = scales[block / 2];
        double weights[kBlock], differences[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const int code = (source[i / 2] >> (4 * (i & 1)) & 15) - 8;
            weights[i] = static_cast<double>(code) * (scale * powers[i]);
        }
        add_block(weights, packed, block_values[block_scales[block]], shares, differences, sums);
        if (scale > 0.0) {
            double worst = 0.0;
            for (int i = 0; i < kBlock; ++i) worst = std::max(worst, std::fabs(differences[i]) * inverses[i]);
            max_error_steps = std::max(max_error_steps, worst / scale);
        }
        source += kBlock / 2, packed += kBlock / 2;
        powers += kBlock, inverses += kBlock, shares += kBlock;
    }
    return total(sums, max_error_steps);
}

K2_CLONES ColumnError measure_columns_bf16(const uint16_t* weights, const uint8_t* packed, const uint8_t* block_scales,
                                           size_t num_blocks, const double* block_values, const double* shares) {
    Sums sums;
    for (size_t block = 0; block < num_blocks; ++block) {
        double values[kBlock], differences[kBlock];
        for (int i = 0; i < kBlock; ++i) values[i] = bf16_value(weights[i]);
        add_block(values, packed, block_values[block_scales[block]], shares, differences, sums);
        weights += kBlock, packed += kBlock / 2, shares += kBlock;
    }
    return total(sums, 0.0);
}

}  // namespace k2
