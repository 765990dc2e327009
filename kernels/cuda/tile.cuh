// A tile of a matrix in the registers of a block of threads, so that one read serves both directions.
//
// Eight warps, four along the rows and two along the columns; a warp has eight lanes side by side (eight columns each) and four on top of
// each other (kDepth rows each). A thread's piece is kDepth rows of eight columns.
#pragma once

#include "block_scale.cuh"
#include "vectors.cuh"

namespace blockfp {
namespace cuda {

constexpr int kTileThreads = 256;
constexpr int kTileColumns = 128;

template <class E>
constexpr int kDepth = E::kBits == 8 ? 8 : 16;
template <class E>
constexpr int kTileRows = 16 * kDepth<E>;

struct TilePlace {
  int warp_row, warp_column, lane_row, lane_column;
  int row, column;  // of the thread's piece, in the tile

  template <int Depth>
  __device__ __forceinline__ static TilePlace of_thread() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TilePlace p{warp / 2, warp % 2, lane / 8, lane % 8, 0, 0};
    p.row = (p.warp_row * 4 + p.lane_row) * Depth;
    p.column = (p.warp_column * 8 + p.lane_column) * 8;
    return p;
  }
};

// Where the tile lies in its matrix; negative where a block begins before x.
struct TileOrigin {
  int64_t batch, row, column;
};

}  // namespace cuda
}  // namespace blockfp
