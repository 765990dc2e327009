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

// Both scales of a block, [0] for 6 and [1] for 4, and errors under them. Calls, since few blocks come here.
struct ByFormula {
  TriedScale<float> scales[2];
  float tensor_amax;
  ScaleRule rule;

  __device__ __noinline__ ByFormula(int32_t amax, const TensorScale& t, ScaleRule of) : tensor_amax(t.factor), rule(of) {
    for (int k = 0; k < 2; ++k) scales[k] = four_over_six_scale<E2M1, float>(amax, k == 1, t.multiplier, t.decode);
  }

  // The sum of the errors of a row of 16 magnitudes.
  __device__ __noinline__ float sum(const float* row, int k) const {
    const auto value_of = [&](int32_t code) { return four_over_six_value<E2M1, float>(code, scales[k].value, tensor_amax, rule); };
    const bool plain = is_plain(tensor_amax);
    const float of_one = value_of(2), of_three_halves = value_of(3), multiplier = scales[k].multiplier;
    float total = 0.0f;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const float nearest = plain ? four_over_six_plain_value<E2M1, float>(multiply(row[i], multiplier), of_one, of_three_halves)
                                  : value_of(four_over_six_code<E2M1, float>(row[i], multiplier));
      total = add(total, four_over_six_error<float>(nearest, row[i], rule));
    }
    return total;
  }

  // Of a row given by its halves.
  template <class T>
  __device__ __forceinline__ void sums(const Eight<T>& left, const Eight<T>& right, float (&totals)[2]) const {
    float row[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) row[i] = fabsf(i < 8 ? value<T>(left, i) : value<T>(right, i - 8));
#pragma unroll
    for (int k = 0; k < 2; ++k) totals[k] = sum(row, k);
  }

  // The scale for 4 where its errors are smaller: not where one is NaN.
  __device__ __forceinline__ BlockScale<float> chosen(const float (&totals)[2]) const {
    const bool takes_4 = totals[1] < totals[0];
    return {takes_4 ? scales[1].stored : scales[0].stored, takes_4 ? scales[1].multiplier : scales[0].multiplier};
  }
};

// ---- by estimates

// amax / 6, rounded once, as a division does it but for numbers that are tiny or huge: the remainder corrects the product.
__device__ __forceinline__ float divide_by_max(float amax) {
  static_assert(E2M1::kMax == 6, "held against divisions of every mantissa");
  const float quotient = __fmul_rn(amax, element_max_reciprocal<E2M1>());
  return __fmaf_rn(__fmaf_rn(quotient, -6.0f, amax), element_max_reciprocal<E2M1>(), quotient);
}

// 1 / x, rounded once, of normal numbers whose reciprocal is one; NaN of 0.
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

  // Of a block with this amax; `valid`, whether estimates tell anything of it: no NaN, no Inf, nothing beyond the largest code.
  __device__ __forceinline__ Estimates(int32_t amax, const QuantizeArguments& a, const TensorScale& t) : rule_(a.format.rule) {
    const float base = multiply(divide_by_max(from_bits<float>(amax)), t.multiplier);
    stored_ = convert_pair<false>(base, multiply(base, 1.5f));
    const __half2 values = bit_cast<__half2>(halves_of<false>(static_cast<uint16_t>(stored_)));
    valid = is_plain(t.factor);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      units_[k] = multiply(k == 0 ? __low2float(values) : __high2float(values), t.decode);
      multipliers_[k] = multiply(plain_reciprocal(units_[k]), kDown);
      // From 7 on the nearest magnitude would be 8; NaN where the scale is 0.
      valid = valid && multiply(from_bits<float>(amax), multipliers_[k]) < 7 * kDown;
    }
  }

  bool valid;

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
    const bool squares = squares_errors(rule_);
    const float units[2] = {squares ? units_[0] * units_[0] : units_[0], squares ? units_[1] * units_[1] : units_[1]};
    const float margin = (units[0] + units[1]) * (Elements == 16 ? 0x1p-13f : 0x1p-9f) * (squares ? 2 * kDown * kDown : kDown);
    return valid && margin > 0x1p-100f && fabsf(units[0] * sums_[0] - units[1] * sums_[1]) > margin;
  }

  __device__ __forceinline__ bool takes_4() const {
    const bool squares = squares_errors(rule_);
    return (squares ? units_[1] * units_[1] : units_[1]) * sums_[1] < (squares ? units_[0] * units_[0] : units_[0]) * sums_[0];
  }

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

  ScaleRule rule_;
  uint32_t stored_;
  float units_[2], multipliers_[2];
  float sums_[2] = {0.0f, 0.0f};
};

// ---- blocks of 1x16, which a thread holds

template <class T>
__device__ __forceinline__ BlockScale<float> choose_by_formula(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                               const TensorScale& tensor) {
  const ByFormula formula(amax, tensor, a.format.rule);
  float totals[2] = {0.0f, 0.0f};
  if (amax != 0) formula.sums<T>(x[0], x[1], totals);
  return formula.chosen(totals);
}

// The scale, and the codes if they are sure: else `encode`, called with the multiplier, makes them.
template <class T, class Encode>
__device__ __forceinline__ BlockScale<float> choose_and_encode(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                               const TensorScale& tensor, uint2 (&codes)[2], Encode encode) {
  Estimates estimates(amax, a, tensor);
  Candidates candidates[2];
  estimates.add(x, candidates);
  BlockScale<float> scale;
  if (estimates.is_sure<16>()) {
    scale = estimates.chosen();
#pragma unroll
    for (int g = 0; g < 2; ++g) codes[g] = candidates[g].chosen(estimates.takes_4(), x[g]);
  } else {
    scale = choose_by_formula<T>(x, amax, a, tensor);
    encode(scale.multiplier);
  }
  return scale;
}

// The scale alone.
template <class T>
__device__ __forceinline__ BlockScale<float> choose_scale(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                          const TensorScale& tensor) {
  Estimates estimates(amax, a, tensor);
  Candidates unused[2];
  estimates.add(x, unused);
  return estimates.is_sure<16>() ? estimates.chosen() : choose_by_formula<T>(x, amax, a, tensor);
}

// ---- blocks of 16x16, which four lanes hold, two side by side, two on top of each other

constexpr int kBeside = 1, kBelow = 8;  // lanes apart

// Every lane of the warp comes here.
template <class T, class P>
__device__ __forceinline__ BlockScale<float> choose_square_by_formula(const P& piece, int32_t amax, const TensorScale& tensor) {
  constexpr int kOwn = kDepth / 2;  // rows whose sums this lane makes: the upper ones on the left, the lower ones on the right
  const bool right = threadIdx.x & kBeside;
  const ByFormula formula(amax, tensor, piece.a.format.rule);
  float totals[kOwn][2];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    Eight<T> halves[2];
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      const uint32_t upper = piece.x[i].word[w], lower = piece.x[i + kOwn].word[w];
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, right ? upper : lower, kBeside), own = right ? lower : upper;
      halves[0].word[w] = right ? other : own, halves[1].word[w] = right ? own : other;
    }
    formula.sums<T>(halves[0], halves[1], totals[i]);
  }
  float whole[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    // Rows 8 apart, then 4, 2, 1: two lanes' sums are the same whichever of them adds.
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      totals[i][k] = add(totals[i][k], __shfl_xor_sync(0xFFFFFFFFu, totals[i][k], kBelow));
      totals[i][k] = add(totals[i][k], __shfl_xor_sync(0xFFFFFFFFu, totals[i][k], kBeside));
    }
    whole[k] = add(add(totals[0][k], totals[2][k]), add(totals[1][k], totals[3][k]));
  }
  return formula.chosen(whole);
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
  if (__any_sync(0xFFFFFFFFu, !sure)) {
    const BlockScale<float> by_formula = choose_square_by_formula<T>(piece, amax, tensor);
    if (!sure) {
      scale = by_formula;
      encode(scale.multiplier, [&](int r, uint2 c) { codes.of_row[r] = c; });
    }
  }
  return scale;
}

}  // namespace cuda
}  // namespace blockfp
