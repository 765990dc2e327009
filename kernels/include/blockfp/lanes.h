// The types of the block arithmetic: "lanes", a float and an int32 of the same width. A lane type is `float` (CUDA, scalar CPU
// code) or a vector of floats (GCC's vector extension), so each function below is written once for both.
//
// Only int32 operations and single fp32 operations are used. Compile with -ffp-contract=off, never with -ffast-math, and run
// with subnormals enabled (CPU: see cpu/float_mode.h; CUDA: no -ftz=true).
#pragma once

#include <cstdint>

// Always inlined on the host: files compiled for different instruction sets share these headers, and if the linker kept the
// AVX-512 file's copy of a function, machines without AVX-512 would crash.
#if defined(__CUDACC__)
#define BLOCKFP_HD __host__ __device__ __forceinline__
#define BLOCKFP_UNROLL _Pragma("unroll")
#else
#define BLOCKFP_HD inline __attribute__((always_inline))
#define BLOCKFP_UNROLL _Pragma("GCC unroll 16")
#endif

namespace blockfp {

template <class F>
struct LaneTypes;

template <>
struct LaneTypes<float> {
  using Int = int32_t;
  using UInt = uint32_t;
  BLOCKFP_HD static float to_float(int32_t x) { return static_cast<float>(x); }
  BLOCKFP_HD static int32_t truncate(float x) { return static_cast<int32_t>(x); }
};

template <class F>
using Int = typename LaneTypes<F>::Int;
template <class F>
using UInt = typename LaneTypes<F>::UInt;

constexpr int32_t kInfinity = 0x7F800000;
constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int32_t kNan = 0x7FC00000;
constexpr int32_t kFp32Max = 0x7F7FFFFF;
constexpr int32_t kOne = 0x3F800000;

template <class To, class From>
BLOCKFP_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class F>
BLOCKFP_HD Int<F> to_bits(F x) {
  return bit_cast<Int<F>>(x);
}

template <class F>
BLOCKFP_HD F from_bits(Int<F> bits) {
  return bit_cast<F>(bits);
}

template <class I>
BLOCKFP_HD I smaller(I a, I b) {
  return a < b ? a : b;
}

template <class I>
BLOCKFP_HD I larger(I a, I b) {
  return a > b ? a : b;
}

// Sets all lanes to a value. V: lanes of floats or integers, like the value's type.
template <class V>
BLOCKFP_HD V splat(int32_t value) {
  return V{} + value;
}

template <class V>
BLOCKFP_HD V splat(float value) {
  return bit_cast<V>(Int<V>{} + bit_cast<int32_t>(value));
}

// Logical right shift.
template <class F>
BLOCKFP_HD Int<F> shift_right(Int<F> x, int places) {
  return bit_cast<Int<F>>(bit_cast<UInt<F>>(x) >> places);
}

// Products and sums that compilers can't contract to a fused multiply-add.
template <class F>
BLOCKFP_HD F multiply(F a, F b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

template <class F>
BLOCKFP_HD F add(F a, F b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// IEEE division, rounded to nearest; CUDA's `/` depends on flags.
template <class F>
BLOCKFP_HD F divide(F a, F b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Converts integers with magnitudes below 2^24 to float, and floats to their integer part.
template <class F>
BLOCKFP_HD F to_float(Int<F> x) {
  return LaneTypes<F>::to_float(x);
}

template <class F>
BLOCKFP_HD Int<F> truncate(F x) {
  return LaneTypes<F>::truncate(x);
}

}  // namespace blockfp
