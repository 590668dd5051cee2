// What the figures of MXFP4 weights follow from: exact counts for each of the 256 bytes of a scale.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k2 {

// Add to tallies[256][4], by the scale byte: groups with a code that is not zero, such codes, and the sum of (2v)**2; the
// last is the largest code.
void tally_mxfp4(const uint8_t* packed, const uint8_t* scale_bytes, size_t num_groups, int64_t* tallies);

}  // namespace k2
