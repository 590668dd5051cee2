// The functions of vector_*.cpp on other CPUs: instructions.cpp finds no vectors, so these have nothing to do.
#include "channels.hpp"
#include "gptq.hpp"
#include "vectors.hpp"

#if !K2_HAS_VECTORS

namespace k2::vectors {

void convert_mse(const Batch&, int, const SearchTables&, Tally&, Totals&) {}
void convert_max(const Batch&, Tally&, Totals&) {}
void search_even(const uint8_t*, const SplitImportance*, const PackedErrors&, const uint8_t*, int*) {}
int search_block(const uint8_t*, const Plan&, const PackedErrors&, Seen&) { return -1; }
void encode_both(const uint8_t*, const uint8_t*, const uint8_t*, uint8_t*) {}
void count_fields(const uint8_t*, const Plan&, Fields&) {}
void encode_groups(const uint8_t*, const Plan&, const uint8_t* const*, uint8_t*) {}
RowSums measure_int4(const Int4&, const Quantized&, const ChannelFactors&, Figures&) { return {}; }
void round_tile(const Rounding&, size_t, size_t, float*, uint8_t*) {}

}  // namespace k2::vectors

#endif
