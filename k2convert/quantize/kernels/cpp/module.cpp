// The extension module: flat, contiguous NumPy arrays in, results into the caller's arrays; all release the interpreter's
// lock. ValueError if sizes do not fit, TypeError if a dtype does not. The build writes its types to ../_cpu.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "convert.hpp"
#include "fp8.hpp"
#include "gptq.hpp"
#include "instructions.hpp"
#include "measure.hpp"
#include "numbers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using nb::ndarray;
template <class T>
using In = ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

k2::Int4 int4_of(const In<uint8_t>& packed, const In<uint16_t>& scale_bits) {
    require(packed.size() == 16 * scale_bits.size(), "packed must have 16 bytes for each scale");
    return {packed.data(), scale_bits.data(), scale_bits.size()};
}

// Bytes that a conversion writes, and whether they fit the source.
using Bytes = Out<uint8_t>;

void require_results(size_t num_blocks, const Bytes& packed, const Bytes& scale_bytes) {
    require(packed.size() == 8 * num_blocks && scale_bytes.size() == num_blocks, "sizes do not fit");
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

// The fields of a struct in its order.
using FigureTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double>;

FigureTuple tuple_of(const k2::Figures& figures) {
    return {figures.num_nonzero,       figures.equal_nonzero,   figures.equal_blocks,    figures.recoverable_codes,
            figures.num_five_or_seven, figures.num_minus_eight, figures.max_error_steps, figures.least_scale};
}

// Energy, squared error, the figures, and the blocks outside the normal range.
using CountedTuple = std::tuple<double, double, FigureTuple, int64_t>;

CountedTuple tuple_of(const k2::Counted& counted, k2::Rule rule, double global_scale) {
    k2::RowSums sums;
    const k2::Figures figures = k2::figures_of(counted, rule, global_scale, sums);
    return {sums.energy, sums.error, tuple_of(figures), counted.totals.outside_normal};
}

CountedTuple convert_mse(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, int exponent,
                             const k2::SearchTables& tables, const Bytes& out, const Bytes& scale_bytes) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    require_results(2 * scale_bits.size(), out, scale_bytes);
    const k2::Counted counted = k2::convert_mse(source, exponent, tables, out.data(), scale_bytes.data());
    return tuple_of(counted, k2::Rule::mse, std::ldexp(1.0, exponent));
}

CountedTuple convert_max(const In<uint8_t>& packed, const In<uint16_t>& scale_bits, float global_scale,
                           const Bytes& out, const Bytes& scale_bytes) {
    const k2::Int4 source = int4_of(packed, scale_bits);
    require_results(2 * scale_bits.size(), out, scale_bytes);
    const k2::Counted counted = k2::convert_max(source, global_scale, out.data(), scale_bytes.data());
    return tuple_of(counted, k2::Rule::max, global_scale);
}

std::tuple<uint32_t, float, bool> measure(const In<uint8_t>& packed, const In<uint16_t>& scale_bits) {
    const k2::Measured measured = k2::measure(int4_of(packed, scale_bits));
    return {measured.largest_bits, measured.amax, measured.usable};
}

void require_bf16(size_t weights, size_t packed, size_t blocks) {
    require(weights == k2::kBlock * blocks && packed == k2::kBlock / 2 * blocks, "sizes do not fit");
}

void quantize_mse_bf16(const In<uint16_t>& source, double global_scale, const Bytes& packed, const Bytes& scale_bytes) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    k2::quantize_mse_bf16(source.data(), scale_bytes.size(), global_scale, packed.data(), scale_bytes.data());
}

void quantize_max_bf16(const In<uint16_t>& source, float global_scale, const Bytes& packed, const Bytes& scale_bytes) {
    require_bf16(source.size(), packed.size(), scale_bytes.size());
    k2::quantize_max_bf16(source.data(), scale_bytes.size(), global_scale, packed.data(), scale_bytes.data());
}

// Measure rows with `measure_row`, which gets the first block of a row: the sums of each row [N * 2], and the figures.
template <class MeasureRow>
FigureTuple measure_rows(const In<uint8_t>& packed, const In<uint8_t>& block_scales, const In<double>& block_values,
                       size_t columns, const Out<double>& sums, const MeasureRow& measure_row) {
    const size_t num_blocks = block_scales.size(), num_rows = sums.size() / 2;
    require(packed.size() == 8 * num_blocks && block_values.size() == 256 && sums.size() == 2 * num_rows &&
                columns % k2::kBlock == 0 && num_rows * columns == k2::kBlock * num_blocks, "sizes do not fit");
    k2::Figures figures;
    for (size_t row = 0; row < num_rows; ++row) {
        const size_t first = row * (columns / k2::kBlock);
        const k2::Quantized written{packed.data() + 8 * first, block_scales.data() + first, block_values.data()};
        const k2::RowSums found = measure_row(first, written, figures);
        sums.data()[2 * row] = found.energy, sums.data()[2 * row + 1] = found.error;
    }
    return tuple_of(figures);
}

FigureTuple measure_int4(const In<uint8_t>& source, const In<uint16_t>& scale_bits, const In<uint8_t>& packed,
                         const In<uint8_t>& block_scales, const In<double>& block_values, size_t columns,
                         const std::optional<In<double>>& powers, const Out<double>& sums) {
    int4_of(source, scale_bits);
    require(source.size() == packed.size() && columns % 32 == 0, "sizes do not fit");
    require(!powers || powers->size() == columns, "a power for each column");
    return measure_rows(packed, block_scales, block_values, columns, sums,
                        [&](size_t first, const k2::Quantized& written, k2::Figures& figures) {
                            const k2::Int4 row{source.data() + 8 * first, scale_bits.data() + first / 2, columns / 32};
                            return k2::measure_int4(row, written, powers ? powers->data() : nullptr, figures);
                        });
}

FigureTuple measure_bf16(const In<uint16_t>& source, const In<uint8_t>& packed, const In<uint8_t>& block_scales,
                         const In<double>& block_values, size_t columns, const Out<double>& sums) {
    require_bf16(source.size(), packed.size(), block_scales.size());
    return measure_rows(packed, block_scales, block_values, columns, sums,
                        [&](size_t first, const k2::Quantized& written, k2::Figures& figures) {
                            return k2::measure_bf16(source.data() + k2::kBlock * first, written, columns / k2::kBlock, figures);
                        });
}

k2::Fp8Shape fp8_shape(const In<uint16_t>& bits, const In<float>& scales, size_t columns, size_t group,
                       size_t num_codes) {
    require(columns > 0 && group > 0 && bits.size() % columns == 0 && num_codes == bits.size(), "sizes do not fit");
    const size_t rows = bits.size() / columns;
    require(scales.size() == rows * ((columns + group - 1) / group), "scales");
    return {rows, columns, group};
}

void encode_fp8(const In<uint16_t>& bits, const In<float>& scales, size_t columns, size_t group,
                const Out<uint8_t>& codes) {
    k2::encode_fp8(bits.data(), fp8_shape(bits, scales, columns, group, codes.size()), scales.data(), codes.data());
}

std::tuple<int64_t, int64_t> measure_fp8(const In<uint16_t>& bits, const In<uint8_t>& codes, const In<float>& scales,
                                         size_t columns, size_t group, const Out<double>& energies,
                                         const Out<double>& errors) {
    const k2::Fp8Shape shape = fp8_shape(bits, scales, columns, group, codes.size());
    require(energies.size() == shape.rows && errors.size() == shape.rows, "sums");
    const auto found = k2::measure_fp8(bits.data(), codes.data(), shape, scales.data(), energies.data(), errors.data());
    return {found.num_nonzero, found.equal_nonzero};
}

void count_bytes(const In<uint8_t>& bytes, const Out<int64_t>& counts) {
    require(counts.size() == 256, "counts");
    k2::count_bytes(bytes.data(), bytes.size(), counts.data());
}

void count_mxfp4(const In<uint8_t>& packed, const In<uint8_t>& scale_bytes, const Out<int64_t>& counts) {
    require(packed.size() == 16 * scale_bytes.size() && counts.size() == 4 * 256, "sizes do not fit");
    k2::count_mxfp4(packed.data(), scale_bytes.data(), scale_bytes.size(), counts.data());
}

void round_gptq(const In<float>& target, const In<float>& form, const In<float>& factor,
                const In<float>& block_factors, const In<float>& block_inverses, int sweeps, size_t threads,
                const Out<uint8_t>& packed, const Out<uint8_t>& scale_bytes) {
    const size_t columns = block_factors.size() / k2::kBlock, rows = columns == 0 ? 0 : target.size() / columns;
    require(columns > 0 && columns % k2::kBlock == 0 && block_factors.size() == k2::kBlock * columns &&
                form.size() == columns * columns && factor.size() == form.size() &&
                block_inverses.size() == block_factors.size(), "damped Hessian");
    require(target.size() == rows * columns && 2 * packed.size() == target.size() &&
                k2::kBlock * scale_bytes.size() == target.size(), "sizes do not fit");
    k2::round_gptq({target.data(), form.data(), factor.data(), block_factors.data(), block_inverses.data(), rows,
                    columns, sweeps, packed.data(), scale_bytes.data()}, threads);
}

void use_instructions(const std::string& name) {
    require(k2::use_instructions(name.c_str()), "instructions must be 'portable', or 'avx2' or 'neon' if the CPU has it");
}

}  // namespace

NB_MODULE(_cpu, module) {
    nb::set_leak_warnings(false);  // the tables live as long as the process
    const auto freely = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<k2::SearchTables>(module, "SearchTables").def(
        nb::new_(&make_tables), "windows"_a, "errors"_a, "keys"_a, "choices"_a, "maps"_a, "full_errors"_a, "scale_bytes"_a);
    module.def("convert_mse", &convert_mse, freely);
    module.def("convert_max", &convert_max, freely);
    module.def("measure", &measure, freely);
    module.def("quantize_mse_bf16", &quantize_mse_bf16, freely);
    module.def("quantize_max_bf16", &quantize_max_bf16, freely);
    module.def("measure_int4", &measure_int4, freely, "source"_a, "scale_bits"_a, "packed"_a, "block_scales"_a, "block_values"_a,
               "columns"_a, "powers"_a.none(), "sums"_a);
    module.def("measure_bf16", &measure_bf16, freely);
    module.def("encode_fp8", &encode_fp8, freely);
    module.def("measure_fp8", &measure_fp8, freely);
    module.def("count_bytes", &count_bytes, freely);
    module.def("count_mxfp4", &count_mxfp4, freely);
    module.def("round_gptq", &round_gptq, freely);
    module.def("instructions", &k2::instructions);
    module.def("use_instructions", &use_instructions);
}
