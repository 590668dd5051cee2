// The least squared error that a block can have, see metrics/block_bound.py.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "measure.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

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

// The assignments of |q| = 1..8 for steps t of these octaves, see sum_of_bounds_int4. In an octave no code changes but
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

// The assignments to |q| = 1..8 that some block with equal exponents needs, as doubled values, repeated to fill a vector
// (tests/quantize/kernels/test_windows.py compares them with all others for every histogram).
constexpr int kFew = 8;
struct FewAssignments {
    alignas(32) float products[8][kFew], squares[8][kFew];
    FewAssignments() {
        constexpr int doubled[6][8] = {{1, 2, 3, 4, 6, 6, 8, 8},  {1, 2, 4, 4, 6, 8, 8, 8},   {1, 3, 4, 6, 6, 8, 8, 12},
                                       {1, 3, 4, 6, 8, 8, 8, 12}, {2, 3, 4, 6, 8, 8, 12, 12}, {3, 6, 8, 12, 12, 12, 12, 12}};
        for (int k = 0; k < 8; ++k) {
            for (int i = 0; i < kFew; ++i) {
                products[k][i] = static_cast<float>((k + 1) * doubled[i % 6][k]);
                squares[k][i] = static_cast<float>(doubled[i % 6][k] * doubled[i % 6][k]);
            }
        }
    }
};
const FewAssignments kFewAssignments;

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

// The same for a block with equal exponents.
K2_CLONES double explained_by_few(const ColumnBlock& block, double unit) {
    float inner[kFew] = {}, norm[kFew] = {};
    for (int i = 0; i < kBlock; ++i) {
        if (block.magnitudes[i] == 0) continue;
        for (int j = 0; j < kFew; ++j) {
            inner[j] += kFewAssignments.products[block.magnitudes[i] - 1][j];
            norm[j] += kFewAssignments.squares[block.magnitudes[i] - 1][j];
        }
    }
    double most = 0.0;
    for (int j = 0; j < kFew; ++j) {
        const double sum = static_cast<double>(inner[j]) * unit;
        most = std::max(most, sum * sum / static_cast<double>(norm[j]));
    }
    return most;
}

}  // namespace

double sum_of_bounds_bf16(const uint16_t* source, size_t num_blocks) {
    double sum = 0.0;
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock) {
        float weights[kBlock];
        for (int i = 0; i < kBlock; ++i) weights[i] = bf16_value(source[i] & 0x7FFFu);
        sum += bound_of(weights);
    }
    return sum;
}

// Steps t in units of s: up to 4/7 * 2**-highest twice the step is at least as good, from 16/7 * 2**-lowest on half of
// it (see columns.hpp), so the octaves from 2**(-1 - highest) to 2**(2 - lowest) hold a best one. A column sees t * 2**a,
// hence the same assignments a octaves further up. A tie at a breakpoint is no better than the steps around it. Inner
// products have at most 25 bits if exponents differ by at most 6, so shares are rounded once, and the greatest is exact.
double sum_of_bounds_int4(const uint8_t* packed, const uint16_t* scale_bits, const int8_t* exponents, size_t num_blocks) {
    double sum = 0.0;
    static const auto assignments = std::make_unique<const OctaveAssignments>();
    for (size_t i = 0; i < num_blocks; ++i, packed += kBlock / 2, exponents += kBlock) {
        ColumnBlock block{{}, {}, 127, -127};
        for (int j = 0; j < kBlock; ++j) {
            block.magnitudes[j] = std::abs((packed[j / 2] >> (4 * (j & 1)) & 15) - 8);
            block.exponents[j] = exponents[j];
            if (block.magnitudes[j] == 0) continue;
            block.lowest = std::min(block.lowest, block.exponents[j]);
            block.highest = std::max(block.highest, block.exponents[j]);
        }
        const double scale = bf16_value(scale_bits[i] & 0x7FFFu);
        if (block.lowest > block.highest || scale == 0.0) continue;
        const double unit = std::ldexp(scale, -block.highest);
        int squares = 0;
        for (int j = 0; j < kBlock; ++j) squares += block.magnitudes[j] * block.magnitudes[j];
        if (block.lowest == block.highest) {
            sum += std::max(squares * (unit * unit) - explained_by_few(block, unit), 0.0);
            continue;
        }
        float weights[kBlock];
        double energy = 0.0;
        for (int j = 0; j < kBlock; ++j) {
            weights[j] = static_cast<float>(std::ldexp(block.magnitudes[j] * scale, -block.exponents[j]));
            energy += static_cast<double>(weights[j]) * static_cast<double>(weights[j]);
        }
        if (block.highest - block.lowest > kMostSpread) sum += bound_of(weights);
        else sum += std::max(energy - explained_by_octaves(block, *assignments, unit), 0.0);
    }
    return sum;
}

}  // namespace k2
