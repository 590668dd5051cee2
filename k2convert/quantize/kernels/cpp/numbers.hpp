// Scalar arithmetic of the three formats, operation by operation as in formats/: FP32 or FP64, rounded after
// each operation (the build forbids fused multiply-adds), ties to even.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// On x86-64, functions with plain loops are compiled twice; the loader takes the version for the CPU.
#if defined(__x86_64__) && defined(__ELF__)
#define K2_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define K2_CLONES
#endif

namespace k2 {

constexpr int kBlock = 16;
constexpr int kMinNormalByte = 0x08;
constexpr int kMaxByte = 0x7E;
constexpr int kOneByte = 0x38;

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float bf16_value(uint32_t bits) { return bits_as<float>(bits << 16); }

inline float round_to_bf16(float value) {
    uint32_t bits = bits_as<uint32_t>(value);
    bits += 0x7FFF + ((bits >> 16) & 1);
    return bits_as<float>(bits & 0xFFFF0000u);
}

// Round to an integer, ties to even; numbers from 2**52 on are integers already; infinity and NaN stay.
inline double round_half_even(double value) {
    constexpr double shift = 4503599627370496.0;
    const double magnitude = value < 0 ? -value : value;
    if (!(magnitude < shift)) return value;
    const double rounded = (magnitude + shift) - shift;
    return value < 0 ? -rounded : rounded;
}

// The E4M3 byte nearest to a value in 2**-9 .. 448.
inline int e4m3_byte(float value) {
    if (value < 0x1p-6f) return static_cast<int>(round_half_even(static_cast<double>(value) * 512.0));
    const uint32_t bits = bits_as<uint32_t>(value);
    return static_cast<int>((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
}

// The value of a positive E4M3 byte.
inline float e4m3_value(int byte) {
    if (byte < kMinNormalByte) return static_cast<float>(byte) * 0x1p-9f;
    return bits_as<float>(static_cast<uint32_t>(byte + (120 << 3)) << 20);
}

// The block scale that `max` chooses for a block's largest |w|.
inline int max_scale_byte(float amax, float global_scale) {
    float scale = amax / (6.0f * global_scale);
    if (scale == 0.0f) scale = 1.0f;
    return e4m3_byte(std::min(std::max(scale, 0x1p-9f), 448.0f));
}

// The code 0..7 of E2M1 nearest to value / step, ties to the even code; `quadrupled` is four times the value.
template <class T>
inline int nearest_code(T quadrupled, T step) {
    return (quadrupled > step) + (quadrupled >= T(3) * step) + (quadrupled > T(5) * step) +
           (quadrupled >= T(7) * step) + (quadrupled > T(10) * step) + (quadrupled >= T(14) * step) +
           (quadrupled > T(20) * step);
}

inline int nearest_code(float scaled) { return nearest_code(4.0f * scaled, 1.0f); }

constexpr double kCodeValues[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

// s = mantissa * 2**exponent with a mantissa of 128..255; both are zero if s is.
struct SplitScale {
    int mantissa, exponent;
};

inline SplitScale split_scale(uint32_t bits) {
    int mantissa = static_cast<int>(bits & 0x7F), exponent = static_cast<int>((bits >> 7) & 0xFF);
    if (exponent > 0) return {mantissa + 128, exponent - 134};
    if (mantissa == 0) return {0, 0};
    exponent = -133;
    while (mantissa < 128) mantissa <<= 1, --exponent;
    return {mantissa, exponent};
}

}  // namespace k2
