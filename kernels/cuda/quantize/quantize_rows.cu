// Launches of quantize_rows.cuh for one element, BLOCKFP_ELEMENT.
#include <algorithm>

#include "row_launch.cuh"

namespace blockfp {
namespace cuda {
namespace {

template <class E, int Block, class T, bool Chooses>
cudaError_t general(const QuantizeArguments& a, cudaStream_t stream) {
  constexpr int kElements = 8 * kRowGroups<E>;
  const int64_t pieces = ceil_div(a.window.column_phase + a.x.columns, kElements);
  int shift = 4;  // sixteen lanes hold the longest block
  while ((2 << shift) <= kRowThreads && (int64_t{1} << shift) < pieces) ++shift;
  // An empty array still has a tensor scale, which the first block writes.
  const int64_t spans = std::max(ceil_div(pieces, int64_t{1} << shift), int64_t{1});
  const int64_t blocks = spans * std::max(ceil_div(a.x.batches * a.x.rows, (kRowThreads >> shift) * kRowsAtOnce), int64_t{1});
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const int64_t grid_columns = Block == 0 ? 1 : ceil_div(a.window.column_phase + a.x.columns, Block);
  quantize_rows_general<E, Block, T, Chooses><<<blocks, kRowThreads, 0, stream>>>(a, shift, spans, grid_columns, vectors_fit(a.x));
  return cudaGetLastError();
}

template <class E, int Block, class T, bool Chooses>
cudaError_t rows(const QuantizeArguments& a, cudaStream_t stream) {
  const int64_t elements = a.x.batches * a.x.rows * a.x.columns;
  const bool whole = elements > 0 && a.window.column_phase == 0 && a.x.columns % (Block == 0 ? 1 : Block) == 0 &&
                     elements % (8 * kRowGroups<E>) == 0 && is_contiguous(a.x) && vectors_fit(a.x) && aligned(a.row.codes);
  if (whole && a.row.key == nullptr) return launch_row_kernel<E, Block, T, Rounding::kNearest, AsItLies, Chooses>(a, elements, stream);
  if constexpr (Block == 16) {
    const Window& w = a.window;
    if (whole && w.row == 0 && w.column == 0 && w.rows == a.x.rows && w.columns == a.x.columns) {
      return launch_row_kernel<E, Block, T, Rounding::kStochastic, AsItLies, Chooses>(a, elements, stream);
    }
  }
  return general<E, Block, T, Chooses>(a, stream);
}

}  // namespace

template <>
cudaError_t launch_rows<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  const cudaError_t error = with_block<BLOCKFP_ELEMENT>(a.format.block_columns, [&](auto block) {
    return with_dtype(a.x.dtype, [&](auto dtype) {
      using E = BLOCKFP_ELEMENT;
      using T = decltype(dtype);
      constexpr int kBlock = decltype(block)::value;
      if constexpr (kBlock == 16) {
        if (a.format.four_over_six()) return rows<E, kBlock, T, true>(a, stream);
      }
      return rows<E, kBlock, T, false>(a, stream);
    });
  });
  return error == cudaSuccess ? launch_spoil(a, stream) : error;
}

}  // namespace cuda
}  // namespace blockfp
