// The instructions of the hand-vectorized kernels, detected when the module is loaded, the same for all threads.
#pragma once

namespace k2 {

// "avx2", "neon" or "portable".
const char* instructions();
// Choose them by name, for tests; false if the CPU cannot run them.
bool use_instructions(const char* name);
// Whether those of vector_*.cpp are chosen, AVX2's or NEON's.
bool uses_vectors();

}  // namespace k2
