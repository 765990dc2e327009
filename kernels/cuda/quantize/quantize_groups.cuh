// Quantizes rows sorted by group, both directions from one read: the tiles of quantize_tiles.cuh, each within one group.
//
// A tile begins at a multiple of its height in its group, so pieces may end inside a group but never reach into the next. The
// kernel replaces arguments about x by those of its group; along the columns, a group has room for its padding with zeros.
#pragma once

#include "quantize_tiles.cuh"

namespace blockfp {
namespace cuda {

// The arguments of this block's group, and its tile; false if there is none. Blocks go across, then down.
__device__ __forceinline__ bool find_group(QuantizeArguments& a, TileOrigin& tile, uint32_t across) {
  const uint32_t down = blockIdx.x / across;
  const int4* at = reinterpret_cast<const int4*>(a.groups.tiles + down);
  const int4 first = __ldg(at), second = __ldg(at + 1);
  const GroupTile own{first.x, first.y, first.z, first.w, second.x, {}};
  if (own.group < 0) return false;
  a.groups.own = own;
  tile = {0, own.row, static_cast<int64_t>(blockIdx.x - down * across) * kTileColumns};
  a.x.data = static_cast<const char*>(a.x.data) + own.first_row * a.x.row_stride * dtype_bytes(a.x.dtype);
  a.x.rows = a.window.rows = own.rows;
  const auto key_of = [&](const uint32_t* keys) { return keys == nullptr ? nullptr : keys + 4 * own.group; };
  a.row.key = key_of(a.row.key), a.column.key = key_of(a.column.key);
  return true;
}

// Advances the pointers to amaxes and to per-tensor scales to the group's.
template <int Block>
__device__ __forceinline__ void find_tensor_scale(QuantizeArguments& a) {
  const int group = a.groups.own.group;
  if (a.amax != nullptr) a.amax += group * a.groups.overflow_stride, a.amax_t += group * a.groups.overflow_stride;
  if constexpr (Block == 0) {
    a.row.scales = static_cast<float*>(a.row.scales) + group;
    a.column.scales = static_cast<float*>(a.column.scales) + group;
    if (a.recorded != nullptr) a.recorded += group;
  } else {
    a.tensor_scale += group, a.tensor_scale_t += group;
  }
}

// One scale for both directions: per group, or of square blocks.
template <class E, int Block, class T, Rounding R>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, T, R>)
    quantize_groups_one_scale(const __grid_constant__ QuantizeArguments all, uint32_t across, bool vectors) {
  __shared__ __align__(16) StagedSquare<E, Block, R> shared;
  QuantizeArguments a = all;
  TileOrigin tile;
  if (!find_group(a, tile, across)) return;
  if constexpr (Block == 0 || Block == 16) find_tensor_scale<Block>(a);
  Piece<E, T, R> piece(a, tile);
  piece.load(vectors);
  const TensorScale tensor = tensor_scales<E, Block>(a, tile.row == 0 && tile.column == 0).rows;
  if (a.x.rows != 0) quantize_square<Block, false>(piece, tensor, shared);
}

// Blocks of 1x16 and 1x32, whose scales a warp determines.
template <class E, int Block, class T, Rounding R>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, T, R>)
    quantize_groups_within_warps(const __grid_constant__ QuantizeArguments all, uint32_t across, bool vectors) {
  __shared__ __align__(16) StagedLines<E, Block, R> shared;
  QuantizeArguments a = all;
  TileOrigin tile;
  if (!find_group(a, tile, across)) return;
  if constexpr (Block == 16) find_tensor_scale<Block>(a);
  Piece<E, T, R> piece(a, tile);
  piece.load(vectors);
  const TensorScales tensor = tensor_scales<E, Block>(a, tile.row == 0 && tile.column == 0);
  if (a.x.rows != 0) quantize_lines(piece, tensor, shared);
}

// Blocks of 1x128, whose scales the warps of a tile determine together.
template <class E, class T, Rounding R>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, T, R>)
    quantize_groups_across_warps(const __grid_constant__ QuantizeArguments all, uint32_t across, bool vectors) {
  __shared__ __align__(16) StagedWide<E, R, WideScales<E, T, R>> shared;
  QuantizeArguments a = all;
  TileOrigin tile;
  if (!find_group(a, tile, across) || a.x.rows == 0) return;
  Piece<E, T, R> piece(a, tile);
  piece.load(vectors);
  quantize_wide_lines(piece, shared);
}

}  // namespace cuda
}  // namespace blockfp
