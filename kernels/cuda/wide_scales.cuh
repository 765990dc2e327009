// Scales of blocks of 128, which reach over the warps of a tile and meet in shared memory.
#pragma once

#include "piece.cuh"
#include "scales_by_tile.cuh"

namespace blockfp {
namespace cuda {

// A warp's part of a tile.
template <class E>
constexpr int kWarpRows = 4 * kDepth<E>;
constexpr int kWarpColumns = 64;

// 1-D, both directions; a tile holds one block of each of its lines.
template <class E, class T, Rounding R>
struct WideScales {
  static constexpr int kRowParts = kTileColumns / kWarpColumns, kColumnParts = kTileRows<E> / kWarpRows<E>;
  static_assert(kTileRows<E> == 128 && kTileColumns == 128, "a line's block is as long as a tile");
  using P = Piece<E, T, R>;

  int32_t row_parts[kRowParts][128], column_parts[kColumnParts][128];
  __align__(16) float row_multipliers[128];
  __align__(16) float column_multipliers[128];

  // Stores the scales; the multipliers are ready at its end, for all threads.
  __device__ __forceinline__ void decide(const P& piece) {
    const QuantizeArguments& a = piece.a;
    const bool rows = a.row.codes != nullptr;
    constexpr int kRowWords = P::kRows / kLinesPerWord<T>, kColumnWords = kWords<T>;
    if (rows) {
      uint32_t words[kRowWords];
      piece.template row_amaxes<false>(words);
      share<kRowWords, 8, 1>(words, row_parts[piece.place.warp_column] + piece.place.row);
    }
    uint32_t words[kColumnWords];
    piece.template column_amaxes<false>(words);
    share<kColumnWords, 4, 8>(words, column_parts[piece.place.warp_row] + piece.place.column);
    __syncthreads();
    // Half of the threads have a row each, half a column.
    const int line = threadIdx.x % 128;
    const TileOrigin& tile = piece.tile;
    if (threadIdx.x >= 128) {
      const int64_t at = place(a, tile.batch * a.x.columns + tile.column + line, (tile.row + a.window.row_phase) / 128,
                               grid(a.window.row_phase + a.x.rows));
      column_multipliers[line] = scale_line(a, column_parts, line, is_inside(tile.column + line, a.x.columns), a.column, at);
    } else if (rows) {
      const int64_t at = place(a, tile.batch * a.x.rows + tile.row + line, (tile.column + a.window.column_phase) / 128,
                               grid(a.window.column_phase + a.x.columns));
      row_multipliers[line] = scale_line(a, row_parts, line, is_inside(tile.row + line, a.x.rows), a.row, at);
    }
    __syncthreads();
  }

  // Eight from `first`, a multiple of four.
  __device__ __forceinline__ static void read(const float* multipliers, int first, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(multipliers + first + i);
      out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
  }

 private:
  __device__ __forceinline__ static int64_t grid(int64_t elements) { return (elements + 127) / 128; }

  __device__ __forceinline__ static int64_t place(const QuantizeArguments& a, int64_t line, int64_t block, int64_t blocks) {
    return P::kWhole && a.scales_by_tile ? index_by_tile(line, block, blocks) : line * blocks + block;
  }

  __device__ __forceinline__ static bool is_inside(int64_t line, int64_t lines) { return line < lines && (P::kWhole || line >= 0); }

  template <int Words, int Lanes, int Step>
  __device__ __forceinline__ static void share(uint32_t (&words)[Words], int32_t* out) {
    using Share = LaneShare<Words, Lanes, Step>;
    Share::template reduce<T, false>(words);
    if (Share::lane() % Share::kSame != 0) return;
#pragma unroll
    for (int i = 0; i < Share::kMine * kLinesPerWord<T>; ++i) {
      out[Share::first() * kLinesPerWord<T> + i] = magnitude_bits<T, false>(words[i / kLinesPerWord<T>], i % kLinesPerWord<T>);
    }
  }

  template <int Parts>
  __device__ __forceinline__ static float scale_line(const QuantizeArguments& a, const int32_t (&parts)[Parts][128], int line,
                                                     bool inside, const Output& out, int64_t at) {
    int32_t most = parts[0][line];
#pragma unroll
    for (int i = 1; i < Parts; ++i) most = max(most, parts[i][line]);
    const BlockScale<float> scale = block_scale<E, 128>(most, a, {});
    if (inside && P::kWhole && a.scales_by_tile) {
      store_by_tile(static_cast<uint32_t*>(out.scales), at, scale.stored);
    } else if (inside) {
      store_scale<128>(out.scales, at, scale.stored);
    }
    return scale.multiplier;
  }
};

// Square: the tile is one block.
template <class E, class T, Rounding R>
struct WideSquareScale {
  static constexpr int kParts = kTileThreads / 32;
  int32_t parts[kParts];

  // The block's scale, the same in all threads.
  __device__ __forceinline__ BlockScale<float> decide(const Piece<E, T, R>& piece) {
    static_assert(kTileRows<E> == 128 && kTileColumns == 128, "a block is a tile");
    const int32_t amax = lanes_max<32>(piece.template amax<false>());
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = amax;
    __syncthreads();
    int32_t most = parts[0];
#pragma unroll
    for (int i = 1; i < kParts; ++i) most = max(most, parts[i]);
    return block_scale<E, 128>(most, piece.a, {});
  }
};

}  // namespace cuda
}  // namespace blockfp
