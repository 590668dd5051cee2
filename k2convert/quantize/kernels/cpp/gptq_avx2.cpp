// The same code as in gptq.cpp, compiled for AVX2 with fused multiply-adds. It runs only if the CPU has both.
#if defined(__x86_64__)
#define K2_LEVEL avx2
#include "gptq_tile.hpp"
#else
#include "gptq.hpp"

namespace k2::avx2 {
void round_tile(const Rounding& rounding, size_t first, size_t rows, float* room, uint8_t* scales) {
    portable::round_tile(rounding, first, rows, room, scales);
}
}  // namespace k2::avx2
#endif
