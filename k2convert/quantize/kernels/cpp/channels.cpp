#include "channels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "instructions.hpp"
#include "numbers.hpp"

namespace k2 {

namespace {

std::vector<Plan> make_plans(const Columns& columns) {
    std::vector<Plan> plans(columns.size / kBlock);
    for (size_t block = 0; block < plans.size(); ++block) {
        Plan& plan = plans[block];
        const auto exponent_of = [&](int i) { return columns.exponents ? columns.exponents[kBlock * block + i] : int8_t{0}; };
        for (int exponent = -kMaxExponent; exponent <= kMaxExponent; ++exponent) {
            const int group = plan.num_groups;
            for (int i = 0; i < kBlock; ++i) {
                if (exponent_of(i) != exponent) continue;
                plan.num_groups = group + 1;
                plan.exponents[group] = static_cast<int8_t>(exponent);
                plan.groups[i] = static_cast<uint8_t>(group);
                plan.importance[i] = columns.importance ? columns.importance[kBlock * block + i] : uint8_t{1};
                plan.total += plan.importance[i];
                const int split = i / 2 + 8 * (i & 1);
                plan.masks[group][split] = 255;
                plan.split_importance.values[split] = plan.importance[i];
            }
        }
    }
    return plans;
}

// s * 2**-a as BF16 bits without the sign; exact, as formats/int4.py makes sure.
uint32_t divided_bits(uint32_t bits, int exponent) {
    static constexpr float divisors[kNumExponents] = {16.0f, 8.0f, 4.0f, 2.0f, 1.0f, 0.5f, 0.25f, 0.125f, 0.0625f};
    return bits_as<uint32_t>(bf16_value(bits & 0x7FFF) * divisors[exponent + kMaxExponent]) >> 16;
}

// Errors of |q| = 1..8 for grid indices from -kTableBelow on, in units of (s / 2ms)**2, whole numbers times a power of
// two: float64 [128, 8, kTableSize].
constexpr int kTableBelow = 48, kTableSize = 208;
struct WideErrors {
    double errors[kNumMantissas][8][kTableSize];
    WideErrors() {
        for (int ms = 0; ms < kNumMantissas; ++ms) {
            for (int k = 1; k < 9; ++k) {
                const double wanted = 2.0 * k * (ms + kNumMantissas);
                for (int i = 0; i < kTableSize; ++i) {
                    const int grid_index = i - kTableBelow;
                    const double step = std::ldexp(8.0 + (grid_index & 7), grid_index >> 3);
                    const double difference = wanted - 2.0 * kCodeValues[nearest_code(2.0 * wanted, step)] * step;
                    errors[ms][k - 1][i] = difference * difference;
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
K2_CLONES int last_least(const Term* terms, int num_terms, int count) {
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
    std::memset(fields.sums, 0, plan.num_groups * sizeof fields.sums[0]);
    std::memset(fields.present, 0, sizeof fields.present);
    for (int i = 0; i < kBlock; ++i) {
        const int nibble = packed[i / 2] >> (4 * (i & 1)) & 15;
        if (nibble == 8) continue;
        const int group = plan.groups[i], k = nibble < 8 ? 8 - nibble : nibble - 8;
        fields.sums[group][k - 1] = static_cast<uint16_t>(fields.sums[group][k - 1] + plan.importance[i]);
        fields.present[group] = static_cast<uint8_t>(fields.present[group] | 1 << (k - 1));
    }
}

// Make the terms of a block, whose first candidate has this grid index; return how many. Absent groups have none.
int make_terms(const Fields& fields, const Plan& plan, int table, int first, Term* terms) {
    int num_terms = 0;
    for (int group = 0; group < plan.num_groups; ++group) {
        const int exponent = plan.exponents[group], at = first + 8 * exponent + kTableBelow;
        const double unit = static_cast<double>(1 << 2 * (kMaxExponent - exponent));
        for (unsigned present = fields.present[group]; present != 0; present &= present - 1) {
            const int k = __builtin_ctz(present);
            terms[num_terms++] = {fields.sums[group][k] * unit, wide_errors().errors[table][k] + at};
        }
    }
    return num_terms;
}

// The outcome of a block under `mse`; any grid index, since a scale beyond the grid has codes of one kind.
struct Chosen {
    int grid_index, scale_byte;
};

// All candidates of rules/search_int4.py, in its unit of s / 32 ms.
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

// What happens to the elements of a group: the output nibble of each source nibble.
struct alignas(16) Mapping {
    uint8_t map[16];
};

// Converts block after block.
class Converter {
public:
    Converter(bool is_max, int exponent, float global_scale, const SearchTables& tables)
        : is_max_(is_max), exponent_(exponent), global_scale_(global_scale), known_(is_max ? kKnown : 0),
          tables_(tables) {}

    int64_t outside_normal = 0;

    void convert(const uint8_t* packed, uint16_t scale_bits, const Plan& plan, uint8_t* out, uint8_t* scale_byte) {
        Fields fields;
        if (uses_vectors_) vectors::count_fields(packed, plan, fields);
        else count_fields(packed, plan, fields);
        Mapping mappings[kNumExponents];
        *scale_byte = static_cast<uint8_t>(is_max_ ? choose_max(fields, plan, scale_bits, mappings)
                                                     : choose_mse(fields, plan, scale_bits, mappings));
        if (uses_vectors_) {
            const uint8_t* maps[kNumExponents];
            for (int group = 0; group < plan.num_groups; ++group) maps[group] = mappings[group].map;
            return vectors::encode_groups(packed, plan, maps, out);
        }
        for (int i = 0; i < kBlock; i += 2) {
            const uint8_t byte = packed[i / 2];
            out[i / 2] = static_cast<uint8_t>(mappings[plan.groups[i]].map[byte & 15] |
                                              mappings[plan.groups[i + 1]].map[byte >> 4] << 4);
        }
    }

private:
    int choose_max(const Fields& fields, const Plan& plan, uint16_t scale_bits, Mapping* mappings) {
        uint32_t bits[kNumExponents];
        float amax = 0.0f;
        for (int group = 0; group < plan.num_groups; ++group) {
            const int largest = largest_magnitude(fields.present[group]);
            bits[group] = divided_bits(scale_bits, plan.exponents[group]);
            amax = std::max(amax, round_to_bf16(static_cast<float>(largest) * bf16_value(bits[group])));
        }
        const int byte = max_scale_byte(amax, global_scale_);
        for (int group = 0; group < plan.num_groups; ++group) {
            const uint32_t key = bits[group] << 8 | static_cast<uint32_t>(byte);
            Known& known = known_[key * 0x9E3779B1u >> (32 - kKnownBits)];
            if (known.key != key) {
                known.key = key;
                known.mapping = Mapping{};
                plain_map(bf16_value(bits[group]), byte, global_scale_, known.mapping.map);
            }
            mappings[group] = known.mapping;
        }
        return byte;
    }

    int choose_mse(const Fields& fields, const Plan& plan, uint16_t scale_bits, Mapping* mappings) {
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
        const int num_terms = make_terms(fields, plan, table, first, terms);
        int found = last_least(terms, num_terms, kSearchedFirst + more);
        if (found >= kBelowOne + kLastOctave + more) found = last_least(terms, num_terms, kSearched + more);
        Chosen chosen{first + found, 0};
        chosen.scale_byte = 8 * (10 - (exponent_ - scale.exponent)) + chosen.grid_index;
        if (chosen.scale_byte < kMinNormalByte || chosen.scale_byte > kMaxByte) {
            chosen = search_all(fields, plan, scale, exponent_, outside_normal);
        }
        for (int group = 0; group < plan.num_groups; ++group) {
            const int place = table * kNumCandidates + rank_of(chosen.grid_index + 8 * plan.exponents[group]);
            std::memcpy(mappings[group].map, map_of(tables_, place), 16);
        }
        return chosen.scale_byte;
    }

    static constexpr int kKnownBits = 14;
    static constexpr size_t kKnown = size_t{1} << kKnownBits;
    struct Known {
        uint32_t key = ~0u;
        Mapping mapping;
    };

    const bool uses_vectors_ = uses_vectors(), is_max_;
    const int exponent_;
    const float global_scale_;
    // Maps of `max` that were computed last.
    std::vector<Known> known_;
    const SearchTables& tables_;
};

PackedErrors pack_errors(const SearchTables& tables, int ms) {
    PackedErrors made{};
    const int gi = grid_index_of_one(ms + kNumMantissas), first = gi + kFirstPlace;
    for (int shift = 0; shift < kShifts; ++shift) {
        PackedErrors::Shifted& shifted = made.shifted[shift];
        const auto pack = [&](double error) {
            return static_cast<int16_t>(std::min(std::floor(std::ldexp(error, -2 - 2 * shift)), 65535.0) - 32768.0);
        };
        for (int k = 0; k < 8; ++k) {
            const double* errors = wide_errors().errors[ms][k] + first + 8 * shift + kTableBelow;
            double least = *std::min_element(wide_errors().errors[ms][k], errors);
            for (int place = 0; place < kPlaces; ++place) {
                if (place < kStarts) shifted.below[place][k] = pack(least);
                const int16_t error = shifted.errors[k / 2][place][k % 2] = pack(errors[place]);
                const int flags = (error == 32767) << k | (errors[place] != errors[place - 8]) << (8 + k);
                shifted.marks[place].flags |= static_cast<uint16_t>(flags);
                shifted.marks[place].map = tables.choices[ms * kNumCandidates + rank_of(first + 8 * shift + place)] & 0xFF;
                least = std::min(least, errors[place]);
            }
        }
    }
    made.starts[0] = -128;
    for (int k = 1; k < 9; ++k) {
        int i = first;
        // 16/7 for k = 7, since t = 2 is often the best: it has most of the values 1 to 7.
        const int wanted = 16 * (k < 3 ? k : k < 5 ? k + 1 : k < 8 ? 7 : 8) * (ms + kNumMantissas);
        while (49.0 * std::ldexp(8.0 + (i & 7), i >> 3) < wanted) ++i;
        made.starts[k] = static_cast<int8_t>(i - 16 - first);
    }
    return made;
}

// One for each ms.
const PackedErrors* packed_errors(const SearchTables& tables) {
    static const auto packed = [&] {
        std::vector<PackedErrors> made;
        for (int ms = 0; ms < kNumMantissas; ++ms) made.push_back(pack_errors(tables, ms));
        return made;
    }();
    return packed.data();
}

// Converts groups of columns with vectors; `converter` settles the blocks that the search leaves open.
class FastConverter {
public:
    FastConverter(const std::vector<Plan>& plans, int exponent, const SearchTables& tables, Converter& converter)
        : plans_(plans), split_(plans.size()), is_even_(plans.size()), exponent_(exponent), tables_(tables),
          packed_(packed_errors(tables)), converter_(converter) {
        for (size_t block = 0; block < plans.size(); ++block) {
            split_[block] = plans[block].split_importance, is_even_[block] = plans[block].num_groups == 1;
        }
    }

    void convert(const Int4& source, uint8_t* out, uint8_t* scale_bytes) {
        for (size_t group = 0, place = 0; group < source.num_groups; ++group, place += 2) {
            if (place == plans_.size()) place = 0;
            convert_group(source, group, place, out + 16 * group, scale_bytes + 2 * group);
        }
    }

private:
    void convert_group(const Int4& source, size_t group, size_t place, uint8_t* out, uint8_t* scale_bytes) {
        const Plan* plans = &plans_[place];
        const SplitScale scale = split_scale(source.scale_bits[group] & 0x7FFF);
        const int table = scale.mantissa == 0 ? 0 : scale.mantissa - kNumMantissas;
        const uint8_t* packed = source.packed + 16 * group;
        const uint8_t* is_even = &is_even_[place];
        int places[2];
        if (is_even[0] || is_even[1]) vectors::search_even(packed, &split_[place], packed_[table], is_even, places);
        const auto byte_of = [&](int half, int lowest) {
            const int grid_index = grid_index_of_one(table + kNumMantissas) + kFirstPlace + places[half] - 8 * lowest;
            return 8 * (10 - (exponent_ - scale.exponent)) + grid_index;
        };
        const auto is_settled = [&](int half, int byte) {
            return scale.mantissa != 0 && places[half] >= 0 && byte >= kMinNormalByte && byte <= kMaxByte;
        };
        if (is_even[0] && is_even[1]) {
            const int first = byte_of(0, plans[0].exponents[0]), second = byte_of(1, plans[1].exponents[0]);
            if (is_settled(0, first) && is_settled(1, second)) {
                scale_bytes[0] = static_cast<uint8_t>(first), scale_bytes[1] = static_cast<uint8_t>(second);
                const auto* marks = packed_[table].shifted[0].marks;
                return vectors::encode_both(packed, tables_.maps + 16 * marks[places[0]].map,
                                         tables_.maps + 16 * marks[places[1]].map, out);
            }
        }
        for (int half = 0; half < 2; ++half) {
            const Plan& plan = plans[half];
            Seen seen;
            seen.lowest = plan.exponents[0];
            if (!is_even[half] || places[half] < 0) {
                places[half] = vectors::search_block(packed + 8 * half, plan, packed_[table], seen);
                if (places[half] < 0) places[half] = settle(plan, table, seen);
            }
            const int byte = byte_of(half, seen.lowest);
            if (!is_settled(half, byte)) {
                converter_.convert(packed + 8 * half, source.scale_bits[group], plan, out + 8 * half, scale_bytes + half);
                continue;
            }
            scale_bytes[half] = static_cast<uint8_t>(byte);
            // Groups without a weight can have lower exponents, and any map.
            const uint8_t* maps[kNumExponents];
            for (int i = 0; i < plan.num_groups; ++i) {
                const int shift = std::max(plan.exponents[i] - seen.lowest, 0);
                maps[i] = tables_.maps + 16 * packed_[table].shifted[shift].marks[places[half]].map;
            }
            vectors::encode_groups(packed + 8 * half, plan, maps, out + 8 * half);
        }
    }

    // The place of the winner among what was seen, by exact sums; -1 if it is open.
    static int settle(const Plan& plan, int table, const Seen& seen) {
        if (seen.near == 0) return -1;
        Term terms[kBlock];
        const int first = grid_index_of_one(table + kNumMantissas) + kFirstPlace + seen.start - 8 * seen.lowest;
        const int num_terms = make_terms(seen.fields, plan, table, first, terms);
        double least = std::numeric_limits<double>::infinity();
        int best = -1;
        for (uint64_t near = seen.near; near != 0; near &= near - 1) {
            const int candidate = __builtin_ctzll(near);
            double sum = 0.0;
            for (int t = 0; t < num_terms; ++t) sum += terms[t].weight * terms[t].errors[candidate];
            if (sum <= least) least = sum, best = seen.start + candidate;
        }
        return best;
    }

    const std::vector<Plan>& plans_;
    // Of each plan, since all plans are larger than a core's nearest cache.
    std::vector<SplitImportance> split_;
    std::vector<uint8_t> is_even_;
    const int exponent_;
    const SearchTables& tables_;
    const PackedErrors* packed_;
    Converter& converter_;
};

}  // namespace

int64_t convert_columns(const Int4& source, const Columns& columns, bool is_max, int exponent, float global_scale,
                        const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes) {
    const std::vector<Plan> plans = make_plans(columns);
    Converter converter(is_max, exponent, global_scale, tables);
    if (uses_vectors() && !is_max) {
        FastConverter(plans, exponent, tables, converter).convert(source, out, scale_bytes);
        return converter.outside_normal;
    }
    for (size_t group = 0, place = 0; group < source.num_groups; ++group, place += 2) {
        if (place == plans.size()) place = 0;
        for (size_t block = 2 * group; block < 2 * group + 2; ++block) {
            converter.convert(source.packed + 8 * block, source.scale_bits[group], plans[place + block % 2], out + 8 * block,
                              scale_bytes + block);
        }
    }
    return converter.outside_normal;
}

MeasuredColumns measure_columns(const Int4& source, const Columns& columns) {
    const std::vector<Plan> plans = make_plans(columns);
    // 2**-a of each group of 32 columns with the lowest a.
    std::vector<float> powers(plans.size() / 2);
    for (size_t i = 0; i < powers.size(); ++i) {
        powers[i] = std::ldexp(1.0f, -std::min(plans[2 * i].exponents[0], plans[2 * i + 1].exponents[0]));
    }
    MeasuredColumns measured{0.0f, 0.0f};
    for (size_t group = 0, place = 0; group < source.num_groups; ++group, place += 2) {
        if (place == plans.size()) place = 0;
        const uint32_t bits = source.scale_bits[group] & 0x7FFF;
        // Most groups can raise neither: amax is at most eight times the largest scale.
        if (!(8.0f * (bf16_value(bits) * powers[place / 2]) > measured.amax)) continue;
        for (size_t half = 0; half < 2; ++half) {
            const Plan& plan = plans[place + half];
            const float largest = bf16_value(divided_bits(bits, plan.exponents[0]));
            measured.scale_max = std::max(measured.scale_max, largest);
            // Most blocks cannot raise amax.
            if (!(8.0f * largest > measured.amax)) continue;
            Fields fields;
            count_fields(source.packed + 16 * group + 8 * half, plan, fields);
            for (int i = 0; i < plan.num_groups; ++i) {
                const int most = largest_magnitude(fields.present[i]);
                const float scale = bf16_value(divided_bits(bits, plan.exponents[i]));
                measured.amax = std::max(measured.amax, round_to_bf16(static_cast<float>(most) * scale));
            }
        }
    }
    return measured;
}

}  // namespace k2
