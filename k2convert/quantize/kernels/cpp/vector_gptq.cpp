// The same code as in gptq.cpp with fused multiply-adds, for AVX2 or NEON. It runs only if the CPU has both.
#if defined(__x86_64__) || defined(__aarch64__)
#define K2_LEVEL vectors
#include "gptq_tile.hpp"
#else
#include "gptq.hpp"

namespace k2::vectors {
void round_tile(const Rounding& rounding, size_t first, size_t rows, float* room, uint8_t* scales) {
    portable::round_tile(rounding, first, rows, room, scales);
}
}  // namespace k2::vectors
#endif
