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

// How a block of 16 columns falls into groups with equal exponents.
struct Plan {
    int num_groups = 0;
    int8_t exponents[kNumExponents];
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
        const size_t split = column % kBlock / 2 + 8 * (column & 1);
        plan.split_groups.masks[group][split] = 255;
        plan.split_importance.values[split] = importance;
    }
    return plans;
}

// s * 2**-a as BF16 bits without the sign; exact, as formats/channels.py makes sure.
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

// The outcome of a block under `mse`; any grid index, since a scale beyond the grid has codes of one kind.
struct Chosen {
    int grid_index, scale_byte;
};

// All candidates of rules/mse.py, in its unit of s / 32 ms.
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

float largest_weight(const Fields& fields, const Plan& plan, const uint32_t* bits) {
    float amax = 0.0f;
    for (int group = 0; group < plan.num_groups; ++group) {
        const int largest = largest_magnitude(fields.present[group]);
        amax = std::max(amax, round_to_bf16(static_cast<float>(largest) * bf16_value(bits[group])));
    }
    return amax;
}

// Converts block after block.
class Converter {
public:
    Converter(bool is_max, int exponent, float global_scale, const SearchTables& tables)
        : is_max_(is_max), exponent_(exponent), global_scale_(global_scale), known_(is_max ? kKnown : 0),
          tables_(tables), wide_(wide_errors()) {}

    int64_t outside_normal = 0;

    void convert(const uint8_t* packed, uint16_t scale_bits, const Plan& plan, uint8_t* out, uint8_t* scale_byte) {
        Fields fields;
        if (uses_avx2_) {
            avx2::count_fields(packed, plan.split_groups, plan.split_importance, plan.num_groups, fields);
        } else {
            count_fields(packed, plan, fields);
        }
        Mapping mappings[kNumExponents];
        *scale_byte = static_cast<uint8_t>(is_max_ ? choose_max(fields, plan, scale_bits, mappings)
                                                     : choose_mse(fields, plan, scale_bits, mappings));
        if (uses_avx2_) return avx2::encode_groups(packed, plan.split_groups, mappings, plan.num_groups, out);
        for (int i = 0; i < kBlock; i += 2) {
            const uint8_t byte = packed[i / 2];
            out[i / 2] = static_cast<uint8_t>(mappings[plan.groups[i]].map[byte & 15] |
                                              mappings[plan.groups[i + 1]].map[byte >> 4] << 4);
        }
    }

private:
    int choose_max(const Fields& fields, const Plan& plan, uint16_t scale_bits, Mapping* mappings) {
        uint32_t bits[kNumExponents];
        for (int group = 0; group < plan.num_groups; ++group) bits[group] = divided_bits(scale_bits, plan.exponents[group]);
        const int byte = max_scale_byte(largest_weight(fields, plan, bits), global_scale_);
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

    const bool uses_avx2_ = uses_avx2(), is_max_;
    const int exponent_;
    const float global_scale_;
    // Maps of `max` that were computed last.
    std::vector<Known> known_;
    const SearchTables& tables_;
    const WideErrors& wide_;
};

// Converts groups of columns with AVX2; `converter` takes the blocks with exponents and those that it cannot settle.
class ImatrixConverter {
public:
    ImatrixConverter(const std::vector<Plan>& plans, int exponent, const SearchTables& tables, Converter& converter)
        : plans_(plans), split_(plans.size()), exponent_(exponent), tables_(tables), packed_(packed_errors(tables)),
          converter_(converter) {
        for (size_t block = 0; block < plans.size(); ++block) split_[block] = plans[block].split_importance;
    }

    void convert(const Int4& source, uint8_t* out, uint8_t* scale_bytes) {
        for (size_t group = 0, place = 0; group < source.num_groups; ++group, place += 2) {
            if (place == plans_.size()) place = 0;
            const SplitScale scale = split_scale(source.scale_bits[group] & 0x7FFF);
            const int table = scale.mantissa == 0 ? 0 : scale.mantissa - kNumMantissas;
            const int first_index = grid_index_of_one(table + kNumMantissas) - kBelowOne;
            Found found[2];
            avx2::search_imatrix(source.packed + 16 * group, &split_[place],
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
    Converter& converter_;
};

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
        }
        return made;
    }();
    return *packed;
}

int64_t convert_columns(const Int4& source, const Columns& columns, bool is_max, int exponent, float global_scale,
                        const SearchTables& tables, uint8_t* out, uint8_t* scale_bytes) {
    const std::vector<Plan> plans = make_plans(columns);
    Converter converter(is_max, exponent, global_scale, tables);
    if (uses_avx2() && !is_max) {
        ImatrixConverter(plans, exponent, tables, converter).convert(source, out, scale_bytes);
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
                const int most = largest_magnitude(fields.present[i]);
                measured.amax = std::max(measured.amax, round_to_bf16(static_cast<float>(most) * scales[i]));
            }
        }
    }
    return measured;
}

}  // namespace k2
