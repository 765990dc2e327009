// NVFP4's choice between two scales of a block on the GPU: the arithmetic of blockfp/four_over_six.h, and who adds up whose errors.
//
// A row of a block is added up by one thread, from its first element to its last. Lanes that share a square block trade rows first.
#pragma once

#include "block_scale.cuh"
#include "blockfp/four_over_six.h"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

// Sum of the errors of a row's 16 magnitudes under a scale. Of tensors that are tiny or huge, or hold an Inf: rare, so it is called.
template <class E>
__device__ __noinline__ float sum_errors_carefully(const float* row, float scale, float multiplier, float tensor_amax, ScaleRule rule) {
  float total = 0.0f;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int32_t code = four_over_six_code<E, float>(row[i], multiplier);
    total = add(total, four_over_six_error<float>(four_over_six_value<E, float>(code, scale, tensor_amax, rule), row[i], rule));
  }
  return total;
}

// The scales that are tried for a block: [0] maps its amax to 6, [1] to 4.
template <class E>
struct Tries {
  TriedScale<float> scales[2];
  float of_one[2], of_three_halves[2];  // what codes stand for in a plain tensor
  float tensor_amax;
  ScaleRule rule;

  __device__ __forceinline__ Tries(int32_t amax, const QuantizeArguments& a, const TensorScale& t)
      : tensor_amax(t.factor), rule(a.format.rule) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      scales[k] = four_over_six_scale<E, float>(amax, k == 1, t.multiplier, t.decode);
      of_one[k] = four_over_six_value<E, float>(2, scales[k].value, tensor_amax, rule);
      of_three_halves[k] = four_over_six_value<E, float>(3, scales[k].value, tensor_amax, rule);
    }
  }

  // The sum of the errors of a row, given by its halves.
  template <class T>
  __device__ __forceinline__ float sum(const Eight<T>& left, const Eight<T>& right, int k) const {
    const auto magnitude = [&](int i) { return fabsf(i < 8 ? value<T>(left, i) : value<T>(right, i - 8)); };
    float total = 0.0f;
    if (is_plain(tensor_amax)) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float x = magnitude(i), y = multiply(x, scales[k].multiplier);
        const float nearest = four_over_six_plain_value<E, float>(y, of_one[k], of_three_halves[k]);
        total = add(total, four_over_six_error<float>(nearest, x, rule));
      }
      return total;
    }
    float row[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) row[i] = magnitude(i);
    return sum_errors_carefully<E>(row, scales[k].value, scales[k].multiplier, tensor_amax, rule);
  }

  // The scale for 4 where its errors are smaller: not where one is NaN.
  __device__ __forceinline__ BlockScale<float> chosen(float six, float four) const {
    const bool takes_4 = four < six;
    return {takes_4 ? scales[1].stored : scales[0].stored, takes_4 ? scales[1].multiplier : scales[0].multiplier};
  }
};

// The scale of a block of 1x16 that a thread holds.
template <class E, class T>
__device__ __forceinline__ BlockScale<float> choose_scale(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                          const TensorScale& tensor) {
  const Tries<E> tries(amax, a, tensor);
  return tries.chosen(tries.template sum<T>(x[0], x[1], 0), tries.template sum<T>(x[0], x[1], 1));
}

// The scale of a block of 16x16 that four lanes hold, two side by side, two on top of each other. Every lane of the warp comes here.
template <class E, class T, Rounding R>
__device__ __forceinline__ BlockScale<float> choose_square_scale(const Piece<E, T, R>& piece, int32_t amax, const TensorScale& tensor) {
  constexpr int kOwn = kDepth / 2;  // rows whose sums this lane makes: the upper ones on the left, the lower ones on the right
  constexpr int kBeside = 1, kBelow = 8;
  const bool right = threadIdx.x & kBeside;
  const Tries<E> tries(amax, piece.a, tensor);
  float sums[2][kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    Eight<T> halves[2];
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      const uint32_t upper = piece.x[i].word[w], lower = piece.x[i + kOwn].word[w];
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, right ? upper : lower, kBeside), own = right ? lower : upper;
      halves[0].word[w] = right ? other : own, halves[1].word[w] = right ? own : other;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) sums[k][i] = tries.template sum<T>(halves[0], halves[1], k);
  }
  float whole[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    // Rows 8 apart, then 4, 2, 1: two lanes' sums are the same whichever of them adds.
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sums[k][i] = add(sums[k][i], __shfl_xor_sync(0xFFFFFFFFu, sums[k][i], kBelow));
      sums[k][i] = add(sums[k][i], __shfl_xor_sync(0xFFFFFFFFu, sums[k][i], kBeside));
    }
    whole[k] = add(add(sums[k][0], sums[k][2]), add(sums[k][1], sums[k][3]));
  }
  return tries.chosen(whole[0], whole[1]);
}

}  // namespace cuda
}  // namespace blockfp
