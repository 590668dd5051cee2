// What follows from counted pairs and from sampled blocks, operation by operation as in formats/ (float64, in the order
// given there), so that figures agree to the last bit.
#include <cmath>

#include "int4.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

// Blocks whose pairs may be counted before the hash table has to be asked for room.
constexpr size_t kSampleBatch = 2 * kBatchGroups;

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

// The bound of a block, see formats.block_bound.
double block_bound(uint64_t word, double scale, const Assignments& assignments) {
    double energy = 0.0, sums[12] = {};
    for (int k = 0; k < 8; ++k) {
        const double count = static_cast<double>(word >> (8 * k) & 0xFF);
        energy += count * static_cast<double>((k + 1) * (k + 1));
        for (int i = 0; i < 12; ++i) sums[i] += count * assignments[k][i];
    }
    double explained = 0.0;
    for (int i = 0; i < 6; ++i) explained = std::max(explained, sums[i] * sums[i] / std::max(sums[i + 6], 1.0));
    return (energy - explained) * (scale * scale);
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
    std::vector<uint64_t> words;
    std::vector<int64_t> keys;
    std::vector<double> bounds;
    const size_t size = (2 * source.num_groups - first + stride - 1) / stride;
    words.reserve(size), keys.reserve(size), bounds.reserve(size);
    for (size_t block = first; block < 2 * source.num_groups; block += stride) {
        const int64_t bits = source.scale_bits[block / 2] & 0x7FFF;
        words.push_back(block_word(source.packed + 8 * block));
        keys.push_back(bits << 8 | scale_bytes[block]);
        bounds.push_back(block_bound(words.back(), bf16_value(static_cast<uint32_t>(bits)), assignments));
    }
    Sampled sampled{error_of_blocks(words, keys, rule, global_scale), 0.0, exact_sum(bounds)};
    sampled.plain = sampled.achieved;
    if (rule != Rule::plain || static_cast<double>(plain_scale) != global_scale) {
        for (size_t i = 0; i < words.size(); ++i) {
            const int64_t bits = keys[i] >> 8;
            int largest = 0;
            while (present_magnitudes(words[i]) >> largest) ++largest;
            const float amax = round_to_bf16(static_cast<float>(largest) * bf16_value(static_cast<uint32_t>(bits)));
            keys[i] = bits << 8 | plain_scale_byte(amax, plain_scale);
        }
        sampled.plain = error_of_blocks(words, keys, Rule::plain, plain_scale);
    }
    return sampled;
}

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
    // Half way between two numbers the next partial decides.
    if (!partials.empty() && ((low < 0.0 && partials.back() < 0.0) || (low > 0.0 && partials.back() > 0.0))) {
        const double doubled = 2.0 * low, rounded = high + doubled;
        if (doubled == rounded - high) high = rounded;
    }
    return high;
}

}  // namespace k2
