// Launches of quantize_groups.cuh for one element, BLOCKFP_ELEMENT.
#include "quantize_groups.cuh"

#include <algorithm>

#include "tile_launch.cuh"

namespace blockfp {
namespace cuda {
namespace {

template <class E, int Block, class T, bool Square, Rounding R>
cudaError_t groups(const QuantizeArguments& a, cudaStream_t stream) {
  static_assert(kTileRows == kGroupUnit, "a tile lies in one group, of which each has at least one");
  const int64_t across = std::max(ceil_div(a.x.columns, kTileColumns), int64_t{1});
  const int64_t blocks = across * group_tiles(a.groups.tokens, a.groups.count);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const bool vectors = vectors_fit(a.x);
  if constexpr (Square) {
    quantize_groups_one_scale<E, Block, T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, vectors);
  } else if constexpr (Block == 128) {
    quantize_groups_across_warps<E, T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, vectors);
  } else {
    quantize_groups_within_warps<E, Block, T, R><<<blocks, kTileThreads, 0, stream>>>(a, across, vectors);
  }
  return cudaGetLastError();
}

template <class E, int Block, class T, bool Square>
cudaError_t with_rounding(const QuantizeArguments& a, cudaStream_t stream) {
  const bool keys = (a.row.codes != nullptr && a.row.key != nullptr) || (a.column.codes != nullptr && a.column.key != nullptr);
  const bool fits = a.x.columns % 8 == 0 && vectors_fit(a.x) && aligned(a.row.codes);
  return fits && !keys ? groups<E, Block, T, Square, Rounding::kGroups>(a, stream)
                       : groups<E, Block, T, Square, Rounding::kGroupsGeneral>(a, stream);
}

}  // namespace

template <>
cudaError_t launch_groups<BLOCKFP_ELEMENT>(QuantizeArguments a, const int32_t* words, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  if (a.groups.count == 0) return cudaSuccess;
  a.groups.tiles = tiles_of_groups(words, a.groups.count);
  return with_kernel<E>(a, [&](auto block, auto dtype, auto square) {
    return with_rounding<E, decltype(block)::value, decltype(dtype), decltype(square)::value>(a, stream);
  });
}

}  // namespace cuda
}  // namespace blockfp
