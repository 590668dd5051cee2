#include "convert.hpp"

#include <algorithm>
#include <limits>

#include "numbers.hpp"

namespace k2 {

namespace {

constexpr int kNumScales = kMaxByte - kMinNormalByte + 1;
// NUM_WINDOW_SCALES of rules/mse.py, and the same padded to whole vectors of float64.
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

// The index of the best normal scale, as rules/mse.py finds it; amax is not zero.
int best_scale(const float* weights, double amax, const double* steps) {
    double errors[kScratch];
    const double* low = std::lower_bound(steps, steps + kNumScales, amax / 14.0);
    const int first = std::min(static_cast<int>(low - steps), kNumScales - 1);
    // Beyond the last scale the steps are infinite, so their error is infinite or NaN and never the least.
    const int count = std::min(kWindowScales, kNumScales - first);
    add_errors(weights, steps + first, kPaddedWindow, errors);
    const int best = first + last_least(errors, count);
    const bool in_last_octave = 2.0 * amax < 7.0 * steps[best];
    if (!in_last_octave && amax <= 4.0 * steps[kNumScales - 1] && amax >= 4.0 * steps[0]) return best;
    add_errors(weights, steps, kNumScales, errors);
    return last_least(errors, kNumScales);
}

}  // namespace

void quantize_mse_bf16(const uint16_t* source, size_t num_blocks, double global_scale, uint8_t* packed,
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
        const auto nibble = [&](int i) {
            const int code = nearest_code(4.0 * static_cast<double>(weights[i]), step);
            return code | (code > 0 && source[i] >> 15 ? 8 : 0);
        };
        for (int i = 0; i < kBlock; i += 2) packed[i / 2] = static_cast<uint8_t>(nibble(i) | nibble(i + 1) << 4);
    }
}

void quantize_max_bf16(const uint16_t* source, size_t num_blocks, float global_scale, uint8_t* packed,
                       uint8_t* scale_bytes) {
    for (size_t block = 0; block < num_blocks; ++block, source += kBlock, packed += kBlock / 2) {
        float weights[kBlock];
        const int byte = max_scale_byte(load_magnitudes(source, weights), global_scale);
        const float step = e4m3_value(byte) * global_scale;
        scale_bytes[block] = static_cast<uint8_t>(byte);
        const auto nibble = [&](int i) {
            const float scaled = weights[i] / step;
            return nearest_code(scaled) | (scaled > 0.0f && source[i] >> 15 ? 8 : 0);
        };
        for (int i = 0; i < kBlock; i += 2) packed[i / 2] = static_cast<uint8_t>(nibble(i) | nibble(i + 1) << 4);
    }
}

}  // namespace k2
