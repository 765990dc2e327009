// Sources of the elements that a kernel quantizes: x itself, or an activation's output.
#pragma once

#include "gated.cuh"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

struct AsItLies {
  template <class P>
  __device__ __forceinline__ static void load(P& piece, bool vectors) {
    piece.load(vectors);
  }

  // Eights from element `index` on, of contiguous rows.
  template <class T, int Count>
  __device__ __forceinline__ static void load_line(const QuantizeArguments& a, int64_t index, Eight<T> (&x)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) x[i] = load_vector<T>(static_cast<const typename T::Raw*>(a.x.data) + index + 8 * i);
  }
};

struct OfActivations {
  // Of a single matrix. Assumes that vectors fit.
  template <class E, class T, Rounding R>
  __device__ __forceinline__ static void load(Piece<E, T, R>& piece, bool) {
    static_assert(Piece<E, T, R>::kWhole, "a piece lies in x or outside it");
    constexpr int kRows = kDepth, kAtOnce = 4;
    const QuantizeArguments& a = piece.a;
#pragma unroll
    for (int r = 0; r < kRows; ++r) piece.x[r] = zeros<T>();
    if (!piece.inside()) return;
    const int64_t row = piece.tile.row + piece.place.row, column = piece.tile.column + piece.place.column;
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      GateAndUp<T> parts[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) parts[r].load(a.x, a.gated, row + first + r, column);
      with_activation(a.gated.activation, [&](auto activation) {
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) piece.x[first + r] = parts[r].template made<decltype(activation)::value>(a.gated);
      });
    }
  }

  // Eights from element `index` on, counted as if rows were contiguous. Their length is a multiple of eight.
  template <class T, int Count>
  __device__ __forceinline__ static void load_line(const QuantizeArguments& a, int64_t index, Eight<T> (&x)[Count]) {
    GateAndUp<T> parts[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const int64_t at = index + 8 * i, row = at / a.x.columns;
      parts[i].load(a.x, a.gated, row, at - row * a.x.columns);
    }
    with_activation(a.gated.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < Count; ++i) x[i] = parts[i].template made<decltype(activation)::value>(a.gated);
    });
  }
};

// Whether a source's output is quantized to this element in blocks of this length: the casts of inputs in recipes.
template <class E, int Block>
constexpr bool kMadeBlock = (E::kId == E4M3::kId && Block != 16) || (E::kId == E3M2::kId && Block == 32) ||
                             (E::kId == E2M1::kId && (Block == 16 || Block == 32));

}  // namespace cuda
}  // namespace blockfp
