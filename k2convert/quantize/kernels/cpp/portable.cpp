// Batches in plain C++, for CPUs without vectors and for the groups that remain after multiples of four.
#include <cstring>

#include "groups.hpp"
#include "numbers.hpp"

namespace k2::portable {

namespace {

void encode_block(const uint8_t* packed, const uint8_t* map, uint8_t* out) {
    for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(map[packed[i] & 15] | map[packed[i] >> 4] << 4);
}

// The least of error << 8 | (255 - position) over the 16 candidates of a window; errors minus 32768 for each weight.
int32_t least_key(const SearchTables& tables, size_t mantissa, int window, uint64_t word) {
    const int16_t* errors = tables.errors + (mantissa + static_cast<size_t>(window) * kWindowBytes) / sizeof(int16_t);
    int32_t keys[kLanes];
    std::memcpy(keys, tables.keys + window * kLanes, sizeof keys);
    for (int pair = 0; pair < 4; ++pair, errors += 2 * kLanes) {
        const int32_t first = static_cast<int32_t>(word >> (16 * pair) & 0xFF) << 8;
        const int32_t second = static_cast<int32_t>(word >> (16 * pair + 8) & 0xFF) << 8;
        for (int lane = 0; lane < kLanes; ++lane) keys[lane] += first * errors[2 * lane] + second * errors[2 * lane + 1];
    }
    int32_t least = keys[0];
    for (int lane = 1; lane < kLanes; ++lane) least = std::min(least, keys[lane]);
    return least;
}

int32_t search_block(const SearchTables& tables, size_t mantissa, uint8_t present, uint64_t word) {
    const int window = tables.windows[present];
    if (window < kFirstPair) return least_key(tables, mantissa, window, word);
    const int* both = kPairs[window - kFirstPair];
    return std::min(least_key(tables, mantissa, both[0], word), least_key(tables, mantissa, both[1], word));
}

int32_t num_counted(uint64_t word) {
    int32_t sum = 0;
    for (; word != 0; word >>= 8) sum += word & 0xFF;
    return sum;
}

}  // namespace

void convert_mse(const Batch& batch, int exponent, const SearchTables& tables, Counts& counts, Totals& totals) {
    for (size_t block = 0; block < 2 * batch.num_groups; ++block) {
        const uint8_t* packed = batch.packed + 8 * block;
        const int number = batch.slots[block / 2];
        const Slot& slot = counts.slot(number);
        const uint64_t word = block_word(packed);
        const uint8_t present = present_magnitudes(word);
        const int32_t key = search_block(tables, static_cast<size_t>(slot.table), present, word);
        const int position = ~key & 0xFF, scale_byte = slot.first + position;
        BlockChoice choice{scale_byte, slot.rank - position};
        if (word == 0 || scale_byte < kMinNormalByte || scale_byte > kMaxByte ||
            capped_magnitudes(tables, choice.index, present) != 0) {
            choice = search_block(counts.bits_of(number), word, exponent, tables, counts, totals);
        } else {
            count_row(counts.rows() + slot.row + position * kRowBytes, word);
            totals.equal_blocks += (key >> 8) == -32768 * num_counted(word);
        }
        batch.scale_bytes[block] = static_cast<uint8_t>(choice.scale_byte);
        encode_block(packed, map_of(tables, choice.index), batch.out + 8 * block);
    }
}

void convert_max(const Batch& batch, Counts& counts, Totals& totals) {
    for (size_t block = 0; block < 2 * batch.num_groups; ++block) {
        const uint8_t* packed = batch.packed + 8 * block;
        const uint64_t word = block_word(packed);
        const uint8_t present = present_magnitudes(word);
        uint8_t* row = counts.rows() + counts.slot(batch.slots[block / 2]).row + largest_magnitude(present) * kRowBytes;
        count_row(row, word);
        totals.equal_blocks += (row[kInexactByte] & present) == 0;
        batch.scale_bytes[block] = row[kScaleByte];
        encode_block(packed, row + kMapByte, batch.out + 8 * block);
    }
}

}  // namespace k2::portable
