// Launches of quantize_tiles.cuh for one element, BLOCKFP_ELEMENT.
#include "tile_launch.cuh"

namespace blockfp {
namespace cuda {
namespace {

template <class E, int Block, class T, bool Square, bool Chooses>
cudaError_t with_rounding(const QuantizeArguments& a, cudaStream_t stream) {
  const bool fits = whole_vectors(a, E::kBits == 4 ? 32 : 16), row_key = has_key(a.row), column_key = has_key(a.column);
  if (fits && !row_key && !column_key) return launch_tile_kernel<E, Block, T, Square, Rounding::kNearest, AsItLies, Chooses>(a, stream);
  if constexpr (Block == 16) {
    const Window& w = a.window;
    const bool eights = (w.row | w.column | w.rows | w.columns) % 8 == 0;
    if (fits && eights && row_key == (a.row.codes != nullptr) && column_key == (a.column.codes != nullptr)) {
      return launch_tile_kernel<E, Block, T, Square, Rounding::kStochastic, AsItLies, Chooses>(a, stream);
    }
  }
  return launch_tile_kernel<E, Block, T, Square, Rounding::kGeneral, AsItLies, Chooses>(a, stream);
}

}  // namespace

template <>
cudaError_t launch_tiles<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  return with_kernel<E>(a, [&](auto block, auto dtype, auto square) {
    using T = decltype(dtype);
    constexpr int kBlock = decltype(block)::value;
    constexpr bool kSquare = decltype(square)::value;
    if constexpr (kBlock == 16) {
      if (a.format.four_over_six()) return kSquare ? with_rounding<E, kBlock, T, kSquare, kSquare>(a, stream) : cudaErrorInvalidValue;
    }
    return with_rounding<E, kBlock, T, kSquare, false>(a, stream);
  });
}

}  // namespace cuda
}  // namespace blockfp
