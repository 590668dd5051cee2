#include "instructions.hpp"

#include <cstring>

namespace k2 {

namespace {

bool has_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

bool chosen_avx2 = has_avx2();

}  // namespace

bool uses_avx2() { return chosen_avx2; }

const char* instructions() { return chosen_avx2 ? "avx2" : "portable"; }

bool use_instructions(const char* name) {
    const bool wants_avx2 = std::strcmp(name, "avx2") == 0;
    if ((wants_avx2 && !has_avx2()) || (!wants_avx2 && std::strcmp(name, "portable") != 0)) return false;
    chosen_avx2 = wants_avx2;
    return true;
}

}  // namespace k2
