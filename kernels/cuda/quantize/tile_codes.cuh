// Codes of a piece of a tile: its rows to memory, its columns to shared memory, where transposed codes gather before they leave.
#pragma once

#include <cuda_bf16.h>

#include "stochastic_e2m1.cuh"
#include "tile_piece.cuh"

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
    store_groups<E>(bytes + (kUnits ? unit(column, index) : column * kPitch + 12 * index), codes);
  }

  // To the transposed codes of `piece`'s matrix; every thread of the block comes here.
  template <class P>
  __device__ __forceinline__ void copy_out(const P& piece) const {
    const QuantizeArguments& a = piece.a;
    const TileOrigin& tile = piece.tile;
    if constexpr (P::kInGroups) {
      const int64_t pitch = a.groups.columns / 8 * E::kBits, first = a.groups.own.first_column + tile.row;
      copy_vectors(a.column.codes + tile.column * pitch + first / 8 * E::kBits, pitch, filled_rows(a) - tile.row,
                   a.x.columns - tile.column);
      return;
    }
    const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.rows);
    if constexpr (P::kWhole) {
      uint8_t* out = a.column.codes + (tile.batch * a.x.columns + tile.column) * pitch + tile.row / 8 * E::kBits;
      copy_vectors(out, pitch, a.x.rows - tile.row, a.x.columns - tile.column);
    } else {
      copy_bytes(a.column.codes + tile.batch * a.x.columns * pitch, pitch, tile.row / 8 * E::kBits, tile.column, a.x.columns);
    }
  }

 private:
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

// Row r's codes of a piece, to memory.
template <class E, class T, Rounding R>
class RowOutput {
 public:
  __device__ __forceinline__ explicit RowOutput(const Piece<E, T, R>& piece) : piece_(piece) {
    const QuantizeArguments& a = piece.a;
    const int64_t column = piece.tile.column + piece.place.column, row = piece.tile.row + piece.place.row;
    pitch_ = Packing<E::kBits>::row_bytes(a.x.columns);
    const int64_t line = kOfGroups<R> ? a.groups.own.first_row + row : piece.tile.batch * a.x.rows + row;
    out_ = a.row.codes + line * pitch_ + column / 8 * E::kBits;
    inside_ = a.row.codes != nullptr && piece.inside();
    bytes_ = packed_bytes<E::kBits>(static_cast<int>(max(min(a.x.columns - column, int64_t{8}), int64_t{0})));
  }

  // To be called for one row after the other.
  __device__ __forceinline__ void put(int r, uint2 codes) {
    if constexpr (Piece<E, T, R>::kWhole) {
      if (inside_) store_eight<E::kBits>(out_, codes);
    } else if constexpr (R == Rounding::kGroups) {
      if (inside_ && piece_.inside(r)) store_eight<E::kBits>(out_, codes);
    } else {
      if (inside_ && piece_.inside(r)) store_some<E::kBits>(out_, codes, 0, bytes_);
    }
    out_ += pitch_;
  }

 private:
  const Piece<E, T, R>& piece_;
  uint8_t* out_;
  int64_t pitch_;
  bool inside_;
  int bytes_;
};

template <class E, class T, Rounding R>
class PieceCodes {
 public:
  using P = Piece<E, T, R>;
  static constexpr int kRows = P::kRows;

  __device__ __forceinline__ PieceCodes(const P& piece, bool nan, const TensorScale& tensor)
      : piece_(piece), nan_(nan || (R == Rounding::kStochastic && is_huge(tensor))) {}

  // `multiplier` takes a row, `put` a row and its codes.
  template <class Multiplier, class Put>
  __device__ __forceinline__ void rows(Multiplier multiplier, Put put) const {
    const QuantizeArguments& a = piece_.a;
    const Window& w = a.window;
    const uint64_t row = piece_.tile.batch * w.rows + w.row + piece_.tile.row + piece_.place.row;
    const uint64_t column = w.column + piece_.tile.column + piece_.place.column;
    if constexpr (R == Rounding::kStochastic) {
      const uint32_t key[2] = {__ldg(a.row.key), __ldg(a.row.key + 1)};
      const uint64_t first = (row * w.columns + column) / 8, step = w.columns / 8;
#pragma unroll
      for (int r = 0; r < kRows; r += 2) {
        const TwoGroups groups{{multiplier(r), multiplier(r + 1)}, {key[0], key[1]}, {first + r * step, first + (r + 1) * step}, nan_};
        const uint2 codes = encode_stochastic_groups<T>(piece_.x[r], piece_.x[r + 1], groups);
        put(r, {codes.x, 0});
        put(r + 1, {codes.y, 0});
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        put(r, encode_scaled<E, R>([&](int i) { return value<T>(piece_.x[r], i); }, multiplier(r), nan_, a.row.key,
                                   (row + r) * w.columns + column));
      }
    }
  }

  // `put` takes a column and its codes, eight rows after eight.
  template <class Multiplier, class Put>
  __device__ __forceinline__ void columns(Multiplier multiplier, Put put) const {
    const QuantizeArguments& a = piece_.a;
    const Window& w = a.window;
    const uint64_t column = piece_.tile.batch * w.columns + w.column + piece_.tile.column + piece_.place.column;
    const uint64_t row = w.row + piece_.tile.row + piece_.place.row;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint2 codes[kRows / 8];
      if constexpr (R == Rounding::kStochastic) {
        const uint64_t first = ((column + j) * w.rows + row) / 8;
        const float by = multiplier(j);
        const TwoGroups groups{{by, by}, {__ldg(a.column.key), __ldg(a.column.key + 1)}, {first, first + 1}, nan_};
        const uint2 both = encode_stochastic_groups<T>(column_of(j, 0), column_of(j, 8), groups);
        codes[0] = {both.x, 0}, codes[1] = {both.y, 0};
      } else {
#pragma unroll
        for (int h = 0; h < kRows / 8; ++h) {
          codes[h] = encode_scaled<E, R>([&](int i) { return value<T>(piece_.x[8 * h + i], j); }, multiplier(j), nan_, a.column.key,
                                         (column + j) * w.rows + row + 8 * h);
        }
      }
      put(j, codes);
    }
  }

 private:
  // Rows first .. first + 7 of column j.
  __device__ __forceinline__ Eight<T> column_of(int j, int first) const {
    Eight<T> out;
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      if constexpr (kLinesPerWord<T> == 2) {
        const uint32_t low = piece_.x[first + 2 * i].word[j / 2], high = piece_.x[first + 2 * i + 1].word[j / 2];
        out.word[i] = __byte_perm(low, high, j % 2 ? 0x7632 : 0x5410);
      } else {
        out.word[i] = piece_.x[first + i].word[j];
      }
    }
    return out;
  }

  const P& piece_;
  bool nan_;  // or what else needs care, see stochastic_e2m1.cuh
};

// Takes a column and its codes to where they gather.
template <class E, class T, Rounding R>
__device__ __forceinline__ auto staged(const Piece<E, T, R>& piece, Staging<E>& staging) {
  return [&](int j, const uint2(&codes)[kDepth<E> / 8]) {
    staging.put(piece.place.column + j, piece.place.row / kDepth<E>, codes);
  };
}

// Codes of both directions by one multiplier. Those of the columns are the rows' transposed, where that is so; 6-bit ones are made again.
template <class E, class T, Rounding R>
__device__ __forceinline__ void encode_both(const Piece<E, T, R>& piece, const PieceCodes<E, T, R>& codes, float multiplier,
                                            Staging<E>& staging) {
  const QuantizeArguments& a = piece.a;
  const auto same = [&](int) { return multiplier; };
  RowOutput<E, T, R> out(piece);
  if (kToNearest<R> || (kTold<R> && a.row.key == nullptr && a.column.key == nullptr)) {
    if constexpr (R != Rounding::kStochastic && E::kBits != 6) {
      uint2 rows[kDepth<E>];
      codes.rows(same, [&](int r, uint2 c) { rows[r] = c, out.put(r, c); });
      if (a.column.codes == nullptr) return;
      uint2 columns[kDepth<E> / 8][8];
#pragma unroll
      for (int h = 0; h < kDepth<E> / 8; ++h) transpose_eight<E::kBits>(rows + 8 * h, columns[h]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint2 column[kDepth<E> / 8];
#pragma unroll
        for (int h = 0; h < kDepth<E> / 8; ++h) column[h] = columns[h][j];
        staged(piece, staging)(j, column);
      }
      return;
    }
  }
  if constexpr (!kToNearest<R> || E::kBits == 6) {
    if (a.row.codes != nullptr) codes.rows(same, [&](int r, uint2 c) { out.put(r, c); });
    if (a.column.codes != nullptr) codes.columns(same, staged(piece, staging));
  }
}

// bfloat16 times powers of two (as LineScales gathers them), two products at once; exact but for products that every 8-bit element
// rounds to zero.
__device__ __forceinline__ uint32_t multiply_pair(uint32_t x, uint32_t powers) {
  return bit_cast<uint32_t>(__hmul2_rn(bit_cast<__nv_bfloat162>(x), bit_cast<__nv_bfloat162>(powers)));
}

template <class E, class Value>
__device__ __forceinline__ uint2 encode_values(Value value_of) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = value_of(i);
  return encode_eight<E>(y);
}

template <class E, class T, Rounding R>
constexpr bool kMultipliesPairs = T::kId == Bf16::kId && E::kBits == 8 && kToNearest<R>;

// PieceCodes::rows and ::columns for kMultipliesPairs, MX blocks and gathered words of multipliers.
template <class E, Rounding R, class Put>
__device__ __forceinline__ void rows_by_pairs(const Piece<E, Bf16, R>& piece, const uint32_t (&powers)[4], Put put) {
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const uint32_t by = __byte_perm(powers[r / 2], 0, r % 2 ? 0x3232 : 0x1010);
    Eight<Bf16> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) y.word[i] = multiply_pair(piece.x[r].word[i], by);
    put(r, encode_values<E>([&](int i) { return value<Bf16>(y, i); }));
  }
}

template <class E, Rounding R, class Put>
__device__ __forceinline__ void columns_by_pairs(const Piece<E, Bf16, R>& piece, const uint32_t (&powers)[4], Put put) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t y[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) y[r] = multiply_pair(piece.x[r].word[pair], powers[pair]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 codes[1] = {encode_values<E>([&](int i) { return __uint_as_float(half ? y[i] & 0xFFFF0000u : y[i] << 16); })};
      put(2 * pair + half, codes);
    }
  }
}

// Codes of the rows with a scale each, of LineScales. Every lane of the warp comes here.
template <class Scales, class E, class T, Rounding R, class Put>
__device__ __forceinline__ void encode_rows(const Piece<E, T, R>& piece, const Scales& scales, const TensorScale& tensor, Put put) {
  uint32_t words[kDepth<E> / Scales::kPerWord];
  scales.gather(words);
  if constexpr (kMultipliesPairs<E, T, R>) {
    rows_by_pairs<E, R>(piece, words, put);
  } else {
    PieceCodes<E, T, R>(piece, scales.nan, tensor).rows([&](int r) { return scales.multiplier(words, r); }, put);
  }
}

// The same of the columns.
template <class Scales, class E, class T, Rounding R, class Put>
__device__ __forceinline__ void encode_columns(const Piece<E, T, R>& piece, const Scales& scales, const TensorScale& tensor, Put put) {
  uint32_t words[8 / Scales::kPerWord];
  scales.gather(words);
  if constexpr (kMultipliesPairs<E, T, R>) {
    columns_by_pairs<E, R>(piece, words, put);
  } else {
    PieceCodes<E, T, R>(piece, scales.nan, tensor).columns([&](int j) { return scales.multiplier(words, j); }, put);
  }
}

}  // namespace cuda
}  // namespace blockfp
