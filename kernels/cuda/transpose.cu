// Launches of transpose.cuh.
#include "transpose.cuh"

#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

template <int Bits>
cudaError_t with_bits(const void* in, void* out, int64_t batches, int64_t rows, int64_t columns, cudaStream_t stream) {
  if (Bits == 8 && rows % kByteTile == 0 && columns % kByteTile == 0 && aligned(in, 16) && aligned(out, 16)) {
    const int64_t tiles = batches * (rows / kByteTile) * (columns / kByteTile);
    if (tiles == 0) return cudaSuccess;
    if (tiles > kMostBlocks) return cudaErrorInvalidConfiguration;
    transpose_bytes<<<tiles, kTransposeThreads, 0, stream>>>(static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out), rows,
                                                             columns);
    return cudaGetLastError();
  }
  const int64_t across = ceil_div(columns, kTransposeTile), down = ceil_div(rows, kTransposeTile);
  const int64_t blocks = batches * across * down;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const bool vectors = rows % 8 == 0 && columns % 8 == 0 && aligned(in, 8) && aligned(out, 8);
  transpose<Bits><<<blocks, kTransposeThreads, 0, stream>>>(static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out), rows,
                                                           columns, across, down, vectors);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_transpose(const void* in, void* out, int bits, int64_t batches, int64_t rows, int64_t columns,
                             cudaStream_t stream) {
  switch (bits) {
    case 4:
      return with_bits<4>(in, out, batches, rows, columns, stream);
    case 6:
      return with_bits<6>(in, out, batches, rows, columns, stream);
    case 8:
      return with_bits<8>(in, out, batches, rows, columns, stream);
    default:
      return with_bits<32>(in, out, batches, rows, columns, stream);
  }
}

}  // namespace cuda
}  // namespace blockfp
