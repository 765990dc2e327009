// Writes one-byte scales in the order of block-scaled tensor-core products, padded with zeros: tiles of 128 rows by 4 scales.
#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kInterleaveThreads = 256;

// A thread writes four adjacent bytes: row i, scales 4 q .. 4 q + 3. Row i of the product has scale row i / repeat.
__global__ void __launch_bounds__(kInterleaveThreads)
    interleave(const uint8_t* in, uint32_t* out, int64_t words, int64_t rows, int64_t m, int64_t n, int64_t row_tiles,
               int64_t column_tiles, int repeat) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kInterleaveThreads + threadIdx.x;
  if (index >= words) return;
  const int64_t tile = index / 128, place = index % 128;
  const int64_t column_tile = tile % column_tiles, row_tile = tile / column_tiles % row_tiles;
  const int64_t batch = tile / column_tiles / row_tiles;
  const int64_t row = row_tile * 128 + place % 4 * 32 + place / 4;
  uint32_t word = 0;
  if (row < rows) {
    const uint8_t* scales = in + (batch * m + row / repeat) * n;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t column = column_tile * 4 + j;
      if (column < n) word |= static_cast<uint32_t>(scales[column]) << (8 * j);
    }
  }
  out[index] = word;
}

cudaError_t launch_interleave(const uint8_t* in, uint8_t* out, int64_t batches, int64_t rows, int64_t m, int64_t n, int repeat,
                              cudaStream_t stream) {
  const int64_t row_tiles = ceil_div(rows, 128), column_tiles = ceil_div(n, 4);
  const int64_t words = batches * row_tiles * column_tiles * 128;
  if (words == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(words, kInterleaveThreads);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  interleave<<<blocks, kInterleaveThreads, 0, stream>>>(in, reinterpret_cast<uint32_t*>(out), words, rows, m, n, row_tiles,
                                                       column_tiles, repeat);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
