// NVFP4's choice between two scales of a block on the GPU: by estimates, and if these are too close by the formula of
// blockfp/four_over_six.h.
//
// The formula rounds each element's value twice and its error once, three times the steps of the codes themselves. Distances of
// the scaled elements from their codes are nearly proportional to the errors, and also give the codes under both scales.
#pragma once

#include "block_scale.cuh"
#include "blockfp/four_over_six.h"
#include "tile_piece.cuh"

namespace blockfp {
namespace cuda {

// ---- by the formula

// The sum of 16 magnitudes' errors, one in each lane of half a warp. Not inlined, since few blocks need it.
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

// Computes a block by the formula with a whole warp: each lane has an element of a row of 16, lanes 0 to 15 under the scale for
// 6, the others under that for 4. If a single lane did it, the others would wait.
struct ByFormula {
  TriedScale<float> tried;
  float tensor_amax;
  ScaleRule rule;

  __device__ __forceinline__ ByFormula(int32_t amax, const TensorScale& t, ScaleRule of)
      : tried(four_over_six_scale<E2M1, float>(amax, threadIdx.x & 16, t.multiplier, t.decode)), tensor_amax(t.factor), rule(of) {}

  // The sum of a row's errors under this lane's scale. The row's halves are in lanes `left` and `right`.
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

  // The scale for 4 if its errors are smaller; not if one is NaN.
  __device__ __forceinline__ BlockScale<float> chosen(float total) const {
    const int from = __shfl_sync(0xFFFFFFFFu, total, 16) < __shfl_sync(0xFFFFFFFFu, total, 0) ? 16 : 0;
    return {__shfl_sync(0xFFFFFFFFu, tried.stored, from), __shfl_sync(0xFFFFFFFFu, tried.multiplier, from)};
  }
};

// Calls each(lane) for every lane where `wanted` is true, one after another, with all lanes of the warp.
template <class Each>
__device__ __forceinline__ void for_each_lane(bool wanted, Each each) {
  for (uint32_t left = __ballot_sync(0xFFFFFFFFu, wanted); left != 0; left &= left - 1) each(__ffs(left) - 1);
}

// ---- by estimates

// Whether estimates hold for a tensor: none of its formulas' intermediate results is subnormal or Inf.
__device__ __forceinline__ bool is_plain(float tensor_amax) { return tensor_amax >= 0x1p-80f && tensor_amax <= 0x1p110f; }

// amax / 6, rounded once as by a division, except for tiny or huge numbers: the remainder corrects the product.
__device__ __forceinline__ float divide_by_max(float amax) {
  static_assert(E2M1::kMax == 6, "held against divisions of every mantissa");
  const float quotient = __fmul_rn(amax, element_max_reciprocal<E2M1>());
  return __fmaf_rn(__fmaf_rn(quotient, -6.0f, amax), element_max_reciprocal<E2M1>(), quotient);
}

// 1 / x, rounded once, for normal numbers with normal reciprocals.
__device__ __forceinline__ float plain_reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return __fmaf_rn(out, __fmaf_rn(-x, out, 1.0f), out);
}

// Eight E2M1 codes without signs under each of two scales; the nibbles' top bits are arbitrary.
struct Candidates {
  uint32_t of[2];

  // The codes under one scale, with the signs of x.
  template <class T>
  __device__ __forceinline__ uint2 chosen(bool second, const Eight<T>& x) const {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = value<T>(x, i);
    return {((second ? of[1] : of[0]) & 0x77777777u) | nibble_signs(values), 0};
  }
};

// A block's two scales and an estimate of its errors under each, in units of the scale.
class Estimates {
 public:
  static constexpr float kDown = kE2m1Down;  // elements are also scaled by this

  // For a block with this amax.
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
      // From 7 on, the nearest magnitude would be 8.
      valid_ = valid_ && multiply(from_bits<float>(amax), multipliers_[k]) < 7 * kDown;
    }
  }

  // Adds the elements' distances, or their squares; returns their codes.
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

  // Adds the sums of a lane with another part of the block.
  __device__ __forceinline__ void add_lane(int distance) {
#pragma unroll
    for (int k = 0; k < 2; ++k) sums_[k] += __shfl_xor_sync(0xFFFFFFFFu, sums_[k], distance);
  }

  // Whether the formula is certain to choose as `takes_4` does. It rounds values twice, elements times the multiplier five
  // times, an error and each sum once; together with the roundings of the sums here, that is at most 2^-13 units for 16
  // elements, 2^-9 for 256, and twice as much for squares.
  template <int Elements>
  __device__ __forceinline__ bool is_sure() const {
    static_assert(Elements == 16 || Elements == 256, "counted for these");
    const float margin =
        (weight(0) + weight(1)) * (Elements == 16 ? 0x1p-13f : 0x1p-9f) * (squares_errors(rule_) ? 2 * kDown * kDown : kDown);
    if (empty_) return sums_[0] == 0.0f;  // false if there is a NaN
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
        // A sum whose last place is E2M1's spacing at y; everything else here is exact.
        const float shifted = __fmaf_rn(power, 0x1p22f, y);
        nearest[i] = __fmaf_rn(power, -0x1p22f, shifted);
        const float distance = __fadd_rn(y, -nearest[i]);
        sums_[k] = Squares ? __fmaf_rn(distance, distance, sums_[k]) : __fadd_rn(sums_[k], fabsf(distance));
      }
      const float even[4] = {nearest[0], nearest[2], nearest[4], nearest[6]}, odd[4] = {nearest[1], nearest[3], nearest[5], nearest[7]};
      // Bytes of four times the code; the two bits below it are zero.
      codes.of[k] = select_bits(0x0F0F0F0Fu, convert_four<false>(even) >> 2, convert_four<false>(odd) << 2);
    }
    return codes;
  }

  // Error per unit of distance, or of squared distance.
  __device__ __forceinline__ float weight(int k) const { return squares_errors(rule_) ? units_[k] * units_[k] : units_[k]; }
  __device__ __forceinline__ float error(int k) const { return weight(k) * sums_[k]; }

  ScaleRule rule_;
  bool empty_, valid_;  // all elements are zero or NaN; estimates are meaningful: no Inf, and nothing beyond the largest code
  uint32_t stored_;
  float units_[2], multipliers_[2];
  float sums_[2] = {0.0f, 0.0f};
};

// ---- blocks of 1x16, held by a thread

// Replaces a scale that isn't certain by the formula's choice. Every lane of the warp must call it.
template <class T>
__device__ __forceinline__ void choose_by_formula(const Eight<T> (&x)[2], int32_t amax, const QuantizeArguments& a,
                                                  const TensorScale& tensor, bool sure, BlockScale<float>& scale) {
  for_each_lane(!sure, [&](int lane) {
    const ByFormula formula(__shfl_sync(0xFFFFFFFFu, amax, lane), tensor, a.format.rule);
    const BlockScale<float> chosen = formula.chosen(formula.sum<T>(x[0], x[1], lane, lane));
    if (threadIdx.x % 32 == lane) scale = chosen;
  });
}

// Chooses the scale, and computes the codes if it is certain; otherwise `encode`, called with the multiplier, does. Every lane
// of the warp must call it.
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

// Chooses the scale only. Every lane of the warp must call it.
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

// ---- blocks of 16x16, held by four lanes, two side by side and two above each other

constexpr int kBeside = 1, kBelow = 8;  // distances of lanes

// Chooses the scale of the block that begins in lane `first`, from the rows of each lane. Not inlined, with rows in memory:
// registers are kept for the frequent path.
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

// Known codes of a piece's rows, with the interface of PieceCodes.
struct KnownCodes {
  uint2 of_row[kDepth];

  template <class Multiplier, class Put>
  __device__ __forceinline__ void rows(Multiplier, Put put) const {
#pragma unroll
    for (int r = 0; r < kDepth; ++r) put(r, of_row[r]);
  }
};

// Chooses the scale, and computes codes rounded to nearest; if they aren't known from the choice, `encode`, called with the
// multiplier, gives those of a row. Every lane of the warp must call it.
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
