// Batches with vectors. This file is compiled for AVX2 or NEON, and its code runs only if the CPU has it.
//
// Two vectors hold sixteen candidates. Counts are multiplied by 256 when they are spread to 16-bit lanes, so the low
// byte of a sum is free for the candidate's position, and one minimum finds both. `vpmaddwd` adds two magnitudes at
// once. Errors are capped to 16 bits (see cpu.py), and 16 of them times 256 fit 32 bits.
#include <cstring>

#include "groups.hpp"
#include "numbers.hpp"
#include "vectors.hpp"

#if K2_HAS_VECTORS

namespace k2::vectors {

namespace {

__m256i load(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }
__m256i load_unaligned(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
void store(void* to, __m256i value) { _mm256_store_si256(static_cast<__m256i*>(to), value); }
__m128i load_half(const void* from) { return _mm_load_si128(static_cast<const __m128i*>(from)); }

// Low and high nibbles of 32 bytes.
struct Nibbles {
    __m256i low, high;
};

Nibbles split_nibbles(__m256i bytes) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask)};
}

template <int Pair>
__m256i count_pair(const Nibbles& nibbles) {
    // For each source nibble: 1 if its magnitude is 2 * Pair + 1, 32 if it is 2 * Pair + 2.
    const __m256i table = table_of([](int nibble) {
        const int magnitude = nibble < 8 ? 8 - nibble : nibble - 8;
        return static_cast<char>(magnitude == 2 * Pair + 1 ? 1 : magnitude == 2 * Pair + 2 ? 32 : 0);
    });
    const __m256i both = _mm256_add_epi8(_mm256_shuffle_epi8(table, nibbles.low), _mm256_shuffle_epi8(table, nibbles.high));
    return _mm256_slli_epi64(_mm256_sad_epu8(both, _mm256_setzero_si256()), 16 * Pair);
}

// The histograms of four blocks, one word each.
__m256i count_magnitudes(const Nibbles& nibbles) {
    const __m256i sums = _mm256_or_si256(_mm256_or_si256(count_pair<0>(nibbles), count_pair<1>(nibbles)),
                                         _mm256_or_si256(count_pair<2>(nibbles), count_pair<3>(nibbles)));
    return _mm256_or_si256(_mm256_and_si256(sums, _mm256_set1_epi16(0x001F)),
                           _mm256_and_si256(_mm256_slli_epi64(sums, 3), _mm256_set1_epi16(0x1F00)));
}

// The sets of magnitudes that occur in four blocks, a byte each.
uint32_t present_in_four(__m256i words) {
    return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(words, _mm256_setzero_si256())));
}

// Replace the nibbles of two groups, in each of the four blocks by the map of that block.
__m256i encode(const Nibbles& nibbles, const uint8_t* const maps[4]) {
    const __m256i first = _mm256_shuffle_epi8(_mm256_set_m128i(load_half(maps[2]), load_half(maps[0])),
                                              _mm256_unpacklo_epi64(nibbles.low, nibbles.high));
    const __m256i second = _mm256_shuffle_epi8(_mm256_set_m128i(load_half(maps[3]), load_half(maps[1])),
                                               _mm256_unpackhi_epi64(nibbles.low, nibbles.high));
    // Codes are below 16, so shifting pairs of bytes by four moves nothing across a byte.
    return _mm256_or_si256(_mm256_unpacklo_epi64(first, second),
                           _mm256_slli_epi16(_mm256_unpackhi_epi64(first, second), 4));
}

void count_row(uint8_t* row, const uint64_t* word) {
    const __m256i counts = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(word)));
    store(row, _mm256_add_epi32(load(row), counts));
    ++reinterpret_cast<uint32_t*>(row)[kBlocksLane];
}

// The keys of sixteen candidates under one window, as the lesser of each two.
__m256i window_keys(const SearchTables& tables, const char* mantissa, int window, uint64_t word) {
    const auto* errors = reinterpret_cast<const __m256i*>(mantissa + window * kWindowBytes);
    const auto* keys = reinterpret_cast<const __m256i*>(tables.keys + window * kLanes);
    const __m256i counts = _mm256_set1_epi64x(static_cast<int64_t>(word));
    // Bytes 2p and 2p + 1 of the word as the high bytes of two 16-bit lanes, eight times.
    const __m256i pair0 = _mm256_shuffle_epi8(counts, _mm256_set1_epi32(0x01800080));
    const __m256i pair1 = _mm256_shuffle_epi8(counts, _mm256_set1_epi32(0x03800280));
    const __m256i pair2 = _mm256_shuffle_epi8(counts, _mm256_set1_epi32(0x05800480));
    const __m256i pair3 = _mm256_shuffle_epi8(counts, _mm256_set1_epi32(0x07800680));
    __m256i low = _mm256_add_epi32(keys[0], _mm256_madd_epi16(pair0, errors[0]));
    __m256i high = _mm256_add_epi32(keys[1], _mm256_madd_epi16(pair0, errors[1]));
    const __m256i low_too = _mm256_madd_epi16(pair1, errors[2]), high_too = _mm256_madd_epi16(pair1, errors[3]);
    low = _mm256_add_epi32(low, _mm256_madd_epi16(pair2, errors[4]));
    high = _mm256_add_epi32(high, _mm256_madd_epi16(pair2, errors[5]));
    low = _mm256_add_epi32(low, _mm256_add_epi32(low_too, _mm256_madd_epi16(pair3, errors[6])));
    high = _mm256_add_epi32(high, _mm256_add_epi32(high_too, _mm256_madd_epi16(pair3, errors[7])));
    return _mm256_min_epi32(low, high);
}

__m256i block_keys(const SearchTables& tables, const char* mantissa, uint8_t present, uint64_t word) {
    const int window = tables.windows[present];
    if (__builtin_expect(window < kFirstPair, 1)) return window_keys(tables, mantissa, window, word);
    const int* both = kPairs[window - kFirstPair];
    return _mm256_min_epi32(window_keys(tables, mantissa, both[0], word), window_keys(tables, mantissa, both[1], word));
}

__m256i least_of_two(__m256i a, __m256i b) {
    return _mm256_min_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

__m256i least_of_four(__m256i a, __m256i b) {
    return _mm256_min_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

// The least key of each of eight blocks.
__m256i least_keys(const __m256i keys[8]) {
    const __m256i first = least_of_four(least_of_two(keys[0], keys[1]), least_of_two(keys[2], keys[3]));
    const __m256i second = least_of_four(least_of_two(keys[4], keys[5]), least_of_two(keys[6], keys[7]));
    return _mm256_min_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                            _mm256_permute2x128_si256(first, second, 0x31));
}

// The number of non-zero codes in each of eight blocks.
__m256i num_counted(const uint64_t* words) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i sums = _mm256_packus_epi32(_mm256_sad_epu8(load(words), zero), _mm256_sad_epu8(load(words + 4), zero));
    return _mm256_permute4x64_epi64(sums, 0xD8);
}

struct Buffers {
    alignas(64) uint64_t words[2 * kBatchGroups];
    alignas(64) uint8_t present[2 * kBatchGroups];
};

void count_batch(const Batch& batch, Buffers& buffers) {
    for (size_t group = 0; group < batch.num_groups; group += 2) {
        const __m256i words = count_magnitudes(split_nibbles(load_unaligned(batch.packed + 16 * group)));
        store(buffers.words + 2 * group, words);
        const uint32_t present = present_in_four(words);
        std::memcpy(buffers.present + 2 * group, &present, sizeof present);
    }
}

}  // namespace

void convert_mse(const Batch& batch, int exponent, const SearchTables& tables, Counts& counts, Totals& totals) {
    Buffers buffers;
    count_batch(batch, buffers);
    const Slot* slots = counts.slots();
    uint8_t* rows = counts.rows();
    const __m256i zero = _mm256_setzero_si256();
    __m256i equal_blocks = zero;
    for (size_t group = 0; group < batch.num_groups; group += 4) {
        const uint64_t* words = buffers.words + 2 * group;
        const uint8_t* present = buffers.present + 2 * group;
        __m256i candidates[8];
        __m128i found[4];
        for (int i = 0; i < 4; ++i) {
            const Slot* slot = slots + batch.slots[group + i];
            found[i] = load_half(slot);
            const char* mantissa = reinterpret_cast<const char*>(tables.errors) + slot->table;
            candidates[2 * i] = block_keys(tables, mantissa, present[2 * i], words[2 * i]);
            candidates[2 * i + 1] = block_keys(tables, mantissa, present[2 * i + 1], words[2 * i + 1]);
        }
        const __m256i keys = least_keys(candidates);
        const __m256i positions = _mm256_andnot_si256(keys, _mm256_set1_epi32(0xFF));
        // The fields of the slots, each twice, once for each block of the group.
        const __m256i even = _mm256_set_m128i(found[2], found[0]), odd = _mm256_set_m128i(found[3], found[1]);
        const __m256i firsts = _mm256_shuffle_epi32(_mm256_unpacklo_epi32(even, odd), 0xFA);
        const __m256i ranks_rows = _mm256_unpackhi_epi32(even, odd);
        const __m256i scale_bytes = _mm256_add_epi32(firsts, positions);
        const __m256i counted = num_counted(words);
        const __m256i odd_ones = _mm256_or_si256(
            _mm256_cmpeq_epi32(counted, zero),
            _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(kMinNormalByte), scale_bytes),
                            _mm256_cmpgt_epi32(scale_bytes, _mm256_set1_epi32(kMaxByte))));
        // The error is zero if the sum is -32768 for each non-zero weight.
        const __m256i sums = _mm256_add_epi32(_mm256_srai_epi32(keys, 8), _mm256_slli_epi32(counted, 15));
        equal_blocks = _mm256_sub_epi32(equal_blocks, _mm256_andnot_si256(odd_ones, _mm256_cmpeq_epi32(sums, zero)));

        alignas(32) int32_t index[8], row[8];
        alignas(32) uint8_t bytes[32];
        const __m256i narrowed = _mm256_packus_epi16(_mm256_packs_epi32(scale_bytes, zero), zero);
        const __m256i halves = _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1);
        store(bytes, _mm256_permutevar8x32_epi32(narrowed, halves));
        store(index, _mm256_sub_epi32(_mm256_shuffle_epi32(ranks_rows, 0x50), positions));
        store(row, _mm256_add_epi32(_mm256_shuffle_epi32(ranks_rows, 0xFA), _mm256_slli_epi32(positions, 6)));
        int undecided = _mm256_movemask_ps(_mm256_castsi256_ps(odd_ones)), capped = 0;
        if (__builtin_expect(undecided == 0, 1)) {
            for (int i = 0; i < 8; ++i) capped |= capped_magnitudes(tables, index[i], present[i]);
        }
        if (__builtin_expect((undecided | capped) != 0, 0)) {
            for (int i = 0; i < 8; ++i) {
                if (!(undecided >> i & 1) && !capped_magnitudes(tables, index[i], present[i])) continue;
                const uint16_t bits = counts.bits_of(batch.slots[group + i / 2]);
                const BlockChoice choice = search_block(bits, words[i], exponent, tables, counts, totals);
                bytes[i] = static_cast<uint8_t>(choice.scale_byte);
                index[i] = choice.index;
                row[i] = Counts::spare_row();
            }
        }
        std::memcpy(batch.scale_bytes + 2 * group, bytes, 8);
        for (int i = 0; i < 8; ++i) count_row(rows + row[i], words + i);
        for (int i = 0; i < 8; i += 4) {
            const uint8_t* maps[4];
            for (int j = 0; j < 4; ++j) maps[j] = map_of(tables, index[i + j]);
            const size_t at = 16 * group + 8 * i;
            const __m256i codes = encode(split_nibbles(load_unaligned(batch.packed + at)), maps);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(batch.out + at), codes);
        }
    }
    alignas(32) int32_t lanes[8];
    store(lanes, equal_blocks);
    for (const int32_t lane : lanes) totals.equal_blocks += lane;
}

void convert_max(const Batch& batch, Counts& counts, Totals& totals) {
    uint8_t* rows = counts.rows();
    const Slot* slots = counts.slots();
    int64_t equal_blocks = 0;
    for (size_t group = 0; group < batch.num_groups; group += 2) {
        const Nibbles nibbles = split_nibbles(load_unaligned(batch.packed + 16 * group));
        alignas(32) uint64_t words[4];
        const __m256i counted = count_magnitudes(nibbles);
        store(words, counted);
        const uint32_t present = present_in_four(counted);
        const uint8_t* maps[4];
        for (int i = 0; i < 4; ++i) {
            const uint32_t occurring = present >> (8 * i) & 0xFF;
            const int largest = largest_magnitude(static_cast<uint8_t>(occurring));
            uint8_t* row = rows + slots[batch.slots[group + i / 2]].row + largest * kRowBytes;
            count_row(row, words + i);
            equal_blocks += (row[kInexactByte] & occurring) == 0;
            batch.scale_bytes[2 * group + i] = row[kScaleByte];
            maps[i] = row + kMapByte;
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(batch.out + 16 * group), encode(nibbles, maps));
    }
    totals.equal_blocks += equal_blocks;
}

}  // namespace k2::vectors
#endif
