// Counting pairs of source scale and block scale during the conversion, when columns have no factors.
//
// Under a rule, the pair decides the code of each |q|, so all figures follow from a few thousand counts. It takes a
// third of the time of comparing every weight with its code, which measure.hpp does for any other NVFP4 weight.
//
// Every distinct source scale gets a slot, and every slot a few rows, one for each block scale that its blocks usually
// get. The row is found without a search: under `mse` by the candidate's position, under `max` by the block's
// largest |q|. Blocks that are searched one by one (all zero, or with a best scale outside the normal E4M3 range) are
// counted in a small hash table. A row is one cache line, with everything that a block needs:
//
//     byte  0..31                        32..35    36            37                           48..63
//           elements with |q| = 1..8,    blocks    `max`:      `max`: bit k - 1 if        `max`: output nibble
//           uint32 each                            E4M3 byte     |q| = k is inexact           of each source nibble
//
// When the slots or the hash table are full, the counts are moved to a list of pairs, and counting continues.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace k2 {

constexpr int kMaxSlots = 2048;
constexpr int kMseRows = 40;
constexpr int kMaxRows = 9;
constexpr int kRowBytes = 64;
constexpr int kBlocksLane = 8;
constexpr int kScaleByte = 36, kInexactByte = 37, kMapByte = 48;
constexpr int kOddCapacity = 1 << 13;
// Groups that go through the phases of a kernel together; their buffers fit the first-level cache.
constexpr int kBatchGroups = 64;
// 32-bit counters can count this many groups of 32 weights.
constexpr int64_t kMaxGroups = int64_t{1} << 26;

enum class Rule { mse, max };

// One pair: key = BF16 bits of s << 8 | E4M3 byte of b, its blocks, and their elements with |q| = 0..8.
struct Pair {
    int64_t key, num_blocks, counts[9];
};

struct Totals {
    int64_t equal_blocks = 0, outside_normal = 0;
};

// The counts of a tensor, in ascending order of the key.
struct Counted {
    std::vector<Pair> pairs;
    Totals totals;
};

// Where a source scale is in the tables of `mse`, see cpu.py.
struct Slot {
    int32_t table;  // byte offset of its mantissa's errors
    int32_t first;  // E4M3 byte of position 0, any integer
    int32_t rank;   // index of position 0 in the table of choices
    int32_t row;    // byte offset of the row of position 0
};

// Add a block to its row; `word` has the number of |q| = k in byte k - 1.
inline void count_row(uint8_t* row, uint64_t word) {
    uint32_t lanes[kBlocksLane + 1];
    std::memcpy(lanes, row, sizeof lanes);
    for (int k = 0; k < 8; ++k) lanes[k] += word >> (8 * k) & 0xFF;
    ++lanes[kBlocksLane];
    std::memcpy(row, lanes, sizeof lanes);
}

class Counts {
public:
    Counts();

    // The slot of a scale, or -1.
    int slot_of(uint16_t bits) const { return slot_of_[bits]; }
    // A new slot, its rows empty.
    int open_slot(uint16_t bits, Rule rule);
    uint16_t bits_of(int slot) const { return slot_bits_[slot]; }
    Slot& slot(int number) { return slots_[number]; }
    const Slot* slots() const { return slots_; }
    uint8_t* rows() { return rows_; }
    // A row whose counts are discarded.
    static constexpr int32_t spare_row() { return kMaxSlots * kMseRows * kRowBytes; }

    // Count one block in the hash table.
    void count_odd(int64_t key, uint64_t word);
    // Whether the next batch could need more room than is left.
    bool is_full() const;
    // Move the counts since the last call to `pairs` and leave none.
    void drain(Rule rule, std::vector<Pair>& pairs);

private:
    alignas(kRowBytes) uint8_t rows_[kMaxSlots * kMseRows * kRowBytes + kRowBytes], odd_rows_[kOddCapacity * kRowBytes];
    int64_t odd_keys_[kOddCapacity];
    alignas(16) Slot slots_[kMaxSlots];
    int16_t slot_of_[1 << 16];
    uint16_t slot_bits_[kMaxSlots];
    int num_slots_ = 0, num_odd_ = 0;
};

// The counts of this thread, all zero.
Counts& thread_counts();

// Sort pairs by key and add up those with equal keys. Minus zero is counted with zero.
void merge_pairs(std::vector<Pair>& pairs);

}  // namespace k2
