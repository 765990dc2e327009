// Launches of interleave.cuh.
#include "interleave.cuh"

#include "launch.h"

namespace blockfp {
namespace cuda {

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
