// Where transposed codes gather before they are written.
#pragma once

#include "tile.cuh"

namespace blockfp {
namespace cuda {

// Transposed codes on their way out: kTileColumns rows of kBytes, in shared memory.
//
// 8- and 4-bit codes come in units of 8 bytes, sixteen a row, swapped about so that neither writing nor reading meets a bank twice.
template <class E>
struct Staging {
  static constexpr int kBytes = kTileRows<E> * E::kBits / 8;
  static constexpr bool kUnits = E::kBits != 6;
  static constexpr int kPitch = kUnits ? kBytes : kBytes + 4;
  uint8_t bytes[kTileColumns * kPitch];

  __device__ __forceinline__ static int unit(int column, int index) {
    return column * kPitch + 8 * (index ^ (2 * ((column / 8) % 8)));
  }

  // Codes of kDepth rows of a column, from tile row kDepth * index.
  __device__ __forceinline__ void put(int column, int index, const uint2* codes) {
    if constexpr (E::kBits == 8) {
      *reinterpret_cast<uint2*>(bytes + unit(column, index)) = codes[0];
    } else if constexpr (E::kBits == 4) {
      *reinterpret_cast<uint2*>(bytes + unit(column, index)) = {codes[0].x, codes[1].x};
    } else {
      uint32_t* words = reinterpret_cast<uint32_t*>(bytes + column * kPitch + 12 * index);
      words[0] = codes[0].x, words[1] = codes[0].y | (codes[1].x << 16), words[2] = (codes[1].x >> 16) | (codes[1].y << 16);
    }
  }

  // Whole vectors: x has a multiple of 16 (6- and 8-bit) or 32 rows. `out`: the tile's first byte of the tile's first column; `rows` and
  // `columns`: how many of x are left from there.
  __device__ __forceinline__ void copy_vectors(uint8_t* out, int64_t pitch, int64_t rows, int64_t columns) const {
    constexpr int kVector = kUnits ? 16 : 4, kVectors = kBytes / kVector;
    const int rows_left = static_cast<int>(min(rows, int64_t{kTileRows<E>}));
    const int columns_left = static_cast<int>(min(columns, int64_t{kTileColumns}));
    if constexpr (kUnits) {
      static_assert(kTileThreads % kVectors == 0, "a thread keeps to one vector of each column it copies");
      constexpr int kStep = kTileThreads / kVectors;
      const int first = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
      if (vector * 128 / E::kBits >= rows_left) return;
      out += first * pitch + vector * kVector;
#pragma unroll
      for (int k = 0; k < kTileColumns / kStep; ++k, out += kStep * pitch) {
        const int column = first + k * kStep;
        if (column < columns_left) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(bytes + unit(column, 2 * vector));
      }
    } else {
      for (int i = threadIdx.x; i < kTileColumns * kVectors; i += kTileThreads) {
        const int column = i / kVectors, vector = i % kVectors;
        if (vector / 3 * 16 >= rows_left || column >= columns_left) continue;
        *reinterpret_cast<uint32_t*>(out + column * pitch + vector * kVector) =
            *reinterpret_cast<const uint32_t*>(bytes + column * kPitch + 4 * vector);
      }
    }
  }

  // Byte by byte; `first` is the tile's first byte in its row of codes, negative where the tile begins before x.
  __device__ __forceinline__ void copy_bytes(uint8_t* codes, int64_t pitch, int64_t first, int64_t first_column,
                                             int64_t columns) const {
    for (int i = threadIdx.x; i < kTileColumns * kBytes; i += kTileThreads) {
      const int column = i / kBytes, byte = i % kBytes;
      const int64_t row = first_column + column, at = first + byte;
      if (row < 0 || row >= columns || at < 0 || at >= pitch) continue;
      const int from = kUnits ? unit(column, byte / 8) + byte % 8 : column * kPitch + byte;
      codes[row * pitch + at] = bytes[from];
    }
  }
};

}  // namespace cuda
}  // namespace blockfp
