// Values of codes and scales: code times decode scale rounded once to fp32, then once to the dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "arguments.h"
#include "codes.cuh"

namespace blockfp {
namespace cuda {

constexpr int kDequantizeThreads = 256;
constexpr int kDequantizeRows = 4;  // that a thread reads before it writes the first

__device__ __forceinline__ float2 half_values(uint32_t halves) {
  const __half2 pair = bit_cast<__half2>(halves);
  return {__low2float(pair), __high2float(pair)};
}

// Values of eight codes of E in the low bits of `codes`, exact.
template <class E>
__device__ __forceinline__ void decode_eight(uint2 codes, float (&out)[8]) {
  if constexpr (E::kId == Int8::kId) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t word = i < 4 ? codes.x : codes.y;
      out[i] = __fmul_rn(static_cast<float>(static_cast<int8_t>(word >> (8 * (i % 4)))), 1.0f / 64);
    }
  } else if constexpr (E::kBits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t pair = (i < 2 ? codes.x : codes.y) >> (16 * (i % 2));
      uint32_t halves;
      if constexpr (E::kId == E5M2::kId) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
      } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
      }
      const float2 values = half_values(halves);
      out[2 * i] = values.x, out[2 * i + 1] = values.y;
    }
  } else {
    // In fp16's place a code is a number of the same digits, subnormals included, with another bias.
    constexpr int kShift = 10 - E::kMantissaBits;
    constexpr uint32_t kMask = ((1u << (E::kBits - 1)) - 1) * 0x00010001u;
    constexpr float kRebias = 1 << (15 - E::kBias);
    const uint64_t all = (static_cast<uint64_t>(codes.y) << 32) | codes.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = static_cast<uint32_t>(all >> (2 * E::kBits * i));
      const uint32_t pair = (two & ((1u << E::kBits) - 1)) | ((two << (16 - E::kBits)) & (((1u << E::kBits) - 1) << 16));
      const uint32_t halves = ((pair & kMask) << kShift) | ((pair & ((1u << (E::kBits - 1)) * 0x00010001u)) << (16 - E::kBits));
      const float2 values = half_values(halves);
      out[2 * i] = __fmul_rn(values.x, kRebias), out[2 * i + 1] = __fmul_rn(values.y, kRebias);
    }
  }
}

// Codes first .. last - 1 of a group of eight, zeros elsewhere.
template <int Bits>
__device__ __forceinline__ uint2 load_codes(const uint8_t* codes, int count, bool vectors) {
  uint2 out{};
  if (vectors && count == 8) {
    if constexpr (Bits == 8) return __ldg(reinterpret_cast<const uint2*>(codes));
    if constexpr (Bits == 4) return {__ldg(reinterpret_cast<const uint32_t*>(codes)), 0};
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(codes);
    return {__ldg(halves) | (static_cast<uint32_t>(__ldg(halves + 1)) << 16), __ldg(halves + 2)};
  }
  const int bytes = packed_bytes<Bits>(count);
#pragma unroll
  for (int i = 0; i < Bits; ++i) {
    if (i < bytes) (i < 4 ? out.x : out.y) |= static_cast<uint32_t>(codes[i]) << (8 * (i % 4));
  }
  return out;
}

// Eight values, NaN canonical, to out[0 .. count - 1].
template <class T>
__device__ __forceinline__ void store_values(typename T::Raw* out, const float (&y)[8], int count, bool vectors) {
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    if constexpr (T::kId == Fp32::kId) {
      word[i] = __float_as_uint(y[i] == y[i] ? y[i] : __int_as_float(kNan));
      word[i + 1] = __float_as_uint(y[i + 1] == y[i + 1] ? y[i + 1] : __int_as_float(kNan));
    } else {
      constexpr uint32_t kCanonical = T::kId == Bf16::kId ? 0x7FC0 : 0x7E00;
      uint32_t pair;
      if constexpr (T::kId == Bf16::kId) {
        pair = bit_cast<uint32_t>(__floats2bfloat162_rn(y[i], y[i + 1]));
      } else {
        pair = bit_cast<uint32_t>(__floats2half2_rn(y[i], y[i + 1]));
      }
      if (y[i] != y[i]) pair = (pair & 0xFFFF0000u) | kCanonical;
      if (y[i + 1] != y[i + 1]) pair = (pair & 0xFFFFu) | (kCanonical << 16);
      word[i / 2] = pair;
    }
  }
  constexpr int kPerWord = T::kId == Fp32::kId ? 1 : 2;
  if (vectors && count == 8) {
#pragma unroll
    for (int i = 0; i < 8 / kPerWord; i += 4) {
      reinterpret_cast<uint4*>(out)[i / 4] = {word[i], word[i + 1], word[i + 2], word[i + 3]};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) out[i] = static_cast<typename T::Raw>(word[i / kPerWord] >> (16 * (i % kPerWord)));
  }
}

__device__ __forceinline__ float stored_value(const DequantizeArguments& a, int64_t block) {
  switch (a.format.rule) {
    case ScaleRule::kFp32:
    case ScaleRule::kPow2:
      return __ldg(static_cast<const float*>(a.scales) + block);
    case ScaleRule::kE4m3:
      return multiply(decode<E4M3, float>(__ldg(static_cast<const uint8_t*>(a.scales) + block)), __ldg(a.tensor_scale));
    default:
      return decode_scale<ScaleRule::kE8m0Ceil, float>(__ldg(static_cast<const uint8_t*>(a.scales) + block), 1.0f);
  }
}

// As in the general kernel of quantize_rows.cuh: 2^shift threads side by side, each with kDequantizeRows rows. Eights: each group of
// eight columns lies in one block. `column_shift` and `row_shift` are the logarithms of the block's sides.
template <class E, class T, bool Eights>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize(const __grid_constant__ DequantizeArguments a, int shift, int64_t spans, int64_t grid_rows, int64_t grid_columns,
               int row_shift, int column_shift, bool vectors) {
  using Raw = typename T::Raw;
  const int64_t span = blockIdx.x % spans, band = blockIdx.x / spans;
  const int rows_below = kDequantizeThreads >> shift;
  const int64_t first_row = band * (rows_below * kDequantizeRows) + (threadIdx.x >> shift);
  const int64_t column = ((span << shift) + (threadIdx.x & ((1 << shift) - 1))) * 8;
  if (column >= a.columns) return;
  const int count = static_cast<int>(min(a.columns - column, int64_t{8}));
  const int64_t pitch = Packing<E::kBits>::row_bytes(a.columns), lines = a.batches * a.rows;
  uint2 codes[kDequantizeRows];
  float scale[kDequantizeRows];
  int64_t block_row[kDequantizeRows];
#pragma unroll
  for (int u = 0; u < kDequantizeRows; ++u) {
    const int64_t line = first_row + u * rows_below;
    codes[u] = {};
    scale[u] = 0.0f;
    block_row[u] = 0;
    if (line >= lines) continue;
    codes[u] = load_codes<E::kBits>(a.codes + line * pitch + column / 8 * E::kBits, count, vectors);
    if (a.format.block_rows > 1) {
      const int64_t batch = line / a.rows, row = line - batch * a.rows;
      block_row[u] = batch * grid_rows + ((a.window.row_phase + row) >> row_shift);
    } else if (a.format.block_rows == 1) {
      block_row[u] = line;
    }
    if constexpr (Eights) {
      const int64_t across = a.format.block_rows == 0 ? 0 : (a.window.column_phase + column) >> column_shift;
      scale[u] = stored_value(a, block_row[u] * grid_columns + across);
    }
  }
#pragma unroll
  for (int u = 0; u < kDequantizeRows; ++u) {
    const int64_t line = first_row + u * rows_below;
    if (line >= lines) continue;
    float y[8];
    decode_eight<E>(codes[u], y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (!Eights) {
        const int64_t at = min(column + i, a.columns - 1);
        scale[u] = stored_value(a, block_row[u] * grid_columns + ((a.window.column_phase + at) >> column_shift));
      }
      y[i] = multiply(y[i], scale[u]);
    }
    store_values<T>(static_cast<Raw*>(a.out) + line * a.columns + column, y, count, vectors);
  }
}

}  // namespace cuda
}  // namespace blockfp
