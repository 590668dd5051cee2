// Rounding with error feedback: rows to NVFP4 such that (w - q) H (w - q)^T is small (quantize/gptq/rounding.py).
//
// First pass, columns from left to right: a block of 16 columns tries 8 neighboring E4M3 scales. Under each of them
// its columns are rounded one by one, and the error e of column j moves the columns k behind it by -e U_jk / U_jj. The
// scale with the least sum of (e / U_jj)**2 wins, and its errors move all columns behind the block.
//
// Sweeps, from the gradient G = (w - q) H: w - q is E U, where E are all e / U_jj, so G U^T = E is solved, which takes
// half of the product. A block tries the same search from its own optimum given all other columns,
// and takes the result if the loss falls. Then its columns take the best value under the block's scale, one by one.
//
// Rows do not depend on each other, so bytes do not depend on the number of threads. They may differ between vectors
// with fused multiply-adds and portable code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k2 {

// Rows [N, K] in units of the global scale, all finite; H and the upper triangular U with U^T U = H^-1, both [K, K]; of
// each diagonal block of H the same U, and the inverse, [K/16, 16, 16]. Codes [N, K/2] and scale bytes [N, K/16].
struct Rounding {
    const float *target, *form, *factor, *block_factors, *block_inverses;
    size_t rows, columns;
    int sweeps;
    uint8_t *packed, *scale_bytes;
};

void round_gptq(const Rounding& rounding, size_t threads);

// Rows that share what is read of H and U. With 48 of them rounding takes 1.1 times as long.
constexpr size_t kTileRows = 96;
// Columns whose errors are collected before the columns behind them see any.
constexpr size_t kPanel = 128;
// Room in floats for a tile: three arrays of weights, and the errors of a panel.
inline size_t tile_room(size_t columns) { return kTileRows * (3 * columns + kPanel); }

namespace portable {
void round_tile(const Rounding& rounding, size_t first, size_t rows, float* room, uint8_t* scales);
}
namespace vectors {
void round_tile(const Rounding& rounding, size_t first, size_t rows, float* room, uint8_t* scales);
}

}  // namespace k2
