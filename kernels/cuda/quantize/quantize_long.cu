// Quantizes FP8 with a scale for each whole row, or each whole column, in two reads: of their amaxes, and of the codes.
#include "tile_launch.cuh"

namespace blockfp {
namespace cuda {
namespace {

// Raises the amaxes of rows and of columns, either of which may be null, to those of a tile.
template <class T, Rounding R>
__global__ void __launch_bounds__(kTileThreads)
    amax_of_lines(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, bool vectors, int32_t* rows, int32_t* columns) {
  __shared__ TileAmaxes<T> amaxes;
  Piece<E4M3, T, R> piece(a, tile_of_block(a.window, across, down, 1));
  piece.load(vectors);
  amaxes.find(piece, rows != nullptr, columns != nullptr);
  const TileOrigin& tile = piece.tile;
  const int line = threadIdx.x % 128;
  if (threadIdx.x >= 128) {
    if (columns != nullptr && tile.column + line < a.x.columns) {
      atomicMax(columns + tile.batch * a.x.columns + tile.column + line, amaxes.column(line));
    }
  } else if (rows != nullptr && tile.row + line < a.x.rows) {
    atomicMax(rows + tile.batch * a.x.rows + tile.row + line, amaxes.row(line));
  }
}

template <class E, class T, Rounding R>
cudaError_t launch(const QuantizeArguments& a, int32_t* rows, int32_t* columns, cudaStream_t stream) {
  const int64_t across = ceil_div(a.x.columns, kTileColumns), down = ceil_div(a.x.rows, kTileRows), blocks = a.x.batches * across * down;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const bool vectors = vectors_fit(a.x);
  amax_of_lines<T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, down, vectors, rows, columns);
  // As in launch_tile_kernel.
  const int64_t strip = rows == nullptr ? down : 1;
  quantize_across_warps<E, T, R, AsItLies, LongScales<E, T, R>><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return launch_spoil(a, stream);
}

}  // namespace

cudaError_t launch_long(QuantizeArguments a, int32_t* amaxes, cudaStream_t stream) {
  const int64_t lines = a.row.codes == nullptr ? 0 : a.x.batches * a.x.rows;
  const int64_t lines_t = a.column.codes == nullptr ? 0 : a.x.batches * a.x.columns;
  int32_t *rows = lines == 0 ? nullptr : amaxes, *columns = lines_t == 0 ? nullptr : amaxes + lines;
  if (cudaError_t error = cudaMemsetAsync(amaxes, 0, (lines + lines_t) * sizeof(int32_t), stream); error != cudaSuccess) return error;
  a.amax = rows, a.amax_t = columns;
  const bool nearest = whole_vectors(a, 16) && !has_key(a.row) && !has_key(a.column);
  return with_dtype(a.x.dtype, [&](auto dtype) {
    using T = decltype(dtype);
    const auto of_element = [&](auto element) {
      using E = decltype(element);
      return nearest ? launch<E, T, Rounding::kNearest>(a, rows, columns, stream) : launch<E, T, Rounding::kGeneral>(a, rows, columns, stream);
    };
    return a.format.element == E5M2::kId ? of_element(E5M2{}) : of_element(E4M3{});
  });
}

}  // namespace cuda
}  // namespace blockfp
