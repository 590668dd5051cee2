// The AVX2 intrinsics of vector_*.cpp for ARM: a vector of 32 bytes is two NEON registers, and results have the same bits.
// Some differ for operands that do not occur: mulhrs_epi16 saturates -32,768 * -32,768, sad_epu8 adds a's bytes (b is
// zero), and a double that does not fit an integer becomes another one.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define K2_INLINE static inline __attribute__((always_inline))

using __m128i = int8x16_t;
using __m128d = float64x2_t;
struct __attribute__((may_alias)) __m256i {
    int8x16_t low, high;
};

// Casts between vectors keep their bits. An operation on 16 bytes, and on each half of 32.
#define K2_UNARY(name, expression)                                            \
    K2_INLINE __m128i _mm_##name(__m128i a) { return (__m128i)(expression); } \
    K2_INLINE __m256i _mm256_##name(__m256i a) { return {_mm_##name(a.low), _mm_##name(a.high)}; }
#define K2_BINARY(name, expression)                                                      \
    K2_INLINE __m128i _mm_##name(__m128i a, __m128i b) { return (__m128i)(expression); } \
    K2_INLINE __m256i _mm256_##name(__m256i a, __m256i b) {                              \
        return {_mm_##name(a.low, b.low), _mm_##name(a.high, b.high)};                   \
    }
#define K2_SHIFT(name, expression)                                                   \
    K2_INLINE __m128i _mm_##name(__m128i a, int n) { return (__m128i)(expression); } \
    K2_INLINE __m256i _mm256_##name(__m256i a, int n) { return {_mm_##name(a.low, n), _mm_##name(a.high, n)}; }
// The same number in all lanes.
#define K2_SET(type, suffix, lane)                                                \
    K2_INLINE __m128i _mm_set1_##suffix(lane x) { return (__m128i)(type{} + x); } \
    K2_INLINE __m256i _mm256_set1_##suffix(lane x) { return {_mm_set1_##suffix(x), _mm_set1_##suffix(x)}; }

K2_SET(uint8x16_t, epi8, uint8_t)
K2_SET(uint16x8_t, epi16, uint16_t)
K2_SET(uint32x4_t, epi32, uint32_t)
K2_SET(uint64x2_t, epi64x, uint64_t)

K2_INLINE __m256i _mm256_setzero_si256() { return {vdupq_n_s8(0), vdupq_n_s8(0)}; }
template <class... Lane>
K2_INLINE __m128i _mm_setr_epi8(Lane... lane) {
    return int8x16_t{static_cast<int8_t>(lane)...};
}
K2_INLINE __m256i _mm256_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h) {
    return {(__m128i)int32x4_t{a, b, c, d}, (__m128i)int32x4_t{e, f, g, h}};
}
K2_INLINE __m256i _mm256_setr_epi64x(int64_t a, int64_t b, int64_t c, int64_t d) {
    return {(__m128i)int64x2_t{a, b}, (__m128i)int64x2_t{c, d}};
}

K2_INLINE __m128i _mm_loadu_si128(const __m128i* from) { return vld1q_s8(reinterpret_cast<const int8_t*>(from)); }
K2_INLINE __m128i _mm_load_si128(const __m128i* from) { return _mm_loadu_si128(from); }
K2_INLINE __m128i _mm_loadl_epi64(const __m128i* from) {
    return vcombine_s8(vld1_s8(reinterpret_cast<const int8_t*>(from)), vdup_n_s8(0));
}
K2_INLINE __m256i _mm256_loadu_si256(const __m256i* from) {
    const auto* bytes = reinterpret_cast<const int8_t*>(from);
    return {vld1q_s8(bytes), vld1q_s8(bytes + 16)};
}
K2_INLINE __m256i _mm256_load_si256(const __m256i* from) { return _mm256_loadu_si256(from); }
K2_INLINE void _mm256_storeu_si256(__m256i* to, __m256i a) {
    auto* bytes = reinterpret_cast<int8_t*>(to);
    vst1q_s8(bytes, a.low), vst1q_s8(bytes + 16, a.high);
}
K2_INLINE void _mm256_store_si256(__m256i* to, __m256i a) { _mm256_storeu_si256(to, a); }

K2_INLINE __m128i _mm256_castsi256_si128(__m256i a) { return a.low; }
K2_INLINE __m256i _mm256_castsi256_ps(__m256i a) { return a; }
K2_INLINE __m256i _mm256_set_m128i(__m128i high, __m128i low) { return {low, high}; }
K2_INLINE __m256i _mm256_broadcastsi128_si256(__m128i a) { return {a, a}; }
K2_INLINE __m256i _mm256_broadcastw_epi16(__m128i a) {
    const auto all = (__m128i)vdupq_laneq_s16((int16x8_t)a, 0);
    return {all, all};
}
#define _mm256_extracti128_si256(a, half) ((a).high)
static_assert(sizeof(__m256i) == 32, "two registers");

K2_BINARY(add_epi8, (uint8x16_t)a + (uint8x16_t)b)
K2_BINARY(add_epi32, (uint32x4_t)a + (uint32x4_t)b)
K2_BINARY(add_epi64, (uint64x2_t)a + (uint64x2_t)b)
K2_BINARY(sub_epi8, (uint8x16_t)a - (uint8x16_t)b)
K2_BINARY(sub_epi32, (uint32x4_t)a - (uint32x4_t)b)
K2_BINARY(subs_epi16, vqsubq_s16((int16x8_t)a, (int16x8_t)b))
K2_BINARY(mulhrs_epi16, vqrdmulhq_s16((int16x8_t)a, (int16x8_t)b))
K2_BINARY(madd_epi16, vpaddq_s32(vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b)),
                                 vmull_high_s16((int16x8_t)a, (int16x8_t)b)))
K2_BINARY(sad_epu8, (static_cast<void>(b), vpaddlq_u32(vpaddlq_u16(vpaddlq_u8((uint8x16_t)a)))))
K2_BINARY(min_epi32, vminq_s32((int32x4_t)a, (int32x4_t)b))
K2_BINARY(max_epu8, vmaxq_u8((uint8x16_t)a, (uint8x16_t)b))
K2_BINARY(cmpeq_epi8, vceqq_s8(a, b))
K2_BINARY(cmpeq_epi16, vceqq_s16((int16x8_t)a, (int16x8_t)b))
K2_BINARY(cmpeq_epi32, vceqq_s32((int32x4_t)a, (int32x4_t)b))
K2_BINARY(cmpgt_epi16, vcgtq_s16((int16x8_t)a, (int16x8_t)b))
K2_BINARY(cmpgt_epi32, vcgtq_s32((int32x4_t)a, (int32x4_t)b))
K2_BINARY(packs_epi16, vqmovn_high_s16(vqmovn_s16((int16x8_t)a), (int16x8_t)b))
K2_BINARY(packs_epi32, vqmovn_high_s32(vqmovn_s32((int32x4_t)a), (int32x4_t)b))
K2_BINARY(packus_epi16, vqmovun_high_s16(vqmovun_s16((int16x8_t)a), (int16x8_t)b))
K2_BINARY(packus_epi32, vqmovun_high_s32(vqmovun_s32((int32x4_t)a), (int32x4_t)b))
K2_BINARY(unpacklo_epi8, vzip1q_s8(a, b))
K2_BINARY(unpackhi_epi8, vzip2q_s8(a, b))
K2_BINARY(unpacklo_epi32, vzip1q_s32((int32x4_t)a, (int32x4_t)b))
K2_BINARY(unpackhi_epi32, vzip2q_s32((int32x4_t)a, (int32x4_t)b))
K2_BINARY(unpacklo_epi64, vzip1q_s64((int64x2_t)a, (int64x2_t)b))
K2_BINARY(unpackhi_epi64, vzip2q_s64((int64x2_t)a, (int64x2_t)b))
K2_BINARY(shuffle_epi8, vqtbl1q_s8(a, (uint8x16_t)b & 0x8F))
K2_BINARY(sign_epi8, ((a ^ (__m128i)vcltzq_s8(b)) - (__m128i)vcltzq_s8(b)) & (__m128i)vtstq_s8(b, b))
K2_BINARY(srlv_epi64, vshlq_u64((uint64x2_t)a, -(int64x2_t)b))
K2_BINARY(and_si, a & b)
K2_BINARY(or_si, a | b)
K2_BINARY(andnot_si, ~a & b)
#define _mm_or_si128 _mm_or_si
#define _mm256_and_si256 _mm256_and_si
#define _mm256_or_si256 _mm256_or_si
#define _mm256_andnot_si256 _mm256_andnot_si
K2_UNARY(abs_epi8, vabsq_s8(a))
K2_UNARY(abs_epi16, vabsq_s16((int16x8_t)a))
K2_SHIFT(slli_epi16, (uint16x8_t)a << static_cast<uint16_t>(n))
K2_SHIFT(slli_epi32, (uint32x4_t)a << static_cast<uint32_t>(n))
K2_SHIFT(slli_epi64, (uint64x2_t)a << static_cast<uint64_t>(n))
K2_SHIFT(srli_epi16, (uint16x8_t)a >> static_cast<uint16_t>(n))
K2_SHIFT(srli_epi64, (uint64x2_t)a >> static_cast<uint64_t>(n))
K2_SHIFT(srai_epi32, (int32x4_t)a >> n)

// Pairs of products of an unsigned and a signed byte, added with saturation.
K2_INLINE __m256i _mm256_maddubs_epi16(__m256i a, __m256i b) {
    const auto half = [](uint8x16_t a, int8x16_t b) {
        const int16x8_t low = (int16x8_t)vmovl_u8(vget_low_u8(a)) * vmovl_s8(vget_low_s8(b));
        const int16x8_t high = (int16x8_t)vmovl_high_u8(a) * vmovl_high_s8(b);
        return (__m128i)vqaddq_s16(vuzp1q_s16(low, high), vuzp2q_s16(low, high));
    };
    return {half((uint8x16_t)a.low, b.low), half((uint8x16_t)a.high, b.high)};
}
K2_INLINE __m256i _mm256_cvtepu8_epi32(__m128i a) {
    const uint16x8_t wide = vmovl_u8(vget_low_u8((uint8x16_t)a));
    return {(__m128i)vmovl_u16(vget_low_u16(wide)), (__m128i)vmovl_high_u16(wide)};
}

// Shuffles by constants. The compiler knows lanes of vectors that are lanes of others.
template <int I>
K2_INLINE __m128i k2_shuffle_epi32(__m128i a) {
    const auto from = (int32x4_t)a;
    return (__m128i)int32x4_t{from[I & 3], from[I >> 2 & 3], from[I >> 4 & 3], from[I >> 6 & 3]};
}
template <int I>
K2_INLINE int64_t k2_word(__m256i a) {
    return I < 2 ? ((int64x2_t)a.low)[I & 1] : ((int64x2_t)a.high)[I & 1];
}
template <int I>
K2_INLINE __m256i k2_permute4x64(__m256i a) {
    return {(__m128i)int64x2_t{k2_word<(I & 3)>(a), k2_word<(I >> 2 & 3)>(a)},
            (__m128i)int64x2_t{k2_word<(I >> 4 & 3)>(a), k2_word<(I >> 6 & 3)>(a)}};
}
template <int I>
K2_INLINE __m128i k2_half(__m256i a, __m256i b) {
    return I == 0 ? a.low : I == 1 ? a.high : I == 2 ? b.low : b.high;
}
#define _mm_shuffle_epi32(a, i) k2_shuffle_epi32<i>(a)
#define _mm256_shuffle_epi32(a, i) (__m256i{k2_shuffle_epi32<i>((a).low), k2_shuffle_epi32<i>((a).high)})
#define _mm256_permute4x64_epi64(a, i) k2_permute4x64<i>(a)
#define _mm256_permute2x128_si256(a, b, i) (__m256i{k2_half<((i) & 3)>(a, b), k2_half<((i) >> 4 & 3)>(a, b)})
#define _mm_srli_si128(a, n) vextq_s8(a, vdupq_n_s8(0), n)
#define _mm_extract_epi16(a, i) static_cast<int>(vgetq_lane_u16((uint16x8_t)(a), i))
#define _mm_extract_epi64(a, i) static_cast<int64_t>(vgetq_lane_s64((int64x2_t)(a), i))
K2_INLINE int _mm_cvtsi128_si32(__m128i a) { return vgetq_lane_s32((int32x4_t)a, 0); }
K2_INLINE __m256i _mm256_permutevar8x32_epi32(__m256i a, __m256i i) {
    const auto half = [a](uint32x4_t i) {
        return vqtbl2q_s8({a.low, a.high}, (uint8x16_t)((i & 7) * 0x04040404 + 0x03020100));
    };
    return {half((uint32x4_t)i.low), half((uint32x4_t)i.high)};
}

// The highest bit of each lane.
K2_INLINE uint32_t k2_movemask_epi8(__m128i a) {
    const uint8x16_t bits = vcltzq_s8(a) & uint8x16_t{1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t pairs = vpaddq_u8(bits, bits), fours = vpaddq_u8(pairs, pairs);
    return vgetq_lane_u16((uint16x8_t)vpaddq_u8(fours, fours), 0);
}
K2_INLINE int _mm256_movemask_epi8(__m256i a) {
    return static_cast<int>(k2_movemask_epi8(a.high) << 16 | k2_movemask_epi8(a.low));
}
K2_INLINE int _mm256_movemask_ps(__m256i a) {
    const uint32x4_t low = vcltzq_s32((int32x4_t)a.low) & uint32x4_t{1, 2, 4, 8};
    const uint32x4_t high = vcltzq_s32((int32x4_t)a.high) & uint32x4_t{16, 32, 64, 128};
    return static_cast<int>(vaddvq_u32(low | high));
}
K2_INLINE int _mm_movemask_pd(__m128d a) {
    return static_cast<int>(vaddvq_u64(vcltzq_s64((int64x2_t)a) & uint64x2_t{1, 2}));
}
K2_INLINE int _mm256_testz_si256(__m256i a, __m256i b) {
    return vmaxvq_u32((uint32x4_t)((a.low & b.low) | (a.high & b.high))) == 0;
}

// Two doubles.
K2_INLINE __m128d _mm_set1_pd(double x) { return vdupq_n_f64(x); }
K2_INLINE __m128d _mm_setr_pd(double a, double b) { return float64x2_t{a, b}; }
K2_INLINE void _mm_storeu_pd(double* to, __m128d a) { vst1q_f64(to, a); }
K2_INLINE __m128d _mm_castsi128_pd(__m128i a) { return (__m128d)a; }
K2_INLINE double _mm_cvtsd_f64(__m128d a) { return vgetq_lane_f64(a, 0); }
K2_INLINE __m128d _mm_add_pd(__m128d a, __m128d b) { return vaddq_f64(a, b); }
K2_INLINE __m128d _mm_sub_pd(__m128d a, __m128d b) { return vsubq_f64(a, b); }
K2_INLINE __m128d _mm_mul_pd(__m128d a, __m128d b) { return vmulq_f64(a, b); }
K2_INLINE __m128d _mm_max_pd(__m128d a, __m128d b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
K2_INLINE __m128d _mm_min_pd(__m128d a, __m128d b) { return vbslq_f64(vcltq_f64(a, b), a, b); }
K2_INLINE __m128d _mm_add_sd(__m128d a, __m128d b) { return vcopyq_laneq_f64(a, 0, vaddq_f64(a, b), 0); }
K2_INLINE __m128d _mm_and_pd(__m128d a, __m128d b) { return (__m128d)((__m128i)a & (__m128i)b); }
K2_INLINE __m128d _mm_unpackhi_pd(__m128d a, __m128d b) { return vzip2q_f64(a, b); }
K2_INLINE __m128d _mm_cmpeq_pd(__m128d a, __m128d b) { return (__m128d)vceqq_f64(a, b); }
K2_INLINE __m128d _mm_cmpge_pd(__m128d a, __m128d b) { return (__m128d)vcgeq_f64(a, b); }
K2_INLINE __m128d _mm_cmplt_pd(__m128d a, __m128d b) { return (__m128d)vcltq_f64(a, b); }
K2_INLINE __m128d _mm_cvtepi32_pd(__m128i a) { return vcvtq_f64_s64(vmovl_s32(vget_low_s32((int32x4_t)a))); }
K2_INLINE __m128i k2_narrow(int64x2_t a) { return (__m128i)vcombine_s32(vmovn_s64(a), vdup_n_s32(0)); }
K2_INLINE __m128i _mm_cvttpd_epi32(__m128d a) { return k2_narrow(vcvtq_s64_f64(a)); }
K2_INLINE __m128i _mm_cvtpd_epi32(__m128d a) { return k2_narrow(vcvtnq_s64_f64(a)); }
