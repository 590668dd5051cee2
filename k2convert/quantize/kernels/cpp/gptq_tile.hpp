// The rows of a tile, in vectors of eight floats, four on ARM; compiled once for each level of instructions (K2_LEVEL).
#pragma once

#include <cstring>

#include "gptq.hpp"
#include "numbers.hpp"

namespace k2::K2_LEVEL {

namespace {

#if defined(__aarch64__)
constexpr size_t kLanes = 4;
#else
constexpr size_t kLanes = 8;
#endif
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(float))));

constexpr size_t kBlockSize = 16, kNumScales = 8;
// Rows and columns of a product that stay in registers, and columns that are packed at a time.
constexpr size_t kGroupRows = 6, kStrip = 16, kPacked = 128;
constexpr size_t kStripVectors = kStrip / kLanes;
// The search starts one below the E4M3 scale that is the nearest to the largest weight / 6.
constexpr int kBelow = 1;
// A block takes a new scale only for a gain that is no rounding error.
constexpr float kWorthwhile = 0.9999f;
static_assert(kTileRows % kGroupRows == 0 && kPanel % kBlockSize == 0, "whole groups");

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline void store(float* to, const Floats& values) { std::memcpy(to, &values, sizeof values); }

inline Floats all(float value) { return value - Floats{}; }

inline float magnitude(float value) { return value < 0 ? -value : value; }

inline float value_of(int byte) {
    return bits_as<float>(static_cast<uint32_t>(byte + (120 << 3)) << 20);
}

// The first of the bytes to try: E4M3's nearest to largest / 6, minus one, within the range.
inline int first_byte(float largest) {
    float scale = largest * (1.0f / 6.0f);
    scale = scale > 0x1p-6f ? scale : 0x1p-6f;
    scale = scale < 448.0f ? scale : 448.0f;
    const uint32_t bits = bits_as<uint32_t>(scale);
    const int byte = static_cast<int>((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3) - kBelow;
    constexpr int last = kMaxByte + 1 - static_cast<int>(kNumScales);
    return byte < kMinNormalByte ? kMinNormalByte : byte > last ? last : byte;
}

// E2M1's nearest value, ties to the even code, saturating. Adding and subtracting 1.5 * 2**23 rounds to integers.
inline Floats nearest_value(const Floats& scaled) {
    // Casts between vectors keep their bits.
    const Ints bits = (Ints)scaled;
    const Ints sign = bits & INT32_MIN;
    Floats size = (Floats)(bits & INT32_MAX);
    size = size < 6.0f ? size : all(6.0f);
    const Floats inverse = size < 2.0f ? all(2.0f) : size < 4.0f ? all(1.0f) : all(0.5f);
    const Floats step = size < 2.0f ? all(0.5f) : size < 4.0f ? all(1.0f) : all(2.0f);
    const Floats rounded = ((size * inverse + 12582912.0f) - 12582912.0f) * step;
    return (Floats)((Ints)rounded | sign);
}

inline float nearest_value(float scaled) {
    float size = magnitude(scaled);
    size = size < 6.0f ? size : 6.0f;
    const float inverse = size < 2.0f ? 2.0f : size < 4.0f ? 1.0f : 0.5f;
    const float step = size < 2.0f ? 0.5f : size < 4.0f ? 1.0f : 2.0f;
    const float rounded = ((size * inverse + 12582912.0f) - 12582912.0f) * step;
    return scaled < 0 ? -rounded : rounded;
}

// c -= a b for six rows of a and c and a packed strip of b, [depth, 16].
inline void subtract_strip(const float* a, size_t a_stride, const float* b, size_t depth, float* c, size_t c_stride) {
    Floats sums[kGroupRows][kStripVectors] = {};
    for (size_t d = 0; d < depth; ++d) {
        Floats columns[kStripVectors];
        for (size_t v = 0; v < kStripVectors; ++v) columns[v] = load(b + kStrip * d + kLanes * v);
        for (size_t r = 0; r < kGroupRows; ++r) {
            const Floats factor = all(a[r * a_stride + d]);
            for (size_t v = 0; v < kStripVectors; ++v) sums[r][v] += factor * columns[v];
        }
    }
    for (size_t r = 0; r < kGroupRows; ++r) {
        float* row = c + r * c_stride;
        for (size_t v = 0; v < kStripVectors; ++v) store(row + kLanes * v, load(row + kLanes * v) - sums[r][v]);
    }
}

// c -= a b: a [rows, depth], b [depth, columns] or transposed, c [rows, columns]; depth at most kPanel, whole groups and
// strips.
void subtract_product(const float* a, size_t a_stride, size_t rows, const float* b, size_t b_stride, bool is_transposed,
                      size_t depth, size_t columns, float* c, size_t c_stride) {
    alignas(64) float packed[kPanel * kPacked];
    for (size_t start = 0; start < columns; start += kPacked) {
        const size_t width = columns - start < kPacked ? columns - start : kPacked;
        if (is_transposed)
            for (size_t k = 0; k < width; ++k)
                for (size_t d = 0; d < depth; ++d)
                    packed[k / kStrip * kStrip * depth + d * kStrip + k % kStrip] = b[(start + k) * b_stride + d];
        else
            for (size_t d = 0; d < depth; ++d) {
                const float* from = b + d * b_stride + start;
                for (size_t k = 0; k < width; k += kStrip)
                    std::memcpy(packed + k * depth + d * kStrip, from + k, kStrip * sizeof(float));
            }
        for (size_t k = 0; k < width; k += kStrip)
            for (size_t r = 0; r < rows; r += kGroupRows)
                subtract_strip(a + r * a_stride, a_stride, packed + k * depth, depth, c + r * c_stride + start + k,
                               c_stride);
    }
}

// The best of the scales for a block: its values, their errors over U_jj, and the sum of squares of these.
struct Found {
    float values[kBlockSize], errors[kBlockSize], loss;
    int byte;
};

inline void search_block(const float* weights, const float* factor, size_t stride, Found& found) {
    alignas(32) float errors[kBlockSize][kNumScales], values[kBlockSize][kNumScales], losses[kNumScales];
    float largest = 0;
    for (size_t i = 0; i < kBlockSize; ++i) {
        const float size = magnitude(weights[i]);
        largest = size > largest ? size : largest;
    }
    const int first = first_byte(largest);
    for (size_t c = 0; c < kNumScales; ++c) losses[c] = value_of(first + static_cast<int>(c));
    for (size_t c = 0; c < kNumScales; c += kLanes) {
        Floats rest[kBlockSize], sums = {};
        for (size_t i = 0; i < kBlockSize; ++i) rest[i] = all(weights[i]);
        const Floats steps = load(losses + c), inverses = 1.0f / steps;
        for (size_t i = 0; i < kBlockSize; ++i) {
            const float* row = factor + i * stride;
            const Floats value = nearest_value(rest[i] * inverses) * steps;
            const Floats error = (rest[i] - value) * all(1.0f / row[i]);
            sums += error * error;
            store(values[i] + c, value);
            store(errors[i] + c, error);
            for (size_t k = i + 1; k < kBlockSize; ++k) rest[k] -= error * all(row[k]);
        }
        store(losses + c, sums);
    }
    size_t best = 0;
    for (size_t c = 1; c < kNumScales; ++c) best = losses[c] < losses[best] ? c : best;
    for (size_t i = 0; i < kBlockSize; ++i) found.values[i] = values[i][best], found.errors[i] = errors[i][best];
    found.loss = losses[best];
    found.byte = first + static_cast<int>(best);
}

// A square of a [K, K] matrix on its diagonal, contiguous.
struct Panel {
    alignas(64) float values[kPanel * kPanel];
    size_t start, size;

    Panel(const float* matrix, size_t columns, size_t start)
        : start(start), size(columns - start < kPanel ? columns - start : kPanel) {
        for (size_t i = 0; i < size; ++i)
            std::memcpy(values + i * kPanel, matrix + (start + i) * columns + start, size * sizeof(float));
    }
    const float* row(size_t i) const { return values + i * kPanel; }
};

class Tile {
   public:
    Tile(const Rounding& rounding, size_t first, size_t rows, float* room, uint8_t* scales)
        : rounding_(rounding), columns_(rounding.columns), rows_(rows),
          padded_((rows + kGroupRows - 1) / kGroupRows * kGroupRows), weights_(room),
          values_(room + kTileRows * columns_), gradient_(room + 2 * kTileRows * columns_),
          errors_(room + 3 * kTileRows * columns_), scales_(scales), first_(first) {}

    void round() {
        std::memcpy(weights_, rounding_.target + first_ * columns_, rows_ * columns_ * sizeof(float));
        std::memset(weights_ + rows_ * columns_, 0, (padded_ - rows_) * columns_ * sizeof(float));
        std::memset(gradient_ + rows_ * columns_, 0, (padded_ - rows_) * columns_ * sizeof(float));
        for (size_t start = 0; start < columns_; start += kPanel)
            round_panel(Panel(rounding_.factor, columns_, start));
        if (rounding_.sweeps > 0) {
            start_gradient();
            for (int sweep = 1; sweep <= rounding_.sweeps; ++sweep) run_sweep(sweep == rounding_.sweeps);
        }
        for (size_t r = 0; r < rows_; ++r) encode_row(r);
    }

   private:
    // The gradient's memory holds the errors.
    void round_panel(const Panel& factor) {
        Found found;
        for (size_t j = 0; j < factor.size; j += kBlockSize)
            for (size_t r = 0; r < rows_; ++r) {
                float* row = weights_ + r * columns_ + factor.start;
                search_block(row + j, factor.row(j) + j, kPanel, found);
                std::memcpy(values_ + r * columns_ + factor.start + j, found.values, sizeof found.values);
                std::memcpy(gradient_ + r * columns_ + factor.start + j, found.errors, sizeof found.errors);
                scales_[(r * columns_ + factor.start + j) / kBlockSize] = static_cast<uint8_t>(found.byte);
                for (size_t k = j + kBlockSize; k < factor.size; k += kStrip) {
                    Floats rest[kStripVectors];
                    for (size_t v = 0; v < kStripVectors; ++v) rest[v] = load(row + k + kLanes * v);
                    for (size_t i = 0; i < kBlockSize; ++i) {
                        const Floats error = all(found.errors[i]);
                        const float* columns = factor.row(j + i) + k;
                        for (size_t v = 0; v < kStripVectors; ++v) rest[v] -= error * load(columns + kLanes * v);
                    }
                    for (size_t v = 0; v < kStripVectors; ++v) store(row + k + kLanes * v, rest[v]);
                }
            }
        const size_t end = factor.start + factor.size;
        subtract_product(gradient_ + factor.start, columns_, padded_,
                         rounding_.factor + factor.start * columns_ + end, columns_, false, factor.size,
                         columns_ - end, weights_ + end, columns_);
    }

    // Solves G U^T = E in the memory of E, panels and their columns from right to left.
    void start_gradient() {
        alignas(32) float factor[kPanel * kPanel];  // transposed
        for (size_t end = columns_; end > 0;) {
            const size_t start = (end - 1) / kPanel * kPanel, size = end - start;
            const float* matrix = rounding_.factor + start;
            for (size_t i = 0; i < size; ++i)
                for (size_t k = 0; k < size; ++k) factor[k * kPanel + i] = matrix[(start + i) * columns_ + k];
            for (size_t r = 0; r < rows_; ++r) solve_row(gradient_ + r * columns_ + start, factor, size);
            subtract_product(gradient_ + start, columns_, padded_, matrix, columns_, true, size, start, gradient_,
                             columns_);
            end = start;
        }
        for (size_t r = 0; r < kTileRows; ++r) is_done_[r] = false;
    }

    void solve_row(float* row, const float* factor, size_t size) const {
        for (size_t k = size; k-- > 0;) {
            const float value = row[k] / factor[k * kPanel + k];
            const Floats found = all(value);
            for (size_t i = 0; i < k; i += kLanes)
                store(row + i, load(row + i) - found * load(factor + k * kPanel + i));
            row[k] = value;
        }
    }

    // After the last sweep no gradient is needed, so in it columns that are done are not updated.
    void run_sweep(bool is_last) {
        bool has_changed[kTileRows] = {};
        for (size_t start = 0; start < columns_; start += kPanel) {
            const Panel form(rounding_.form, columns_, start);
            std::memset(errors_, 0, kTileRows * kPanel * sizeof(float));
            for (size_t j = 0; j < form.size; j += kBlockSize) {
                for (size_t r = 0; r < rows_; ++r)
                    if (!is_done_[r] && improve_block(form, j, r)) has_changed[r] = true;
            }
            for (size_t r = 0; r < rows_; ++r) spread(form, r, is_last);
        }
        for (size_t r = 0; r < rows_; ++r) is_done_[r] = !has_changed[r];
    }

    bool improve_block(const Panel& form, size_t j, size_t r) {
        float* values = values_ + r * columns_ + form.start + j;
        const float* gradient = gradient_ + r * columns_ + form.start + j;
        uint8_t& byte = scales_[(r * columns_ + form.start + j) / kBlockSize];
        bool has_changed = search_again(form, j, r, values, gradient, byte);
        const float step = value_of(byte), inverse_step = 1.0f / step;
        for (size_t i = 0; i < kBlockSize; ++i) {
            const float best = values[i] + gradient[i] / form.row(j + i)[j + i];
            if (change(form, j + i, r, nearest_value(best * inverse_step) * step)) has_changed = true;
        }
        return has_changed;
    }

    // Search from the block's optimum, and take what is found if the loss falls.
    bool search_again(const Panel& form, size_t j, size_t r, const float* values, const float* gradient,
                      uint8_t& byte) {
        const float* inverse = rounding_.block_inverses + (form.start + j) * kBlockSize;
        alignas(32) float optimum[kBlockSize] = {};
        for (size_t k = 0; k < kBlockSize; ++k)
            for (size_t i = 0; i < kBlockSize; ++i) optimum[i] += gradient[k] * inverse[k * kBlockSize + i];
        float loss = 0;
        for (size_t i = 0; i < kBlockSize; ++i) {
            loss += optimum[i] * gradient[i];
            optimum[i] += values[i];
        }
        Found found;
        search_block(optimum, rounding_.block_factors + (form.start + j) * kBlockSize, kBlockSize, found);
        if (!(found.loss < loss * kWorthwhile)) return false;
        byte = static_cast<uint8_t>(found.byte);
        for (size_t i = 0; i < kBlockSize; ++i) change(form, j + i, r, found.values[i]);
        return true;
    }

    // Change a value; its panel's gradients follow now, all others when the panel is done.
    bool change(const Panel& form, size_t column, size_t r, float value) {
        float& current = values_[r * columns_ + form.start + column];
        const float difference = value - current;
        if (difference == 0) return false;
        current = value;
        errors_[r * kPanel + column] += difference;
        float* gradient = gradient_ + r * columns_ + form.start;
        const float* row = form.row(column);
        const Floats factor = all(difference);
        for (size_t k = 0; k < form.size; k += kLanes) store(gradient + k, load(gradient + k) - factor * load(row + k));
        return true;
    }

    void spread(const Panel& form, size_t r, bool is_last) {
        const float* differences = errors_ + r * kPanel;
        size_t chosen[kPanel + 3], count = 0;
        for (size_t i = 0; i < form.size; ++i)
            if (differences[i] != 0) chosen[count++] = i;
        for (size_t first = 0; first < count; first += 4) {
            const float* rows[4];
            Floats factors[4];
            for (size_t i = 0; i < 4; ++i) {
                const size_t column = chosen[first + i < count ? first + i : first];
                rows[i] = rounding_.form + (form.start + column) * columns_;
                factors[i] = all(first + i < count ? differences[column] : 0.0f);
            }
            float* gradient = gradient_ + r * columns_;
            const auto update = [&](size_t begin, size_t end) {
                for (size_t k = begin; k < end; k += kLanes) {
                    Floats sum = load(gradient + k);
                    for (size_t i = 0; i < 4; ++i) sum -= factors[i] * load(rows[i] + k);
                    store(gradient + k, sum);
                }
            };
            if (!is_last) update(0, form.start);
            update(form.start + form.size, columns_);
        }
    }

    // A block without values gets what rule `mse` writes: codes 0, never -0, and the scale 1.
    void encode_row(size_t r) {
        static constexpr uint8_t codes[13] = {0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7};  // by twice the value
        const float* values = values_ + r * columns_;
        for (size_t j = 0; j < columns_; j += kBlockSize) {
            const uint8_t byte = scales_[(r * columns_ + j) / kBlockSize];
            const float doubled = 2.0f / value_of(byte);
            uint8_t* packed = rounding_.packed + ((first_ + r) * columns_ + j) / 2;
            bool is_empty = true;
            for (size_t i = 0; i < kBlockSize; i += 2) {
                uint8_t nibbles[2];
                for (size_t k = 0; k < 2; ++k) {
                    const float value = values[j + i + k];
                    nibbles[k] = codes[static_cast<int>(magnitude(value) * doubled + 0.5f)];
                    if (nibbles[k] != 0) is_empty = false;
                    if (nibbles[k] != 0 && value < 0) nibbles[k] |= 8;
                }
                packed[i / 2] = static_cast<uint8_t>(nibbles[0] | nibbles[1] << 4);
            }
            rounding_.scale_bytes[((first_ + r) * columns_ + j) / kBlockSize] = is_empty ? kOneByte : byte;
        }
    }

    const Rounding& rounding_;
    size_t columns_, rows_, padded_;
    float *weights_, *values_, *gradient_, *errors_;
    uint8_t* scales_;
    size_t first_;
    bool is_done_[kTileRows];
};

}  // namespace

void round_tile(const Rounding& rounding, size_t first, size_t rows, float* room, uint8_t* scales) {
    Tile(rounding, first, rows, room, scales).round();
}

}  // namespace k2::K2_LEVEL
