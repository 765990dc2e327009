// Transposes codes and scales, packed codes too: a square tile through shared memory, one code an entry.
#include "blockfp/packing.h"
#include "launch.h"

namespace blockfp {
namespace cuda {

constexpr int kTransposeThreads = 256;
constexpr int kTransposeTile = 64;

// Bits 8, 6, 4: codes of that many bits in rows of bytes. Bits 32: words. A thread moves a unit of eight codes (or one word) at a time.
template <int Bits>
struct TransposeEntry {
  using Type = uint8_t;
  static constexpr int kUnit = 8;
};
template <>
struct TransposeEntry<32> {
  using Type = uint32_t;
  static constexpr int kUnit = 1;
};

template <int Bits>
__host__ __device__ inline int64_t transpose_pitch(int64_t columns) {
  if constexpr (Bits == 32) return 4 * columns;
  else return Packing<Bits>::row_bytes(columns);
}

template <int Bits>
__global__ void __launch_bounds__(kTransposeThreads) transpose(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns,
                                                               int64_t across, int64_t down, bool vectors) {
  using Entry = typename TransposeEntry<Bits>::Type;
  constexpr int kUnit = TransposeEntry<Bits>::kUnit, kUnits = kTransposeTile / kUnit;
  // One more entry a row keeps the columns of the tile out of one another's banks.
  __shared__ Entry tile[kTransposeTile][kTransposeTile + (Bits == 32 ? 1 : 4)];
  const int64_t matrix = across * down, batch = blockIdx.x / matrix, in_matrix = blockIdx.x % matrix;
  const int64_t row0 = in_matrix / across * kTransposeTile, column0 = in_matrix % across * kTransposeTile;
  const int64_t in_pitch = transpose_pitch<Bits>(columns), out_pitch = transpose_pitch<Bits>(rows);
  in += batch * rows * in_pitch;
  out += batch * columns * out_pitch;
#pragma unroll
  for (int i = threadIdx.x; i < kTransposeTile * kUnits; i += kTransposeThreads) {
    const int r = i / kUnits, unit = i % kUnits;
    const int64_t row = row0 + r, column = column0 + unit * kUnit;
    if (row >= rows || column >= columns) {
      for (int k = 0; k < kUnit; ++k) tile[r][unit * kUnit + k] = 0;
      continue;
    }
    if constexpr (Bits == 32) {
      tile[r][unit] = reinterpret_cast<const uint32_t*>(in + row * in_pitch)[column];
    } else {
      const uint8_t* at = in + row * in_pitch + column / 8 * Bits;
      const int64_t left = in_pitch - column / 8 * Bits;
      uint64_t word = 0;
      if (vectors && Bits == 8 && left >= 8) {
        word = *reinterpret_cast<const uint64_t*>(at);
      } else {
        for (int k = 0; k < Bits && k < left; ++k) word |= static_cast<uint64_t>(at[k]) << (8 * k);
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        // Whatever the last group holds beyond the row must not reach the transposed one.
        tile[r][unit * 8 + k] = column + k < columns ? (word >> (Bits * k)) & ((1u << Bits) - 1) : 0;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kTransposeTile * kUnits; i += kTransposeThreads) {
    const int c = i / kUnits, unit = i % kUnits;
    const int64_t column = column0 + c, row = row0 + unit * kUnit;
    if (row >= rows || column >= columns) continue;
    if constexpr (Bits == 32) {
      reinterpret_cast<uint32_t*>(out + column * out_pitch)[row] = tile[unit][c];
    } else {
      uint64_t word = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) word |= static_cast<uint64_t>(tile[unit * 8 + k][c]) << (Bits * k);
      uint8_t* at = out + column * out_pitch + row / 8 * Bits;
      const int64_t left = out_pitch - row / 8 * Bits;
      if (vectors && Bits == 8 && left >= 8) {
        *reinterpret_cast<uint64_t*>(at) = word;
      } else {
        for (int k = 0; k < Bits && k < left; ++k) at[k] = word >> (8 * k);
      }
    }
  }
}

constexpr int kByteTile = 128;

// Bytes in whole tiles of 128 x 128: a thread turns 4 rows of 16 bytes in registers, so that shared memory sees words only.
__global__ void __launch_bounds__(kTransposeThreads) transpose_bytes(const uint8_t* in, uint8_t* out, int64_t rows,
                                                                     int64_t columns) {
  // Columns of words; 33 and 4 more for every 16 columns keep all lanes in banks of their own, writing and reading.
  __shared__ uint32_t tile[kByteTile * 33 + kByteTile / 16 * 4];
  const auto at = [](int column, int word) { return column * 33 + column / 16 * 4 + word; };
  const int64_t across = columns / kByteTile, down = rows / kByteTile, matrix = across * down;
  const int64_t batch = blockIdx.x / matrix, in_matrix = blockIdx.x % matrix;
  const int64_t row0 = in_matrix / across * kByteTile, column0 = in_matrix % across * kByteTile;
  in += batch * rows * columns;
  out += batch * rows * columns;
  const int eighth = threadIdx.x % 8, four = threadIdx.x / 8;
  uint4 line[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    line[i] = *reinterpret_cast<const uint4*>(in + (row0 + four * 4 + i) * columns + column0 + eighth * 16);
  }
  const uint32_t* words[4] = {&line[0].x, &line[1].x, &line[2].x, &line[3].x};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t a = words[0][w], b = words[1][w], c = words[2][w], d = words[3][w];
    const uint32_t ab0 = __byte_perm(a, b, 0x5140), ab2 = __byte_perm(a, b, 0x7362);
    const uint32_t cd0 = __byte_perm(c, d, 0x5140), cd2 = __byte_perm(c, d, 0x7362);
    const int column = eighth * 16 + w * 4;
    tile[at(column, four)] = __byte_perm(ab0, cd0, 0x5410);
    tile[at(column + 1, four)] = __byte_perm(ab0, cd0, 0x7632);
    tile[at(column + 2, four)] = __byte_perm(ab2, cd2, 0x5410);
    tile[at(column + 3, four)] = __byte_perm(ab2, cd2, 0x7632);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = four + i * 32;
    uint4 turned;
    turned.x = tile[at(column, eighth * 4)];
    turned.y = tile[at(column, eighth * 4 + 1)];
    turned.z = tile[at(column, eighth * 4 + 2)];
    turned.w = tile[at(column, eighth * 4 + 3)];
    *reinterpret_cast<uint4*>(out + (column0 + column) * rows + row0 + eighth * 16) = turned;
  }
}

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
