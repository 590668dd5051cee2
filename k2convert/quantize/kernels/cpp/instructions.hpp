// The instructions of the hand-vectorized kernels, detected when the module is loaded, the same for all threads.
#pragma once

namespace k2 {

// "avx2" or "portable".
const char* instructions();
// Choose them by name, for tests; false if the CPU cannot run them.
bool use_instructions(const char* name);
bool uses_avx2();

}  // namespace k2
