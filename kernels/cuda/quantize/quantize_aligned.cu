// Launches of quantize_aligned.cuh for one element, BLOCKFP_ELEMENT.
#include "quantize_aligned.cuh"

#include <algorithm>

#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

template <class E, class T, Rounding R, bool Stored, class Source = AsItLies>
cudaError_t whole(QuantizeArguments a, cudaStream_t stream) {
  const int64_t across = ceil_div(a.x.columns, kTileColumns), down = ceil_div(a.x.rows, kTileRows), blocks = a.x.batches * across * down;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  // As in tile_launch.cuh.
  const int64_t strip = a.aligned_row.codes == nullptr ? down : 1;
  if constexpr (Stored && R == Rounding::kNearest) {
    a.scales_by_tile = can_order_scales(a.x.rows, a.x.columns) && aligned(a.column.scales);
  }
  quantize_aligned<E, T, R, Stored, Source><<<blocks, kTileThreads, 0, stream>>>(a, across, down, strip, vectors_fit(a.x));
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (a.scales_by_tile) {
    const ScalesByTile columns{static_cast<uint32_t*>(a.column.scales), a.x.batches * a.x.columns, static_cast<int>(down)};
    if (cudaError_t error = launch_order_scales({nullptr, 0, 0}, columns, nullptr, stream); error != cudaSuccess) return error;
  }
  return launch_spoil(a, stream);
}

template <class E, class T, Rounding R, bool Stored>
cudaError_t groups(const QuantizeArguments& a, cudaStream_t stream) {
  const int64_t across = std::max(ceil_div(a.x.columns, kTileColumns), int64_t{1});
  const int64_t blocks = across * group_tiles(a.groups.tokens, a.groups.count);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  quantize_groups_aligned<E, T, R, Stored><<<blocks, kTileThreads, 0, stream>>>(a, across, vectors_fit(a.x));
  return cudaGetLastError();
}

// Calls body with the element's dtype, and whether columns are stored, as types; Int8 is never aligned.
template <class E, class Body>
cudaError_t with_kind(const QuantizeArguments& a, Body body) {
  if constexpr (E::kComplement) {
    return cudaErrorInvalidValue;
  } else {
    return with_dtype(a.x.dtype, [&](auto dtype) {
      return a.column.codes != nullptr ? body(dtype, std::true_type{}) : body(dtype, std::false_type{});
    });
  }
}

}  // namespace

template <>
cudaError_t launch_aligned<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  return with_kind<E>(a, [&](auto dtype, auto stored) {
    using T = decltype(dtype);
    constexpr bool kStored = decltype(stored)::value;
    const int unit = !kStored ? 8 : (E::kBits == 4 ? 32 : 16);
    const bool fits = a.x.columns % 8 == 0 && a.x.rows % unit == 0 && vectors_fit(a.x) && aligned(a.column.codes);
    return fits ? whole<E, T, Rounding::kNearest, kStored>(a, stream) : whole<E, T, Rounding::kGeneral, kStored>(a, stream);
  });
}

template <>
cudaError_t launch_aligned_gated<BLOCKFP_ELEMENT>(const QuantizeArguments& a, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  if constexpr (!kMadeBlock<E, 32>) {
    return cudaErrorInvalidValue;
  } else {
    return a.x.dtype == Bf16::kId ? whole<E, Bf16, Rounding::kNearest, false, OfActivations>(a, stream)
                                  : whole<E, Fp16, Rounding::kNearest, false, OfActivations>(a, stream);
  }
}

template <>
cudaError_t launch_aligned_groups<BLOCKFP_ELEMENT>(QuantizeArguments a, const int32_t* words, cudaStream_t stream) {
  using E = BLOCKFP_ELEMENT;
  if (a.groups.count == 0) return cudaSuccess;
  a.groups.tiles = tiles_of_groups(words, a.groups.count);
  return with_kind<E>(a, [&](auto dtype, auto stored) {
    using T = decltype(dtype);
    constexpr bool kStored = decltype(stored)::value;
    return a.x.columns % 8 == 0 && vectors_fit(a.x) ? groups<E, T, Rounding::kGroups, kStored>(a, stream)
                                                    : groups<E, T, Rounding::kGroupsGeneral, kStored>(a, stream);
  });
}

}  // namespace cuda
}  // namespace blockfp
