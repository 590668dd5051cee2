// The search by importance with AVX2, for blocks without channel exponents. This file is compiled for AVX2, and its
// code runs only if the CPU has it.
//
// Six vectors hold the sums of 48 candidates: errors of 16 bits times importances of at most 16 * 255, so they fit 32
// bits. Lanes are placed such that two rounds of packing put the mask of least sums in the order of candidates: the
// low halves of vectors 0 to 3 hold candidates 0 to 15, their high halves 16 to 31, those of vectors 4 and 5 the rest.
#include "channels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace k2::avx2 {

namespace {

template <int Magnitude>
__m256i sum_of(__m256i magnitudes, __m256i importance) {
    const __m256i chosen = _mm256_and_si256(_mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(Magnitude)), importance);
    return _mm256_slli_epi64(_mm256_sad_epu8(chosen, _mm256_setzero_si256()), 16 * ((Magnitude - 1) % 4));
}

__m256i add_halves(__m256i sums) { return _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4E)); }

// The sums of these bytes where |q| is 1..8, in both halves: 16 bits each.
__m256i sum_by_magnitude(__m256i magnitudes, __m256i values) {
    const __m256i small = _mm256_or_si256(
        _mm256_or_si256(sum_of<1>(magnitudes, values), sum_of<2>(magnitudes, values)),
        _mm256_or_si256(sum_of<3>(magnitudes, values), sum_of<4>(magnitudes, values)));
    const __m256i large = _mm256_or_si256(
        _mm256_or_si256(sum_of<5>(magnitudes, values), sum_of<6>(magnitudes, values)),
        _mm256_or_si256(sum_of<7>(magnitudes, values), sum_of<8>(magnitudes, values)));
    return _mm256_unpacklo_epi64(add_halves(small), add_halves(large));
}

// The summed importance of |q| = 1..8 in both blocks, 16 bits each.
__m256i sum_importance(const uint8_t* packed, const SplitImportance* importance) {
    const __m256i bytes = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    // Each block's bytes twice: once for the low nibbles, which are the even columns, once for the high ones.
    const __m256i twice = _mm256_permute4x64_epi64(bytes, 0x50);
    const __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 4, 0, 4)), _mm256_set1_epi8(15));
    const __m256i table = _mm256_setr_epi8(8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1,
                                           2, 3, 4, 5, 6, 7);
    const __m256i magnitudes = _mm256_shuffle_epi8(table, nibbles);
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(importance));
    return sum_by_magnitude(magnitudes, weights);
}

// The last candidate with the least sum.
int32_t last_least(__m256i sums, const __m256i* errors) {
    const __m256i pair0 = _mm256_shuffle_epi32(sums, 0x00), pair1 = _mm256_shuffle_epi32(sums, 0x55);
    const __m256i pair2 = _mm256_shuffle_epi32(sums, 0xAA), pair3 = _mm256_shuffle_epi32(sums, 0xFF);
    __m256i totals[6];
    for (int i = 0; i < 6; ++i) {
        const __m256i first = _mm256_add_epi32(_mm256_madd_epi16(pair0, errors[4 * i]), _mm256_madd_epi16(pair1, errors[4 * i + 1]));
        const __m256i second = _mm256_add_epi32(_mm256_madd_epi16(pair2, errors[4 * i + 2]), _mm256_madd_epi16(pair3, errors[4 * i + 3]));
        totals[i] = _mm256_add_epi32(first, second);
    }
    __m256i least = _mm256_min_epi32(_mm256_min_epi32(_mm256_min_epi32(totals[0], totals[1]), _mm256_min_epi32(totals[2], totals[3])),
                                     _mm256_min_epi32(totals[4], totals[5]));
    least = _mm256_min_epi32(least, _mm256_permute2x128_si256(least, least, 1));
    least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0x4E));
    least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0xB1));
    __m256i equal[6];
    for (int i = 0; i < 6; ++i) equal[i] = _mm256_cmpeq_epi32(totals[i], least);
    const __m256i front = _mm256_packs_epi16(_mm256_packs_epi32(equal[0], equal[1]), _mm256_packs_epi32(equal[2], equal[3]));
    const __m256i back = _mm256_packs_epi16(_mm256_packs_epi32(equal[4], equal[5]), _mm256_setzero_si256());
    const uint64_t low = static_cast<uint32_t>(_mm256_movemask_epi8(front));
    const uint64_t high = static_cast<uint32_t>(_mm256_movemask_epi8(back));
    return 63 - __builtin_clzll(low | (high & 0xFF) << 32 | (high & 0xFF0000) << 24);
}

}  // namespace

void search_imatrix(const uint8_t* packed, const SplitImportance* importance, const int16_t* errors, Found* found) {
    const __m256i sums = sum_importance(packed, importance);
    const auto* table = reinterpret_cast<const __m256i*>(errors);
    found[0].position = last_least(_mm256_permute4x64_epi64(sums, 0x44), table);
    found[1].position = last_least(_mm256_permute4x64_epi64(sums, 0xEE), table);
    const __m256i absent = _mm256_packs_epi16(_mm256_cmpeq_epi16(sums, _mm256_setzero_si256()), _mm256_setzero_si256());
    const uint32_t present = ~static_cast<uint32_t>(_mm256_movemask_epi8(absent));
    found[0].present = static_cast<uint8_t>(present);
    found[1].present = static_cast<uint8_t>(present >> 16);
}

void encode_block(const uint8_t* packed, const uint8_t* map, uint8_t* out) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed)), mask = _mm_set1_epi8(15);
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(map));
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(bytes, mask));
    const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_or_si128(low, _mm_slli_epi16(high, 4)));
}

namespace {

// The nibbles of a block of 8 bytes: even columns, then odd ones.
__m128i split_block(const uint8_t* packed) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
    return _mm_and_si128(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)), _mm_set1_epi8(15));
}

}  // namespace

void count_fields(const uint8_t* packed, const SplitGroups& groups, const SplitImportance& importance, int num_groups,
                  Fields& fields) {
    const __m128i table = _mm_setr_epi8(8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i all = _mm256_broadcastsi128_si256(_mm_shuffle_epi8(table, split_block(packed)));
    const __m256i weights = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(&importance)));
    for (int group = 0; group < num_groups; group += 2) {
        const __m256i mask = _mm256_load_si256(reinterpret_cast<const __m256i*>(groups.masks[group]));
        const __m256i magnitudes = _mm256_and_si256(all, mask);
        const __m256i sums = sum_by_magnitude(magnitudes, weights);
        _mm256_store_si256(reinterpret_cast<__m256i*>(fields.sums[group]), sums);
        const __m256i zero = _mm256_setzero_si256();
        const uint32_t absent = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(_mm256_cmpeq_epi16(sums, zero), zero)));
        fields.present[group] = static_cast<uint8_t>(~absent);
        fields.present[group + 1] = static_cast<uint8_t>(~absent >> 16);
    }
}

int last_least(const Term* terms, int num_terms, int count) {
    // Sums of at most 16 positive terms in float32 are wrong by less than 2**-19 of them. So the least is among those that
    // are at most 2**-17 larger than the least float32 sum, which are few and are added up exactly.
    alignas(32) float sums[kMaxSearched];
    __m256 least = _mm256_set1_ps(1e38f);
    for (int first = 0; first < count; first += 8) {
        __m256 sum = _mm256_setzero_ps();
        for (int t = 0; t < num_terms; ++t) {
            const __m256 weight = _mm256_set1_ps(static_cast<float>(terms[t].weight));
            sum = _mm256_add_ps(sum, _mm256_mul_ps(weight, _mm256_loadu_ps(terms[t].rounded_errors + first)));
        }
        _mm256_store_ps(sums + first, sum);
        least = _mm256_min_ps(least, sum);
    }
    least = _mm256_min_ps(least, _mm256_permute2f128_ps(least, least, 1));
    least = _mm256_min_ps(least, _mm256_shuffle_ps(least, least, 0x4E));
    least = _mm256_min_ps(least, _mm256_shuffle_ps(least, least, 0xB1));
    const __m256 bound = _mm256_mul_ps(least, _mm256_set1_ps(1.0f + 0x1p-17f));
    int found[kMaxSearched], num_found = 0;
    for (int first = 0; first < count; first += 8) {
        const __m256 is_near = _mm256_cmp_ps(_mm256_load_ps(sums + first), bound, _CMP_LE_OQ);
        for (int mask = _mm256_movemask_ps(is_near); mask != 0; mask &= mask - 1) {
            found[num_found++] = first + __builtin_ctz(static_cast<unsigned>(mask));
        }
    }
    if (num_found == 1) return found[0];
    int best = found[0];
    double best_sum = 1e300;
    for (int i = 0; i < num_found; ++i) {
        double sum = 0.0;
        for (int t = 0; t < num_terms; ++t) sum += terms[t].weight * terms[t].errors[found[i]];
        if (sum <= best_sum) best_sum = sum, best = found[i];
    }
    return best;
}

void encode_groups(const uint8_t* packed, const SplitGroups& groups, const Mapping* mappings, int num_groups,
                   uint8_t* out) {
    const __m128i nibbles = split_block(packed);
    __m128i codes = _mm_setzero_si128();
    for (int group = 0; group < num_groups; ++group) {
        const __m128i mask = _mm_load_si128(reinterpret_cast<const __m128i*>(groups.masks[group]));
        const __m128i map = _mm_load_si128(reinterpret_cast<const __m128i*>(mappings[group].map));
        codes = _mm_or_si128(codes, _mm_and_si128(_mm_shuffle_epi8(map, nibbles), mask));
    }
    const __m128i odd = _mm_slli_epi16(_mm_unpackhi_epi64(codes, codes), 4);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_or_si128(codes, odd));
}

}  // namespace k2::avx2

#else

namespace k2::avx2 {

// Never called: instructions.cpp finds no AVX2.
void search_imatrix(const uint8_t*, const SplitImportance*, const int16_t*, Found*) {}
void encode_block(const uint8_t*, const uint8_t*, uint8_t*) {}
void count_fields(const uint8_t*, const SplitGroups&, const SplitImportance&, int, Fields&) {}
int last_least(const Term*, int, int) { return 0; }
void encode_groups(const uint8_t*, const SplitGroups&, const Mapping*, int, uint8_t*) {}

}  // namespace k2::avx2
#endif
