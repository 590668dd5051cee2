// The functions of vector_*.cpp on other CPUs: instructions.cpp finds no vectors, so these have nothing to do.
#include "gptq.hpp"
#include "groups.hpp"
#include "measure.hpp"
#include "vectors.hpp"

#if !K2_HAS_VECTORS

namespace k2::vectors {

void convert_mse(const Batch&, int, const SearchTables&, Counts&, Totals&) {}
void convert_max(const Batch&, Counts&, Totals&) {}
RowSums measure_int4(const Int4&, const Quantized&, Figures&) { return {}; }
void round_tile(const Rounding&, size_t, size_t, float*, uint8_t*) {}

}  // namespace k2::vectors

#endif
