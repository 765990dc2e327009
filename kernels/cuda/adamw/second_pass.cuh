// Writes codes of new masters in formats whose scales depend on the whole parameter's largest magnitude, which adamw.cuh has
// found; one launch for all parameters with the same kind of blocks. Tiles and lanes are as in adamw.cuh.
//
// In StepEntry, `first` points to that amax (int32 bits, reduced over ranks), and `second` to the tensor scale of two-level
// formats.
#pragma once

#include "adamw.cuh"
#include "block_scale.cuh"

namespace blockfp {
namespace cuda {

enum class SecondBlocks { kTensor, kRow16, kSquare16 };

constexpr int kSecondWarps = 4, kSecondRows = 8;  // per warp
constexpr int kSecondTileRows = kSecondWarps * kSecondRows;

// The scale parameters common to all elements, computed by one thread; the parameter's first tile stores the tensor scale.
template <class E, SecondBlocks B>
__device__ __forceinline__ TensorScale scale_of_parameter(const StepEntry& e, int64_t tile) {
  __shared__ TensorScale shared;
  if (threadIdx.x == 0) {
    const int32_t amax = *static_cast<const int32_t*>(e.first);
    if constexpr (B == SecondBlocks::kTensor) {
      const auto s = static_cast<ScaleRule>(e.rule) == ScaleRule::kPow2 ? fp8_scale<E, ScaleRule::kPow2, float>(amax, 0, kFp32Max)
                                                                        : fp8_scale<E, ScaleRule::kFp32, float>(amax, 0, kFp32Max);
      shared = {s.multiplier, 1.0f, from_bits<float>(s.stored)};
      if (tile == 0) *static_cast<float*>(e.out_scales) = shared.decode;
    } else {
      const auto rule = static_cast<ScaleRule>(e.rule);
      const float multiplier = tensor_multiplier<E>(amax, rule);
      shared = {multiplier, multiply(multiplier, block_factor<E>(rule)), divide(1.0f, multiplier)};
      if (tile == 0) *static_cast<float*>(e.second) = shared.decode;
    }
  }
  __syncthreads();
  return shared;
}

// Four lanes hold the sixteen columns of a block, or a part of them.
__device__ __forceinline__ bool any_of_four(bool nan) {
  return (__ballot_sync(0xFFFFFFFFu, nan) >> (threadIdx.x % 32 / 4 * 4) & 0xFu) != 0;
}

template <class E>
__device__ __forceinline__ void put_scale16(const StepEntry& e, int64_t grid_row, int64_t column, const BlockScale<float>& scale, bool nan) {
  static_cast<uint8_t*>(e.out_scales)[grid_row * ((e.columns + 15) / 16) + column / 16] = nan ? kNanMark<E, 16> : scale.stored;
}

template <class E, SecondBlocks B, bool Vectors>
__device__ __forceinline__ void second_tile(const StepEntry& e, int64_t tile) {
  const TensorScale tensor = scale_of_parameter<E, B>(e, tile);
  if (e.batches == 0 || e.rows == 0 || e.columns == 0) return;
  const int64_t across = (e.columns + kStepColumns - 1) / kStepColumns, down = (e.rows + kSecondTileRows - 1) / kSecondTileRows;
  const int64_t batch = tile / across / down, first_row = tile / across % down * kSecondTileRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = first_row + warp * kSecondRows;
  StepPlace p;
  p.line = batch * e.rows + row;
  p.column = tile % across * kStepColumns + lane * 4;
  p.rows = static_cast<int>(max(min(e.rows - row, int64_t{kSecondRows}), int64_t{0}));
  p.count = static_cast<int>(max(min(e.columns - p.column, int64_t{4}), int64_t{0}));
  Four w[kSecondRows];  // zeros outside of the parameter
#pragma unroll
  for (int r = 0; r < kSecondRows; ++r) {
    const int count = r < p.rows ? p.count : 0;
    w[r] = floats_of<Fp32>(load_raw<4, Vectors>(e.weight, (p.line + r) * e.columns + p.column, count));
  }
  const QuantizeArguments none{};
  if constexpr (B == SecondBlocks::kSquare16) {
    __shared__ int32_t amaxes[kSecondWarps][8];
    __shared__ bool nans[kSecondWarps][8];
    int32_t most = 0;
    bool nan = false;
#pragma unroll
    for (int r = 0; r < kSecondRows; ++r) most = max(most, largest_of(w[r])), nan |= any_nan(w[r]);
    most = lanes_max<4>(most);
    nan = any_of_four(nan);
    if (lane % 4 == 0) amaxes[warp][lane / 4] = most, nans[warp][lane / 4] = nan;
    __syncthreads();
    // A block spans two warps vertically.
    most = max(most, amaxes[warp ^ 1][lane / 4]);
    nan |= nans[warp ^ 1][lane / 4];
    const BlockScale<float> scale = block_scale<E, 16>(most, none, tensor);
    if (p.count == 0) return;
    if (warp % 2 == 0 && lane % 4 == 0 && p.rows > 0) put_scale16<E>(e, batch * ((e.rows + 15) / 16) + row / 16, p.column, scale, nan);
#pragma unroll
    for (int r = 0; r < kSecondRows; ++r) {
      if (r < p.rows) put_codes<E>(e, p.line + r, p, w[r], scale.multiplier, nan);
    }
  } else {
#pragma unroll
    for (int r = 0; r < kSecondRows; ++r) {
      if (r >= p.rows) continue;  // a warp's lanes have the same rows
      float multiplier = tensor.multiplier;
      bool nan = false;
      if constexpr (B == SecondBlocks::kRow16) {
        nan = any_of_four(any_nan(w[r]));
        const BlockScale<float> scale = block_scale<E, 16>(lanes_max<4>(largest_of(w[r])), none, tensor);
        if (lane % 4 == 0 && p.count > 0) put_scale16<E>(e, p.line + r, p.column, scale, nan);
        multiplier = scale.multiplier;
      }
      if (p.count > 0) put_codes<E>(e, p.line + r, p, w[r], multiplier, nan);
    }
  }
}

template <class E, SecondBlocks B>
__global__ void __launch_bounds__(32 * kSecondWarps) second_pass(const __grid_constant__ StepLaunch a) {
  const int index = entry_of(a);
  const StepEntry& e = a.entry[index];
  const StepCoefficients& c = e.coefficients_at != nullptr ? *e.coefficients_at : e.coefficients;
  if (c.skip != 0.0f || c.still()) return;
  const int64_t tile = blockIdx.x - a.first_tile[index];
  if (a.vectors[index]) {
    second_tile<E, B, true>(e, tile);
  } else {
    second_tile<E, B, false>(e, tile);
  }
}

}  // namespace cuda
}  // namespace blockfp
