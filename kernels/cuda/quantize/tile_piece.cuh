// A tile of a matrix in the registers of a thread block, so that one read serves both directions: loading, and the largest
// magnitudes of its rows and columns.
//
// Eight warps, four along the rows and two along the columns; a warp has eight lanes side by side (eight columns each) and four
// above each other (kDepth rows each). A thread's piece is kDepth rows of eight columns. A line is a row or a column; for
// 16-bit elements, the largest magnitudes of two lines share a word.
#pragma once

#include "block_scale.cuh"
#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

constexpr int kTileThreads = 256;
constexpr int kTileColumns = 128;

constexpr int kDepth = 8;
constexpr int kTileRows = 16 * kDepth;

struct Nothing {};

struct TilePlace {
  int warp_row, warp_column, lane_row, lane_column;
  int row, column;  // of the thread's piece, in the tile

  __device__ __forceinline__ static TilePlace of_thread() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TilePlace p{warp / 2, warp % 2, lane / 8, lane % 8, 0, 0};
    p.row = (p.warp_row * 4 + p.lane_row) * kDepth;
    p.column = (p.warp_column * 8 + p.lane_column) * 8;
    return p;
  }
};

// Position of the tile in its matrix; negative if a block begins before x.
struct TileOrigin {
  int64_t batch, row, column;
};

// The existing lines of a tile, or bytes of its lines: `first` to `last` - 1, of those that begin at `at`.
struct LinesOfTile {
  int first, last;

  __device__ __forceinline__ LinesOfTile(int64_t at, int count, int64_t all)
      : first(static_cast<int>(max(-at, int64_t{0}))), last(static_cast<int>(max(min(all - at, int64_t{count}), int64_t{0}))) {}
};

// Number of rows to which a group is padded, along the columns.
__device__ __forceinline__ int64_t filled_rows(const QuantizeArguments& a) { return (a.x.rows + kGroupUnit - 1) / kGroupUnit * kGroupUnit; }

// Sets the word that records an Inf in x, or in the kernel's group, if a block has such an amax.
template <Rounding R>
__device__ __forceinline__ void note_overflow(const QuantizeArguments& a, int32_t amax) {
  if (amax != kInfinity) return;
  if constexpr (kOfGroups<R>) {
    a.groups.overflows[a.groups.own.group] = kInfinity;
  } else if (a.recorded != nullptr) {
    *a.recorded = kInfinity;
  }
}

// Lines per word.
template <class T>
constexpr int kLinesPerWord = 8 / kWords<T>;

// Distributes `Words` maxima, of which `Lanes` lanes, `Step` apart, hold partial values, among these lanes.
template <int Words, int Lanes, int Step>
struct LaneShare {
  static constexpr int kMine = Words > Lanes ? Words / Lanes : 1;  // words that a lane ends up with
  static constexpr int kSame = Lanes > Words ? Lanes / Words : 1;  // lanes that end up with the same words

  __device__ __forceinline__ static int lane() { return threadIdx.x / Step % Lanes; }
  __device__ __forceinline__ static int first() { return lane() / kSame * kMine; }

  // Reduces each lane's share into word[0 .. kMine - 1]: lanes exchange halves until one word is left, then merge that.
  template <class T, bool Poison>
  __device__ __forceinline__ static void reduce(uint32_t (&word)[Words]) {
    trade<T, Poison, Words, Lanes>(word);
  }

 private:
  template <class T, bool Poison, int Left, int Among>
  __device__ __forceinline__ static void trade(uint32_t (&word)[Words]) {
    if constexpr (Among > 1) {
      constexpr int kDistance = Among / 2 * Step, kKeep = Left > 1 ? Left / 2 : 1;
      const bool upper = threadIdx.x & kDistance;
#pragma unroll
      for (int i = 0; i < kKeep; ++i) {
        const uint32_t keep = Left > 1 && upper ? word[i + Left / 2] : word[i];
        const uint32_t send = Left > 1 && !upper ? word[i + Left / 2] : word[i];
        word[i] = larger_magnitude<T, Poison>(keep, __shfl_xor_sync(0xFFFFFFFFu, send, kDistance));
      }
      trade<T, Poison, kKeep, Among / 2>(word);
    }
  }
};

template <class E, class T, Rounding R>
struct Piece {
  // Whole: x begins at tile boundaries, and pieces are inside or outside of it, with aligned vectors.
  static constexpr bool kWhole = R == Rounding::kNearest || R == Rounding::kStochastic;
  static constexpr bool kInGroups = kOfGroups<R>;
  static constexpr int kRows = kDepth;

  const QuantizeArguments& a;
  TilePlace place;
  TileOrigin tile;
  Eight<T> x[kRows];

  __device__ __forceinline__ Piece(const QuantizeArguments& arguments, TileOrigin origin)
      : a(arguments), place(TilePlace::of_thread()), tile(origin) {}

  // Whether the piece is in x; unless kWhole, some of its columns are, and `inside(r)` tells for its rows.
  __device__ __forceinline__ bool inside() const {
    const int64_t column = tile.column + place.column;
    if constexpr (kWhole) return tile.row + place.row < a.x.rows && column < a.x.columns;
    return column >= 0 && column < a.x.columns;
  }

  __device__ __forceinline__ bool inside(int r) const {
    const int64_t row = tile.row + place.row + r;
    return inside() && (kWhole || (row >= 0 && row < a.x.rows));
  }

  __device__ __forceinline__ void load(bool vectors) {
    using Raw = typename T::Raw;
    const int64_t column = tile.column + place.column, row = tile.row + place.row;
    const Raw* at = static_cast<const Raw*>(a.x.data) + tile.batch * a.x.batch_stride + row * a.x.row_stride + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = zeros<T>();
    if constexpr (kWhole) {
      if (!inside()) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r, at += a.x.row_stride) x[r] = load_vector<T>(at);
    } else if constexpr (R == Rounding::kGroups) {
      if (!inside()) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r, at += a.x.row_stride) {
        if (row + r < a.x.rows) x[r] = load_vector<T>(at);
      }
    } else {
      // A phase is a multiple of eight, so a piece either begins inside x or is outside it.
      const int count = column < 0 ? 0 : static_cast<int>(max(min(a.x.columns - column, int64_t{8}), int64_t{0}));
      if (vectors && count == 8) {
#pragma unroll
        for (int r = 0; r < kRows; ++r, at += a.x.row_stride) {
          if (row + r >= 0 && row + r < a.x.rows) x[r] = load_vector<T>(at);
        }
        return;
      }
      // Without branches, so that many loads are in flight.
#pragma unroll
      for (int r = 0; r < kRows; ++r, at += a.x.row_stride) {
        x[r] = load_unmasked<T>(at, row + r >= 0 && row + r < a.x.rows ? count : 0);
      }
      if (count == 8) return;
#pragma unroll
      for (int r = 0; r < kRows; ++r) keep_first(x[r], count);
    }
  }

  // Largest magnitudes of the rows.
  template <bool Poison>
  __device__ __forceinline__ void row_amaxes(uint32_t (&words)[kRows / kLinesPerWord<T>]) const {
    constexpr int kLines = kLinesPerWord<T>;
#pragma unroll
    for (int i = 0; i < kRows / kLines; ++i) {
      uint32_t row[2];
#pragma unroll
      for (int h = 0; h < kLines; ++h) {
        row[h] = x[kLines * i + h].word[0];
#pragma unroll
        for (int j = 1; j < kWords<T>; ++j) row[h] = larger_magnitude<T, Poison>(row[h], x[kLines * i + h].word[j]);
      }
      words[i] = row[0];
      if constexpr (kLines == 2) {
        words[i] = larger_magnitude<T, Poison>(__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632));
      }
    }
  }

  // Largest magnitudes of the columns.
  template <bool Poison>
  __device__ __forceinline__ void column_amaxes(uint32_t (&words)[kWords<T>]) const {
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      words[i] = x[0].word[i];
#pragma unroll
      for (int r = 1; r < kRows; ++r) words[i] = larger_magnitude<T, Poison>(words[i], x[r].word[i]);
    }
  }

  // The largest magnitude of all.
  template <bool Poison>
  __device__ __forceinline__ int32_t amax() const {
    Eight<T> most;
    column_amaxes<Poison>(most.word);
    return largest<T, Poison>(most);
  }
};

}  // namespace cuda
}  // namespace blockfp
