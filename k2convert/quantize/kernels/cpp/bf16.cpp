#include "bf16.hpp"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

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

// The same times a factor for each magnitude.
K2_CLONES void add_weighted_errors(const float* weights, const double* factors, const double* steps, int count,
                                   double* errors) {
    for (int place = 0; place < count; ++place) errors[place] = 0.0;
    for (int i = 0; i < kBlock; ++i) {
        const float weight = weights[i];
        const double factor = factors[i];
        for (int place = 0; place < count; ++place) {
            const double step = steps[place];
            const float ratio = weight / static_cast<float>(step);
            const float unit = ratio < 2.0f ? 0.5f : ratio < 4.0f ? 1.0f : 2.0f;
            const float shift = 12582912.0f * unit;
            float value = (ratio + shift) - shift;
            value = value < 6.0f ? value : 6.0f;
            const double difference = static_cast<double>(weight) - static_cast<double>(value) * step;
            errors[place] += difference * difference * factor;
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

namespace {

// Quantize blocks; `choose` gives the index of the scale for magnitudes that are not all zero.
template <class Choose>
void quantize_blocks(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
                     uint8_t* scale_bytes, const Choose& choose) {
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
            const int best = choose(block, weights, amax, steps);
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

}  // namespace

void quantize_optimal_bf16(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
                           uint8_t* scale_bytes) {
    quantize_blocks(source, num_blocks, global_scale, packed, scale_bytes,
                    [](size_t, const float* weights, float amax, const double* steps) {
                        return best_scale(weights, amax, steps);
                    });
}

void quantize_weighted_bf16(const uint16_t* source, size_t num_blocks, double global_scale, const double* factors,
                            size_t blocks_per_row, uint8_t* packed, uint8_t* scale_bytes) {
    quantize_blocks(source, num_blocks, global_scale, packed, scale_bytes,
                    [=](size_t block, const float* weights, float, const double* steps) {
                        double errors[kNumScales];
                        add_weighted_errors(weights, factors + kBlock * (block % blocks_per_row), steps, kNumScales, errors);
                        return last_least(errors, kNumScales);
                    });
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

void weigh_rows_bf16(const uint16_t* source, const uint8_t* packed, const uint8_t* scale_bytes, double global_scale,
                     const uint8_t* importance, size_t num_rows, size_t blocks_per_row, double* energies,
                     double* errors) {
    for (size_t row = 0; row < num_rows; ++row) {
        energies[row] = errors[row] = 0.0;
        for (size_t i = 0; i < blocks_per_row; ++i, source += kBlock, packed += kBlock / 2, ++scale_bytes) {
            const double step = static_cast<double>(e4m3_value(*scale_bytes)) * global_scale;
            double energy = 0.0, error = 0.0;
            for (int element = 0; element < kBlock; ++element) {
                const double weight = bf16_value(source[element]), factor = importance[kBlock * i + element];
                const double difference = weight - decoded(nibble_of(packed, element), step);
                energy += weight * weight * factor;
                error += difference * difference * factor;
            }
            energies[row] += energy;
            errors[row] += error;
        }
    }
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

namespace {

// The bound of a block of 16 magnitudes.
double bound_of(const float* weights) {
    constexpr double midpoints[7] = {1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0};
    double breakpoints[7 * kBlock];
    int size = 0;
    for (const double midpoint : midpoints) {
        for (int i = 0; i < kBlock; ++i) breakpoints[size++] = static_cast<double>(weights[i]) / (midpoint / 4.0);
    }
    std::sort(breakpoints, breakpoints + size);
    double energy = 0.0, explained = 0.0;
    for (int i = 0; i < kBlock; ++i) energy += static_cast<double>(weights[i]) * static_cast<double>(weights[i]);
    for (int i = 0; i < size; ++i) {
        const double step = i == 0 ? breakpoints[0] / 2.0 : (breakpoints[i] + breakpoints[i - 1]) / 2.0;
        explained = std::max(explained, explained_by(weights, step > 0.0 ? step : 1.0));
    }
    return std::max(energy - explained, 0.0);
}

}  // namespace

void block_bounds_bf16(const uint16_t* source, size_t num_blocks, double* bounds) {
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock) {
        float weights[kBlock];
        load_magnitudes(source, weights);
        bounds[block] = bound_of(weights);
    }
}

namespace {

// The assignments of |q| = 1..8 for steps t of these octaves, see bounds_of_columns. In an octave no code changes but
// at the 13 quotients of the odd parts of |q| and of the midpoints; the places after them repeat the last assignment.
constexpr int kOctaveSize = 16, kMostSpread = 6, kFirstOctave = -1 - kMostSpread, kNumOctaves = 3 + 2 * kMostSpread;
constexpr int kMostSteps = kOctaveSize * (3 + kMostSpread);
struct OctaveAssignments {
    // Doubled values v as |q| v and as v**2.
    alignas(32) float products[8][kNumOctaves * kOctaveSize], squares[8][kNumOctaves * kOctaveSize];
    OctaveAssignments() {
        constexpr double doubled[8] = {0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0};
        std::vector<double> quotients{2.0};
        for (int k = 1; k < 8; k += 2) {
            for (int odd = 1; odd < 8; odd += 2) {
                const double quotient = static_cast<double>(k) / odd;
                quotients.push_back(std::ldexp(quotient, -std::ilogb(quotient)));
            }
        }
        std::sort(quotients.begin(), quotients.end());
        quotients.erase(std::unique(quotients.begin(), quotients.end()), quotients.end());
        const int last = static_cast<int>(quotients.size()) - 2;
        for (int i = 0; i < kNumOctaves * kOctaveSize; ++i) {
            const int place = std::min(i % kOctaveSize, last);
            const double step = std::ldexp(quotients[place] + quotients[place + 1], kFirstOctave + i / kOctaveSize - 1);
            for (int k = 1; k < 9; ++k) {
                const double value = doubled[nearest_code(4.0 * k, step)];
                products[k - 1][i] = static_cast<float>(k * value);
                squares[k - 1][i] = static_cast<float>(value * value);
            }
        }
    }
};

struct ColumnBlock {
    int magnitudes[kBlock], exponents[kBlock];
    int lowest, highest;
};

// The greatest (sum w v)**2 / sum v**2; `unit` is s * 2**-highest.
K2_CLONES double explained_by_octaves(const ColumnBlock& block, const OctaveAssignments& assignments, double unit) {
    const int count = kOctaveSize * (3 + block.highest - block.lowest);
    alignas(32) float inner[kMostSteps] = {}, norm[kMostSteps] = {};
    for (int i = 0; i < kBlock; ++i) {
        if (block.magnitudes[i] == 0) continue;
        const int first = kOctaveSize * (block.exponents[i] - block.highest - 1 - kFirstOctave);
        const float* products = assignments.products[block.magnitudes[i] - 1] + first;
        const float* squares = assignments.squares[block.magnitudes[i] - 1] + first;
        const float factor = static_cast<float>(1 << (block.highest - block.exponents[i]));
        for (int place = 0; place < count; ++place) {
            inner[place] += factor * products[place];
            norm[place] += squares[place];
        }
    }
    double most[kOctaveSize] = {};
    for (int first = 0; first < count; first += kOctaveSize) {
        for (int i = 0; i < kOctaveSize; ++i) {
            const double sum = static_cast<double>(inner[first + i]) * unit, squares = static_cast<double>(norm[first + i]);
            const double share = sum * sum / (squares > 1.0 ? squares : 1.0);
            most[i] = share > most[i] ? share : most[i];
        }
    }
    return *std::max_element(most, most + kOctaveSize);
}

}  // namespace

// Steps t in units of s: up to 4/7 * 2**-highest twice the step is at least as good, from 16/7 * 2**-lowest on half of
// it (see columns.hpp), so the octaves from 2**(-1 - highest) to 2**(2 - lowest) hold a best one. A column sees t * 2**a,
// hence the same assignments a octaves further up. A tie at a breakpoint is no better than the steps around it. Inner
// products have at most 25 bits if exponents differ by at most 6, so shares are rounded once, and the greatest is exact.
void bounds_of_columns(const uint8_t* packed, const float* scales, const int8_t* exponents, size_t num_blocks,
                       double* bounds) {
    static const auto assignments = std::make_unique<const OctaveAssignments>();
    for (size_t i = 0; i < num_blocks; ++i, packed += kBlock / 2, exponents += kBlock) {
        ColumnBlock block{{}, {}, 127, -127};
        for (int j = 0; j < kBlock; ++j) {
            block.magnitudes[j] = std::abs(nibble_of(packed, j) - 8);
            block.exponents[j] = exponents[j];
            if (block.magnitudes[j] == 0) continue;
            block.lowest = std::min(block.lowest, block.exponents[j]);
            block.highest = std::max(block.highest, block.exponents[j]);
        }
        const double scale = std::fabs(static_cast<double>(scales[i]));
        bounds[i] = 0.0;
        if (block.lowest > block.highest || scale == 0.0) continue;
        float weights[kBlock];
        double energy = 0.0;
        for (int j = 0; j < kBlock; ++j) {
            weights[j] = static_cast<float>(std::ldexp(block.magnitudes[j] * scale, -block.exponents[j]));
            energy += static_cast<double>(weights[j]) * static_cast<double>(weights[j]);
        }
        bounds[i] = block.highest - block.lowest > kMostSpread
                        ? bound_of(weights)
                        : std::max(energy - explained_by_octaves(block, *assignments, std::ldexp(scale, -block.highest)), 0.0);
    }
}

}  // namespace k2
