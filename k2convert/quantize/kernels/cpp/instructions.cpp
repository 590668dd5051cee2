#include "instructions.hpp"

#include <cstring>

namespace k2 {

namespace {

#if defined(__x86_64__)
constexpr const char* kVectors = "avx2";
bool has_vectors() { return __builtin_cpu_supports("avx2"); }
#elif defined(__aarch64__)
constexpr const char* kVectors = "neon";
bool has_vectors() { return true; }
#else
constexpr const char* kVectors = "";
bool has_vectors() { return false; }
#endif

bool chosen_vectors = has_vectors();

}  // namespace

bool uses_vectors() { return chosen_vectors; }

const char* instructions() { return chosen_vectors ? kVectors : "portable"; }

bool use_instructions(const char* name) {
    const bool wants_vectors = std::strcmp(name, kVectors) == 0;
    if ((wants_vectors && !has_vectors()) || (!wants_vectors && std::strcmp(name, "portable") != 0)) return false;
    chosen_vectors = wants_vectors;
    return true;
}

}  // namespace k2
