// A block's scale from its amax, on the GPU: scales.h with the GPU's conversions and reciprocal.
//
// `Block`, the number of elements along the contracted axis, selects the family: 0 per tensor, 128 FP8 blocks, 32 MX, 16 NVFP4.
#pragma once

#include <type_traits>

#include "arguments.h"
#include "blockfp/four_over_six.h"
#include "codes.cuh"
#include "eight_elements.cuh"

namespace blockfp {
namespace cuda {

// What all blocks of a tensor share.
struct TensorScale {
  float multiplier;  // per tensor: of the elements; two levels: G
  float factor;      // two levels: multiplies a block's amax; 4-over-6: the tensor's amax
  float decode;      // per tensor: the stored scale; two levels: tensor_scale
};

template <class E, int Block>
__device__ __forceinline__ TensorScale tensor_scale(const QuantizeArguments& a, const int32_t* tensor_amax) {
  TensorScale t{1.0f, 1.0f, 1.0f};
  if constexpr (Block == 0) {
    if (a.multiplier != nullptr) t.multiplier = __ldg(a.multiplier);
    if (a.multiplier != nullptr && !(a.measured && __float_as_int(t.multiplier) <= 0)) {
      t.decode = divide(1.0f, t.multiplier);
    } else {
      // Elsewhere threads are raising `recorded` to what it is already.
      const int32_t amax = a.multiplier != nullptr ? __ldcg(a.recorded) : __ldg(tensor_amax);
      const auto s = a.format.rule == ScaleRule::kPow2
                         ? fp8_scale<E, ScaleRule::kPow2, float>(amax, a.eps_bits, kFp32Max)
                         : fp8_scale<E, ScaleRule::kFp32, float>(amax, a.eps_bits, kFp32Max);
      t.multiplier = s.multiplier;
      t.decode = from_bits<float>(s.stored);
    }
  } else if constexpr (Block == 16) {
    const int32_t amax = __ldg(tensor_amax);
    const bool chooses = a.format.four_over_six();
    t.multiplier = tensor_multiplier<E>(amax, a.format.rule);
    t.factor = chooses ? from_bits<float>(amax) : multiply(t.multiplier, block_factor<E>(a.format.rule));
    t.decode = divide(1.0f, t.multiplier);
  }
  return t;
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  const uint32_t halves = halves_of<false>(static_cast<uint16_t>(code));
  float out;
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(out) : "r"(halves));
  return out;
}

// fp8_scale for powers of two, without its divisions: MAX is 1.75 times a power of two, so the quotient's exponent follows from
// the amax's and from whether its mantissa is above 1.75. (No such quotient rounds up to the next power.)
template <class E>
__device__ __forceinline__ BlockScale<float> fp8_power_scale(int32_t amax, int32_t eps_bits, int32_t largest) {
  static_assert((E::kMaxBits & 0x7FFFFF) == 0x600000, "MAX is 1.75 times a power of two");
  amax = max(amax, eps_bits);
  int32_t exponent = 127 + (E::kMaxBits >> 23) - (amax >> 23) - ((amax & 0x7FFFFF) > 0x600000 ? 1 : 0);
  exponent = exponent > 254 ? largest >> 23 : exponent;
  if (amax == 0 || amax == kInfinity) exponent = 127;
  return {max((254 - exponent) << 23, 0x400000), from_bits<float>(exponent << 23)};
}

// A block's stored scale (a byte, or fp32 bits) and its elements' multiplier.
template <class E, int Block>
__device__ __forceinline__ BlockScale<float> block_scale(int32_t amax, const QuantizeArguments& a, const TensorScale& t) {
  if constexpr (Block == 0) {
    return {__float_as_int(t.decode), t.multiplier};
  } else if constexpr (Block == 128) {
    return a.format.rule == ScaleRule::kPow2 ? fp8_power_scale<E>(amax, a.eps_bits, a.largest_bits)
                                             : fp8_scale<E, ScaleRule::kFp32, float>(amax, a.eps_bits, a.largest_bits);
  } else if constexpr (Block == 32) {
    // e8m0_scale in fewer steps: a carry out of the mantissa increments the exponent, also for Inf.
    int32_t byte;
    if (a.format.rule == ScaleRule::kE8m0Ceil) {
      const int32_t v = to_bits(multiply(from_bits<float>(amax), element_max_reciprocal<E>()));
      byte = (v + (v < 0x800000 ? 0x3FFFFF : 0x7FFFFF)) >> 23;
    } else {
      byte = amax == kInfinity ? 254 : max((amax >> 23) - E::kEmax, 0);
    }
    byte = min(byte, 254);
    return {byte, from_bits<float>(max((254 - byte) << 23, 0x400000))};
  } else {
    const uint32_t stored = convert_pair<false>(multiply(__int_as_float(amax), t.factor), 0.0f) & 0xFF;
    const float decode = multiply(e4m3_value(stored), t.decode);
    return {static_cast<int32_t>(stored), fminf(__frcp_rn(decode), from_bits<float>(kFp32Max))};
  }
}

// A block's amax, and whether it contains a NaN that E has no code for. `amax` returns it in every lane of the block: with
// true_type a NaN counts as larger than everything, with false_type as nothing. Every lane of the warp must call it.
template <class E, class Amax>
__device__ __forceinline__ int32_t amax_within_warp(Amax amax, bool& nan) {
  nan = false;
  if constexpr (E::kHasNan) {
    return amax(std::false_type{});
  } else {
    int32_t most = amax(std::true_type{});
    nan = most > kInfinity;
    if (__any_sync(0xFFFFFFFFu, nan)) most = amax(std::false_type{});
    return most;
  }
}

// Whether blocks of a tensor with this two-level scale may be so large that their multipliers over 2^14 are inexact: an E4M3
// scale is at most 448.
__device__ __forceinline__ bool is_huge(const TensorScale& tensor) { return tensor.decode > 0x1p100f; }

// Range of a block's elements times its multiplier.
template <int Block>
constexpr Range kRange = Block == 16 ? Range::kBounded : Range::kAny;

// Whether a bounded block has elements beyond the bound: its stored scale is too small for it, or it contains an Inf.
template <int Block>
__device__ __forceinline__ bool exceeds_range(int32_t amax, float multiplier) {
  return kRange<Block> == Range::kBounded && !(multiply(from_bits<float>(amax), multiplier) < 7.0f);
}

// The stored scale of a tensor: `decode`, or NaN if the tensor contains an Inf and is to be marked.
__device__ __forceinline__ float stored_tensor_scale(const QuantizeArguments& a, float decode) {
  const bool overflows = a.mark && a.amax != nullptr && __ldg(a.amax) >= kInfinity;
  return overflows ? from_bits<float>(kNan) : decode;
}

// The scale byte that marks a block of E with a NaN; only needed for elements without a NaN code.
template <class E, int Block>
constexpr int kNanMark = Block == 16 ? 0x7F : 0xFF;

// Index of a line's scale of 1x128 in the order of products: block by block, lines padded to a multiple of 4.
__device__ __forceinline__ int64_t ordered_place(int64_t block, int64_t line, int64_t lines) {
  return block * ((lines + 3) / 4 * 4) + line;
}

template <int Block>
__device__ __forceinline__ void store_scale(void* scales, int64_t index, int32_t stored) {
  if constexpr (Block == 0 || Block == 128) {
    static_cast<int32_t*>(scales)[index] = stored;
  } else {
    static_cast<uint8_t*>(scales)[index] = stored;
  }
}

// Whether elements of E exist in blocks of this length.
template <class E, int Block>
constexpr bool kHasBlock = Block == 32 || (Block == 16 ? E::kId == E2M1::kId : E::kHasNan);

// Calls body with the columns of a format's blocks, 0 for the whole tensor, as a type; returns an error if E has no such
// blocks.
template <class E, class Body>
cudaError_t with_block(int columns, Body body) {
  if constexpr (kHasBlock<E, 0>) {
    if (columns == 0) return body(std::integral_constant<int, 0>{});
    if (columns == 128) return body(std::integral_constant<int, 128>{});
  }
  if constexpr (kHasBlock<E, 16>) {
    if (columns == 16) return body(std::integral_constant<int, 16>{});
  }
  return columns == 32 ? body(std::integral_constant<int, 32>{}) : cudaErrorInvalidValue;
}

}  // namespace cuda
}  // namespace blockfp
