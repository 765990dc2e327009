// Launches of dequantize.cuh.
#include "dequantize_flat.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

int log2_of(int power) {
  int shift = 0;
  while ((1 << shift) < power) ++shift;
  return shift;
}

template <class E, class T, int Block>
cudaError_t flat(const DequantizeArguments& a, cudaStream_t stream) {
  constexpr int kGroups = kFlatGroups<E, T>;
  const int64_t row_groups = a.columns / kGroupSize<T>, lines = a.batches * a.rows;
  if (Block != 0 && a.format.square()) {
    const uint32_t spans = ceil_div(row_groups, kDequantizeThreads);
    const int64_t blocks = spans * (lines / kGroups);
    if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
    dequantize_flat<E, T, Block, true><<<blocks, kDequantizeThreads, 0, stream>>>(a, spans, row_groups);
  } else {
    const int64_t groups = lines * row_groups, blocks = ceil_div(groups, kDequantizeThreads * kGroups);
    if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
    dequantize_flat<E, T, Block, false><<<blocks, kDequantizeThreads, 0, stream>>>(a, 1, groups);
  }
  return cudaGetLastError();
}

// Whether the flat kernel can run: all blocks are whole, all vectors aligned, and rows of square blocks long enough for a
// thread block.
bool is_flat(const DequantizeArguments& a) {
  const int block = a.format.per_tensor() ? 8 : a.format.block_columns;
  if (a.columns % block != 0 || !aligned(a.out) || !aligned(a.codes, 8)) return false;
  if (a.window.row_phase != 0 || a.window.column_phase != 0) return false;
  return a.format.per_tensor() || !a.format.square() || (a.rows % block == 0 && a.columns >= 8 * kDequantizeThreads);
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeArguments& a, cudaStream_t stream) {
  const int64_t lines = a.batches * a.rows, groups = ceil_div(a.columns, 8);
  if (lines * groups == 0) return cudaSuccess;
  if (is_flat(a)) {
    return with_element(a.format.element, [&](auto element) {
      using E = decltype(element);
      return with_block<E>(a.format.block_columns, [&](auto block) {
        return with_dtype(a.dtype, [&](auto dtype) { return flat<E, decltype(dtype), decltype(block)::value>(a, stream); });
      });
    });
  }
  int shift = 0;
  while (shift < 8 && (int64_t{1} << shift) < groups) ++shift;
  const int64_t spans = ceil_div(groups, int64_t{1} << shift);
  const int64_t blocks = spans * ceil_div(lines, (kDequantizeThreads >> shift) * kDequantizeRows);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const bool per_tensor = a.format.per_tensor();
  const int64_t grid_rows = per_tensor ? 1 : ceil_div(a.window.row_phase + a.rows, a.format.block_rows);
  const int64_t grid_columns = per_tensor ? 1 : ceil_div(a.window.column_phase + a.columns, a.format.block_columns);
  const int row_shift = log2_of(a.format.block_rows), column_shift = log2_of(a.format.block_columns);
  return with_element(a.format.element, [&](auto element) {
    using E = decltype(element);
    return with_dtype(a.dtype, [&](auto dtype) {
      using T = decltype(dtype);
      const bool vectors = a.columns % 8 == 0 && aligned(a.out) && aligned(a.codes, 8);
      if (per_tensor || a.window.column_phase % 8 == 0) {
        dequantize<E, T, true><<<blocks, kDequantizeThreads, 0, stream>>>(a, shift, spans, grid_rows, grid_columns, row_shift,
                                                                          column_shift, vectors);
      } else {
        dequantize<E, T, false><<<blocks, kDequantizeThreads, 0, stream>>>(a, shift, spans, grid_rows, grid_columns, row_shift,
                                                                           column_shift, vectors);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace blockfp
