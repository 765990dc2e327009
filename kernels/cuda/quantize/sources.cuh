// Sources of the elements that a kernel quantizes: x itself, or an activation's output or gradients.
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

// What is computed from gate and up, `AtOnce` rows at a time: as many as registers allow.
template <template <class> class Parts, int AtOnce>
struct Made {
  // Of a single matrix. Assumes that vectors fit.
  template <class E, class T, Rounding R>
  __device__ __forceinline__ static void load(Piece<E, T, R>& piece, bool) {
    static_assert(Piece<E, T, R>::kWhole, "a piece lies in x or outside it");
    constexpr int kRows = kDepth, kAtOnce = AtOnce;
    const QuantizeArguments& a = piece.a;
    const auto& how = Parts<T>::how(a);
#pragma unroll
    for (int r = 0; r < kRows; ++r) piece.x[r] = zeros<T>();
    if (!piece.inside()) return;
    const int64_t row = piece.tile.row + piece.place.row, column = piece.tile.column + piece.place.column;
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      Parts<T> parts[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) parts[r].load(a.x, how, row + first + r, column);
      with_activation(how.activation, [&](auto activation) {
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) piece.x[first + r] = parts[r].template made<decltype(activation)::value>(how);
      });
    }
  }

  // Eights from element `index` on, counted as if rows were contiguous. Their length is a multiple of eight.
  template <class T, int Count>
  __device__ __forceinline__ static void load_line(const QuantizeArguments& a, int64_t index, Eight<T> (&x)[Count]) {
    const auto& how = Parts<T>::how(a);
    Parts<T> parts[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const int64_t at = index + 8 * i, row = at / a.x.columns;
      parts[i].load(a.x, how, row, at - row * a.x.columns);
    }
    with_activation(how.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < Count; ++i) x[i] = parts[i].template made<decltype(activation)::value>(how);
    });
  }
};

using OfActivations = Made<GateAndUp, 4>;
using OfGradients = Made<GradientSources, 2>;

// Whether a source's output is quantized to this element in blocks of this length: the casts of inputs in recipes, and of
// gradients with delayed scaling. In blocks, gradients are cast no faster as they are made (H200: 1.2 to 2.7% of a layer slower).
template <class E, int Block>
constexpr bool kMadeBlock = (E::kId == E4M3::kId && Block != 16) || (E::kId == E3M2::kId && Block == 32) ||
                             (E::kId == E2M1::kId && (Block == 16 || Block == 32));
template <class E, int Block>
constexpr bool kMadeGradient = (E::kId == E4M3::kId || E::kId == E5M2::kId) && Block == 0;

}  // namespace cuda
}  // namespace blockfp
