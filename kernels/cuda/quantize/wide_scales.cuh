// Scales that a tile's warps know together: of blocks as long as the tile, and of whole lines.
#pragma once

#include "scales_by_tile.cuh"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

// A warp's part of a tile.
constexpr int kWarpRows = 4 * kDepth;
constexpr int kWarpColumns = 64;

// The largest magnitudes of a tile's rows and columns, whose parts its warps combine in shared memory.
template <class T>
struct TileAmaxes {
  static constexpr int kRowParts = kTileColumns / kWarpColumns, kColumnParts = kTileRows / kWarpRows;
  static_assert(kTileRows == 128 && kTileColumns == 128, "a line's part is as long as a tile");

  int32_t row_parts[kRowParts][128], column_parts[kColumnParts][128];

  // On return, they are ready for all threads.
  template <class P>
  __device__ __forceinline__ void find(const P& piece, bool rows, bool columns) {
    constexpr int kRowWords = P::kRows / kLinesPerWord<T>, kColumnWords = kWords<T>;
    if (rows) {
      uint32_t words[kRowWords];
      piece.template row_amaxes<false>(words);
      share<kRowWords, 8, 1>(words, row_parts[piece.place.warp_column] + piece.place.row);
    }
    if (columns) {
      uint32_t words[kColumnWords];
      piece.template column_amaxes<false>(words);
      share<kColumnWords, 4, 8>(words, column_parts[piece.place.warp_row] + piece.place.column);
    }
    __syncthreads();
  }

  __device__ __forceinline__ int32_t row(int line) const { return largest_part(row_parts, line); }
  __device__ __forceinline__ int32_t column(int line) const { return largest_part(column_parts, line); }

 private:
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
  __device__ __forceinline__ static int32_t largest_part(const int32_t (&parts)[Parts][128], int line) {
    int32_t most = parts[0][line];
#pragma unroll
    for (int i = 1; i < Parts; ++i) most = max(most, parts[i][line]);
    return most;
  }
};

// Multipliers of a tile's rows and columns, in shared memory.
struct LineMultipliers {
  __align__(16) float row_multipliers[128];
  __align__(16) float column_multipliers[128];

  // The multipliers of eight lines from `first`, a multiple of four.
  __device__ __forceinline__ void read_rows(int first, float (&out)[8]) const { read(row_multipliers, first, out); }
  __device__ __forceinline__ void read_columns(int first, float (&out)[8]) const { read(column_multipliers, first, out); }

 private:
  __device__ __forceinline__ static void read(const float* multipliers, int first, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(multipliers + first + i);
      out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
  }
};

// Scales of 1-D blocks of 128, both directions: a tile has one block of each of its lines.
template <class E, class T, Rounding R>
struct WideScales : LineMultipliers {
  using P = Piece<E, T, R>;

  TileAmaxes<T> amaxes;

  // Stores the scales; on return, the multipliers are ready for all threads.
  __device__ __forceinline__ void decide(const P& piece) {
    const QuantizeArguments& a = piece.a;
    const bool rows = a.row.codes != nullptr;
    amaxes.find(piece, rows, true);
    // Half of the threads have a row each, the other half a column.
    const int line = threadIdx.x % 128;
    const TileOrigin& tile = piece.tile;
    if constexpr (kOfGroups<R>) {
      const GroupTile& own = a.groups.own;
      if (threadIdx.x >= 128) {
        const int64_t at = ordered_place((own.first_column + tile.row) / 128, tile.column + line, a.x.columns);
        const bool inside = a.column.codes != nullptr && tile.column + line < a.x.columns;
        column_multipliers[line] = scale_line(a, amaxes.column(line), inside, a.column, at);
      } else if (rows) {
        const int64_t at = ordered_place(tile.column / 128, own.first_row + tile.row + line, a.groups.tokens);
        row_multipliers[line] = scale_line(a, amaxes.row(line), tile.row + line < a.x.rows, a.row, at);
      }
    } else if (threadIdx.x >= 128) {
      const int64_t block = (tile.row + a.window.row_phase) / 128, blocks = grid(a.window.row_phase + a.x.rows);
      const int64_t at = place(a, a.column, tile.batch, tile.column + line, a.x.columns, block, blocks);
      column_multipliers[line] = scale_line(a, amaxes.column(line), is_inside(tile.column + line, a.x.columns), a.column, at);
    } else if (rows) {
      const int64_t block = (tile.column + a.window.column_phase) / 128, blocks = grid(a.window.column_phase + a.x.columns);
      const int64_t at = place(a, a.row, tile.batch, tile.row + line, a.x.rows, block, blocks);
      row_multipliers[line] = scale_line(a, amaxes.row(line), is_inside(tile.row + line, a.x.rows), a.row, at);
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ static int64_t grid(int64_t elements) { return (elements + 127) / 128; }

  __device__ __forceinline__ static int64_t place(const QuantizeArguments& a, const Output& out, int64_t batch, int64_t line, int64_t lines,
                                                  int64_t block, int64_t blocks) {
    if (out.ordered) return ordered_place(block, line, lines);
    line += batch * lines;
    return P::kWhole && a.scales_by_tile ? index_by_tile(line, block, blocks) : line * blocks + block;
  }

  __device__ __forceinline__ static bool is_inside(int64_t line, int64_t lines) { return line < lines && (P::kWhole || line >= 0); }

  __device__ __forceinline__ static float scale_line(const QuantizeArguments& a, int32_t most, bool inside, const Output& out, int64_t at) {
    const BlockScale<float> scale = block_scale<E, 128>(most, a, {});
    note_overflow<R>(a, most);
    if (inside && P::kWhole && a.scales_by_tile) {
      store_by_tile(static_cast<uint32_t*>(out.scales), at, scale.stored);
    } else if (inside) {
      store_scale<128>(out.scales, at, scale.stored);
    }
    return scale.multiplier;
  }
};

// Scales of whole rows and columns, whose amaxes are known (a.amax, a.amax_t). The first tile of a line stores its scale.
template <class E, class T, Rounding R>
struct LongScales : LineMultipliers {
  __device__ __forceinline__ void decide(const Piece<E, T, R>& piece) {
    const QuantizeArguments& a = piece.a;
    const TileOrigin& tile = piece.tile;
    const int line = threadIdx.x % 128;
    if (threadIdx.x >= 128) {
      if (a.column.codes != nullptr) {
        column_multipliers[line] = scale_line(a, a.amax_t, tile.batch, tile.column + line, a.x.columns, a.column, tile.row == 0);
      }
    } else if (a.row.codes != nullptr) {
      row_multipliers[line] = scale_line(a, a.amax, tile.batch, tile.row + line, a.x.rows, a.row, tile.column == 0);
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ static float scale_line(const QuantizeArguments& a, const int32_t* amaxes, int64_t batch, int64_t line,
                                                     int64_t lines, const Output& out, bool stores) {
    if (line >= lines) return 1.0f;
    const int32_t amax = __ldg(amaxes + batch * lines + line);
    const BlockScale<float> scale = block_scale<E, 128>(amax, a, {});
    if (stores) {
      note_overflow<R>(a, amax);
      store_scale<128>(out.scales, batch * lines + line, scale.stored);
    }
    return scale.multiplier;
  }
};

}  // namespace cuda
}  // namespace blockfp
