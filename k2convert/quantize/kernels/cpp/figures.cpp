// The figures of counted pairs and of sampled blocks, operation by operation as in metrics/ (float64, in the same
// order), so that they are equal to the last bit.
#include <cmath>
#include <cstring>

#include "instructions.hpp"
#include "int4.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

// Blocks whose pairs are counted between two checks of the room in the hash table.
constexpr size_t kSampleBatch = 2 * kBatchGroups;
constexpr size_t kBoundBatch = 32;
// How many sampled blocks ahead memory is prefetched.
constexpr size_t kPrefetched = 16;

// The sum of finite values rounded once, as math.fsum returns it.
double exact_sum(const std::vector<double>& values) {
    // Shewchuk's algorithm: partial sums that do not overlap, ascending; then one rounding, ties to even.
    std::vector<double> partials;
    for (double value : values) {
        size_t kept = 0;
        for (double partial : partials) {
            if (std::fabs(value) < std::fabs(partial)) std::swap(value, partial);
            const double high = value + partial, low = partial - (high - value);
            if (low != 0.0) partials[kept++] = low;
            value = high;
        }
        partials.resize(kept);
        partials.push_back(value);
    }
    if (partials.empty()) return 0.0;
    double high = partials.back(), low = 0.0;
    partials.pop_back();
    while (!partials.empty()) {
        const double before = high, partial = partials.back();
        partials.pop_back();
        high = before + partial;
        low = partial - (high - before);
        if (low != 0.0) break;
    }
    // If the sum is half way between two numbers, the next partial decides.
    if (!partials.empty() && ((low < 0.0 && partials.back() < 0.0) || (low > 0.0 && partials.back() > 0.0))) {
        const double doubled = 2.0 * low, rounded = high + doubled;
        if (doubled == rounded - high) high = rounded;
    }
    return high;
}

struct PairError {
    double energy = 0, error = 0;
};

int code_of(int k, float scale, double step, float plain_step, Rule rule) {
    if (rule == Rule::plain) return nearest_code(round_to_bf16(static_cast<float>(k) * scale) / plain_step);
    return nearest_code(4.0 * (static_cast<double>(k) * static_cast<double>(scale)), step);
}

PairError evaluate(int64_t key, const int64_t* counts, Rule rule, double global_scale, Figures* figures) {
    const float scale = bf16_value(static_cast<uint32_t>(key >> 8));
    const double exact_scale = scale;
    const float block_scale = e4m3_value(static_cast<int>(key & 0xFF));
    const double step = static_cast<double>(block_scale) * global_scale;
    const float plain_step = block_scale * static_cast<float>(global_scale);
    PairError sums;
    for (int k = 0; k < 9; ++k) {
        const double count = static_cast<double>(counts[k]);
        const double wanted = static_cast<double>(k) * exact_scale;
        const double written = kCodeValues[code_of(k, scale, step, plain_step, rule)] * step;
        const double difference = wanted - written;
        sums.energy += count * (wanted * wanted);
        sums.error += count * (difference * difference);
        if (figures == nullptr) continue;
        if (wanted != 0.0) {
            figures->num_nonzero += counts[k];
            if (difference == 0.0) figures->equal_nonzero += counts[k];
            if (counts[k] > 0) {
                figures->max_error_steps = std::max(figures->max_error_steps, std::fabs(difference) / exact_scale);
            }
        }
        const double steps = exact_scale > 0.0 ? written / exact_scale : 0.0;
        if (round_half_even(steps) == k) figures->recoverable_codes += counts[k];
    }
    return sums;
}

// The squared error of blocks with these histograms and keys.
double error_of_blocks(const std::vector<uint64_t>& words, const std::vector<int64_t>& keys, Rule rule,
                       double global_scale) {
    Tally& tally = thread_tally();
    std::vector<Pair> pairs;
    for (size_t i = 0; i < words.size(); ++i) {
        if (i % kSampleBatch == 0 && tally.is_full()) tally.drain(rule, pairs);
        tally.count_odd(keys[i], words[i]);
    }
    tally.drain(rule, pairs);
    merge_pairs(pairs);
    std::vector<double> errors(pairs.size());
    for (size_t i = 0; i < pairs.size(); ++i) {
        errors[i] = evaluate(pairs[i].key, pairs[i].counts, rule, global_scale, nullptr).error;
    }
    return exact_sum(errors);
}

// The bounds of up to kBoundBatch blocks with these scales, see metrics/block_bound.py; one vector lane for each block.
K2_CLONES void bound_blocks(const uint64_t* words, const double* scales, size_t size, const Assignments& assignments,
                            double* bounds) {
    double counts[8][kBoundBatch], sums[12][kBoundBatch] = {}, energy[kBoundBatch] = {}, explained[kBoundBatch] = {};
    for (int k = 0; k < 8; ++k) {
        for (size_t i = 0; i < kBoundBatch; ++i) {
            counts[k][i] = static_cast<int32_t>(i < size ? words[i] >> (8 * k) & 0xFF : 0);
            energy[i] += counts[k][i] * static_cast<double>((k + 1) * (k + 1));
        }
        for (int j = 0; j < 12; ++j) {
            for (size_t i = 0; i < kBoundBatch; ++i) sums[j][i] += counts[k][i] * assignments[k][j];
        }
    }
    for (int j = 0; j < 6; ++j) {
        for (size_t i = 0; i < kBoundBatch; ++i) {
            const double squares = sums[j + 6][i] > 1.0 ? sums[j + 6][i] : 1.0;
            const double share = sums[j][i] * sums[j][i] / squares;
            explained[i] = share > explained[i] ? share : explained[i];
        }
    }
    for (size_t i = 0; i < size; ++i) bounds[i] = (energy[i] - explained[i]) * (scales[i] * scales[i]);
}

// The histograms of blocks of 8 bytes.
std::vector<uint64_t> count_blocks(const std::vector<uint64_t>& packed) {
    std::vector<uint64_t> words(packed.size());
    const auto* bytes = reinterpret_cast<const uint8_t*>(packed.data());
    const size_t whole = uses_avx2() ? packed.size() / 4 * 4 : 0;
    avx2::count_blocks(bytes, whole, words.data());
    portable::count_blocks(bytes + 8 * whole, packed.size() - whole, words.data() + whole);
    return words;
}

}  // namespace

Figures figures_of_pairs(const int64_t* keys, const int64_t* counts, size_t num_pairs, Rule rule, double global_scale) {
    Figures figures;
    std::vector<double> energies(num_pairs), errors(num_pairs);
    for (size_t i = 0; i < num_pairs; ++i) {
        const PairError sums = evaluate(keys[i], counts + 9 * i, rule, global_scale, &figures);
        energies[i] = sums.energy;
        errors[i] = sums.error;
    }
    figures.energy = exact_sum(energies);
    figures.squared_error = exact_sum(errors);
    return figures;
}

Sampled sample(const Int4& source, const uint8_t* scale_bytes, size_t first, size_t stride, Rule rule,
               double global_scale, float plain_scale, const Assignments& assignments) {
    const size_t size = (2 * source.num_groups - first + stride - 1) / stride;
    std::vector<uint64_t> packed(size);
    std::vector<int64_t> keys(size);
    std::vector<double> scales(size), bounds(size);
    for (size_t i = 0, block = first; i < size; ++i, block += stride) {
        // Sampled blocks are on cache lines far from each other.
        const size_t ahead = std::min(block + kPrefetched * stride, 2 * source.num_groups - 1);
        __builtin_prefetch(source.packed + 8 * ahead);
        __builtin_prefetch(source.scale_bits + ahead / 2);
        __builtin_prefetch(scale_bytes + ahead);
        const int64_t bits = source.scale_bits[block / 2] & 0x7FFF;
        std::memcpy(&packed[i], source.packed + 8 * block, 8);
        keys[i] = bits << 8 | scale_bytes[block];
        scales[i] = bf16_value(static_cast<uint32_t>(bits));
    }
    const std::vector<uint64_t> words = count_blocks(packed);
    for (size_t i = 0; i < size; i += kBoundBatch) {
        bound_blocks(&words[i], &scales[i], std::min(kBoundBatch, size - i), assignments, &bounds[i]);
    }
    Sampled sampled{error_of_blocks(words, keys, rule, global_scale), 0.0, exact_sum(bounds)};
    sampled.plain = sampled.achieved;
    if (rule != Rule::plain || static_cast<double>(plain_scale) != global_scale) {
        for (size_t i = 0; i < words.size(); ++i) {
            const int64_t bits = keys[i] >> 8;
            int largest = 0;
            while (present_magnitudes(words[i]) >> largest) ++largest;
            const float amax = round_to_bf16(static_cast<float>(largest) * static_cast<float>(scales[i]));
            keys[i] = bits << 8 | plain_scale_byte(amax, plain_scale);
        }
        sampled.plain = error_of_blocks(words, keys, Rule::plain, plain_scale);
    }
    return sampled;
}

}  // namespace k2
