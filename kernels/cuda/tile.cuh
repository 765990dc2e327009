// A tile of a matrix in the registers of a block of threads, so that one read serves both directions.
//
// Eight warps, four along the rows and two along the columns; a warp has eight lanes side by side (eight columns each) and four on top of
// each other (kDepth rows each). A thread's piece is kDepth rows of eight columns.
#pragma once

#include <cuda_bf16.h>

#include "block_scale.cuh"
#include "vectors.cuh"

namespace blockfp {
namespace cuda {

constexpr int kTileThreads = 256;
constexpr int kTileColumns = 128;

template <class E>
constexpr int kDepth = E::kBits == 8 ? 8 : 16;
template <class E>
constexpr int kTileRows = 16 * kDepth<E>;

struct TilePlace {
  int warp_row, warp_column, lane_row, lane_column;
  int row, column;  // of the thread's piece, in the tile

  template <int Depth>
  __device__ __forceinline__ static TilePlace of_thread() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TilePlace p{warp / 2, warp % 2, lane / 8, lane % 8, 0, 0};
    p.row = (p.warp_row * 4 + p.lane_row) * Depth;
    p.column = (p.warp_column * 8 + p.lane_column) * 8;
    return p;
  }
};

// Where the tile lies in its matrix; negative where a block begins before x.
struct TileOrigin {
  int64_t batch, row, column;
};

// The random Hadamard transform of each column of sixteen rows, rounded to T. Values as in hadamard.h; signs are free here.
template <class T>
__device__ __forceinline__ void rotate_columns(Eight<T> (&x)[16]) {
  constexpr uint32_t kFlips = 0xD7E8;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float z[2][16];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        float v = value<T>(x[r], 2 * pair + half);
        // Below 2^-100 counts as zero of its sign; fp16 has nothing so small.
        if constexpr (T::kId != Fp16::kId) v = fabsf(v) < 0x1p-100f ? __fmul_rn(v, 0.0f) : v;
        z[half][r] = (kFlips >> r) & 1 ? -v : v;
      }
#pragma unroll
      for (int h = 1; h < 16; h *= 2) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i & h) continue;
          const float a = z[half][i], b = z[half][i + h];
          z[half][i] = __fadd_rn(a, b);
          z[half][i + h] = __fadd_rn(a, -b);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float low = __fmul_rn(z[0][r], 0.25f), high = __fmul_rn(z[1][r], 0.25f);
      if constexpr (T::kId == Fp32::kId) {
        x[r].word[2 * pair] = __float_as_uint(low), x[r].word[2 * pair + 1] = __float_as_uint(high);
      } else if constexpr (T::kId == Bf16::kId) {
        x[r].word[pair] = bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
      } else {
        x[r].word[pair] = bit_cast<uint32_t>(__floats2half2_rn(low, high));
      }
    }
  }
}

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

  // Whole vectors: x has a multiple of 16 (6- and 8-bit) or 32 rows. `out`: the tile's first byte of the tile's first column.
  __device__ __forceinline__ void copy_vectors(uint8_t* out, int64_t pitch, int64_t rows, int64_t columns) const {
    constexpr int kVector = kUnits ? 16 : 4, kVectors = kBytes / kVector;
#pragma unroll
    for (int i = threadIdx.x; i < kTileColumns * kVectors; i += kTileThreads) {
      const int column = i / kVectors, vector = i % kVectors;
      const int row = kUnits ? vector * 128 / E::kBits : vector / 3 * 16;
      if (row >= rows || column >= columns) continue;
      uint8_t* at = out + column * pitch + vector * kVector;
      if constexpr (kUnits) {
        *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(bytes + unit(column, 2 * vector));
      } else {
        *reinterpret_cast<uint32_t*>(at) = *reinterpret_cast<const uint32_t*>(bytes + column * kPitch + 4 * vector);
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
