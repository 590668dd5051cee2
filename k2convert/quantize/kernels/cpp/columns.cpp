#include "columns.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "instructions.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

// How a block of 16 columns falls into groups with equal exponents.
struct Plan {
    int num_groups = 0;
    int8_t exponents[kNumExponents];
    uint8_t sizes[kNumExponents] = {};
    uint16_t importances[kNumExponents] = {};
    // For each column.
    uint8_t groups[kBlock], importance[kBlock];
    SplitGroups split_groups{};
    SplitImportance split_importance{};
};

std::vector<Plan> make_plans(const Columns& columns) {
    std::vector<Plan> plans(columns.size / kBlock);
    for (size_t column = 0; column < columns.size; ++column) {
        Plan& plan = plans[column / kBlock];
        const int8_t exponent = columns.exponents ? columns.exponents[column] : int8_t{0};
        int group = 0;
        while (group < plan.num_groups && plan.exponents[group] != exponent) ++group;
        if (group == plan.num_groups) plan.exponents[plan.num_groups++] = exponent;
        const uint8_t importance = columns.importance ? columns.importance[column] : uint8_t{1};
        plan.groups[column % kBlock] = static_cast<uint8_t>(group);
        plan.importance[column % kBlock] = importance;
        ++plan.sizes[group];
        plan.importances[group] = static_cast<uint16_t>(plan.importances[group] + importance);
        const size_t split = column % kBlock / 2 + 8 * (column & 1);
        plan.split_groups.masks[group][split] = 255;
        plan.split_importance.values[split] = importance;
    }
    return plans;
}

// Scales of different octaves differ in the upper bits of a key alone, so these must count.
size_t hash_of(int64_t key) { return static_cast<size_t>(static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15u >> 40); }

// Counts by pair in a hash table: a row of 32-bit counters for each key.
//
//     0 .. 7    elements with |q| = 1..8       8   blocks      9    elements
//     16 .. 23  their summed importance        24  summed importance of all elements
class ColumnTally {
public:
    ColumnTally() : keys_(kCapacity, -1), rows_(new Row[kCapacity]) {}

    struct alignas(64) Row {
        uint32_t counts[8], blocks, elements, unused[6];
        uint32_t sums[8], importance, also_unused[7];
    };

    Row& row(int64_t key) {
        size_t place = hash_of(key) % kCapacity;
        while (keys_[place] != key) {
            if (keys_[place] < 0) {
                keys_[place] = key;
                std::memset(&rows_[place], 0, sizeof(Row));
                used_.push_back(place);
                break;
            }
            place = (place + 1) & (kCapacity - 1);
        }
        return rows_[place];
    }

    // Elements to be counted later, when their row is in the cache: rows are megabytes apart in no order.
    struct alignas(16) Pending {
        uint16_t counts[8], sums[8];
        int64_t key;
        uint16_t blocks, elements, importance;
    };

    Pending& add(int64_t key) {
        if (num_pending_ == kMaxPending) count_pending();
        const size_t place = hash_of(key) % kCapacity;
        __builtin_prefetch(&keys_[place]);
        __builtin_prefetch(rows_[place].counts, 1);
        __builtin_prefetch(rows_[place].sums, 1);
        Pending& pending = pending_[num_pending_++];
        pending.key = key;
        return pending;
    }

    // Whether the next block could need more room, or its counters overflow.
    bool is_full(int64_t blocks) const { return used_.size() > kCapacity / 2 || blocks >= kMaxBlocks; }

    void drain(std::vector<ColumnPair>& pairs) {
        count_pending();
        for (const size_t place : used_) {
            const Row& row = rows_[place];
            ColumnPair pair{keys_[place], row.blocks, {}, {}};
            int64_t counted = 0, summed = 0;
            for (int k = 1; k < 9; ++k) {
                counted += pair.counts[k] = row.counts[k - 1];
                summed += pair.sums[k] = row.sums[k - 1];
            }
            pair.counts[0] = row.elements - counted;
            pair.sums[0] = row.importance - summed;
            pairs.push_back(pair);
            keys_[place] = -1;
        }
        used_.clear();
    }

private:
    void count_pending() {
        for (int i = 0; i < num_pending_; ++i) {
            const Pending& pending = pending_[i];
            Row& added = row(pending.key);
            for (int k = 0; k < 8; ++k) added.counts[k] += pending.counts[k];
            for (int k = 0; k < 8; ++k) added.sums[k] += pending.sums[k];
            added.blocks += pending.blocks;
            added.elements += pending.elements;
            added.importance += pending.importance;
        }
        num_pending_ = 0;
    }

    static constexpr size_t kCapacity = 1 << 16;
    static constexpr int kMaxPending = 128;
    // A block adds at most 16 * 255 to a counter.
    static constexpr int64_t kMaxBlocks = 1 << 20;
    std::vector<int64_t> keys_;
    std::unique_ptr<Row[]> rows_;
    std::vector<size_t> used_;
    Pending pending_[kMaxPending];
    int num_pending_ = 0;
};

// Sort pairs by key and add up those with equal keys.
void merge_column_pairs(std::vector<ColumnPair>& pairs) {
    std::vector<std::pair<int64_t, size_t>> order(pairs.size());
    for (size_t i = 0; i < pairs.size(); ++i) order[i] = {pairs[i].key, i};
    std::sort(order.begin(), order.end());
    std::vector<ColumnPair> merged;
    merged.reserve(pairs.size());
    for (const auto& [key, i] : order) {
        if (merged.empty() || merged.back().key != key) {
            merged.push_back(pairs[i]);
            continue;
        }
        merged.back().num_blocks += pairs[i].num_blocks;
        for (int k = 0; k < 9; ++k) merged.back().counts[k] += pairs[i].counts[k], merged.back().sums[k] += pairs[i].sums[k];
    }
    pairs.swap(merged);
}

// s * 2**-a as BF16 bits without the sign; exact, as formats/columns.py makes sure.
uint32_t divided_bits(uint32_t bits, int exponent) {
    static constexpr float divisors[kNumExponents] = {16.0f, 8.0f, 4.0f, 2.0f, 1.0f, 0.5f, 0.25f, 0.125f, 0.0625f};
    return bits_as<uint32_t>(bf16_value(bits & 0x7FFF) * divisors[exponent + kMaxExponent]) >> 16;
}

// Errors of |q| = 1..8 for grid indices from -kTableBelow on, in units of (s / 2ms)**2, whole numbers times a power of
// two: float64 [128, 8, kTableSize].
constexpr int kTableBelow = 48, kTableSize = 208;
struct WideErrors {
    double errors[kNumMantissas][8][kTableSize];
    float rounded_errors[kNumMantissas][8][kTableSize];
    WideErrors() {
        for (int ms = 0; ms < kNumMantissas; ++ms) {
            for (int k = 1; k < 9; ++k) {
                const double wanted = 2.0 * k * (ms + kNumMantissas);
                for (int i = 0; i < kTableSize; ++i) {
                    const int grid_index = i - kTableBelow;
                    const double step = std::ldexp(8.0 + (grid_index & 7), grid_index >> 3);
                    const double difference = wanted - 2.0 * kCodeValues[nearest_code(2.0 * wanted, step)] * step;
                    errors[ms][k - 1][i] = difference * difference;
                    rounded_errors[ms][k - 1][i] = static_cast<float>(difference * difference);
                }
            }
        }
    }
};

const WideErrors& wide_errors() {
    static const auto errors = std::make_unique<const WideErrors>();
    return *errors;
}

// The last of the least sums over terms, among `count` candidates, a multiple of eight. Sums are exact.
int last_least(const Term* terms, int num_terms, int count) {
    double least[8], places[8];
    for (int i = 0; i < 8; ++i) least[i] = std::numeric_limits<double>::infinity(), places[i] = 0.0;
    for (int first = 0; first < count; first += 8) {
        double sums[8] = {};
        for (int t = 0; t < num_terms; ++t) {
            const double weight = terms[t].weight;
            const double* errors = terms[t].errors + first;
            for (int i = 0; i < 8; ++i) sums[i] += weight * errors[i];
        }
        const double place = first;
        for (int i = 0; i < 8; ++i) {
            places[i] = sums[i] <= least[i] ? place : places[i];
            least[i] = sums[i] <= least[i] ? sums[i] : least[i];
        }
    }
    int best = 0;
    for (int i = 1; i < 8; ++i) {
        const bool is_later = places[i] + i > places[best] + best;
        if (least[i] < least[best] || (least[i] == least[best] && is_later)) best = i;
    }
    return static_cast<int>(places[best]) + best;
}

void count_fields(const uint8_t* packed, const Plan& plan, Fields& fields) {
    std::memset(fields.counts, 0, plan.num_groups * sizeof fields.counts[0]);
    std::memset(fields.sums, 0, plan.num_groups * sizeof fields.sums[0]);
    std::memset(fields.present, 0, sizeof fields.present);
    for (int i = 0; i < kBlock; ++i) {
        const int nibble = packed[i / 2] >> (4 * (i & 1)) & 15;
        if (nibble == 8) continue;
        const int group = plan.groups[i], k = nibble < 8 ? 8 - nibble : nibble - 8;
        ++fields.counts[group][k - 1];
        fields.sums[group][k - 1] = static_cast<uint16_t>(fields.sums[group][k - 1] + plan.importance[i]);
        fields.present[group] = static_cast<uint8_t>(fields.present[group] | 1 << (k - 1));
    }
}

// The outcome of a block under `optimal`; any grid index, since a scale beyond the grid has codes of one kind.
struct Chosen {
    int grid_index, scale_byte;
};

// All candidates of rules/column_search.py, in its unit of s / 32 ms.
Chosen search_all(const Fields& fields, const Plan& plan, const SplitScale& scale, int exponent, int64_t& outside_normal) {
    constexpr int lowest_shift = -kMaxExponent, past_shift = 10 + kMaxExponent;
    const int offset = std::min(std::max(exponent - scale.exponent, lowest_shift - 6), past_shift + 9);
    const double infinity = std::numeric_limits<double>::infinity();
    double least = infinity, best = infinity;
    Chosen chosen{0, kMaxByte};
    const auto attempt = [&](double step, bool is_grid, int grid_index, int byte, bool exists) {
        double error = 0.0;
        for (int group = 0; group < plan.num_groups; ++group) {
            const double unit = std::ldexp(static_cast<double>(scale.mantissa), kMaxExponent - plan.exponents[group]);
            for (int k = 1; k < 9; ++k) {
                if (fields.sums[group][k - 1] == 0) continue;
                const double wanted = k * unit;
                const double value = is_grid ? kCodeValues[nearest_code(4.0 * wanted, step)] * step : 0.0;
                const double difference = 2.0 * (wanted - value);
                error += fields.sums[group][k - 1] * (difference * difference);
            }
        }
        least = std::min(least, error);
        if (exists && error < best) best = error, chosen = {grid_index, byte};
    };
    attempt(0.0, false, 8 * 64, kMaxByte, offset + 5 >= past_shift);
    for (int grid_index = 8 * past_shift - 1; grid_index >= 8 * lowest_shift; --grid_index) {
        const int byte = 8 * (10 - offset) + grid_index;
        attempt(std::ldexp(8.0 + (grid_index & 7), (grid_index >> 3) - lowest_shift), true, grid_index, byte,
                byte >= kMinNormalByte && byte <= kMaxByte);
    }
    attempt(0.0, false, -8 * 64, kMaxByte, offset + 5 < lowest_shift);
    outside_normal += least < best;
    return chosen;
}

Mapping plain_mapping(uint32_t bits, int byte, float global_scale) {
    Mapping mapping{};
    const float scale = bf16_value(bits), step = e4m3_value(byte) * global_scale;
    const double exact_step = static_cast<double>(e4m3_value(byte)) * static_cast<double>(global_scale);
    for (int k = 1; k < 9; ++k) {
        const float scaled = round_to_bf16(static_cast<float>(k) * scale) / step;
        const int code = nearest_code(scaled);
        mapping.map[8 - k] = static_cast<uint8_t>(code | (scaled > 0.0f ? 8 : 0));
        if (k < 8) mapping.map[8 + k] = static_cast<uint8_t>(code);
        const bool is_exact = static_cast<double>(k) * static_cast<double>(scale) == kCodeValues[code] * exact_step;
        mapping.inexact = static_cast<uint8_t>(mapping.inexact | !is_exact << (k - 1));
    }
    return mapping;
}

float largest_magnitude(const Fields& fields, const Plan& plan, const uint32_t* bits) {
    float amax = 0.0f;
    for (int group = 0; group < plan.num_groups; ++group) {
        int largest = 0;
        while (fields.present[group] >> largest) ++largest;
        amax = std::max(amax, round_to_bf16(static_cast<float>(largest) * bf16_value(bits[group])));
    }
    return amax;
}

// Converts block after block.
class Converter {
public:
    Converter(Rule rule, int exponent, float global_scale, const SearchTables& tables, ColumnTally& tally,
              ColumnCounts& counted)
        : rule_(rule), exponent_(exponent), global_scale_(global_scale), known_(rule == Rule::plain ? kKnown : 0), tables_(tables),
          inexact_(packed_errors(tables).inexact), wide_(wide_errors()), tally_(tally), counted_(counted) {}

    void convert(const uint8_t* packed, uint16_t scale_bits, const Plan& plan, uint8_t* out, uint8_t* scale_byte) {
        Fields fields;
        if (uses_avx2_) {
            avx2::count_fields(packed, plan.split_groups, plan.split_importance, plan.num_groups, fields);
        } else {
            count_fields(packed, plan, fields);
        }
        uint32_t bits[kNumExponents];
        for (int group = 0; group < plan.num_groups; ++group) bits[group] = divided_bits(scale_bits, plan.exponents[group]);
        Mapping mappings[kNumExponents];
        *scale_byte = static_cast<uint8_t>(rule_ == Rule::plain ? choose_plain(fields, plan, bits, mappings)
                                                                 : choose_optimal(fields, plan, scale_bits, mappings));
        bool is_equal = true;
        for (int group = 0; group < plan.num_groups; ++group) {
            is_equal &= (mappings[group].inexact & fields.present[group]) == 0;
            ColumnTally::Pending& added = tally_.add(static_cast<int64_t>(bits[group]) << 8 | *scale_byte);
            std::memcpy(added.counts, fields.counts[group], sizeof added.counts);
            std::memcpy(added.sums, fields.sums[group], sizeof added.sums);
            added.blocks = group == 0;
            added.elements = plan.sizes[group];
            added.importance = plan.importances[group];
        }
        counted_.equal_blocks += is_equal;
        if (uses_avx2_) return avx2::encode_groups(packed, plan.split_groups, mappings, plan.num_groups, out);
        for (int i = 0; i < kBlock; i += 2) {
            const uint8_t byte = packed[i / 2];
            out[i / 2] = static_cast<uint8_t>(mappings[plan.groups[i]].map[byte & 15] |
                                              mappings[plan.groups[i + 1]].map[byte >> 4] << 4);
        }
    }

private:
    int choose_plain(const Fields& fields, const Plan& plan, const uint32_t* bits, Mapping* mappings) {
        const int byte = plain_scale_byte(largest_magnitude(fields, plan, bits), global_scale_);
        for (int group = 0; group < plan.num_groups; ++group) {
            const int64_t key = static_cast<int64_t>(bits[group]) << 8 | byte;
            Known& known = known_[hash_of(key) % kKnown];
            if (known.key != key) known = {key, plain_mapping(bits[group], byte, global_scale_)};
            mappings[group] = known.mapping;
        }
        return byte;
    }

    int choose_optimal(const Fields& fields, const Plan& plan, uint16_t scale_bits, Mapping* mappings) {
        const SplitScale scale = split_scale(scale_bits & 0x7FFF);
        int lowest = kNumExponents, highest = -kNumExponents;
        for (int group = 0; group < plan.num_groups; ++group) {
            if (fields.present[group] == 0) continue;
            lowest = std::min<int>(lowest, plan.exponents[group]);
            highest = std::max<int>(highest, plan.exponents[group]);
        }
        if (scale.mantissa == 0 || lowest > highest) {
            for (int group = 0; group < plan.num_groups; ++group) mappings[group] = Mapping{};
            return kOneByte;
        }
        const int table = scale.mantissa - kNumMantissas;
        const int first = grid_index_of_one(scale.mantissa) - kBelowOne - 8 * highest;
        const int more = 8 * (highest - lowest);
        Term terms[kBlock];
        int num_terms = 0;
        for (int group = 0; group < plan.num_groups; ++group) {
            const int exponent = plan.exponents[group], at = first + 8 * exponent + kTableBelow;
            const double unit = static_cast<double>(1 << 2 * std::max(highest - exponent, 0));
            for (unsigned present = fields.present[group]; present != 0; present &= present - 1) {
                const int k = __builtin_ctz(present);
                const double weight = fields.sums[group][k] * unit;
                terms[num_terms++] = {weight, wide_.errors[table][k] + at, wide_.rounded_errors[table][k] + at};
            }
        }
        const auto least_of = [&](int count) {
            return uses_avx2_ ? avx2::last_least(terms, num_terms, count) : last_least(terms, num_terms, count);
        };
        int found = least_of(kSearchedFirst + more);
        if (found >= kBelowOne + kLastOctave + more) found = least_of(kSearched + more);
        Chosen chosen{first + found, 0};
        chosen.scale_byte = 8 * (10 - (exponent_ - scale.exponent)) + chosen.grid_index;
        if (chosen.scale_byte < kMinNormalByte || chosen.scale_byte > kMaxByte) {
            chosen = search_all(fields, plan, scale, exponent_, counted_.outside_normal);
        }
        for (int group = 0; group < plan.num_groups; ++group) {
            const int place = table * kNumCandidates + rank_of(chosen.grid_index + 8 * plan.exponents[group]);
            std::memcpy(mappings[group].map, map_of(tables_, place), 16);
            mappings[group].inexact = inexact_[place];
        }
        return chosen.scale_byte;
    }

    static constexpr size_t kKnown = 1 << 14;
    struct Known {
        int64_t key = -1;
        Mapping mapping;
    };

    const bool uses_avx2_ = uses_avx2();
    const Rule rule_;
    const int exponent_;
    const float global_scale_;
    // Mappings of `plain` that were computed last.
    std::vector<Known> known_;
    const SearchTables& tables_;
    const uint8_t* inexact_;
    const WideErrors& wide_;
    ColumnTally& tally_;
    ColumnCounts& counted_;
};

// The histogram of |q| = 1..8 of a block of 8 bytes, a byte each.
using Histogram = uint64_t;

void count_block(ColumnTally::Pending& added, Histogram histogram, const uint64_t words[2], uint32_t importance) {
    for (int k = 0; k < 8; ++k) added.counts[k] = histogram >> (8 * k) & 0xFF;
    std::memcpy(added.sums, words, sizeof added.sums);
    added.blocks = 1;
    added.elements = kBlock;
    added.importance = static_cast<uint16_t>(importance);
}

// Converts groups of columns with AVX2; `converter` takes the blocks with exponents and those that it cannot settle.
class WeightedConverter {
public:
    WeightedConverter(const std::vector<Plan>& plans, int exponent, const SearchTables& tables, ColumnTally& tally,
                      ColumnCounts& counted, Converter& converter)
        : plans_(plans), split_(plans.size()), exponent_(exponent), tables_(tables), packed_(packed_errors(tables)),
          tally_(tally), counted_(counted), converter_(converter) {
        for (size_t block = 0; block < plans.size(); ++block) split_[block] = plans[block].split_importance;
    }

    void convert(const Int4& source, size_t first, size_t size, size_t place, uint8_t* out, uint8_t* scale_bytes) {
        uint64_t histograms[2 * kBatchGroups];
        avx2::count_blocks(source.packed + 16 * first, 2 * size, histograms);
        for (size_t i = 0; i < size; ++i, place += 2) {
            if (place == plans_.size()) place = 0;
            const size_t group = first + i;
            const uint32_t bits = source.scale_bits[group] & 0x7FFF;
            const SplitScale scale = split_scale(bits);
            const int table = scale.mantissa == 0 ? 0 : scale.mantissa - kNumMantissas;
            const int first_index = grid_index_of_one(table + kNumMantissas) - kBelowOne;
            Found found[2];
            avx2::search_weighted(source.packed + 16 * group, &split_[place],
                                  packed_.errors + static_cast<size_t>(table) * kSearched * 8, found);
            for (size_t half = 0; half < 2; ++half) {
                const size_t block = 2 * group + half;
                const Plan& plan = plans_[place + half];
                const int grid_index = first_index + found[half].position;
                const int byte = 8 * (10 - (exponent_ - scale.exponent)) + grid_index;
                const int at = table * kNumCandidates + kLastGridRank - grid_index;
                const uint8_t present = found[half].present;
                if (plan.num_groups != 1 || plan.exponents[0] != 0 || scale.mantissa == 0 || present == 0 || byte < kMinNormalByte || byte > kMaxByte ||
                    capped_magnitudes(tables_, at, present) != 0) {
                    converter_.convert(source.packed + 8 * block, source.scale_bits[group], plan, out + 8 * block,
                                       scale_bytes + block);
                    continue;
                }
                scale_bytes[block] = static_cast<uint8_t>(byte);
                counted_.equal_blocks += (packed_.inexact[at] & present) == 0;
                count_block(tally_.add(static_cast<int64_t>(bits) << 8 | byte), histograms[2 * i + half],
                            found[half].words, plan.importances[0]);
                avx2::encode_block(source.packed + 8 * block, map_of(tables_, at), out + 8 * block);
            }
        }
    }

private:
    const std::vector<Plan>& plans_;
    std::vector<SplitImportance> split_;
    const int exponent_;
    const SearchTables& tables_;
    const PackedErrors& packed_;
    ColumnTally& tally_;
    ColumnCounts& counted_;
    Converter& converter_;
};

ColumnTally& thread_column_tally() {
    thread_local ColumnTally tally;
    return tally;
}

// The candidate of a lane of a vector in PackedErrors, so that one mask of equal lanes is in the order of candidates.
int candidate_of_lane(int vector, int lane) {
    if (vector < 4) return 4 * vector + lane % 4 + 16 * (lane / 4);
    return 32 + 4 * (vector - 4) + lane % 4 + 8 * (lane / 4);
}

}  // namespace

const PackedErrors& packed_errors(const SearchTables& tables) {
    static const std::unique_ptr<const PackedErrors> packed = [&] {
        auto made = std::make_unique<PackedErrors>();
        int16_t* error = made->errors;
        for (int ms = 0; ms < kNumMantissas; ++ms) {
            const double* full = tables.full_errors + ms * 9 * kNumCandidates;
            const int first = grid_index_of_one(ms + kNumMantissas) - kBelowOne;
            for (int vector = 0; vector < 6; ++vector) {
                for (int pair = 0; pair < 4; ++pair) {
                    for (int lane = 0; lane < 8; ++lane) {
                        const int rank = rank_of(first + candidate_of_lane(vector, lane));
                        for (int k = 2 * pair + 1; k < 2 * pair + 3; ++k) {
                            const double capped = std::min(full[k * kNumCandidates + rank] / 4.0, 65535.0);
                            *error++ = static_cast<int16_t>(capped - 32768.0);
                        }
                    }
                }
            }
            for (int rank = 0; rank < kNumCandidates; ++rank) {
                uint8_t bits = 0;
                for (int k = 1; k < 9; ++k) bits = static_cast<uint8_t>(bits | (full[k * kNumCandidates + rank] != 0.0) << (k - 1));
                made->inexact[ms * kNumCandidates + rank] = bits;
            }
        }
        return made;
    }();
    return *packed;
}

ColumnCounts convert_columns(const Int4& source, const Columns& columns, Rule rule, int exponent, float global_scale,
                             const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes) {
    const std::vector<Plan> plans = make_plans(columns);
    ColumnTally& tally = thread_column_tally();
    ColumnCounts counted;
    Converter converter(rule, exponent, global_scale, tables, tally, counted);
    WeightedConverter weighted(plans, exponent, tables, tally, counted, converter);
    const bool is_weighted = uses_avx2() && rule == Rule::optimal;
    int64_t since_drained = 0;
    for (size_t first = 0; first < source.num_groups; first += kBatchGroups) {
        if (tally.is_full(since_drained)) tally.drain(counted.pairs), since_drained = 0;
        const size_t size = std::min<size_t>(kBatchGroups, source.num_groups - first);
        size_t place = 2 * first % plans.size();
        // count_blocks takes multiples of four blocks.
        const size_t whole = is_weighted ? size / 2 * 2 : 0;
        if (whole > 0) weighted.convert(source, first, whole, place, out, scale_bytes);
        place = 2 * (first + whole) % plans.size();
        for (size_t group = first + whole; group < first + size; ++group, place += 2) {
            if (place == plans.size()) place = 0;
            for (size_t half = 0; half < 2; ++half) {
                const size_t block = 2 * group + half;
                converter.convert(source.packed + 8 * block, source.scale_bits[group], plans[place + half],
                                  out + 8 * block, scale_bytes + block);
            }
        }
        since_drained += static_cast<int64_t>(2 * size);
    }
    tally.drain(counted.pairs);
    merge_column_pairs(counted.pairs);
    return counted;
}

MeasuredColumns measure_columns(const Int4& source, const Columns& columns) {
    const std::vector<Plan> plans = make_plans(columns);
    MeasuredColumns measured{0.0f, 0.0f};
    for (size_t group = 0, place = 0; group < source.num_groups; ++group, place += 2) {
        if (place == plans.size()) place = 0;
        const uint32_t bits = source.scale_bits[group] & 0x7FFF;
        for (size_t half = 0; half < 2; ++half) {
            const Plan& plan = plans[place + half];
            float scales[kNumExponents], largest = 0.0f;
            for (int i = 0; i < plan.num_groups; ++i) {
                scales[i] = bf16_value(divided_bits(bits, plan.exponents[i]));
                largest = std::max(largest, scales[i]);
            }
            measured.scale_max = std::max(measured.scale_max, largest);
            // Most blocks cannot raise amax.
            if (!(8.0f * largest > measured.amax)) continue;
            Fields fields;
            count_fields(source.packed + 16 * group + 8 * half, plan, fields);
            for (int i = 0; i < plan.num_groups; ++i) {
                int most = 0;
                while (fields.present[i] >> most) ++most;
                measured.amax = std::max(measured.amax, round_to_bf16(static_cast<float>(most) * scales[i]));
            }
        }
    }
    return measured;
}

}  // namespace k2
