// Puts scales that a tile kernel has stored by tiles in order.
//
// A tile has four bytes of scales per line, which are far apart in the final order: every four bytes would cost a memory sector
// of 32, in total an eighth of the traffic of a kernel for both directions (H200: 0.81 of a copy's speed instead of 0.93). So
// the tile kernel writes [tile][line] within the memory of each band of eight lines, in whole sectors; this kernel converts it
// to [line][tile], a band at a time.
#include <algorithm>

#include "launch.h"
#include "scales_by_tile.cuh"

namespace blockfp {
namespace cuda {

constexpr int kOrderThreads = 128;
// A thread block has a band: first those of the rows, then of the columns.
__global__ void __launch_bounds__(kOrderThreads) order_scales(const __grid_constant__ ScalesByTile rows,
                                                              const __grid_constant__ ScalesByTile columns, const int32_t* overflow) {
  extern __shared__ uint32_t band[];  // [tile][line], with a word of padding per tile to avoid bank conflicts on both sides
  wait_for_preceding();
  // As four bytes each NaN, and as a word NaN.
  const uint32_t spoiled = overflow != nullptr && *static_cast<const volatile int32_t*>(overflow) == kInfinity ? ~0u : 0u;
  const uint32_t row_bands = rows.words == nullptr ? 0 : static_cast<uint32_t>(rows.lines / kBandLines);
  const bool of_rows = blockIdx.x < row_bands;
  const int tiles = of_rows ? rows.tiles : columns.tiles;
  const int64_t index = of_rows ? blockIdx.x : blockIdx.x - row_bands;
  uint32_t* words = (of_rows ? rows.words : columns.words) + index * kBandLines * tiles;
  constexpr int kPitch = kBandLines + 1, kAtOnce = 4, kQuads = kBandLines / 4;  // quads of words per tile
  for (int first = threadIdx.x; first < kQuads * tiles; first += kAtOnce * kOrderThreads) {
    uint4 four[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int quad = first + k * kOrderThreads;
      if (quad < kQuads * tiles) four[k] = load_by_tile(words + 4 * quad);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int quad = first + k * kOrderThreads;
      uint32_t* to = band + quad / kQuads * kPitch + quad % kQuads * 4;
      if (quad >= kQuads * tiles) continue;
      to[0] = four[k].x | spoiled, to[1] = four[k].y | spoiled, to[2] = four[k].z | spoiled, to[3] = four[k].w | spoiled;
    }
  }
  __syncthreads();
  constexpr int kLanes = kOrderThreads / kBandLines;  // per line
  const int line = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t* from = band + line;
  uint32_t* out = words + line * tiles;
  if (tiles % 4 == 0) {
#pragma unroll 4
    for (int tile = 4 * lane; tile < tiles; tile += 4 * kLanes) {
      *reinterpret_cast<uint4*>(out + tile) = {from[tile * kPitch], from[(tile + 1) * kPitch], from[(tile + 2) * kPitch],
                                               from[(tile + 3) * kPitch]};
    }
  } else {
    for (int tile = lane; tile < tiles; tile += kLanes) out[tile] = from[tile * kPitch];
  }
}

namespace {

constexpr int64_t kTile = 128;
// Of a band in shared memory; the limit that every GPU grants by default.
constexpr int64_t kMostBytes = 48 * 1024;

int64_t band_bytes(int64_t tiles) { return tiles * (kBandLines + 1) * sizeof(uint32_t); }

int64_t bands(const ScalesByTile& scales) { return scales.words == nullptr ? 0 : scales.lines / kBandLines; }

}  // namespace

bool can_order_scales(int64_t rows, int64_t columns) {
  return rows % kTile == 0 && columns % kTile == 0 && band_bytes(std::max(rows, columns) / kTile) <= kMostBytes;
}

cudaError_t launch_order_scales(const ScalesByTile& rows, const ScalesByTile& columns, const int32_t* overflow, cudaStream_t stream) {
  const int64_t blocks = bands(rows) + bands(columns);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  return launch_early(order_scales, blocks, kOrderThreads, band_bytes(std::max(rows.tiles, columns.tiles)), stream, rows, columns, overflow);
}

}  // namespace cuda
}  // namespace blockfp
