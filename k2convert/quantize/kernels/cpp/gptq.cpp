#define K2_LEVEL portable
#include "gptq_tile.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "instructions.hpp"

namespace k2 {

namespace {

bool uses_fused_vectors() {
#if defined(__x86_64__)
    return uses_vectors() && __builtin_cpu_supports("fma");
#else
    return uses_vectors();
#endif
}

}  // namespace

void round_gptq(const Rounding& rounding, size_t threads) {
    const size_t columns = rounding.columns, num_tiles = (rounding.rows + kTileRows - 1) / kTileRows;
    threads = std::max<size_t>(1, std::min(threads, num_tiles));
    const auto round_tile = uses_fused_vectors() ? vectors::round_tile : portable::round_tile;
    std::vector<float> room(threads * tile_room(columns));
    std::vector<uint8_t> scales(threads * kTileRows * (columns / 16));
    std::atomic<size_t> next{0};
    const auto work = [&](size_t thread) {
        for (size_t tile = next++; tile < num_tiles; tile = next++) {
            const size_t first = tile * kTileRows;
            round_tile(rounding, first, std::min(kTileRows, rounding.rows - first),
                       room.data() + thread * tile_room(columns), scales.data() + thread * kTileRows * (columns / 16));
        }
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        while (others.size() + 1 < threads) others.emplace_back(work, others.size() + 1);
    } catch (const std::system_error&) {
        // The machine allows no more threads. Those that run, this one included, do all tiles.
    }
    work(0);
    for (std::thread& other : others) other.join();
}

}  // namespace k2
