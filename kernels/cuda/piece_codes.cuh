// Codes of a piece: its rows to memory, its columns to where transposed codes gather.
#pragma once

#include <cuda_bf16.h>

#include "piece.cuh"
#include "staging.cuh"
#include "stochastic.cuh"

namespace blockfp {
namespace cuda {

// Row r's codes of a piece, to memory.
template <class E, class T, Rounding R>
class RowOutput {
 public:
  __device__ __forceinline__ explicit RowOutput(const Piece<E, T, R>& piece) : piece_(piece) {
    const QuantizeArguments& a = piece.a;
    const int64_t column = piece.tile.column + piece.place.column, row = piece.tile.row + piece.place.row;
    pitch_ = Packing<E::kBits>::row_bytes(a.x.columns);
    out_ = a.row.codes + (piece.tile.batch * a.x.rows + row) * pitch_ + column / 8 * E::kBits;
    inside_ = a.row.codes != nullptr && piece.inside();
    bytes_ = packed_bytes<E::kBits>(static_cast<int>(max(min(a.x.columns - column, int64_t{8}), int64_t{0})));
  }

  // To be called for one row after the other.
  __device__ __forceinline__ void put(int r, uint2 codes) {
    if constexpr (Piece<E, T, R>::kWhole) {
      if (inside_) store_eight<E::kBits>(out_, codes);
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
  bool nan_;  // or what else needs care, see stochastic.cuh
};

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
constexpr bool kMultipliesPairs = T::kId == Bf16::kId && E::kBits == 8 && R == Rounding::kNearest;

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

}  // namespace cuda
}  // namespace blockfp
