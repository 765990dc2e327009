// Launches a kernel of quantize_tiles.cuh, and the kernel that orders its scales.
#pragma once

#include "launch.h"
#include "quantize_tiles.cuh"

namespace blockfp {
namespace cuda {

// Whether a tile has four bytes of scales per line.
template <int Block, bool Square>
constexpr bool kWordALine = !Square && (Block == 32 || Block == 128);

// Whether the kernels that round to nearest, or by eights of random numbers, can run: tiles begin where x does, and vectors fit.
inline bool whole_vectors(const QuantizeArguments& a, int row_unit) {
  return a.window.row_phase == 0 && a.window.column_phase == 0 && a.x.columns % 8 == 0 && a.x.rows % row_unit == 0 &&
         vectors_fit(a.x) && aligned(a.row.codes) && aligned(a.column.codes);
}

inline bool has_key(const Output& out) { return out.codes != nullptr && out.key != nullptr; }

template <class E, int Block, class T, bool Square, Rounding R, class Source = AsItLies, bool Chooses = false>
cudaError_t launch_tile_kernel(QuantizeArguments a, cudaStream_t stream) {
  const int64_t across = ceil_div(a.window.column_phase + a.x.columns, kTileColumns);
  const int64_t down = ceil_div(a.window.row_phase + a.x.rows, kTileRows);
  const int64_t blocks = a.x.batches * across * down;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  // Columns alone prefer tiles above each other, both directions adjacent tiles (H200: 0.92 instead of 0.89 of a copy's speed).
  const int64_t strip = a.row.codes == nullptr ? down : 1;
  if constexpr (kWordALine<Block, Square> && R != Rounding::kGeneral) {
    const bool ordered = a.row.ordered || a.column.ordered;
    a.scales_by_tile = !ordered && can_order_scales(a.x.rows, a.x.columns) && aligned(a.row.scales) && aligned(a.column.scales);
  }
  const bool vectors = vectors_fit(a.x);
  if constexpr (Square) {
    quantize_one_scale<E, Block, T, R, Source, Chooses><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  } else if constexpr (Block == 128) {
    quantize_across_warps<E, T, R, Source><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  } else {
    quantize_within_warps<E, Block, T, R, Source><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  }
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (!a.scales_by_tile) return launch_spoil(a, stream);
  uint32_t* rows = a.row.codes == nullptr ? nullptr : static_cast<uint32_t*>(a.row.scales);
  return launch_order_scales({rows, a.x.batches * a.x.rows, static_cast<int>(across)},
                             {static_cast<uint32_t*>(a.column.scales), a.x.batches * a.x.columns, static_cast<int>(down)},
                             a.mark ? a.recorded : nullptr, stream);
}

// Calls body with the block, the dtype and whether blocks are square, as types, if a kernel is compiled for them. One scale for
// the whole tensor counts as square.
template <class E, class Body>
cudaError_t with_kernel(const QuantizeArguments& a, Body body) {
  return with_block<E>(a.format.block_columns, [&](auto block) {
    return with_dtype(a.x.dtype, [&](auto dtype) {
      if constexpr (decltype(block)::value != 0) {
        if (!a.format.square()) return body(block, dtype, std::false_type{});
      }
      return body(block, dtype, std::true_type{});
    });
  });
}

}  // namespace cuda
}  // namespace blockfp
