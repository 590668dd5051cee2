// Which instructions the kernels of hand-written vectors use: found when the module is loaded, the same for all threads.
#pragma once

namespace k2 {

// "avx2" where the CPU has it, or "portable".
const char* instructions();
// Choose them by name, for tests; false where the CPU cannot run them.
bool use_instructions(const char* name);
bool uses_avx2();

}  // namespace k2
