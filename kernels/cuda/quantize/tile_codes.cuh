// Codes of a tile's piece: rows go to memory, columns to shared memory, where transposed codes are collected before they are
// stored.
#pragma once

#include <cuda_bf16.h>

#include "runs.cuh"
#include "stochastic_e2m1.cuh"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

// Transposed codes waiting to be stored: kTileColumns lines of kBytes, in shared memory.
template <class E>
struct Staging {
  static constexpr int kBytes = kTileRows * E::kBits / 8;
  // Padding by a vector every eight lines keeps adjacent threads, which write eight lines each, in different banks.
  static constexpr int kPad = 16;
  __align__(16) uint8_t bytes_[kTileColumns * kBytes + kTileColumns / 8 * kPad];

  // Codes of kDepth rows of a column, from tile row kDepth * index.
  __device__ __forceinline__ void put(int column, int index, uint2 codes) {
    store_eight<E::kBits>(bytes_ + place(column) + index * E::kBits, codes);
  }

  // Of twice as many rows, from tile row kDepth * index, which is even.
  __device__ __forceinline__ void put_pair(int column, int index, const uint2 (&codes)[2]) {
    store_groups<E>(bytes_ + place(column) + index * E::kBits, codes);
  }

  // Stores them to the transposed codes of `piece`'s matrix; every thread of the block must call it.
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
    const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.rows), first = tile.row / 8 * E::kBits;
    uint8_t* out = a.column.codes + (tile.batch * a.x.columns + tile.column) * pitch + first;
    if (P::kWhole && (E::kBits != 6 || pitch % 16 == 0)) {
      copy_vectors(out, pitch, a.x.rows - tile.row, a.x.columns - tile.column);
    } else if constexpr (!P::kWhole || E::kBits == 6) {
      const LinesOfTile lines(tile.column, kTileColumns, a.x.columns), bytes(first, kBytes, pitch);
      copy_runs<kBytes, kTileColumns, kTileThreads>(
          out, pitch, lines.first, lines.last, bytes.first, bytes.last,
          [this](int column, int word) { return *reinterpret_cast<const uint32_t*>(bytes_ + place(column) + 4 * word); });
    }
  }

  // Stores whole vectors. `out`: the tile's first byte of its first column; `rows` and `columns`: how many of x remain from
  // there.
  __device__ __forceinline__ void copy_vectors(uint8_t* out, int64_t pitch, int64_t rows, int64_t columns) const {
    constexpr int kVectors = kBytes / 16, kStep = kTileThreads / kVectors;
    const int rows_left = static_cast<int>(min(rows, int64_t{kTileRows}));
    const int columns_left = static_cast<int>(min(columns, int64_t{kTileColumns}));
    // A thread copies the same vector of each of its columns.
    const int first = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
    if (vector * 128 / E::kBits >= rows_left || first >= kStep) return;
    out += first * pitch + vector * 16;
#pragma unroll
    for (int column = first; column < kTileColumns; column += kStep, out += kStep * pitch) {
      if (column < columns_left) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(bytes_ + place(column) + vector * 16);
    }
  }

 private:
  __device__ __forceinline__ static int place(int column) { return column * kBytes + column / 8 * kPad; }
};

// Codes of rows that begin at any address, waiting to be stored: kTileRows rows of kBytes, in shared memory.
template <class E>
struct RowStaging {
  static constexpr int kBytes = kTileColumns * E::kBits / 8;
  // Rows of lanes above each other are in different banks.
  static constexpr int kStep = kDepth * kBytes + kBytes / 2;
  uint8_t bytes_[16 * kStep];

  __device__ __forceinline__ void put(int row, int column, uint2 codes) {
    store_eight<E::kBits>(bytes_ + place(row) + column / 8 * E::kBits, codes);
  }

  // Stores them to the codes of `piece`'s matrix; every thread of the block must call it.
  template <class P>
  __device__ __forceinline__ void copy_out(const P& piece) const {
    const QuantizeArguments& a = piece.a;
    const TileOrigin& tile = piece.tile;
    const int64_t pitch = Packing<E::kBits>::row_bytes(a.x.columns), first = tile.column / 8 * E::kBits;
    const int64_t line = P::kInGroups ? a.groups.own.first_row : tile.batch * a.x.rows;
    const LinesOfTile lines(tile.row, kTileRows, a.x.rows), bytes(first, kBytes, pitch);
    copy_runs<kBytes, kTileRows, kTileThreads>(
        a.row.codes + (line + tile.row) * pitch + first, pitch, lines.first, lines.last, bytes.first, bytes.last,
        [this](int row, int word) { return *reinterpret_cast<const uint32_t*>(bytes_ + place(row) + 4 * word); });
  }

 private:
  __device__ __forceinline__ static int place(int row) { return row / kDepth * kStep + row % kDepth * kBytes; }
};

// A tile's codes in shared memory: the columns'; before them the rows', if those aren't stored directly.
template <class E, Rounding R>
union StagedCodes {
  Staging<E> columns;
  std::conditional_t<kVectorRows<R>, Nothing, RowStaging<E>> rows;
};

// Codes of a piece's rows: directly to memory, or through shared memory if rows begin at any address.
template <class E, class T, Rounding R>
class RowOutput {
 public:
  __device__ __forceinline__ RowOutput(const Piece<E, T, R>& piece, StagedCodes<E, R>& staged) : piece_(piece), staged_(staged) {
    if constexpr (kVectorRows<R>) {
      const QuantizeArguments& a = piece.a;
      const int64_t column = piece.tile.column + piece.place.column, row = piece.tile.row + piece.place.row;
      pitch_ = Packing<E::kBits>::row_bytes(a.x.columns);
      const int64_t line = kOfGroups<R> ? a.groups.own.first_row + row : piece.tile.batch * a.x.rows + row;
      out_ = a.row.codes + line * pitch_ + column / 8 * E::kBits;
      inside_ = a.row.codes != nullptr && piece.inside();
    }
  }

  // To be called for each row in order, by every lane of the warp.
  __device__ __forceinline__ void put(int r, uint2 codes) {
    constexpr bool kWhole = Piece<E, T, R>::kWhole;
    if (kVectorRows<R> && E::kBits == 6 && piece_.a.x.columns % 16 == 0) {
      // Adjacent lanes exchange codes, so that one has sixteen of a row, the other of the row below: three words.
      if (r % 2 == 0) {
        above_ = codes;
        return;
      }
      const bool odd = threadIdx.x % 2 != 0;
      const uint2 sent = odd ? above_ : codes;
      const uint2 other = {__shfl_xor_sync(0xFFFFFFFFu, sent.x, 1), __shfl_xor_sync(0xFFFFFFFFu, sent.y, 1)};
      const uint2 pair[2] = {odd ? other : above_, odd ? codes : other};
      if (inside_ && (kWhole || piece_.inside(r - 1 + odd))) store_groups<E>(out_ + (odd ? pitch_ - 6 : 0), pair);
      out_ += 2 * pitch_;
    } else if constexpr (kVectorRows<R>) {
      if (inside_ && (kWhole || piece_.inside(r))) store_eight<E::kBits>(out_, codes);
      out_ += pitch_;
    } else {
      staged_.rows.put(piece_.place.row + r, piece_.place.column, codes);
    }
  }

  // After the last row; every thread of the block must call it, and shared memory is free again.
  __device__ __forceinline__ void finish() {
    if constexpr (!kVectorRows<R>) {
      __syncthreads();
      if (piece_.a.row.codes != nullptr) staged_.rows.copy_out(piece_);
      __syncthreads();
    }
  }

 private:
  const Piece<E, T, R>& piece_;
  StagedCodes<E, R>& staged_;
  uint8_t* out_;
  int64_t pitch_;
  bool inside_;
  uint2 above_;
};

template <class E, class T, Rounding R, Range Bounds>
class PieceCodes {
 public:
  using P = Piece<E, T, R>;
  static constexpr int kRows = P::kRows;

  // `care` is as for encode_scaled, except for the tensor's part of it.
  __device__ __forceinline__ PieceCodes(const P& piece, bool care, const TensorScale& tensor)
      : piece_(piece), care_(care || (Bounds == Range::kBounded && is_huge(tensor))) {}

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
        const TwoGroups groups{{multiplier(r), multiplier(r + 1)}, {key[0], key[1]}, {first + r * step, first + (r + 1) * step}, care_};
        const uint2 codes = encode_stochastic_groups<T>(piece_.x[r], piece_.x[r + 1], groups);
        put(r, {codes.x, 0});
        put(r + 1, {codes.y, 0});
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        put(r, encode_scaled<E, R, Bounds>([&](int i) { return value<T>(piece_.x[r], i); }, multiplier(r), care_, a.row.key,
                                           (row + r) * w.columns + column));
      }
    }
  }

  // `put` takes a column and its codes.
  template <class Multiplier, class Put>
  __device__ __forceinline__ void columns(Multiplier multiplier, Put put) const {
    const QuantizeArguments& a = piece_.a;
    const Window& w = a.window;
    const uint64_t column = piece_.tile.batch * w.columns + w.column + piece_.tile.column + piece_.place.column;
    const uint64_t row = w.row + piece_.tile.row + piece_.place.row;
    if constexpr (R == Rounding::kStochastic) {
      const uint32_t key[2] = {__ldg(a.column.key), __ldg(a.column.key + 1)};
      const uint64_t first = (column * w.rows + row) / 8, step = w.rows / 8;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const TwoGroups groups{{multiplier(j), multiplier(j + 1)}, {key[0], key[1]}, {first + j * step, first + (j + 1) * step}, care_};
        const uint2 codes = encode_stochastic_groups<T>(column_of(j), column_of(j + 1), groups);
        put(j, {codes.x, 0});
        put(j + 1, {codes.y, 0});
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        put(j, encode_scaled<E, R, Bounds>([&](int i) { return value<T>(piece_.x[i], j); }, multiplier(j), care_, a.column.key,
                                           (column + j) * w.rows + row));
      }
    }
  }

 private:
  __device__ __forceinline__ Eight<T> column_of(int j) const {
    Eight<T> out;
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      if constexpr (kLinesPerWord<T> == 2) {
        out.word[i] = __byte_perm(piece_.x[2 * i].word[j / 2], piece_.x[2 * i + 1].word[j / 2], j % 2 ? 0x7632 : 0x5410);
      } else {
        out.word[i] = piece_.x[i].word[j];
      }
    }
    return out;
  }

  const P& piece_;
  bool care_;
};

// Puts a column's codes into shared memory; to be called for each column in order, by every lane of the warp.
template <class E, class T, Rounding R>
__device__ __forceinline__ auto staged(const Piece<E, T, R>& piece, StagedCodes<E, R>& staging) {
  if constexpr (E::kBits == 6) {
    // As in RowOutput: lanes above each other exchange codes, so that one has sixteen of a column, the other of the next.
    return [&, before = uint2{}](int j, uint2 codes) mutable {
      if (j % 2 == 0) {
        before = codes;
        return;
      }
      const bool below = piece.place.lane_row % 2 != 0;
      const uint2 sent = below ? before : codes;
      const uint2 other = {__shfl_xor_sync(0xFFFFFFFFu, sent.x, 8), __shfl_xor_sync(0xFFFFFFFFu, sent.y, 8)};
      const uint2 pair[2] = {below ? other : before, below ? codes : other};
      staging.columns.put_pair(piece.place.column + j - 1 + below, piece.place.row / kDepth - below, pair);
    };
  } else {
    return [&](int j, uint2 codes) { staging.columns.put(piece.place.column + j, piece.place.row / kDepth, codes); };
  }
}

// Codes of both directions with one multiplier. The columns' codes are the rows' transposed if possible; 6-bit ones are encoded
// again.
template <class E, class T, Rounding R, class Codes>
__device__ __forceinline__ void encode_both(const Piece<E, T, R>& piece, const Codes& codes, float multiplier,
                                            StagedCodes<E, R>& staging) {
  const QuantizeArguments& a = piece.a;
  const auto same = [&](int) { return multiplier; };
  RowOutput<E, T, R> out(piece, staging);
  if (kToNearest<R> || (kTold<R> && a.row.key == nullptr && a.column.key == nullptr)) {
    if constexpr (R != Rounding::kStochastic && E::kBits != 6) {
      uint2 rows[kDepth];
      codes.rows(same, [&](int r, uint2 c) { rows[r] = c, out.put(r, c); });
      out.finish();
      if (a.column.codes == nullptr) return;
      uint2 columns[8];
      transpose_eight<E::kBits>(rows, columns);
#pragma unroll
      for (int j = 0; j < 8; ++j) staged(piece, staging)(j, columns[j]);
      return;
    }
  }
  if constexpr (!kToNearest<R> || E::kBits == 6) {
    if (a.row.codes != nullptr) {
      codes.rows(same, [&](int r, uint2 c) { out.put(r, c); });
      out.finish();
    }
    if (a.column.codes != nullptr) codes.columns(same, staged(piece, staging));
  }
}

// bfloat16 times powers of two (as LineScales gathers them), two products at once; exact except for products that every 8-bit
// element rounds to zero.
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
constexpr bool kMultipliesPairs = T::kId == Bf16::kId && kToNearest<R>;

// Pairs times the factor that encode_eight expects.
template <class E>
__device__ __forceinline__ uint32_t prescaled_pair(uint32_t y) {
  if constexpr (E::kBits != 6) return y;
  return multiply_pair(y, E::kMantissaBits == 2 ? 0x39803980u : 0x3C803C80u);  // 2^-12, 2^-6
}

// PieceCodes::rows and ::columns for kMultipliesPairs, MX blocks and gathered words of multipliers. No block contains a NaN
// that E has no code for, nor, for E2M1, an Inf.
template <class E, Rounding R, class Put>
__device__ __forceinline__ void rows_by_pairs(const Piece<E, Bf16, R>& piece, const uint32_t (&powers)[4], Put put) {
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const uint32_t by = __byte_perm(powers[r / 2], 0, r % 2 ? 0x3232 : 0x1010);
    Eight<Bf16> y;
#pragma unroll
    for (int i = 0; i < 4; ++i) y.word[i] = multiply_pair(piece.x[r].word[i], by);
    if constexpr (E::kId == E2M1::kId) {
      uint32_t even, odd;
      low_bytes(e2m1_pair(y.word[0]), e2m1_pair(y.word[1]), e2m1_pair(y.word[2]), e2m1_pair(y.word[3]), even, odd);
      put(r, {even + 16 * odd, 0});
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.word[i] = prescaled_pair<E>(y.word[i]);
      put(r, encode_values<E>([&](int i) { return value<Bf16>(y, i); }));
    }
  }
}

template <class E, Rounding R, class Put>
__device__ __forceinline__ void columns_by_pairs(const Piece<E, Bf16, R>& piece, const uint32_t (&powers)[4], Put put) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t y[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) y[r] = multiply_pair(piece.x[r].word[pair], powers[pair]);
    if constexpr (E::kId == E2M1::kId) {
#pragma unroll
      for (int r = 0; r < 8; ++r) y[r] = e2m1_pair(y[r]);
      uint32_t even[2], odd[2];
      low_bytes(y[0], y[2], y[4], y[6], even[0], even[1]);
      low_bytes(y[1], y[3], y[5], y[7], odd[0], odd[1]);
      put(2 * pair, {even[0] + 16 * odd[0], 0});
      put(2 * pair + 1, {even[1] + 16 * odd[1], 0});
    } else {
#pragma unroll
      for (int r = 0; r < 8; ++r) y[r] = prescaled_pair<E>(y[r]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        put(2 * pair + half, encode_values<E>([&](int i) { return __uint_as_float(half ? y[i] & 0xFFFF0000u : y[i] << 16); }));
      }
    }
  }
}

// Codes of the rows with a scale each, from LineScales. Every lane of the warp must call it.
template <class Scales, class E, class T, Rounding R, class Put>
__device__ __forceinline__ void encode_rows(const Piece<E, T, R>& piece, const Scales& scales, const TensorScale& tensor, Put put) {
  uint32_t words[kDepth / Scales::kPerWord];
  scales.gather(words);
  if constexpr (kMultipliesPairs<E, T, R> && Scales::kPerWord == 2) {
    if (E::kHasNan || !scales.care) return rows_by_pairs<E, R>(piece, words, put);
  }
  if constexpr (!kMultipliesPairs<E, T, R> || Scales::kPerWord == 1 || !E::kHasNan) {
    PieceCodes<E, T, R, Scales::kBounds>(piece, scales.care, tensor).rows([&](int r) { return scales.multiplier(words, r); }, put);
  }
}

// The same for the columns.
template <class Scales, class E, class T, Rounding R, class Put>
__device__ __forceinline__ void encode_columns(const Piece<E, T, R>& piece, const Scales& scales, const TensorScale& tensor, Put put) {
  uint32_t words[8 / Scales::kPerWord];
  scales.gather(words);
  if constexpr (kMultipliesPairs<E, T, R> && Scales::kPerWord == 2) {
    if (E::kHasNan || !scales.care) return columns_by_pairs<E, R>(piece, words, put);
  }
  if constexpr (!kMultipliesPairs<E, T, R> || Scales::kPerWord == 1 || !E::kHasNan) {
    PieceCodes<E, T, R, Scales::kBounds>(piece, scales.care, tensor).columns([&](int j) { return scales.multiplier(words, j); }, put);
  }
}

}  // namespace cuda
}  // namespace blockfp
