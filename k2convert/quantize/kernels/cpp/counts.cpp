#include "counts.hpp"

#include <algorithm>
#include <memory>

namespace k2 {

namespace {

void add_row(std::vector<Pair>& pairs, int64_t key, const uint8_t* row) {
    uint32_t lanes[kBlocksLane + 1];
    std::memcpy(lanes, row, sizeof lanes);
    Pair pair{key, lanes[kBlocksLane], {}};
    int64_t others = 0;
    for (int k = 1; k < 9; ++k) others += pair.counts[k] = lanes[k - 1];
    pair.counts[0] = 16 * pair.num_blocks - others;
    pairs.push_back(pair);
}

bool is_used(const uint8_t* row) {
    uint32_t blocks;
    std::memcpy(&blocks, row + 4 * kBlocksLane, sizeof blocks);
    return blocks != 0;
}

}  // namespace

Counts::Counts() {
    std::memset(rows_ + spare_row(), 0, kRowBytes);
    std::fill(std::begin(odd_keys_), std::end(odd_keys_), -1);
    std::fill(std::begin(slot_of_), std::end(slot_of_), int16_t{-1});
}

int Counts::open_slot(uint16_t bits, Rule rule) {
    const int slot = num_slots_++;
    slot_of_[bits] = static_cast<int16_t>(slot);
    slot_bits_[slot] = bits;
    const size_t slot_bytes = (rule == Rule::mse ? kMseRows : kMaxRows) * kRowBytes;
    std::memset(rows_ + slot * slot_bytes, 0, slot_bytes);
    slots_[slot] = Slot{0, 0, 0, static_cast<int32_t>(slot * slot_bytes)};
    return slot;
}

void Counts::count_odd(int64_t key, uint64_t word) {
    size_t place = static_cast<size_t>(key * 40503) & (kOddCapacity - 1);
    while (odd_keys_[place] != key) {
        if (odd_keys_[place] < 0) {
            odd_keys_[place] = key;
            std::memset(odd_rows_ + place * kRowBytes, 0, kRowBytes);
            ++num_odd_;
            break;
        }
        place = (place + 1) & (kOddCapacity - 1);
    }
    count_row(odd_rows_ + place * kRowBytes, word);
}

bool Counts::is_full() const {
    return num_slots_ > kMaxSlots - kBatchGroups || num_odd_ > kOddCapacity / 2 - 2 * kBatchGroups;
}

void Counts::drain(Rule rule, std::vector<Pair>& pairs) {
    const int rows_per_slot = rule == Rule::mse ? kMseRows : kMaxRows;
    for (int slot = 0; slot < num_slots_; ++slot) {
        const int64_t bits = slot_bits_[slot] & 0x7FFF;
        for (int i = 0; i < rows_per_slot; ++i) {
            const uint8_t* row = rows_ + slots_[slot].row + i * kRowBytes;
            if (!is_used(row)) continue;
            add_row(pairs, bits << 8 | (rule == Rule::mse ? slots_[slot].first + i : row[kScaleByte]), row);
        }
        slot_of_[slot_bits_[slot]] = -1;
    }
    if (num_odd_ > 0) {
        for (int place = 0; place < kOddCapacity; ++place) {
            if (odd_keys_[place] < 0) continue;
            add_row(pairs, odd_keys_[place], odd_rows_ + place * kRowBytes);
            odd_keys_[place] = -1;
        }
    }
    num_slots_ = num_odd_ = 0;
}

Counts& thread_counts() {
    thread_local const auto counts = std::make_unique<Counts>();
    return *counts;
}

void merge_pairs(std::vector<Pair>& pairs) {
    std::vector<std::pair<int64_t, size_t>> order(pairs.size());
    for (size_t i = 0; i < pairs.size(); ++i) order[i] = {pairs[i].key, i};
    std::sort(order.begin(), order.end());
    std::vector<Pair> merged;
    merged.reserve(pairs.size());
    for (const auto& [key, i] : order) {
        if (merged.empty() || merged.back().key != key) {
            merged.push_back(pairs[i]);
            continue;
        }
        merged.back().num_blocks += pairs[i].num_blocks;
        for (int k = 0; k < 9; ++k) merged.back().counts[k] += pairs[i].counts[k];
    }
    pairs.swap(merged);
}

}  // namespace k2
