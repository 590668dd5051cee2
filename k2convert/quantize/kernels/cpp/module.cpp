// The extension module: arrays in, arrays and numbers out; see _cpu.pyi. Its functions release the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "bf16.hpp"
#include "codes.hpp"
#include "columns.hpp"
#include "decode.hpp"
#include "feedback.hpp"
#include "instructions.hpp"
#include "int4.hpp"
#include "numbers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using nb::ndarray;
template <class T>
using In = ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Release = nb::gil_scoped_release;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

k2::Int4 int4_of(const In<uint8_t>& packed, const In<uint16_t>& scale_bits) {
    require(packed.size() == 16 * scale_bits.size(), "packed must have 16 bytes for each scale");
    return {packed.data(), scale_bits.data(), scale_bits.size()};
}

template <class T>
nb::object array_of(std::unique_ptr<T[]> values, size_t rows, size_t columns) {
    T* data = values.release();
    const nb::capsule owner(data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
    if (columns == 0) return nb::cast(ndarray<nb::numpy, T, nb::ndim<1>>(data, {rows}, owner));
    return nb::cast(ndarray<nb::numpy, T, nb::ndim<2>>(data, {rows, columns}, owner));
}

// (keys int64 [P], blocks int64 [P], counts int64 [P, 9], equal blocks, blocks outside the normal range)
nb::tuple tuple_of(const k2::Counted& counted) {
    const size_t size = counted.pairs.size();
    auto keys = std::make_unique<int64_t[]>(size), blocks = std::make_unique<int64_t[]>(size);
    auto counts = std::make_unique<int64_t[]>(9 * size);
    for (size_t i = 0; i < size; ++i) {
        keys[i] = counted.pairs[i].key;
        blocks[i] = counted.pairs[i].num_blocks;
        std::copy_n(counted.pairs[i].counts, 9, counts.get() + 9 * i);
    }
    return nb::make_tuple(array_of(std::move(keys), size, 0), array_of(std::move(blocks), size, 0),
                          array_of(std::move(counts), size, 9), counted.equal_blocks, counted.outside_normal);
}

template <class T, size_t N>
void fill(T (&target)[N], const In<T>& values, const char* what) {
    require(values.size() == N, what);
    std::copy_n(values.data(), N, target);
}

std::unique_ptr<k2::SearchTables> make_tables(const In<uint8_t>& windows, const In<int16_t>& errors,
                                              const In<int32_t>& keys, const In<uint16_t>& choices,
                                              const In<uint8_t>& maps, const In<double>& full_errors,
                                              const In<uint8_t>& scale_bytes) {
    auto tables = std::make_unique<k2::SearchTables>();
    fill(tables->windows, windows, "windows");
    fill(tables->errors, errors, "errors");
    fill(tables->keys, keys, "keys");
    fill(tables->choices, choices, "choices");
    fill(tables->full_errors, full_errors, "full_errors");
    fill(tables->scale_bytes, scale_bytes, "scale_bytes");
    require(maps.size() <= sizeof tables->maps && maps.size() % 16 == 0, "maps");
    std::copy_n(maps.data(), maps.size(), tables->maps);
    for (const uint8_t window : tables->windows) require(window < k2::kFirstPair + 2, "windows");
    for (const uint16_t choice : tables->choices) require(16u * (choice & 0xFF) < maps.size(), "choices");
    return tables;
}

nb::tuple convert_optimal(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, int exponent,
                          const k2::SearchTables& tables, const Out<uint8_t>& out, const Out<uint8_t>& scale_bytes) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    require(out.size() == packed.size() && scale_bytes.size() == 2 * scale_bits.size(), "sizes do not fit");
    k2::Counted counted;
    {
        const Release release;
        counted = k2::convert_optimal(source, exponent, tables, out.data(), scale_bytes.data());
    }
    return tuple_of(counted);
}

nb::tuple convert_plain(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, float global_scale,
                        const Out<uint8_t>& out, const Out<uint8_t>& scale_bytes) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    require(out.size() == packed.size() && scale_bytes.size() == 2 * scale_bits.size(), "sizes do not fit");
    k2::Counted counted;
    {
        const Release release;
        counted = k2::convert_plain(source, global_scale, out.data(), scale_bytes.data());
    }
    return tuple_of(counted);
}

k2::Columns columns_of(const std::optional<In<int8_t>>& exponents, const std::optional<In<uint8_t>>& importance,
                       const k2::Int4& source) {
    const size_t size = exponents ? exponents->size() : importance ? importance->size() : 0;
    require(size > 0 && size % 32 == 0 && 32 * source.num_groups % size == 0, "columns");
    require(!importance || importance->size() == size, "columns");
    for (size_t i = 0; exponents && i < size; ++i) {
        require(std::abs(exponents->data()[i]) <= k2::kMaxExponent, "exponents");
    }
    return {exponents ? exponents->data() : nullptr, importance ? importance->data() : nullptr, size};
}

// As tuple_of, with the summed importance int64 [P, 9] at the end.
nb::tuple convert_columns(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, std::optional<In<int8_t>> exponents,
                          std::optional<In<uint8_t>> importance, bool is_plain, int exponent, float global_scale,
                          const k2::SearchTables& tables, const Out<uint8_t>& out, const Out<uint8_t>& scale_bytes) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    const k2::Columns columns = columns_of(exponents, importance, source);
    require(out.size() == packed.size() && scale_bytes.size() == 2 * scale_bits.size(), "sizes do not fit");
    k2::ColumnCounts counted;
    {
        const Release release;
        counted = k2::convert_columns(source, columns, is_plain ? k2::Rule::plain : k2::Rule::optimal, exponent,
                                      global_scale, tables, out.data(), scale_bytes.data());
    }
    const size_t size = counted.pairs.size();
    auto keys = std::make_unique<int64_t[]>(size), blocks = std::make_unique<int64_t[]>(size);
    auto counts = std::make_unique<int64_t[]>(9 * size), sums = std::make_unique<int64_t[]>(9 * size);
    for (size_t i = 0; i < size; ++i) {
        keys[i] = counted.pairs[i].key;
        blocks[i] = counted.pairs[i].num_blocks;
        std::copy_n(counted.pairs[i].counts, 9, counts.get() + 9 * i);
        std::copy_n(counted.pairs[i].sums, 9, sums.get() + 9 * i);
    }
    return nb::make_tuple(array_of(std::move(keys), size, 0), array_of(std::move(blocks), size, 0),
                          array_of(std::move(counts), size, 9), counted.equal_blocks, counted.outside_normal,
                          array_of(std::move(sums), size, 9));
}

nb::tuple magnitude_of_columns(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, const In<int8_t>& exponents) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    const k2::Columns columns = columns_of(exponents, std::nullopt, source);
    k2::MeasuredColumns measured;
    {
        const Release release;
        measured = k2::measure_columns(source, columns);
    }
    return nb::make_tuple(measured.scale_max, measured.amax);
}

nb::tuple measure(const In<uint8_t>& packed, const In<uint16_t>& scale_bits) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    k2::Measured measured;
    {
        const Release release;
        measured = k2::measure(source);
    }
    return nb::make_tuple(measured.largest_bits, measured.amax, measured.usable);
}

nb::tuple sample(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, const In<uint8_t>& scale_bytes,
                 size_t first, size_t stride, bool is_plain, double global_scale, float plain_scale,
                 const In<double>& assignments) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    require(scale_bytes.size() == 2 * scale_bits.size() && stride > 0, "sizes do not fit");
    require(assignments.size() == sizeof(k2::Assignments) / sizeof(double), "assignments");
    k2::Assignments table;
    std::copy_n(assignments.data(), assignments.size(), &table[0][0]);
    k2::Sampled sampled;
    {
        const Release release;
        const k2::Rule rule = is_plain ? k2::Rule::plain : k2::Rule::optimal;
        sampled = k2::sample(source, scale_bytes.data(), first, stride, rule, global_scale, plain_scale, table);
    }
    return nb::make_tuple(sampled.achieved, sampled.plain, sampled.bound);
}

nb::tuple figures_of_pairs(const In<int64_t>& keys, const In<int64_t>& counts, bool is_plain, double global_scale) {
    require(counts.size() == 9 * keys.size(), "counts must be nine for each key");
    k2::Figures figures;
    {
        const Release release;
        const k2::Rule rule = is_plain ? k2::Rule::plain : k2::Rule::optimal;
        figures = k2::figures_of_pairs(keys.data(), counts.data(), keys.size(), rule, global_scale);
    }
    return nb::make_tuple(figures.energy, figures.squared_error, figures.num_nonzero, figures.equal_nonzero,
                          figures.recoverable_codes, figures.max_error_steps);
}

void require_bf16(size_t weights, size_t packed, size_t blocks) {
    require(weights == k2::kBlock * blocks && packed == k2::kBlock / 2 * blocks, "sizes do not fit");
}

void quantize_optimal_bf16(const In<uint16_t>& source, double global_scale, const Out<uint8_t>& packed,
                           const Out<uint8_t>& scale_bytes) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    k2::quantize_optimal_bf16(source.data(), scale_bytes.size(), global_scale, packed.data(), scale_bytes.data());
}

void quantize_weighted_bf16(const In<uint16_t>& source, double global_scale, const In<double>& factors,
                            const Out<uint8_t>& packed, const Out<uint8_t>& scale_bytes) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    require(factors.size() > 0 && factors.size() % k2::kBlock == 0 && source.size() % factors.size() == 0, "factors");
    k2::quantize_weighted_bf16(source.data(), scale_bytes.size(), global_scale, factors.data(),
                               factors.size() / k2::kBlock, packed.data(), scale_bytes.data());
}

void weigh_rows_bf16(const In<uint16_t>& source, const In<uint8_t>& packed, const In<uint8_t>& scale_bytes,
                     double global_scale, const In<uint8_t>& importance, const Out<double>& energies,
                     const Out<double>& errors) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    require(importance.size() % k2::kBlock == 0 && source.size() == importance.size() * energies.size(), "importance");
    require(errors.size() == energies.size(), "errors");
    k2::weigh_rows_bf16(source.data(), packed.data(), scale_bytes.data(), global_scale, importance.data(),
                        energies.size(), importance.size() / k2::kBlock, energies.data(), errors.data());
}

void quantize_plain_bf16(const In<uint16_t>& source, float global_scale, const Out<uint8_t>& packed,
                         const Out<uint8_t>& scale_bytes) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    k2::quantize_plain_bf16(source.data(), scale_bytes.size(), global_scale, packed.data(), scale_bytes.data());
}

nb::tuple measure_rows_bf16(const In<uint16_t>& source, const In<uint8_t>& packed, const In<uint8_t>& scale_bytes,
                            double global_scale, const Out<double>& energies, const Out<double>& errors) {
    const size_t rows = energies.size();
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    require(errors.size() == rows && (rows == 0 ? scale_bytes.size() == 0 : scale_bytes.size() % rows == 0), "rows");
    k2::Bf16Totals totals;
    {
        const Release release;
        totals = k2::measure_rows_bf16(source.data(), packed.data(), scale_bytes.data(), global_scale, rows,
                                       rows == 0 ? 0 : scale_bytes.size() / rows, energies.data(), errors.data());
    }
    return nb::make_tuple(totals.num_nonzero, totals.equal_nonzero, totals.equal_blocks);
}

void block_errors_bf16(const In<uint16_t>& source, const In<uint8_t>& packed, const In<uint8_t>& scale_bytes,
                       double global_scale, const Out<double>& errors) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    require(errors.size() == scale_bytes.size(), "errors");
    k2::block_errors_bf16(source.data(), packed.data(), scale_bytes.data(), errors.size(), global_scale, errors.data());
}

void block_bounds_bf16(const In<uint16_t>& source, const Out<double>& bounds) {
    require(source.size() == k2::kBlock * bounds.size(), "bounds");
    k2::block_bounds_bf16(source.data(), bounds.size(), bounds.data());
}

void bounds_of_columns(const In<uint8_t>& packed, const In<float>& scales, const In<int8_t>& exponents,
                       const Out<double>& bounds) {
    require(scales.size() == bounds.size() && packed.size() == k2::kBlock / 2 * bounds.size() &&
                exponents.size() == k2::kBlock * bounds.size(), "sizes do not fit");
    k2::bounds_of_columns(packed.data(), scales.data(), exponents.data(), bounds.size(), bounds.data());
}

// Write energy, error, largest error in steps, non-zero and unchanged weights of each row: sums [N * 3], counts [N *
// 2].
template <class MeasureRow>
void measure_decoded(size_t num_blocks, const Out<double>& sums, const Out<int64_t>& counts, const MeasureRow& row) {
    const size_t num_rows = sums.size() / 3;
    require(sums.size() == 3 * num_rows && counts.size() == 2 * num_rows, "sums and counts");
    require(num_rows == 0 ? num_blocks == 0 : num_blocks % num_rows == 0, "rows");
    const size_t blocks_per_row = num_rows == 0 ? 0 : num_blocks / num_rows;
    for (size_t i = 0; i < num_rows; ++i) {
        const k2::RowError error = row(i * blocks_per_row, blocks_per_row);
        double* sum = sums.data() + 3 * i;
        sum[0] = error.energy, sum[1] = error.error, sum[2] = error.max_error_steps;
        counts.data()[2 * i] = error.num_nonzero;
        counts.data()[2 * i + 1] = error.equal_nonzero;
    }
}

void measure_decoded_int4(const In<uint8_t>& source, const In<double>& scales, const In<uint8_t>& packed,
                          const In<uint8_t>& block_scales, const In<double>& block_values, const Out<double>& sums,
                          const Out<int64_t>& counts) {
    const size_t num_blocks = block_scales.size();
    require(source.size() == 8 * num_blocks && packed.size() == 8 * num_blocks && 2 * scales.size() == num_blocks &&
                block_values.size() == 256 && sums.size() % 3 == 0, "sizes do not fit");
    require(sums.size() == 0 || num_blocks / (sums.size() / 3) % 2 == 0, "rows are whole groups");
    measure_decoded(num_blocks, sums, counts, [&](size_t first, size_t size) {
        return k2::measure_row_int4(source.data() + 8 * first, scales.data() + first / 2, packed.data() + 8 * first,
                                    block_scales.data() + first, size / 2, block_values.data());
    });
}

void measure_decoded_bf16(const In<uint16_t>& source, const In<uint8_t>& packed, const In<uint8_t>& block_scales,
                          const In<double>& block_values, const Out<double>& sums, const Out<int64_t>& counts) {
    const size_t num_blocks = block_scales.size();
    require_bf16(source.size(), packed.size(), num_blocks);
    require(block_values.size() == 256, "block_values");
    measure_decoded(num_blocks, sums, counts, [&](size_t first, size_t size) {
        return k2::measure_row_bf16(source.data() + 16 * first, packed.data() + 8 * first, block_scales.data() + first,
                                    size, block_values.data());
    });
}

// The same with factors of the columns: sums [N * 5], the last two weighted; counts [N * 2].
template <class MeasureRow>
void measure_columns(size_t num_blocks, size_t columns, const Out<double>& sums, const Out<int64_t>& counts,
                     const MeasureRow& row) {
    const size_t num_rows = sums.size() / 5, blocks_per_row = columns / k2::kBlock;
    require(sums.size() == 5 * num_rows && counts.size() == 2 * num_rows, "sums and counts");
    require(columns % k2::kBlock == 0 && num_blocks == num_rows * blocks_per_row, "rows");
    for (size_t i = 0; i < num_rows; ++i) {
        const k2::ColumnError error = row(i * blocks_per_row, blocks_per_row);
        double* sum = sums.data() + 5 * i;
        sum[0] = error.row.energy, sum[1] = error.row.error, sum[2] = error.row.max_error_steps;
        sum[3] = error.weighted_energy, sum[4] = error.weighted_error;
        counts.data()[2 * i] = error.row.num_nonzero;
        counts.data()[2 * i + 1] = error.row.equal_nonzero;
    }
}

void measure_columns_int4(const In<uint8_t>& source, const In<double>& scales, const In<uint8_t>& packed,
                          const In<uint8_t>& block_scales, const In<double>& block_values, const In<double>& powers,
                          const In<double>& inverses, const In<double>& shares, const Out<double>& sums,
                          const Out<int64_t>& counts) {
    const size_t num_blocks = block_scales.size(), columns = shares.size();
    require(source.size() == 8 * num_blocks && packed.size() == 8 * num_blocks && 2 * scales.size() == num_blocks &&
                block_values.size() == 256 && powers.size() == columns && inverses.size() == columns && columns % 32 == 0,
            "sizes do not fit");
    measure_columns(num_blocks, columns, sums, counts, [&](size_t first, size_t size) {
        return k2::measure_columns_int4(source.data() + 8 * first, scales.data() + first / 2, packed.data() + 8 * first,
                                        block_scales.data() + first, size / 2, block_values.data(), powers.data(),
                                        inverses.data(), shares.data());
    });
}

void measure_columns_bf16(const In<uint16_t>& source, const In<uint8_t>& packed, const In<uint8_t>& block_scales,
                          const In<double>& block_values, const In<double>& shares, const Out<double>& sums,
                          const Out<int64_t>& counts) {
    const size_t num_blocks = block_scales.size();
    require_bf16(source.size(), packed.size(), num_blocks);
    require(block_values.size() == 256, "block_values");
    measure_columns(num_blocks, shares.size(), sums, counts, [&](size_t first, size_t size) {
        return k2::measure_columns_bf16(source.data() + 16 * first, packed.data() + 8 * first,
                                        block_scales.data() + first, size, block_values.data(), shares.data());
    });
}

void round_with_feedback(const In<float>& target, const In<float>& form, const In<float>& factor,
                         const In<float>& block_factors, int sweeps, size_t threads, const Out<uint8_t>& packed,
                         const Out<uint8_t>& scale_bytes) {
    const size_t columns = block_factors.size() / k2::kBlock, rows = columns == 0 ? 0 : target.size() / columns;
    require(columns > 0 && columns % k2::kBlock == 0 && block_factors.size() == k2::kBlock * columns &&
                form.size() == columns * columns && factor.size() == form.size(), "curvature");
    require(target.size() == rows * columns && 2 * packed.size() == target.size() &&
                k2::kBlock * scale_bytes.size() == target.size(), "sizes do not fit");
    const k2::Curvature curvature{form.data(), factor.data(), block_factors.data(), columns};
    k2::round_with_feedback({target.data(), rows, curvature, sweeps, packed.data(), scale_bytes.data()}, threads);
}

// Write the sums of each row [N * 4]: energy, error, and both times the importance.
nb::tuple measure_codes(const In<uint8_t>& source, const In<double>& scales, const In<uint8_t>& packed,
                        const In<uint8_t>& block_scales, const In<double>& block_values,
                        const std::optional<In<double>>& powers, const std::optional<In<double>>& inverses,
                        const std::optional<In<double>>& importance, const Out<double>& sums) {
    const size_t num_blocks = block_scales.size(), num_rows = sums.size() / 4;
    const size_t blocks_per_row = num_rows == 0 ? 0 : num_blocks / num_rows;
    const size_t blocks_per_scale = scales.size() == num_blocks ? 1 : 2;
    require(source.size() == 8 * num_blocks && packed.size() == 8 * num_blocks && block_values.size() == 256 &&
                blocks_per_scale * scales.size() == num_blocks, "sizes do not fit");
    require(sums.size() == 4 * num_rows && num_blocks == num_rows * blocks_per_row, "rows");
    require(blocks_per_scale == 1 || blocks_per_row % 2 == 0, "rows are whole groups");
    const auto columns = [&](const std::optional<In<double>>& numbers) -> const double* {
        if (!numbers) return nullptr;
        require(numbers->size() == k2::kBlock * blocks_per_row, "columns");
        return numbers->data();
    };
    const k2::CodedInt4 weight{source.data(),    scales.data(),     packed.data(),       block_scales.data(),
                               columns(powers),  columns(inverses), columns(importance), blocks_per_row,
                               blocks_per_scale};
    require((weight.powers == nullptr) == (weight.inverses == nullptr), "powers and inverses");
    k2::CodeFigures figures;
    {
        const Release release;
        for (size_t row = 0; row < num_rows; ++row) {
            const k2::CodeSums found = k2::measure_codes(weight, row, block_values.data(), figures);
            double* sum = sums.data() + 4 * row;
            sum[0] = found.energy, sum[1] = found.error, sum[2] = found.weighted_energy, sum[3] = found.weighted_error;
        }
    }
    return nb::make_tuple(figures.num_nonzero, figures.equal_nonzero, figures.equal_blocks, figures.recoverable_codes,
                          figures.num_five_or_seven, figures.num_minus_eight, figures.max_error_steps,
                          figures.least_scale);
}

void use_instructions(const std::string& name) {
    require(k2::use_instructions(name.c_str()), "instructions must be 'portable', or 'avx2' if the CPU has it");
}

}  // namespace

NB_MODULE(_cpu, module) {
    nb::set_leak_warnings(false);  // the tables live as long as the process
    const auto freely = nb::call_guard<Release>();
    nb::class_<k2::SearchTables>(module, "SearchTables").def(
        nb::new_(&make_tables), "windows"_a, "errors"_a, "keys"_a, "choices"_a, "maps"_a, "full_errors"_a, "scale_bytes"_a);
    module.def("convert_optimal", &convert_optimal);
    module.def("convert_plain", &convert_plain);
    module.def("convert_columns", &convert_columns, "packed"_a, "scale_bits"_a, "exponents"_a.none(),
               "importance"_a.none(), "is_plain"_a, "exponent"_a, "global_scale"_a, "tables"_a, "out"_a, "scale_bytes"_a);
    module.def("magnitude_of_columns", &magnitude_of_columns);
    module.def("measure", &measure);
    module.def("sample", &sample);
    module.def("figures_of_pairs", &figures_of_pairs);
    module.def("quantize_optimal_bf16", &quantize_optimal_bf16, freely);
    module.def("quantize_plain_bf16", &quantize_plain_bf16, freely);
    module.def("quantize_weighted_bf16", &quantize_weighted_bf16, freely);
    module.def("weigh_rows_bf16", &weigh_rows_bf16, freely);
    module.def("measure_rows_bf16", &measure_rows_bf16);
    module.def("block_errors_bf16", &block_errors_bf16, freely);
    module.def("block_bounds_bf16", &block_bounds_bf16, freely);
    module.def("bounds_of_columns", &bounds_of_columns, freely);
    module.def("measure_decoded_int4", &measure_decoded_int4, freely);
    module.def("measure_decoded_bf16", &measure_decoded_bf16, freely);
    module.def("measure_columns_int4", &measure_columns_int4, freely);
    module.def("measure_columns_bf16", &measure_columns_bf16, freely);
    module.def("round_with_feedback", &round_with_feedback, freely);
    module.def("measure_codes", &measure_codes, "source"_a, "scales"_a, "packed"_a, "block_scales"_a, "block_values"_a,
               "powers"_a.none(), "inverses"_a.none(), "importance"_a.none(), "sums"_a);
    module.def("instructions", &k2::instructions);
    module.def("use_instructions", &use_instructions);
}
