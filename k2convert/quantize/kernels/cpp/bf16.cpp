#include "bf16.hpp"

#include <limits>

#include "numbers.hpp"

namespace k2 {

namespace {

constexpr int kNumScales = kMaxByte - kMinNormalByte + 1;
// NUM_WINDOW_SCALES of rules/optimal_bf16.py, and the same padded to whole vectors of float64.
constexpr int kWindowScales = 25;
constexpr int kPaddedWindow = 28;
constexpr int kScratch = kNumScales + kPaddedWindow;

// Write |w| of a block and return the largest.
float load_magnitudes(const uint16_t* source, float* weights) {
    uint32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
        const uint32_t bits = source[i] & 0x7FFFu;
        largest = std::max(largest, bits);
        weights[i] = bf16_value(bits);
    }
    return bf16_value(largest);
}

// The errors of 16 magnitudes under `count` steps.
K2_CLONES void add_errors(const float* weights, const double* steps, int count, double* errors) {
    for (int place = 0; place < count; ++place) errors[place] = 0.0;
    for (int i = 0; i < kBlock; ++i) {
        const float weight = weights[i];
        for (int place = 0; place < count; ++place) {
            const double step = steps[place];
            const float ratio = weight / static_cast<float>(step);
            // Rounding half to even in units of 1/2, 1 or 2 rounds to E2M1; adding 1.5 * 2**23 units does it.
            const float unit = ratio < 2.0f ? 0.5f : ratio < 4.0f ? 1.0f : 2.0f;
            const float shift = 12582912.0f * unit;
            float value = (ratio + shift) - shift;
            value = value < 6.0f ? value : 6.0f;
            const double difference = static_cast<double>(weight) - static_cast<double>(value) * step;
            errors[place] += difference * difference;
        }
    }
}

int last_least(const double* errors, int count) {
    int best = 0;
    for (int place = 1; place < count; ++place) {
        if (errors[place] <= errors[best]) best = place;
    }
    return best;
}

// The index of the best normal scale, as rules/optimal_bf16.py finds it; amax is not zero.
int best_scale(const float* weights, double amax, const double* steps) {
    double errors[kScratch];
    int low = 0, high = kNumScales;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (steps[middle] < amax / 14.0) low = middle + 1;
        else high = middle;
    }
    const int first = std::min(low, kNumScales - 1);
    // Beyond the last scale the steps are infinite, so their error is infinite or NaN and never the least.
    const int count = std::min(kWindowScales, kNumScales - first);
    add_errors(weights, steps + first, kPaddedWindow, errors);
    const int best = first + last_least(errors, count);
    const bool in_last_octave = 2.0 * amax < 7.0 * steps[best];
    if (!in_last_octave && amax <= 4.0 * steps[kNumScales - 1] && amax >= 4.0 * steps[0]) return best;
    add_errors(weights, steps, kNumScales, errors);
    return last_least(errors, kNumScales);
}

double decoded(int nibble, double step) {
    const double value = kCodeValues[nibble & 7] * step;
    return nibble & 8 ? -value : value;
}

int nibble_of(const uint8_t* packed, int i) { return packed[i / 2] >> (4 * (i & 1)) & 15; }

// (sum w v)**2 / sum v**2 for the codes under this step, with v doubled.
double explained_by(const float* weights, double step) {
    double inner = 0.0, norm = 0.0;
    for (int i = 0; i < kBlock; ++i) {
        const double quadrupled = 4.0 * static_cast<double>(weights[i]);
        // The doubled values 0, 1, 2, 3, 4, 6, 8, 12 as a sum over the midpoints below.
        const double value = (quadrupled > step) + (quadrupled >= 3.0 * step) + (quadrupled > 5.0 * step) +
                             (quadrupled >= 7.0 * step) +
                             2.0 * ((quadrupled > 10.0 * step) + (quadrupled >= 14.0 * step)) +
                             4.0 * (quadrupled > 20.0 * step);
        inner += static_cast<double>(weights[i]) * value;
        norm += value * value;
    }
    return inner * inner / std::max(norm, 1.0);
}

}  // namespace

void quantize_optimal_bf16(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
                           uint8_t* scale_bytes) {
    double steps[kScratch];
    for (int i = 0; i < kScratch; ++i) {
        steps[i] = i < kNumScales ? static_cast<double>(e4m3_value(kMinNormalByte + i)) * global_scale
                                  : std::numeric_limits<double>::infinity();
    }
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock, packed += kBlock / 2) {
        float weights[kBlock];
        const float amax = load_magnitudes(source, weights);
        int byte = kOneByte;
        double step = 1.0;
        if (amax > 0.0f) {
            const int best = best_scale(weights, amax, steps);
            byte = kMinNormalByte + best;
            step = steps[best];
        }
        scale_bytes[block] = static_cast<uint8_t>(byte);
        int nibbles[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const int code = nearest_code(4.0 * static_cast<double>(weights[i]), step);
            nibbles[i] = code | (code > 0 && source[i] >> 15 ? 8 : 0);
        }
        for (int i = 0; i < kBlock; i += 2) packed[i / 2] = static_cast<uint8_t>(nibbles[i] | nibbles[i + 1] << 4);
    }
}

void quantize_plain_bf16(const uint16_t* source, size_t num_blocks, float global_scale, uint8_t* packed,
                         uint8_t* scale_bytes) {
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock, packed += kBlock / 2) {
        float weights[kBlock];
        const int byte = plain_scale_byte(load_magnitudes(source, weights), global_scale);
        const float step = e4m3_value(byte) * global_scale;
        scale_bytes[block] = static_cast<uint8_t>(byte);
        int nibbles[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const float scaled = weights[i] / step;
            nibbles[i] = nearest_code(scaled) | (scaled > 0.0f && source[i] >> 15 ? 8 : 0);
        }
        for (int i = 0; i < kBlock; i += 2) packed[i / 2] = static_cast<uint8_t>(nibbles[i] | nibbles[i + 1] << 4);
    }
}

Bf16Totals measure_rows_bf16(const uint16_t* source, const uint8_t* packed, const uint8_t* scale_bytes,
                             double global_scale, size_t num_rows, size_t blocks_per_row, double* energies,
                             double* errors) {
    Bf16Totals totals;
    for (size_t row = 0; row < num_rows; ++row) {
        double row_energy = 0.0, row_error = 0.0;
        for (size_t i = 0; i < blocks_per_row; ++i, source += kBlock, packed += kBlock / 2, ++scale_bytes) {
            const double step = static_cast<double>(e4m3_value(*scale_bytes)) * global_scale;
            double energy = 0.0, error = 0.0;
            int equal = 0;
            for (int element = 0; element < kBlock; ++element) {
                const double weight = bf16_value(source[element]);
                const double difference = weight - decoded(nibble_of(packed, element), step);
                energy += weight * weight;
                error += difference * difference;
                equal += difference == 0.0;
                totals.num_nonzero += weight != 0.0;
                totals.equal_nonzero += weight != 0.0 && difference == 0.0;
            }
            totals.equal_blocks += equal == kBlock;
            row_energy += energy;
            row_error += error;
        }
        energies[row] = row_energy;
        errors[row] = row_error;
    }
    return totals;
}

void block_errors_bf16(const uint16_t* source, const uint8_t* packed, const uint8_t* scale_bytes, size_t num_blocks,
                       double global_scale, double* errors) {
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock, packed += kBlock / 2) {
        const double step = static_cast<double>(e4m3_value(scale_bytes[block])) * global_scale;
        errors[block] = 0.0;
        for (int i = 0; i < kBlock; ++i) {
            const double difference = static_cast<double>(bf16_value(source[i])) - decoded(nibble_of(packed, i), step);
            errors[block] += difference * difference;
        }
    }
}

void block_bounds_bf16(const uint16_t* source, size_t num_blocks, double* bounds) {
    constexpr double midpoints[7] = {1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0};
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock) {
        float weights[kBlock];
        load_magnitudes(source, weights);
        double breakpoints[7 * kBlock];
        int size = 0;
        for (const double midpoint : midpoints) {
            for (const float weight : weights) breakpoints[size++] = static_cast<double>(weight) / (midpoint / 4.0);
        }
        std::sort(breakpoints, breakpoints + size);
        double energy = 0.0, explained = 0.0;
        for (const float weight : weights) energy += static_cast<double>(weight) * static_cast<double>(weight);
        for (int i = 0; i < size; ++i) {
            const double step = i == 0 ? breakpoints[0] / 2.0 : (breakpoints[i] + breakpoints[i - 1]) / 2.0;
            explained = std::max(explained, explained_by(weights, step > 0.0 ? step : 1.0));
        }
        bounds[block] = std::max(energy - explained, 0.0);
    }
}

}  // namespace k2
