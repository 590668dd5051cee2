// The search by importance and exponents with vectors. This file is compiled for AVX2 or NEON, and runs only if the CPU has it.
//
// A window of 24 candidates is looked at, three octaves, and then no other can win. Errors of 16 bits times importances of
// at most 16 * 255 fit 32 bits. Errors of a block's groups are in one unit and rounded down, so a sum is too small by less
// than the block's importance w. If m is the least sum, and no error in it is capped, that candidate's exact sum is below
// m + w. So only candidates with sums below m + w can win, and none
//
//     below the window    if the least error of each field at any smaller step adds up to m + w or more
//     above the window    if none in its last octave can. From t = 2/7 A on, with A the block's largest |q| * 2**-a, half
//                         the step is at least as good (no quotient is above 3.5), and the last octave starts there or
//                         later. So each larger step has one in this octave that is at least as good.
//
// In 10 % of the blocks with exponents of "weighted and scaled" in scripts/bench/kernels.py, the candidates that can win are
// a step and its half with the same errors; then the larger wins. In 7 % exact sums decide. In 6 % the window does not
// suffice, and 64 candidates are looked at. With equal exponents sums are exact, the window starts at t = 4/7 (see
// channels.hpp), and its last octave at 16/7.
#include "channels.hpp"
#include "vectors.hpp"

#if K2_HAS_VECTORS

#include <algorithm>

namespace k2::vectors {

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
    const __m128i table = _mm_setr_epi8(8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i magnitudes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(importance));
    return sum_by_magnitude(magnitudes, weights);
}

__m128i load(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }

using PlaceErrors = const int16_t (*)[kPlaces][2];

// Eight candidates a vector.
template <int N>
struct Totals {
    __m256i sums[N] = {};

    template <int Pair>
    __attribute__((always_inline)) void add_pair(__m256i importance, PlaceErrors errors, int start) {
        const __m256i weights = _mm256_shuffle_epi32(importance, 0x55 * Pair);
        for (int i = 0; i < N; ++i) {
            const __m256i two = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(errors[Pair][start + 8 * i]));
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(weights, two));
        }
    }

    // Add the errors of a group; both halves hold its summed importance.
    __attribute__((always_inline)) void add(__m256i importance, PlaceErrors errors, int start) {
        add_pair<0>(importance, errors, start);
        add_pair<1>(importance, errors, start);
        add_pair<2>(importance, errors, start);
        add_pair<3>(importance, errors, start);
    }

    // The least sum, in all lanes.
    __m256i least() const {
        __m256i least = sums[0];
        for (int i = 1; i < N; ++i) least = _mm256_min_epi32(least, sums[i]);
        least = _mm256_min_epi32(least, _mm256_permute2x128_si256(least, least, 1));
        least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0x4E));
        return _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0xB1));
    }

    // The candidates with sums below a bound.
    uint64_t below(__m256i bound) const {
        uint64_t candidates = 0;
        for (int i = 0; i < N; ++i) {
            const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bound, sums[i])));
            candidates |= static_cast<uint64_t>(mask) << 8 * i;
        }
        return candidates;
    }
};

// The nibbles of a block of 8 bytes: even columns, then odd ones.
__m128i split_block(const uint8_t* packed) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed));
    return _mm_and_si128(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)), _mm_set1_epi8(15));
}

__attribute__((always_inline)) inline void count_groups(const uint8_t* packed, const Plan& plan, int num_groups,
                                                       Fields& fields) {
    const __m128i table = _mm_setr_epi8(8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i all = _mm256_broadcastsi128_si256(_mm_shuffle_epi8(table, split_block(packed)));
    const __m256i weights = _mm256_broadcastsi128_si256(load(&plan.split_importance));
    for (int group = 0; group < num_groups; group += 2) {
        const __m256i mask = _mm256_load_si256(reinterpret_cast<const __m256i*>(plan.masks[group]));
        const __m256i magnitudes = _mm256_and_si256(all, mask);
        const __m256i sums = sum_by_magnitude(magnitudes, weights);
        _mm256_store_si256(reinterpret_cast<__m256i*>(fields.sums[group]), sums);
        const __m256i zero = _mm256_setzero_si256();
        const uint32_t absent = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(_mm256_cmpeq_epi16(sums, zero), zero)));
        fields.present[group] = static_cast<uint8_t>(~absent);
        fields.present[group + 1] = static_cast<uint8_t>(~absent >> 16);
    }
}

using Shifted = PackedErrors::Shifted;

// The winner among 8 * N candidates from seen.start on, or `near`. G is the number of groups, 0 if it varies.
template <int N, int G>
__attribute__((always_inline)) inline int search_window(const Plan& plan, const Shifted* const* groups, Seen& seen) {
    const int num_groups = G > 0 ? G : plan.num_groups;
    Totals<N> totals;
    __m128i outside = _mm_setzero_si128();
    for (int group = 0; group < num_groups; ++group) {
        const __m128i sums = load(seen.fields.sums[group]);
        totals.add(_mm256_broadcastsi128_si256(sums), groups[group]->errors, seen.start);
        outside = _mm_add_epi32(outside, _mm_madd_epi16(sums, load(groups[group]->below[seen.start])));
    }
    outside = _mm_add_epi32(outside, _mm_shuffle_epi32(outside, 0x4E));
    outside = _mm_add_epi32(outside, _mm_shuffle_epi32(outside, 0xB1));
    const __m256i least = totals.least(), bound = _mm256_add_epi32(least, _mm256_set1_epi32(plan.total));
    const uint64_t near = totals.below(bound);
    const int last = last_of(near);
    seen.near = 0;
    if (last >= 8 * N - kLastOctave || _mm_cvtsi128_si32(outside) < _mm256_cvtsi256_si32(bound)) return -1;
    const auto flags_of = [&](int candidate) {
        int flags = 0;
        for (int group = 0; group < num_groups; ++group) {
            flags |= groups[group]->marks[seen.start + candidate].flags & 0x101 * seen.fields.present[group];
        }
        return flags;
    };
    const int flags = flags_of(last);
    const uint64_t winner = uint64_t{1} << last, half = flags < 256 ? winner >> 8 : 0;
    if (((near & ~(winner | half)) | (flags & 255)) == 0) return seen.start + last;
    const int best = last_of(totals.below(_mm256_add_epi32(least, _mm256_set1_epi32(1))));
    if ((flags_of(best) & 255) == 0) seen.near = near;
    return -1;
}

template <int G>
int search_groups(const uint8_t* packed, const Plan& plan, const PackedErrors& errors, Seen& seen) {
    constexpr int none = 127;
    const int num_groups = G > 0 ? G : plan.num_groups;
    count_groups(packed, plan, num_groups, seen.fields);
    int lowest = none;
    for (int group = num_groups - 1; group >= 0; --group) {
        lowest = seen.fields.present[group] != 0 ? plan.exponents[group] - 1 : lowest;
    }
    seen.lowest = lowest, seen.start = -1, seen.near = 0;
    if (lowest == none || plan.exponents[num_groups - 1] - lowest >= kShifts) return -1;
    const Shifted* groups[G > 0 ? G : kNumExponents];
    for (int group = 0; group < num_groups; ++group) {
        const int shift = std::max(plan.exponents[group] - lowest, 0);
        groups[group] = &errors.shifted[shift];
        seen.start = std::max(seen.start, errors.starts[largest_magnitude(seen.fields.present[group])] - 8 * shift);
    }
    const int place = seen.start < 0 ? -1 : search_window<kWindow / 8, G>(plan, groups, seen);
    if (place >= 0 || seen.near != 0) return place;
    seen.start = 0;
    return search_window<kPlaces / 8, 0>(plan, groups, seen);
}

}  // namespace

void search_even(const uint8_t* packed, const SplitImportance* importance, const PackedErrors& errors,
                 const uint8_t* is_wanted, int* places) {
    const int start = errors.starts[7];
    const __m256i sums = sum_importance(packed, importance);
    const __m256i absent = _mm256_packs_epi16(_mm256_cmpeq_epi16(sums, _mm256_setzero_si256()), _mm256_setzero_si256());
    const uint32_t present = ~static_cast<uint32_t>(_mm256_movemask_epi8(absent));
    const __m256i both[2] = {_mm256_permute4x64_epi64(sums, 0x44), _mm256_permute4x64_epi64(sums, 0xEE)};
    for (int half = 0; half < 2; ++half) {
        if (!is_wanted[half]) continue;
        Totals<kWindow / 8> totals;
        totals.add(both[half], errors.shifted[0].errors, start);
        const int candidate = last_of(totals.below(_mm256_add_epi32(totals.least(), _mm256_set1_epi32(1))));
        const uint32_t own = present >> 16 * half & 0xFF;
        const bool is_open = own == 0 || candidate >= kWindow - kLastOctave ||
                             (errors.shifted[0].marks[start + candidate].flags & own) != 0;
        places[half] = is_open ? -1 : start + candidate;
    }
}

int search_block(const uint8_t* packed, const Plan& plan, const PackedErrors& errors, Seen& seen) {
    switch (plan.num_groups) {
        case 1: return search_groups<1>(packed, plan, errors, seen);
        case 2: return search_groups<2>(packed, plan, errors, seen);
        case 3: return search_groups<3>(packed, plan, errors, seen);
        case 4: return search_groups<4>(packed, plan, errors, seen);
        default: return search_groups<0>(packed, plan, errors, seen);
    }
}

void count_fields(const uint8_t* packed, const Plan& plan, Fields& fields) {
    count_groups(packed, plan, plan.num_groups, fields);
}

void encode_both(const uint8_t* packed, const uint8_t* first_map, const uint8_t* second_map, uint8_t* out) {
    const __m256i maps = _mm256_set_m128i(load(second_map), load(first_map)), mask = _mm256_set1_epi8(15);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_castsi128_si256(load(packed)), 0x50);
    const __m256i low = _mm256_shuffle_epi8(maps, _mm256_and_si256(bytes, mask));
    const __m256i high = _mm256_shuffle_epi8(maps, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
    const __m256i codes = _mm256_permute4x64_epi64(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(codes));
}

void encode_groups(const uint8_t* packed, const Plan& plan, const uint8_t* const* maps, uint8_t* out) {
    const __m128i nibbles = split_block(packed);
    __m128i codes = _mm_setzero_si128();
    for (int group = 0; group < plan.num_groups; ++group) {
        const __m128i mask = _mm_load_si128(reinterpret_cast<const __m128i*>(plan.masks[group]));
        codes = _mm_or_si128(codes, _mm_and_si128(_mm_shuffle_epi8(load(maps[group]), nibbles), mask));
    }
    const __m128i odd = _mm_slli_epi16(_mm_unpackhi_epi64(codes, codes), 4);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_or_si128(codes, odd));
}

}  // namespace k2::vectors
#endif
