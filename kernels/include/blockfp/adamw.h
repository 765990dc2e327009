// The AdamW step on a number or on lanes of numbers, moments in fewer bits, and the kernels' description of a parameter. Every
// operation is one of the fp32 operations of blockfp/definition/adamw.py, in its order.
#pragma once

#include "dtypes.h"
#include "elements.h"
#include "threefry.h"

namespace blockfp {

// Storage of moments: fp32; bfloat16; E4M3 in blocks of 1x128 with power-of-two scales (of the second moment, its square root).
enum class Moments : int { kFp32 = 0, kBf16 = 1, kFp8 = 2 };
constexpr int kMomentBlock = 128;

// What is rounded stochastically, as folded into the key (adamw.rounding_key).
constexpr uint32_t kRoundFirst = 3, kRoundSecond = 4;

// What a step writes besides master and moments. kAmax (on a GPU): raises the int32 at out_scales to the fp32 bits of the new
// master's largest magnitude, for codes that a second pass writes.
enum class StepOutput : int { kNone = 0, kCopy = 1, kCodes = 2, kAmax = 3 };

struct StepCoefficients {
  float decay, l2, weight1, beta2, weight2, unbias2, eps, rate, unscale, skip;

  // The step changes no weight, whatever the gradient: masters, codes and scales stay unchanged.
  BLOCKFP_HD bool still() const { return rate == 0.0f && decay == 1.0f; }
};

// One parameter, or this rank's shard of it: a row of the table that `adamw` takes (packed by blockfp/kernels/step_table.py).
// Arrays are contiguous [batches, rows, columns] and begin at a block boundary. Pointers to absent arrays are null.
struct StepEntry {
  const void* gradient;
  float* weight;
  void* first;
  void* second;
  float* first_scales;
  float* second_scales;
  void* out;                          // the weight itself: codes, or values of out_dtype
  void* out_scales;
  const StepCoefficients* coefficients_at;  // instead of `coefficients`, if only the device knows them
  const float* step_at;               // likewise instead of `step`
  int64_t batches, rows, columns;
  int64_t first_batch, first_row, first_column;  // the shard's offset in the unsharded array, for the random index
  int64_t total_rows, total_columns;
  int32_t gradient_dtype, moments, output, out_dtype;        // kId of dtypes.h; Moments; StepOutput
  int32_t element, block_rows, block_columns, rule;          // of the codes
  int32_t largest_bits, step;
  uint32_t parameter, key0, key1;     // key: the optimizer's
  int32_t reserved;                   // keeps rows a multiple of eight bytes
  StepCoefficients coefficients;

  BLOCKFP_HD uint64_t random_index(int64_t batch, int64_t row, int64_t column) const {
    return ((first_batch + batch) * total_rows + first_row + row) * total_columns + first_column + column;
  }
};
static_assert(sizeof(StepEntry) % 8 == 0, "rows of the table are arrays of 64-bit words");

// adamw.rounding_key: the words for rounding `what` of this parameter.
BLOCKFP_HD Words<uint32_t> rounding_key(uint32_t key0, uint32_t key1, uint32_t step, uint32_t parameter, uint32_t what) {
  Words<uint32_t> key = threefry2x32<uint32_t>(key0, key1, 0u, step);
  key = threefry2x32<uint32_t>(key.w0, key.w1, 0u, parameter);
  return threefry2x32<uint32_t>(key.w0, key.w1, 0u, what);
}

// IEEE square root, rounded to nearest.
template <class F>
BLOCKFP_HD F square_root(F x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  float lanes[sizeof(F) / sizeof(float)];
  __builtin_memcpy(lanes, &x, sizeof(F));
  for (float& lane : lanes) lane = __builtin_sqrtf(lane);
  __builtin_memcpy(&x, lanes, sizeof(F));
  return x;
#endif
}

// One step that isn't skipped: replaces weight and moments.
template <class F>
BLOCKFP_HD void adamw_step(F& weight, F& first, F& second, F gradient, const StepCoefficients& c) {
  gradient = multiply(gradient, splat<F>(c.unscale));
  if (c.l2 != 0.0f) gradient = add(gradient, multiply(weight, splat<F>(c.l2)));
  first = add(first, multiply(add(gradient, -first), splat<F>(c.weight1)));
  second = add(multiply(second, splat<F>(c.beta2)), multiply(multiply(gradient, splat<F>(c.weight2)), gradient));
  const F denominator = add(multiply(square_root(second), splat<F>(c.unbias2)), splat<F>(c.eps));
  if (c.still()) return;
  weight = add(multiply(weight, splat<F>(c.decay)), divide(multiply(first, splat<F>(c.rate)), denominator));
}

// bfloat16 pattern of x, rounded stochastically: floor(|x| / spacing + (2 u + 1) / 2^17) spacings, at most the largest finite
// value, for a 16-bit u. (Only 16 bits of x are dropped, so the half in u + 1/2 never decides.)
template <class F>
BLOCKFP_HD Int<F> narrow_stochastic(F x, Int<F> u) {
  using I = Int<F>;
  const I bits = to_bits(x), magnitude = bits & kMagnitude;
  I rounded = smaller<I>(shift_right<F>(magnitude + u, 16), splat<I>(0x7F7F));
  rounded = magnitude >= kInfinity ? shift_right<F>(magnitude, 16) : rounded;
  rounded = magnitude > kInfinity ? splat<I>(kNan >> 16) : rounded | (shift_right<F>(bits, 16) & 0x8000);
  return rounded;
}

// Code of a moment (of the second, its square root) in a block with this multiplier, for a 16-bit u. Nonzero values never
// become zero.
template <bool Second, class F>
BLOCKFP_HD Int<F> encode_moment(F x, F multiplier, Int<F> u) {
  Int<F> code = encode_stochastic<E4M3, F, 16>(multiply(x, multiplier), u) & 0xFF;
  if constexpr (Second) code = (code == 0) & (to_bits(x) > 0) ? splat<Int<F>>(1) : code;
  return code;
}

}  // namespace blockfp
