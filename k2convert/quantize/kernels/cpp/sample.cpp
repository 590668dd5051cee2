// The error of sampled blocks, that of rule `max`, and the least that any scale can give.
//
// For a fixed assignment of codes v to the elements, the best real-valued scale leaves sum w**2 - (sum w v)**2 / sum
// v**2. Rounding to nearest changes an assignment only where t crosses a quotient w / m of a weight and a midpoint m
// between E2M1 values. So the least error over all scales, which include E4M3 times g, is that of the best assignment
// between two such quotients.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "groups.hpp"
#include "instructions.hpp"
#include "measure.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

// How many sampled blocks ahead memory is prefetched.
constexpr size_t kPrefetched = 16;
constexpr int8_t kNoExponents[kBlock] = {};

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

// The assignments of |q| = 1..8 for steps t of these octaves, see bound_with_exponents. In an octave no code changes but
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

// Steps t in units of s: up to 4/7 * 2**-highest twice the step is at least as good, from 16/7 * 2**-lowest on half of
// it (see channels.hpp), so the octaves from 2**(-1 - highest) to 2**(2 - lowest) hold a best one. A column sees t * 2**a,
// hence the same assignments a octaves further up. A tie at a breakpoint is no better than the steps around it. Inner
// products have at most 25 bits if exponents differ by at most 6, so shares are rounded once, and the greatest is exact.
double bound_with_exponents(const uint8_t* packed, double scale, const int8_t* exponents) {
    static const auto assignments = std::make_unique<const OctaveAssignments>();
    ColumnBlock block{{}, {}, 127, -127};
    for (int i = 0; i < kBlock; ++i) {
        block.magnitudes[i] = std::abs((packed[i / 2] >> (4 * (i & 1)) & 15) - 8);
        block.exponents[i] = exponents[i];
        if (block.magnitudes[i] == 0) continue;
        block.lowest = std::min(block.lowest, block.exponents[i]);
        block.highest = std::max(block.highest, block.exponents[i]);
    }
    if (block.lowest > block.highest || scale == 0.0) return 0.0;
    float weights[kBlock];
    double energy = 0.0;
    for (int i = 0; i < kBlock; ++i) {
        weights[i] = static_cast<float>(std::ldexp(block.magnitudes[i] * scale, -block.exponents[i]));
        energy += static_cast<double>(weights[i]) * static_cast<double>(weights[i]);
    }
    if (block.highest - block.lowest > kMostSpread) return bound_of(weights);
    return std::max(energy - explained_by_octaves(block, *assignments, std::ldexp(scale, -block.highest)), 0.0);
}

// The assignments of |q| = 1..8 that some block without exponents needs, as doubled values; for every histogram the
// greatest quotient is the same without the others (tests/quantize/kernels/test_windows.py).
constexpr int kFew = 6, kBatch = 32;
constexpr int kDoubled[kFew][8] = {{1, 2, 3, 4, 6, 6, 8, 8},  {1, 2, 4, 4, 6, 8, 8, 8},   {1, 3, 4, 6, 6, 8, 8, 12},
                                   {1, 3, 4, 6, 8, 8, 8, 12}, {2, 3, 4, 6, 8, 8, 12, 12}, {3, 6, 8, 12, 12, 12, 12, 12}};

// The sum of the bounds of up to kBatch blocks with these histograms and scales, one vector lane for each block.
K2_CLONES double sum_of_bounds(const uint64_t* words, const double* scales, size_t size) {
    double counts[8][kBatch], energy[kBatch] = {}, explained[kBatch] = {}, sum = 0.0;
    for (int k = 0; k < 8; ++k) {
        for (size_t i = 0; i < kBatch; ++i) {
            counts[k][i] = static_cast<int32_t>(i < size ? words[i] >> (8 * k) & 0xFF : 0);
            energy[i] += counts[k][i] * static_cast<double>((k + 1) * (k + 1));
        }
    }
    for (const auto& doubled : kDoubled) {
        double inner[kBatch] = {}, norm[kBatch] = {};
        for (int k = 0; k < 8; ++k) {
            const double product = (k + 1) * doubled[k], square = doubled[k] * doubled[k];
            for (size_t i = 0; i < kBatch; ++i) inner[i] += counts[k][i] * product, norm[i] += counts[k][i] * square;
        }
        for (size_t i = 0; i < kBatch; ++i) {
            const double share = inner[i] * inner[i] / (norm[i] > 1.0 ? norm[i] : 1.0);
            explained[i] = share > explained[i] ? share : explained[i];
        }
    }
    for (size_t i = 0; i < size; ++i) sum += (energy[i] - explained[i]) * (scales[i] * scales[i]);
    return sum;
}

// Add the squared errors of a block of exact weights: of what was written, and of what `max` writes.
K2_CLONES void add_errors(const float* weights, const uint8_t* packed, double step, float max_scale, Sampled& sampled) {
    float rounded[kBlock], amax = 0.0f;
    for (int i = 0; i < kBlock; ++i) rounded[i] = round_to_bf16(std::fabs(weights[i]));
    for (int i = 0; i < kBlock; ++i) amax = rounded[i] > amax ? rounded[i] : amax;
    const float block_scale = e4m3_value(max_scale_byte(amax, max_scale)), max_step = block_scale * max_scale;
    const double exact_step = static_cast<double>(block_scale) * static_cast<double>(max_scale);
    double achieved[kBlock], plain[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        const int nibble = packed[i / 2] >> (4 * (i & 1)) & 15;
        const double value = nibble & 8 ? -kCodeValues[nibble & 7] : kCodeValues[nibble & 7];
        const double difference = static_cast<double>(weights[i]) - value * step;
        achieved[i] = difference * difference;
    }
    for (int i = 0; i < kBlock; ++i) {
        // Twice the nearest value, a sum over the midpoints below.
        const float q = 4.0f * (rounded[i] / max_step);
        const int doubled = (q > 1.0f) + (q >= 3.0f) + (q > 5.0f) + (q >= 7.0f) + 2 * ((q > 10.0f) + (q >= 14.0f)) + 4 * (q > 20.0f);
        const double difference = static_cast<double>(std::fabs(weights[i])) - 0.5 * doubled * exact_step;
        plain[i] = difference * difference;
    }
    for (int i = 0; i < kBlock; ++i) sampled.achieved += achieved[i], sampled.plain += plain[i];
}

}  // namespace

Sampled sample_bf16(const uint16_t* source, const Quantized& written, const Sample& sample, float max_scale) {
    Sampled sampled;
    for (size_t block = sample.first; block < sample.num_blocks; block += sample.stride) {
        float weights[kBlock], sizes[kBlock];
        for (int i = 0; i < kBlock; ++i) weights[i] = bf16_value(source[kBlock * block + i]), sizes[i] = std::fabs(weights[i]);
        add_errors(weights, written.packed + 8 * block, written.block_values[written.block_scales[block]], max_scale, sampled);
        sampled.bound += bound_of(sizes);
    }
    return sampled;
}

Sampled sample_int4(const Int4& source, const int8_t* exponents, size_t columns, const Quantized& written,
                    const Sample& sample, float max_scale) {
    Sampled sampled;
    std::vector<uint64_t> packed;
    std::vector<double> scales;
    for (size_t block = sample.first; block < sample.num_blocks; block += sample.stride) {
        // Sampled blocks are on cache lines far from each other.
        const size_t ahead = std::min(block + kPrefetched * sample.stride, sample.num_blocks - 1);
        __builtin_prefetch(source.packed + 8 * ahead);
        __builtin_prefetch(source.scale_bits + ahead / 2);
        __builtin_prefetch(written.packed + 8 * ahead);
        __builtin_prefetch(written.block_scales + ahead);
        const uint8_t* codes = source.packed + 8 * block;
        const float scale = bf16_value(source.scale_bits[block / 2] & 0x7FFFu);
        float weights[kBlock];
        for (int i = 0; i < kBlock; ++i) weights[i] = static_cast<float>((codes[i / 2] >> (4 * (i & 1)) & 15) - 8) * scale;
        const int8_t* own = exponents == nullptr ? kNoExponents : exponents + kBlock * block % columns;
        if (std::memcmp(own, kNoExponents, kBlock) == 0) {
            std::memcpy(&packed.emplace_back(), codes, sizeof packed[0]);
            scales.push_back(scale);
        } else {
            for (int i = 0; i < kBlock; ++i) weights[i] = std::ldexp(weights[i], -own[i]);
            sampled.bound += bound_with_exponents(codes, scale, own);
        }
        add_errors(weights, written.packed + 8 * block, written.block_values[written.block_scales[block]], max_scale, sampled);
    }
    const size_t whole = uses_vectors() ? packed.size() / 4 * 4 : 0;
    const auto* bytes = reinterpret_cast<const uint8_t*>(packed.data());
    std::vector<uint64_t> words(packed.size());
    vectors::count_blocks(bytes, whole, words.data());
    portable::count_blocks(bytes + 8 * whole, packed.size() - whole, words.data() + whole);
    for (size_t i = 0; i < words.size(); i += kBatch) {
        sampled.bound += sum_of_bounds(&words[i], &scales[i], std::min<size_t>(kBatch, words.size() - i));
    }
    return sampled;
}

}  // namespace k2
