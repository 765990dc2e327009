// Transposes codes and scales, packed codes too: a square tile through shared memory, one code an entry.
#pragma once

#include "blockfp/packing.h"

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

}  // namespace cuda
}  // namespace blockfp
