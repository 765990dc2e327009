#include "operands.h"

#include <algorithm>

#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

constexpr int kTile = 32, kLines = 8;

__global__ void __launch_bounds__(kTile * kLines) lay_scales_kernel(StoredScales in, float* out) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile, block = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t filled = (in.rows + 3) / 4 * 4;
  for (int64_t matrix = blockIdx.z; matrix < in.matrices; matrix += gridDim.z) {
    const float* const from = in.data + matrix * in.matrix_stride;
    float* const to = out + matrix * in.blocks * filled;
    for (int line = threadIdx.y; line < kTile; line += kLines) {
      const int64_t r = row + line, b = block + threadIdx.x;
      const int64_t stored = in.repeat == 0 ? 0 : r / in.repeat;
      if (r < filled && b < in.blocks) {
        tile[line][threadIdx.x] = r < in.rows ? from[stored * in.row_stride + b * in.block_stride] : 0;
      }
    }
    __syncthreads();
    for (int line = threadIdx.y; line < kTile; line += kLines) {
      const int64_t r = row + threadIdx.x, b = block + line;
      if (r < filled && b < in.blocks) to[b * filled + r] = tile[threadIdx.x][line];
    }
    __syncthreads();
  }
}

// A thread writes 16 bytes. Rows begin at any byte, so it reads the five aligned words that contain its bytes, and single bytes
// only at the ends of the array.
__global__ void __launch_bounds__(256)
fill_rows_kernel(const uint8_t* in, uint8_t* out, int64_t rows, int64_t length, int64_t filled) {
  const int64_t vectors = filled / 16, count = rows * vectors, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const uint8_t* const end = in + rows * length;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t row = i / vectors, at = (i - row * vectors) * 16;
    const uint8_t* const from = in + row * length + at;
    const int valid = static_cast<int>(min(max(length - at, int64_t{0}), int64_t{16}));
    const uint32_t shift = reinterpret_cast<uint64_t>(from) % 4;
    const uint8_t* const first = from - shift;
    uint32_t x[4] = {};
    if (first >= in && first + 20 <= end) {
      uint32_t words[5];
#pragma unroll
      for (int j = 0; j < 5; ++j) words[j] = reinterpret_cast<const uint32_t*>(first)[j];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = __funnelshift_r(words[j], words[j + 1], shift * 8);
        const int keep = min(max(valid - j * 4, 0), 4);
        if (keep < 4) x[j] &= (1u << keep * 8) - 1;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (j < valid) x[j / 4] |= static_cast<uint32_t>(from[j]) << j % 4 * 8;
      }
    }
    reinterpret_cast<uint4*>(out)[i] = make_uint4(x[0], x[1], x[2], x[3]);
  }
}

}  // namespace

cudaError_t launch_lay_scales(const StoredScales& in, float* out, cudaStream_t stream) {
  const int64_t filled = ceil_div(in.rows, 4) * 4;
  if (filled * in.blocks * in.matrices == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(filled, kTile)), static_cast<unsigned>(ceil_div(in.blocks, kTile)),
                  static_cast<unsigned>(std::min<int64_t>(in.matrices, 65535)));
  lay_scales_kernel<<<grid, dim3(kTile, kLines), 0, stream>>>(in, out);
  return cudaGetLastError();
}

cudaError_t launch_fill_rows(const void* in, void* out, int64_t rows, int64_t length, int64_t filled, cudaStream_t stream) {
  const int64_t blocks = ceil_div(rows * (filled / 16), 256);
  if (blocks == 0) return cudaSuccess;
  fill_rows_kernel<<<static_cast<unsigned>(std::min(blocks, kMostBlocks)), 256, 0, stream>>>(
      static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out), rows, length, filled);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
