// Products with defined bits: takes operands apart, runs the tasks of product_tasks.h.
//
//   product_arrays(a, b, a_scales, b_scales, a_powers, b_powers, bias, addend, out, numbers..)
//       a [m, k], b [n, k]: unpacked codes of an element (kId of elements.h), or bfloat16 (6) or float16 (7).
//       scales: float32 [rows, parts of k], or one for all. powers: E8M0 bytes [rows, k / length] that the matrix unit itself
//       applies. bias [n], addend [m, n]: float32. An absent array has no elements. out: float32 [m, n].
//       length, fraction, mantissa, floor, promotion: of the Summation (blockfp/definition/matrix_units.py); promotion 0: none.
//       of_parts: whether scales multiply sums of parts of k.
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "arguments.h"
#include "blockfp/dispatch.h"
#include "instruction_sets.h"
#include "run_tasks.h"

namespace blockfp {
namespace {

constexpr int kBf16 = 6, kFp16 = 7;
constexpr int16_t kBelowAll = -4096;

// An element's sign * digits / 2^point, its exponent, and its kind.
struct Term {
  float digits = 0;
  int16_t exponent = kBelowAll;
  uint8_t kind = ProductJob::kZero;
};

// `infinity`: the magnitude of Inf; `nan`: that of the first NaN; beyond all magnitudes if there is none.
Term term_of(int magnitude, bool negative, int mantissa_bits, int bias, int infinity, int nan) {
  Term term;
  const int field = magnitude >> mantissa_bits, fraction = magnitude & ((1 << mantissa_bits) - 1);
  const int digits = fraction | (field > 0 ? 1 << mantissa_bits : 0);
  if (magnitude >= nan) {
    term.kind = ProductJob::kNan;
  } else if (magnitude == infinity) {
    term.kind = ProductJob::kInfinite;
  } else if (digits != 0) {
    term.kind = 0;
    term.digits = static_cast<float>(negative ? -digits : digits) / static_cast<float>(1 << mantissa_bits);
    term.exponent = static_cast<int16_t>(std::max(field, 1) - bias);
  }
  term.kind |= negative ? ProductJob::kNegative : 0;
  return term;
}

// The terms of all codes of an element, or of all 16-bit patterns.
std::vector<Term> terms_of(int element) {
  std::vector<Term> terms(element >= kBf16 ? 1 << 16 : 1 << 8);
  if (element >= kBf16) {
    const int mantissa = element == kBf16 ? 7 : 10, bias = element == kBf16 ? 127 : 15, infinity = 0x7FFF >> mantissa << mantissa;
    for (int x = 0; x < 1 << 16; ++x) terms[x] = term_of(x & 0x7FFF, x >> 15, mantissa, bias, infinity, infinity + 1);
    return terms;
  }
  with_element(element, [&](auto e) {
    using E = decltype(e);
    constexpr int kNone = 1 << 16, kInfinity = E::kExponentBits == 5 ? 0x7C : kNone;
    constexpr int kNan = E::kExponentBits == 5 ? 0x7D : (E::kHasNan ? E::kNanCode : kNone);
    for (int x = 0; x < 1 << E::kBits; ++x) {
      terms[x] = term_of(x & ((1 << (E::kBits - 1)) - 1), x >> (E::kBits - 1), E::kMantissaBits, E::kBias, kInfinity, kNan);
    }
  });
  return terms;
}

// One operand, taken apart: [rows, k], or [blocks, k, lanes] for blocks of `lanes` rows.
struct Parts {
  std::unique_ptr<float[]> digits;
  std::unique_ptr<int16_t[]> exponents;
  std::unique_ptr<uint8_t[]> kinds, special;

  Parts(const TensorView& x, const TensorView& powers, int element, int64_t power_block, int lanes) {
    const int64_t rows = x.size(0), k = x.size(1), blocks = (rows + lanes - 1) / lanes, size = blocks * lanes * k;
    digits.reset(new float[size]), exponents.reset(new int16_t[size]), kinds.reset(new uint8_t[size]);
    special.reset(new uint8_t[blocks]());
    const std::vector<Term> terms = terms_of(element);
    const uint8_t* const narrow = data_of<const uint8_t>(x);
    const uint16_t* const wide = data_of<const uint16_t>(x);
    const uint8_t* const of_powers = powers.numel() > 0 ? data_of<const uint8_t>(powers) : nullptr;
    const int64_t in_row = of_powers != nullptr ? powers.size(1) : 0;
    run_tasks(blocks, size * 4, 0, [&](int64_t block, int64_t, void*) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t row = block * lanes + lane;
        for (int64_t l = 0; l < k; ++l) {
          const int64_t from = row * k + l, to = (block * k + l) * lanes + lane;
          Term term;
          if (row < rows) term = terms[element >= kBf16 ? wide[from] : narrow[from]];
          if (of_powers != nullptr && row < rows) {
            const int power = of_powers[row * in_row + l / power_block];
            if (power == 0xFF) term.kind = ProductJob::kNan, term.digits = 0, term.exponent = kBelowAll;
            if (term.digits != 0) term.exponent = static_cast<int16_t>(term.exponent + power - 127);
          }
          digits[to] = term.digits, exponents[to] = term.exponent, kinds[to] = term.kind;
          if ((term.kind & 3) >= ProductJob::kInfinite) special[block] = 1;
        }
      }
    });
  }
};

void check_scales(const TensorView& scales, const char* name, int64_t rows, int64_t parts, bool of_parts) {
  check_device(scales, name, kCpu);
  const bool fits = scales.IsContiguous() && scales.ndim() == 2 && scales.dtype().bits == 32;
  const bool one = scales.numel() == 1;
  check(fits && (one || (of_parts && scales.size(0) == rows && (scales.size(1) == 1 || scales.size(1) >= parts))), name,
        " must be one float32", of_parts ? " or those of all rows and parts of k" : "", " with two axes; it is ", describe(scales));
}

void product_arrays(TensorView a, TensorView b, TensorView a_scales, TensorView b_scales, TensorView a_powers, TensorView b_powers,
                    TensorView bias, TensorView addend, TensorView out, int64_t a_element, int64_t b_element, int64_t length,
                    int64_t fraction, int64_t mantissa, int64_t floor, int64_t promotion, int64_t of_parts) {
  check(a.ndim() == 2 && b.ndim() == 2 && a.size(1) == b.size(1), "a must be [m, k] and b [n, k]; they are ", describe(a), " and ",
        describe(b));
  ProductJob job{};
  job.m = a.size(0), job.n = b.size(0), job.k = a.size(1);
  for (const auto& [x, name, element] : {std::tuple{a, "a", a_element}, std::tuple{b, "b", b_element}}) {
    check((element >= 0 && element <= E2M1::kId) || element == kBf16 || element == kFp16, name, "_element must be a float's, and is ",
          element);
    check_array(x, name, kCpu, x.numel(), element >= kBf16 ? 16 : 8, "unpacked codes, or bfloat16 or float16");
  }
  check(length >= 1 && length <= 1024 && fraction >= 1 && fraction <= 25 && mantissa >= 1 && mantissa <= 23 && floor >= -140 &&
            floor <= 0 && promotion >= 0,
        "this library has no summation of length ", length, ", fraction ", fraction, ", mantissa ", mantissa, ", floor ", floor,
        ", promotion ", promotion);
  job.length = static_cast<int>(length), job.fraction = static_cast<int>(fraction), job.mantissa = static_cast<int>(mantissa);
  job.floor = static_cast<int>(floor), job.promotion = static_cast<int>(promotion), job.of_parts = of_parts != 0;
  check(!job.of_parts || promotion > 0, "scales of parts of k need a promotion");
  const int64_t parts = promotion > 0 ? (job.k + promotion - 1) / promotion : 1;
  check_scales(a_scales, "a_scales", job.m, parts, job.of_parts);
  check_scales(b_scales, "b_scales", job.n, parts, job.of_parts);
  job.a_scales = data_of<const float>(a_scales), job.b_scales = data_of<const float>(b_scales);
  job.a_row = a_scales.size(0) > 1 ? a_scales.size(1) : 0, job.a_part = a_scales.size(1) > 1;
  job.b_row = b_scales.size(0) > 1 ? b_scales.size(1) : 0, job.b_part = b_scales.size(1) > 1;
  for (const auto& [powers, name, rows] : {std::tuple{a_powers, "a_powers", job.m}, std::tuple{b_powers, "b_powers", job.n}}) {
    check_device(powers, name, kCpu);
    check(powers.numel() == 0 || (powers.IsContiguous() && powers.ndim() == 2 && powers.size(0) == rows && powers.dtype().bits == 8 &&
                                  powers.size(1) == (job.k + length - 1) / length),
          name, " must be an E8M0 byte for every ", length, " elements of a row; it is ", describe(powers));
  }
  if (bias.numel() > 0) check_array(bias, "bias", kCpu, job.n, 32, "a float32 for each row of b");
  if (addend.numel() > 0) check_array(addend, "addend", kCpu, job.m * job.n, 32, "float32 in the shape of the result");
  check_array(out, "out", kCpu, job.m * job.n, 32, "float32 [m, n]");
  job.bias = bias.numel() > 0 ? data_of<const float>(bias) : nullptr;
  job.addend = addend.numel() > 0 ? data_of<const float>(addend) : nullptr;
  job.out = data_of<float>(out);
  const Parts left(a, a_powers, static_cast<int>(a_element), length, 1);
  const Parts right(b, b_powers, static_cast<int>(b_element), length, ProductJob::kColumns);
  job.a_digits = left.digits.get(), job.a_exponents = left.exponents.get(), job.a_kinds = left.kinds.get();
  job.b_digits = right.digits.get(), job.b_exponents = right.exponents.get(), job.b_kinds = right.kinds.get();
  job.a_special = left.special.get(), job.b_special = right.special.get();
  const auto run = current_kernels().product;
  run_tasks(job.tasks(), job.m * job.n * std::max<int64_t>(job.k, 1), 0, [&](int64_t task, int64_t, void*) { run(job, task); });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(product_arrays, product_arrays);

}  // namespace
}  // namespace blockfp
