#include "convert.hpp"

#include <cmath>
#include <limits>

#include "instructions.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

// Fill the fields of a slot that depend on its scale, under `mse`.
void place_in_tables(Slot& slot, uint32_t bits, int exponent) {
    const SplitScale scale = split_scale(bits);
    const int grid_index = 32 + (scale.mantissa + 15) / 16 - 8 - kLowestStep;
    // A zero scale has no tables and no position with a valid byte, so its blocks are searched one by one.
    const bool is_zero = scale.mantissa == 0;
    slot.table = is_zero ? 0 : (scale.mantissa - kNumMantissas) * kMantissaBytes;
    slot.first = is_zero ? -(1 << 12) : 8 * (10 - (exponent - scale.exponent)) + grid_index;
    slot.rank = is_zero ? 0 : (scale.mantissa - kNumMantissas) * kNumCandidates + kLastGridRank - grid_index;
}

// The output nibble of each source nibble under `max`, apart from that of zero.
void fill_map(float scale, int byte, float global_scale, uint8_t* map) {
    const float step = e4m3_value(byte) * global_scale;
    for (int k = 1; k < 9; ++k) {
        const float scaled = round_to_bf16(static_cast<float>(k) * scale) / step;
        const int code = nearest_code(scaled);
        map[8 - k] = static_cast<uint8_t>(code | (scaled > 0.0f ? 8 : 0));
        if (k < 8) map[8 + k] = static_cast<uint8_t>(code);
    }
}

// Fill the rows of a scale under `max`, one for each largest |q|: block scale, codes, and which of them are inexact.
void fill_max_rows(uint8_t* row, uint32_t bits, float global_scale) {
    const float scale = bf16_value(bits & 0x7FFF);
    for (int largest = 0; largest < kMaxRows; ++largest, row += kRowBytes) {
        const int byte = max_scale_byte(round_to_bf16(static_cast<float>(largest) * scale), global_scale);
        row[kScaleByte] = static_cast<uint8_t>(byte);
        fill_map(scale, byte, global_scale, row + kMapByte);
        const double exact_step = static_cast<double>(e4m3_value(byte)) * static_cast<double>(global_scale);
        for (int k = 1; k < 9; ++k) {
            const double wanted = static_cast<double>(k) * static_cast<double>(scale);
            const bool is_exact = wanted == kCodeValues[row[kMapByte + 8 - k] & 7] * exact_step;
            row[kInexactByte] = static_cast<uint8_t>(row[kInexactByte] | !is_exact << (k - 1));
        }
    }
}

// Convert in batches; `open` prepares a new slot for a scale, `convert` and `convert_rest` convert a batch.
template <class Open, class Convert, class ConvertRest>
Counted convert_batches(const Int4& source, uint8_t* out, uint8_t* scale_bytes, Rule rule, const Open& open,
                        const Convert& convert, const ConvertRest& convert_rest) {
    Counts& counts = thread_counts();
    Counted counted;
    int16_t slots[kBatchGroups];
    int64_t since_drained = 0;
    for (size_t first = 0; first < source.num_groups; first += kBatchGroups) {
        if (counts.is_full() || since_drained >= kMaxGroups) {
            counts.drain(rule, counted.pairs);
            since_drained = 0;
        }
        const size_t size = std::min<size_t>(kBatchGroups, source.num_groups - first);
        for (size_t i = 0; i < size; ++i) {
            const uint16_t bits = source.scale_bits[first + i];
            const int slot = counts.slot_of(bits);
            slots[i] = static_cast<int16_t>(slot >= 0 ? slot : open(counts, bits));
        }
        const size_t whole = uses_vectors() ? size / 4 * 4 : 0;
        const Batch batch{source.packed + 16 * first, slots, whole, out + 16 * first, scale_bytes + 2 * first};
        if (whole > 0) convert(batch, counts, counted.totals);
        if (whole < size) {
            const Batch rest{batch.packed + 16 * whole, slots + whole, size - whole, batch.out + 16 * whole,
                             batch.scale_bytes + 2 * whole};
            convert_rest(rest, counts, counted.totals);
        }
        since_drained += static_cast<int64_t>(size);
    }
    counts.drain(rule, counted.pairs);
    merge_pairs(counted.pairs);
    return counted;
}

// BF16 bits of 2**125: eight times it overflows. Infinity, NaN and all negative numbers have larger bits; -0.0 is
// usable.
constexpr uint16_t kFirstUnusableBits = 0x7E00;
constexpr uint16_t kMinusZeroBits = 0x8000;
// Groups for which the largest scale is found first: most chunks cannot raise amax and are skipped.
constexpr size_t kChunkGroups = 256;

K2_CLONES uint16_t largest_of(const uint16_t* scale_bits, size_t size) {
    uint16_t largest = 0;
    for (size_t i = 0; i < size; ++i) largest = std::max(largest, scale_bits[i]);
    return largest;
}

// The largest of the bits, with minus zero as zero.
uint16_t largest_bits_of(const uint16_t* scale_bits, size_t size) {
    const uint16_t all = largest_of(scale_bits, size);
    if (all < kFirstUnusableBits) return all;
    uint16_t largest = 0;
    for (size_t i = 0; i < size; ++i) {
        if (scale_bits[i] != kMinusZeroBits) largest = std::max(largest, scale_bits[i]);
    }
    return largest;
}

}  // namespace

BlockChoice search_block(uint16_t bits, uint64_t word, int exponent, const SearchTables& tables, Counts& counts,
                     Totals& totals) {
    const SplitScale scale = split_scale(bits);
    BlockChoice choice{kOneByte, 0};
    if (scale.mantissa == 0 || word == 0) {
        ++totals.equal_blocks;
    } else {
        const int offset = std::min(std::max(exponent - scale.exponent, kLowestOffset), kHighestOffset) - kLowestOffset;
        const double* errors = tables.full_errors + (scale.mantissa - kNumMantissas) * 9 * kNumCandidates;
        double best = std::numeric_limits<double>::infinity(), least = best;
        int best_rank = 0;
        for (int rank = 0; rank < kNumCandidates; ++rank) {
            double error = 0.0;
            for (int k = 1; k < 9; ++k) {
                error += static_cast<double>(word >> (8 * k - 8) & 0xFF) * errors[k * kNumCandidates + rank];
            }
            least = std::min(least, error);
            if (error < best && tables.scale_bytes[offset * kNumCandidates + rank] > 0) best = error, best_rank = rank;
        }
        totals.outside_normal += least < best;
        totals.equal_blocks += best == 0.0;
        choice.scale_byte = tables.scale_bytes[offset * kNumCandidates + best_rank];
        choice.index = (scale.mantissa - kNumMantissas) * kNumCandidates + best_rank;
    }
    counts.count_odd(static_cast<int64_t>(bits & 0x7FFF) << 8 | choice.scale_byte, word);
    return choice;
}

Counted convert_mse(const Int4& source, int exponent, const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes) {
    const auto open = [&](Counts& counts, uint16_t bits) {
        const int slot = counts.open_slot(bits, Rule::mse);
        place_in_tables(counts.slot(slot), bits, exponent);
        return slot;
    };
    return convert_batches(
        source, out, scale_bytes, Rule::mse, open,
        [&](const Batch& batch, Counts& counts, Totals& totals) {
            vectors::convert_mse(batch, exponent, tables, counts, totals);
        },
        [&](const Batch& batch, Counts& counts, Totals& totals) {
            portable::convert_mse(batch, exponent, tables, counts, totals);
        });
}

Counted convert_max(const Int4& source, float global_scale, uint8_t* out, uint8_t* scale_bytes) {
    const auto open = [&](Counts& counts, uint16_t bits) {
        const int slot = counts.open_slot(bits, Rule::max);
        fill_max_rows(counts.rows() + counts.slot(slot).row, bits, global_scale);
        return slot;
    };
    return convert_batches(source, out, scale_bytes, Rule::max, open, vectors::convert_max, portable::convert_max);
}

Figures figures_of(const Counted& counted, Rule rule, double global_scale, RowSums& sums) {
    Figures figures;
    figures.equal_blocks = counted.totals.equal_blocks;
    for (const Pair& pair : counted.pairs) {
        const float scale = bf16_value(static_cast<uint32_t>(pair.key >> 8)), block_scale = e4m3_value(pair.key & 0xFF);
        const double exact_scale = scale, step = static_cast<double>(block_scale) * global_scale;
        const float max_step = block_scale * static_cast<float>(global_scale);
        double energy = 0.0, error = 0.0;
        for (int k = 0; k < 9; ++k) {
            if (pair.counts[k] == 0) continue;
            const double count = static_cast<double>(pair.counts[k]), wanted = k * exact_scale;
            const int code = rule == Rule::max ? nearest_code(round_to_bf16(static_cast<float>(k) * scale) / max_step)
                                                 : nearest_code(4.0 * wanted, step);
            const double written = kCodeValues[code] * step, difference = std::fabs(wanted - written);
            energy += count * (wanted * wanted);
            error += count * (difference * difference);
            if (wanted != 0.0) {
                figures.num_nonzero += pair.counts[k];
                if (difference == 0.0) figures.equal_nonzero += pair.counts[k];
                figures.max_error_steps = std::max(figures.max_error_steps, difference / exact_scale);
                figures.least_scale = std::min(figures.least_scale, exact_scale);
            }
            if (round_half_even(exact_scale > 0.0 ? written / exact_scale : 0.0) == k) {
                figures.recoverable_codes += pair.counts[k];
            }
        }
        figures.num_five_or_seven += pair.counts[5] + pair.counts[7];
        figures.num_minus_eight += pair.counts[8];
        sums.energy += energy;
        sums.error += error;
    }
    return figures;
}

Measured measure(const Int4& source) {
    Measured measured{0, 0.0f, true};
    for (size_t first = 0; first < source.num_groups; first += kChunkGroups) {
        const size_t stop = std::min(first + kChunkGroups, source.num_groups);
        const uint16_t chunk_bits = largest_bits_of(source.scale_bits + first, stop - first);
        measured.largest_bits = std::max<uint32_t>(measured.largest_bits, chunk_bits);
        if (measured.largest_bits >= kFirstUnusableBits) return {measured.largest_bits, 0.0f, false};
        if (!(8.0f * bf16_value(chunk_bits) > measured.amax)) continue;
        for (size_t group = first; group < stop; ++group) {
            const float scale = bf16_value(source.scale_bits[group] & 0x7FFF);
            if (!(8.0f * scale > measured.amax)) continue;
            const uint8_t* packed = source.packed + 16 * group;
            const int largest = largest_magnitude(present_magnitudes(block_word(packed)) |
                                                  present_magnitudes(block_word(packed + 8)));
            measured.amax = std::max(measured.amax, round_to_bf16(static_cast<float>(largest) * scale));
        }
    }
    return measured;
}

}  // namespace k2
