// The extension module: arrays in, arrays and numbers out; see _cpu.pyi. Its functions release the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "bf16.hpp"
#include "decode.hpp"
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
    module.def("measure", &measure);
    module.def("sample", &sample);
    module.def("figures_of_pairs", &figures_of_pairs);
    module.def("quantize_optimal_bf16", &quantize_optimal_bf16, freely);
    module.def("quantize_plain_bf16", &quantize_plain_bf16, freely);
    module.def("measure_rows_bf16", &measure_rows_bf16);
    module.def("block_errors_bf16", &block_errors_bf16, freely);
    module.def("block_bounds_bf16", &block_bounds_bf16, freely);
    module.def("measure_decoded_int4", &measure_decoded_int4, freely);
    module.def("measure_decoded_bf16", &measure_decoded_bf16, freely);
    module.def("instructions", &k2::instructions);
    module.def("use_instructions", &use_instructions);
}
