// Launches of quantize_tiles.cuh, and of what puts its scales in order, for one element, BLOCKFP_ELEMENT.
#include "quantize_tiles.cuh"

#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

// Whether a tile has four bytes of scales for each of its lines.
template <class E, int Block, bool Square>
constexpr bool kWordALine = !Square && kDepth<E> == 8 && (Block == 32 || Block == 128);

template <class E, int Block, class T, bool Square, Rounding R>
cudaError_t tiles(QuantizeArguments a, cudaStream_t stream) {
  const int64_t across = ceil_div(a.window.column_phase + a.x.columns, kTileColumns);
  const int64_t down = ceil_div(a.window.row_phase + a.x.rows, kTileRows<E>);
  const int64_t blocks = a.x.batches * across * down;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  // Columns alone like tiles below each other, both directions tiles side by side (an H200: 0.92 against 0.89 of the copy).
  const int64_t strip = a.row.codes == nullptr ? down : 1;
  if constexpr (kWordALine<E, Block, Square> && R != Rounding::kGeneral) {
    a.scales_by_tile = can_order_scales(a.x.rows, a.x.columns) && aligned(a.row.scales) && aligned(a.column.scales);
  }
  const bool vectors = vectors_fit(a.x);
  if constexpr (Square) {
    quantize_one_scale<E, Block, T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  } else if constexpr (Block == 128) {
    quantize_across_warps<E, T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  } else {
    quantize_within_warps<E, Block, T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  }
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess || !a.scales_by_tile) return error;
  uint32_t* rows = a.row.codes == nullptr ? nullptr : static_cast<uint32_t*>(a.row.scales);
  return launch_order_scales({rows, a.x.batches * a.x.rows, static_cast<int>(across)},
                             {static_cast<uint32_t*>(a.column.scales), a.x.batches * a.x.columns, static_cast<int>(down)}, stream);
}

template <class E, int Block, class T, bool Square>
cudaError_t with_rounding(const QuantizeArguments& a, cudaStream_t stream) {
  const Window& w = a.window;
  const int row_unit = E::kBits == 8 ? 16 : (E::kBits == 4 ? 32 : 64);  // whose codes are vectors
  const bool fits = w.row_phase == 0 && w.column_phase == 0 && a.x.columns % kColumnUnit<E> == 0 && a.x.rows % row_unit == 0 && vectors_fit(a.x) &&
                    aligned(a.row.codes) && aligned(a.column.codes);
  const bool row_key = a.row.codes != nullptr && a.row.key != nullptr;
  const bool column_key = a.column.codes != nullptr && a.column.key != nullptr;
  if (fits && !row_key && !column_key) return tiles<E, Block, T, Square, Rounding::kNearest>(a, stream);
  if constexpr (Block == 16) {
    const bool eights = (w.row | w.column | w.rows | w.columns) % 8 == 0;
    if (fits && eights && row_key == (a.row.codes != nullptr) && column_key == (a.column.codes != nullptr)) {
      return tiles<E, Block, T, Square, Rounding::kStochastic>(a, stream);
    }
  }
  return tiles<E, Block, T, Square, Rounding::kGeneral>(a, stream);
}

}  // namespace

template <>
cudaError_t launch_tiles<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  return with_block<E>(a.format.block_columns, [&](auto block) {
    return with_dtype(a.x.dtype, [&](auto dtype) {
      constexpr int kBlock = decltype(block)::value;
      using T = decltype(dtype);
      // One scale for the whole tensor counts as square.
      if constexpr (kBlock != 0) {
        if (!a.format.square()) return with_rounding<E, kBlock, T, false>(a, stream);
      }
      return with_rounding<E, kBlock, T, true>(a, stream);
    });
  });
}

}  // namespace cuda
}  // namespace blockfp
