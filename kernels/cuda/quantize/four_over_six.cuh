// NVFP4's choice between two scales of a block on the GPU: estimates first, then, where these are too close, the formula of
// blockfp/four_over_six.h.
//
// The formula rounds each element's value twice and its error once, which takes three times the steps that the codes themselves take.
// Distances of the scaled elements from their codes say nearly the same, and give the codes of both scales besides.
#pragma once

#include "block_scale.cuh"
#include "blockfp/four_over_six.h"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

// ---- by the formula

// The sum of the errors of 16 magnitudes, one in each lane of half a warp. A call, since few blocks come here.
static __device__ __noinline__ float sum_errors(float magnitude, float multiplier, float scale, float tensor_amax, ScaleRule rule) {
  const int32_t code = four_over_six_code<E2M1, float>(magnitude, multiplier);
  const float nearest = four_over_six_value<E2M1, float>(code, scale, tensor_amax, rule);
  const float error = four_over_six_error<float>(nearest, magnitude, rule);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) total = add(total, __shfl_sync(0xFFFFFFFFu, error, i, 16));
  return total;
}

// Element i of sixteen, given by their halves.
template <class T>
__device__ __forceinline__ float element(const Eight<T> (&halves)[2], int i) {
  uint32_t words[2 * kWords<T>];
#pragma unroll
  for (int w = 0; w < 2 * kWords<T>; ++w) words[w] = halves[w / kWords<T>].word[w % kWords<T>];
#pragma unroll
  for (int count = kWords<T>, bit = 8; count > 0; count /= 2, bit /= 2) {
#pragma unroll
    for (int w = 0; w < count; ++w) words[w] = i & bit ? words[w + count] : words[w];
  }
  Eight<T> found = zeros<T>();
  found.word[0] = words[0];
  return kWords<T> == 4 && i % 2 != 0 ? value<T>(found, 1) : value<T>(found, 0);
}

// Of a block, by a whole warp: each lane has an element of a row of 16, lanes 0 to 15 under the scale for 6, the others under that for 4.
// A lane that did it alone would keep the others waiting.
struct ByFormula {
  TriedScale<float> tried;
  float tensor_amax;
  ScaleRule rule;

  __device__ __forceinline__ ByFormula(int32_t amax, const TensorScale& t, ScaleRule of)
      : tried(four_over_six_scale<E2M1, float>(amax, threadIdx.x & 16, t.multiplier, t.decode)), tensor_amax(t.factor), rule(of) {}

  // The sum of the errors of a row under this lane's scale. The row's halves lie in lanes `left` and `right`.
  template <class T>
  __device__ __forceinline__ float sum(const Eight<T>& x, const Eight<T>& beside, int left, int right) const {
    Eight<T> halves[2];
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      halves[0].word[w] = __shfl_sync(0xFFFFFFFFu, x.word[w], left);
      halves[1].word[w] = __shfl_sync(0xFFFFFFFFu, beside.word[w], right);
    }
    return sum_errors(fabsf(element<T>(halves, threadIdx.x % 16)), tried.multiplier, tried.value, tensor_amax, rule);
  }

  // The scale for 4 where its errors are smaller: not where one is NaN.
  __device__ __forceinline__ BlockScale<float> chosen(float total) const {
    const int from = __shfl_sync(0xFFFFFFFFu, total, 16) < __shfl_sync(0xFFFFFFFFu, total, 0) ? 16 : 0;
    return {__shfl_sync(0xFFFFFFFFu, tried.stored, from), __shfl_sync(0xFFFFFFFFu, tried.multiplier, from)};
  }
};

// Calls each(lane) for one after the other of those that are wanted, with all lanes of the warp.
template <class Each>
__device__ __forceinline__ void for_each_lane(bool wanted, Each each) {
  for (uint32_t left = __ballot_sync(0xFFFFFFFFu, wanted); left != 0; left &= left - 1) each(__ffs(left) - 1);
}

// ---- by estimates

// Whether estimates hold for a tensor: nothing that its formulas come by is subnormal or Inf.
__device__ __forceinline__ bool is_plain(float tensor_amax) { return tensor_amax >= 0x1p-80f && tensor_amax <= 0x1p110f; }

// amax / 6, rounded once, as a division does it but for numbers that are tiny or huge: the remainder corrects the product.
__device__ __forceinline__ float divide_by_max(float amax) {
  static_assert(E2M1::kMax == 6, "held against divisions of every mantissa");
  const float quotient = __fmul_rn(amax, element_max_reciprocal<E2M1>());
  return __fmaf_rn(__fmaf_rn(quotient, -6.0f, amax), element_max_reciprocal<E2M1>(), quotient);
}

// 1 / x, rounded once, of normal numbers whose reciprocal is one.
__device__ __forceinline__ float plain_reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return __fmaf_rn(out, __fmaf_rn(-x, out, 1.0f), out);
}

// Eight E2M1 codes without signs, the top bits of nibbles arbitrary, under each of two scales.
struct Candidates {
  uint32_t of[2];

  // Those of one, with the signs of x.
  template <class T>
  __device__ __forceinline__ uint2 chosen(bool second, const Eight<T>& x) const {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = value<T>(x, i);
    return {((second ? of[1] : of[0]) & 0x77777777u) | nibble_signs(values), 0};
  }
};

// Scales of a block and what its errors come to under each, in the scale's own units.
class Estimates {
 public:
  static constexpr float kDown = kE2m1Down;  // elements are scaled by this besides

  // Of a block with this amax.
  __device__ __forceinline__ Estimates(int32_t amax, const QuantizeArguments& a, const TensorScale& t)
      : rule_(a.format.rule), empty_(amax == 0) {
    const float base = multiply(divide_by_max(from_bits<float>(amax)), t.multiplier);
    stored_ = convert_pair<false>(base, multiply(base, 1.5f));
    const __half2 values = bit_cast<__half2>(halves_of<false>(static_cast<uint16_t>(stored_)));
    valid_ = is_plain(t.factor);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      units_[k] = multiply(k == 0 ? __low2float(values) : __high2float(values), t.decode);
      const float multiplier = units_[k] == 0.0f ? from_bits<float>(kFp32Max) : plain_reciprocal(units_[k]);
      multipliers_[k] = multiply(multiplier, kDown);
      // From 7 on the nearest magnitude would be 8.
      valid_ = valid_ && multiply(from_bits<float>(amax), multipliers_[k]) < 7 * kDown;
    }
  }

  // Adds the distances of elements, or their squares; returns their codes.
  template <class T, int Count>
  __device__ __forceinline__ void add(const Eight<T> (&x)[Count], Candidates (&codes)[Count]) {
    if (squares_errors(rule_)) {
#pragma unroll
      for (int i = 0; i < Count; ++i) codes[i] = add<T, true>(x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) codes[i] = add<T, false>(x[i]);
    }
  }

  // To the sums those of a lane that has another part of the block.
  __device__ __forceinline__ void add_lane(int distance) {
#pragma unroll
    for (int k = 0; k < 2; ++k) sums_[k] += __shfl_xor_sync(0xFFFFFFFFu, sums_[k], distance);
  }

  // Whether the formula is sure to choose as `takes_4` says. It rounds values twice, elements times the multiplier five times, an error
  // and each sum once; with the roundings of the sums here that is at most 2^-13 units for 16 elements, 2^-9 for 256, and of squares twice
  // as much.
  template <int Elements>
  __device__ __forceinline__ bool is_sure() const {
    static_assert(Elements == 16 || Elements == 256, "counted for these");
    const float margin =
        (weight(0) + weight(1)) * (Elements == 16 ? 0x1p-13f : 0x1p-9f) * (squares_errors(rule_) ? 2 * kDown * kDown : kDown);
    if (empty_) return sums_[0] == 0.0f;  // not with a NaN
    return valid_ && margin > 0x1p-100f && fabsf(error(0) - error(1)) > margin;
  }

  __device__ __forceinline__ bool takes_4() const { return error(1) < error(0); }

  __device__ __forceinline__ BlockScale<float> chosen() const {
    const bool four = takes_4();
    return {static_cast<int32_t>(four ? stored_ >> 8 : stored_ & 0xFF), multiply(four ? multipliers_[1] : multipliers_[0], 1 / kDown)};
  }

 private:
  template <class T, bool Squares>
  __device__ __forceinline__ Candidates add(const Eight<T>& x) {
    Candidates codes;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float nearest[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float y = __fmul_rn(fabsf(value<T>(x, i)), multipliers_[k]);
        const float power = fmaxf(from_bits<float>(to_bits(y) & kInfinity), kDown);
        // A sum whose last place is the spacing of E2M1 at y; all of this is exact but for that.
        const float shifted = __fmaf_rn(power, 0x1p22f, y);
        nearest[i] = __fmaf_rn(power, -0x1p22f, shifted);
        const float distance = __fadd_rn(y, -nearest[i]);
        sums_[k] = Squares ? __fmaf_rn(distance, distance, sums_[k]) : __fadd_rn(sums_[k], fabsf(distance));
      }
      const float even[4] = {nearest[0], nearest[2], nearest[4], nearest[6]}, odd[4] = {nearest[1], nearest[3], nearest[5], nearest[7]};
      // Bytes of four times the code, and two bits below it that are zero.
      codes.of[k] = select_bits(0x0F0F0F0Fu, convert_four<false>(even) >> 2, convert_four<false>(odd) << 2);
    }
    return codes;
  }

  // What a distance counts, or its square.
  __device__ __forceinline__ float weight(int k) const { return squares_errors(rule_) ? units_[k] * units_[k] : units_[k]; }
  __device__ __forceinline__ float error(int k) const { return weight(k) * sums_[k]; }

  ScaleRule rule_;
  bool empty_, valid_;  // all are zeros or NaN; estimates tell something of the block: no Inf, nothing beyond the largest code
  uint32_t stored_;
  float units_[2], multipliers_[2];
  float sums_[2] = {0.0f, 0.0f};
};

// ---- blocks of 1x16, which a thread holds

// Puts the scale into those that are not sure. Every lane of the warp comes here.
template <class T>
__device__ __forceinline__ void choose_by_formula(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                  const TensorScale& tensor, bool sure, BlockScale<float>& scale) {
  for_each_lane(!sure, [&](int lane) {
    const ByFormula formula(__shfl_sync(0xFFFFFFFFu, amax, lane), tensor, a.format.rule);
    const BlockScale<float> chosen = formula.chosen(formula.sum<T>(x[0], x[1], lane, lane));
    if (threadIdx.x % 32 == lane) scale = chosen;
  });
}

// The scale, and the codes if they are sure: else `encode`, called with the multiplier, makes them. Every lane of the warp comes here.
template <class T, class Encode>
__device__ __forceinline__ BlockScale<float> choose_and_encode(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                               const TensorScale& tensor, uint2 (&codes)[2], Encode encode) {
  Estimates estimates(amax, a, tensor);
  Candidates candidates[2];
  estimates.add(x, candidates);
  BlockScale<float> scale = estimates.chosen();
#pragma unroll
  for (int g = 0; g < 2; ++g) codes[g] = candidates[g].chosen(estimates.takes_4(), x[g]);
  const bool sure = estimates.is_sure<16>();
  choose_by_formula<T>(x, amax, a, tensor, sure, scale);
  if (!sure) encode(scale.multiplier);
  return scale;
}

// The scale alone. Every lane of the warp comes here.
template <class T>
__device__ __forceinline__ BlockScale<float> choose_scale(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                          const TensorScale& tensor) {
  Estimates estimates(amax, a, tensor);
  Candidates unused[2];
  estimates.add(x, unused);
  BlockScale<float> scale = estimates.chosen();
  choose_by_formula<T>(x, amax, a, tensor, estimates.is_sure<16>(), scale);
  return scale;
}

// ---- blocks of 16x16, which four lanes hold, two side by side, two on top of each other

constexpr int kBeside = 1, kBelow = 8;  // lanes apart

// The scale of the block that begins in lane `first`, from the rows of each lane. A call, with rows in memory: registers are for what is
// frequent.
template <class T>
__device__ __noinline__ BlockScale<float> choose_square_by_formula(const Eight<T>* own, ByFormula formula, int first) {
  float rows[2 * kDepth];
#pragma unroll 1
  for (int r = 0; r < 2 * kDepth; ++r) {
    const int left = first + r / kDepth * kBelow;
    rows[r] = formula.sum<T>(own[r % kDepth], own[r % kDepth], left, left + kBeside);
  }
  return formula.chosen(four_over_six_sum(rows));
}

// Codes of a piece's rows that are known, as PieceCodes gives them.
struct KnownCodes {
  uint2 of_row[kDepth];

  template <class Multiplier, class Put>
  __device__ __forceinline__ void rows(Multiplier, Put put) const {
#pragma unroll
    for (int r = 0; r < kDepth; ++r) put(r, of_row[r]);
  }
};

// The scale, and codes rounded to nearest: where they are not known at once `encode`, called with the multiplier, gives those of a row.
// Every lane of the warp comes here.
template <class E, class T, Rounding R, class Encode>
__device__ __forceinline__ BlockScale<float> choose_square(const Piece<E, T, R>& piece, int32_t amax, const TensorScale& tensor,
                                                           KnownCodes& codes, Encode encode) {
  Estimates estimates(amax, piece.a, tensor);
  Candidates candidates[kDepth];
  estimates.add(piece.x, candidates);
  estimates.add_lane(kBeside);
  estimates.add_lane(kBelow);
  BlockScale<float> scale = estimates.chosen();
#pragma unroll
  for (int r = 0; r < kDepth; ++r) codes.of_row[r] = candidates[r].chosen(estimates.takes_4(), piece.x[r]);
  const bool sure = estimates.is_sure<256>();
  const bool begins = (threadIdx.x & (kBeside | kBelow)) == 0;
  for_each_lane(!sure && begins, [&](int first) {
    Eight<T> own[kDepth];
#pragma unroll
    for (int r = 0; r < kDepth; ++r) own[r] = piece.x[r];
    const ByFormula formula(__shfl_sync(0xFFFFFFFFu, amax, first), tensor, piece.a.format.rule);
    const BlockScale<float> chosen = choose_square_by_formula<T>(own, formula, first);
    if ((threadIdx.x % 32 & ~(kBeside | kBelow)) == first) scale = chosen;
  });
  if (!sure) encode(scale.multiplier, [&](int r, uint2 c) { codes.of_row[r] = c; });
  return scale;
}

}  // namespace cuda
}  // namespace blockfp
