// Launches of order_scales.cuh.
#include "order_scales.cuh"

#include <algorithm>

#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

constexpr int64_t kTile = 128;
// Of a band in shared memory; what every GPU grants without being asked.
constexpr int64_t kMostBytes = 48 * 1024;

int64_t band_bytes(int64_t tiles) { return tiles * (kBandLines + 1) * sizeof(uint32_t); }

int64_t bands(const ScalesByTile& scales) { return scales.words == nullptr ? 0 : scales.lines / kBandLines; }

}  // namespace

bool can_order_scales(int64_t rows, int64_t columns) {
  return rows % kTile == 0 && columns % kTile == 0 && band_bytes(std::max(rows, columns) / kTile) <= kMostBytes;
}

cudaError_t launch_order_scales(const ScalesByTile& rows, const ScalesByTile& columns, cudaStream_t stream) {
  const int64_t blocks = bands(rows) + bands(columns);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  // The launch need not wait for the tiles: the kernel does.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(kOrderThreads), config.stream = stream;
  config.dynamicSmemBytes = band_bytes(std::max(rows.tiles, columns.tiles));
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, order_scales, rows, columns);
}

}  // namespace cuda
}  // namespace blockfp
