#include "fp8.hpp"

#include <algorithm>

#include "numbers.hpp"

namespace k2 {

namespace {

constexpr uint32_t kExponent = 0x7F800000u;
constexpr uint32_t kSmallest = (127u - 6u) << 23;  // of E4M3's normal numbers
constexpr uint32_t kLargest = 0x43E00000u;  // 448
constexpr uint32_t kDropped = 20u << 23;           // of FP32's 23 bits of mantissa
constexpr size_t kLanes = 8, kStretch = 512;

K2_CLONES void encode(const uint16_t* __restrict bits, size_t count, float scale, uint8_t* __restrict codes) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t word = bits[i];
        // Bits of positive numbers are compared: compilers vectorize minima of integers.
        const uint32_t quotient = bits_as<uint32_t>(bf16_value(word & 0x7FFFu) / scale);
        const uint32_t size = quotient < kLargest ? quotient : kLargest, own = size & kExponent;
        const uint32_t exponent = own > kSmallest ? own : kSmallest;
        // FP32's own addition rounds to the three bits of mantissa that are left; formats/fp8.py says how.
        const uint32_t added = exponent + kDropped;
        const uint32_t steps = bits_as<uint32_t>(bits_as<float>(size) + bits_as<float>(added)) - added;
        codes[i] = static_cast<uint8_t>((steps + ((exponent - kSmallest) >> 20)) | (word >> 8 & 0x80u));
    }
}

// The values of codes times their scale, and the exact weights, for one stretch of columns.
K2_CLONES void decode(const uint16_t* __restrict bits, const uint8_t* __restrict codes, size_t count,
                      float* __restrict exact, float* __restrict values) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t code = codes[i], magnitude = code & 0x7Fu;
        const uint32_t small = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
        const uint32_t is_small = 0u - (magnitude < 8u), is_nan = 0u - (magnitude == 0x7Fu);
        const uint32_t size = (small & is_small) | (((magnitude + 960u) << 20) & ~is_small) | (0x7FC00000u & is_nan);
        values[i] = bits_as<float>(size | (code & 0x80u) << 24);
        exact[i] = bf16_value(bits[i]);
    }
}

struct Sums {
    double energy = 0, error = 0;
    int64_t nonzero = 0, equal = 0;
};

K2_CLONES void add_up(const float* __restrict exact, const float* __restrict values, size_t count, double scale,
                      Sums& sums) {
    double energy[kLanes] = {}, error[kLanes] = {};
    int32_t nonzero[kLanes] = {}, equal[kLanes] = {};
    for (size_t i = 0; i < count; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
            const float weight = exact[i + lane];
            const double difference = static_cast<double>(values[i + lane]) * scale - static_cast<double>(weight);
            energy[lane] += static_cast<double>(weight) * static_cast<double>(weight);
            error[lane] += difference * difference;
            nonzero[lane] += weight != 0.0f;
            equal[lane] += (weight != 0.0f) & (difference == 0.0);
        }
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
        sums.energy += energy[lane];
        sums.error += error[lane];
        sums.nonzero += nonzero[lane];
        sums.equal += equal[lane];
    }
}

void compare(const uint16_t* bits, const uint8_t* codes, size_t count, double scale, Sums& sums) {
    float exact[kStretch], values[kStretch];
    for (size_t start = 0; start < count; start += kStretch) {
        const size_t size = std::min(kStretch, count - start);
        const size_t padded = (size + kLanes - 1) / kLanes * kLanes;
        decode(bits + start, codes + start, size, exact, values);
        std::fill(exact + size, exact + padded, 0.0f);
        std::fill(values + size, values + padded, 0.0f);
        add_up(exact, values, padded, scale, sums);
    }
}

}  // namespace

void encode_fp8(const uint16_t* bits, Fp8Shape shape, const float* scales, uint8_t* codes) {
    for (size_t row = 0; row < shape.rows; ++row) {
        for (size_t start = 0; start < shape.columns; start += shape.group) {
            const size_t at = row * shape.columns + start;
            encode(bits + at, std::min(shape.group, shape.columns - start), *scales++, codes + at);
        }
    }
}

Fp8Figures measure_fp8(const uint16_t* bits, const uint8_t* codes, Fp8Shape shape, const float* scales,
                       double* energies, double* errors) {
    Fp8Figures figures;
    for (size_t row = 0; row < shape.rows; ++row) {
        Sums sums;
        for (size_t start = 0; start < shape.columns; start += shape.group) {
            const size_t at = row * shape.columns + start;
            compare(bits + at, codes + at, std::min(shape.group, shape.columns - start), *scales++, sums);
        }
        energies[row] = sums.energy;
        errors[row] = sums.error;
        figures.num_nonzero += sums.nonzero;
        figures.equal_nonzero += sums.equal;
    }
    return figures;
}

}  // namespace k2
