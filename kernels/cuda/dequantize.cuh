// Values of codes and scales: code times decode scale, rounded once to fp32, then once to the dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block_scale.cuh"
#include "eight_elements.cuh"
#include "runs.cuh"

namespace blockfp {
namespace cuda {

constexpr int kDequantizeThreads = 256;
constexpr int kDequantizeRows = 4;  // rows that a thread reads before it writes the first

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
      const float2 values = half_values(halves_of<E::kId == E5M2::kId>(pair));
      out[2 * i] = values.x, out[2 * i + 1] = values.y;
    }
  } else if constexpr (E::kBits == 6) {
    // As bytes, these are codes of the 8-bit float with as many mantissa bits, times a power of two.
    const __half2 rebias = __float2half2_rn(E::kMantissaBits == 2 ? 4096.0f : 64.0f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = i == 0 ? codes.x : __funnelshift_r(codes.x, codes.y, 24);
      const uint32_t twelve = (word & 0xFFFu) | ((word << 4) & 0xFFF0000u);
      const uint32_t six = (twelve & 0x003F003Fu) | ((twelve << 2) & 0x3F003F00u);
      const uint32_t eight = (six & 0x1F1F1F1Fu) | ((six << 2) & 0x80808080u);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t halves;
        if constexpr (E::kMantissaBits == 2) {
          halves = __byte_perm(eight, 0, j == 0 ? 0x1404 : 0x3424);  // E5M2 is the upper byte of fp16
        } else {
          halves = halves_of<false>(static_cast<uint16_t>(eight >> (16 * j)));
        }
        const float2 values = half_values(bit_cast<uint32_t>(__hmul2(bit_cast<__half2>(halves), rebias)));
        out[4 * i + 2 * j] = values.x, out[4 * i + 2 * j + 1] = values.y;
      }
    }
  } else {
    // The code selects the upper byte of each magnitude in fp16; the lower byte is zero.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t four = codes.x >> (16 * i);
      const uint32_t spread = __byte_perm(four, four >> 4, 0x5140);  // codes in the low nibbles of bytes, in order
      const uint32_t upper = __byte_perm(0x3E3C3800u, 0x46444240u, four & 0x7777u) | ((spread << 4) & 0x80808080u);
      const float2 low = half_values(__byte_perm(upper, 0, 0x1404)), high = half_values(__byte_perm(upper, 0, 0x3424));
      out[4 * i] = low.x, out[4 * i + 1] = low.y, out[4 * i + 2] = high.x, out[4 * i + 3] = high.y;
    }
  }
}

// Loads eight codes at a vector boundary.
template <int Bits>
__device__ __forceinline__ uint2 load_codes(const uint8_t* codes) {
  if constexpr (Bits == 8) return __ldg(reinterpret_cast<const uint2*>(codes));
  if constexpr (Bits == 4) return {__ldg(reinterpret_cast<const uint32_t*>(codes)), 0};
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(codes);
  return {__ldg(halves) | (static_cast<uint32_t>(__ldg(halves + 1)) << 16), __ldg(halves + 2)};
}

// Loads the first `count` of eight codes at any byte; the rest is arbitrary.
template <int Bits>
__device__ __forceinline__ uint2 load_codes_anywhere(const uint8_t* codes, int count) {
  constexpr int kWords = Bits == 4 ? 1 : 2;
  uint32_t words[kWords];
  load_run<kWords, 4, 1>(codes, packed_bytes<Bits>(count), words);
  return {words[0], kWords == 2 ? words[kWords - 1] : 0};
}

// Values as stored, two 16-bit ones per word.
template <class T, int Count>
struct StoredValues {
  static constexpr int kPerWord = T::kId == Fp32::kId ? 1 : 2;
  uint32_t word[Count / kPerWord];

  // NaN becomes the canonical NaN.
  __device__ __forceinline__ explicit StoredValues(const float (&y)[8]) {
#pragma unroll
    for (int i = 0; i < Count; i += 2) {
      if constexpr (T::kId == Fp32::kId) {
        word[i] = __float_as_uint(y[i]), word[i + 1] = __float_as_uint(y[i + 1]);
      } else if constexpr (T::kId == Bf16::kId) {
        word[i / 2] = bit_cast<uint32_t>(__floats2bfloat162_rn(y[i], y[i + 1]));
      } else {
        word[i / 2] = bit_cast<uint32_t>(__floats2half2_rn(y[i], y[i + 1]));
      }
    }
    if (!holds_nan()) return;
    constexpr uint32_t kCanonical = T::kId == Fp32::kId ? kNan : (T::kId == Bf16::kId ? 0x7FC0 : 0x7E00);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (y[i] == y[i]) continue;
      const int shift = 16 * (i % kPerWord);
      word[i / kPerWord] = (word[i / kPerWord] & ~((kPerWord == 1 ? 0xFFFFFFFFu : 0xFFFFu) << shift)) | (kCanonical << shift);
    }
  }

  __device__ __forceinline__ bool holds_nan() const {
    uint32_t most = word[0];
#pragma unroll
    for (int i = 1; i < Count / kPerWord; ++i) most = larger_magnitude<T, true>(most, word[i]);
    if constexpr (T::kId == Fp32::kId) {
      return (most & kMagnitude) > kInfinity;
    } else if constexpr (T::kId == Bf16::kId) {
      const __nv_bfloat162 pair = bit_cast<__nv_bfloat162>(most);
      return !__hbeq2(pair, pair);
    } else {
      const __half2 pair = bit_cast<__half2>(most);
      return !__hbeq2(pair, pair);
    }
  }

  __device__ __forceinline__ void store_vectors(typename T::Raw* out) const {
#pragma unroll
    for (int i = 0; i < Count / kPerWord; i += 4) {
      reinterpret_cast<uint4*>(out)[i / 4] = {word[i], word[i + 1], word[i + 2], word[i + 3]};
    }
  }
};

__device__ __forceinline__ bool has_wide_scales(const DequantizeArguments& a) { return a.format.rule <= ScaleRule::kPow2; }

// The stored scale of a block: fp32 bits, or a byte.
__device__ __forceinline__ uint32_t stored_scale(const DequantizeArguments& a, int64_t block) {
  if (has_wide_scales(a)) return __ldg(static_cast<const uint32_t*>(a.scales) + block);
  return __ldg(static_cast<const uint8_t*>(a.scales) + block);
}

__device__ __forceinline__ float value_of_scale(const DequantizeArguments& a, uint32_t stored) {
  if (has_wide_scales(a)) return __uint_as_float(stored);
  if (a.format.rule == ScaleRule::kE4m3) {
    return multiply(e4m3_value(stored), a.tensor_scale == nullptr ? 1.0f : __ldg(a.tensor_scale));
  }
  return decode_scale<ScaleRule::kE8m0Ceil, float>(stored, 1.0f);
}

// As in the general kernel of quantize_rows.cuh: 2^shift adjacent threads, each with kDequantizeRows rows. Eights: each group
// of eight columns is within one block. `column_shift` and `row_shift` are the logarithms of the block's sides.
template <class E, class T, bool Eights>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize(const __grid_constant__ DequantizeArguments a, int shift, uint32_t spans, int64_t grid_rows, int64_t grid_columns,
               int row_shift, int column_shift, bool vectors) {
  using Raw = typename T::Raw;
  const int64_t band = blockIdx.x / spans, span = blockIdx.x - static_cast<uint32_t>(band) * spans;
  const int rows_below = kDequantizeThreads >> shift;
  const int64_t first_row = band * (rows_below * kDequantizeRows) + (threadIdx.x >> shift);
  const int64_t column = ((span << shift) + (threadIdx.x & ((1 << shift) - 1))) * 8;
  const int in_row = static_cast<int>(max(min(a.columns - column, int64_t{8}), int64_t{0}));
  const int64_t pitch = Packing<E::kBits>::row_bytes(a.columns), lines = a.batches * a.rows;
  uint2 codes[kDequantizeRows];
  float scale[kDequantizeRows];
  int64_t block_row[kDequantizeRows];
#pragma unroll
  for (int u = 0; u < kDequantizeRows; ++u) {
    const int64_t line = first_row + u * rows_below;
    const bool inside = line < lines && in_row != 0;
    const uint8_t* from = a.codes + line * pitch + column / 8 * E::kBits;
    if (vectors) {
      codes[u] = inside ? load_codes<E::kBits>(from) : uint2{};
    } else {
      codes[u] = load_codes_anywhere<E::kBits>(from, inside ? in_row : 0);
    }
  }
#pragma unroll
  for (int u = 0; u < kDequantizeRows; ++u) {
    const int64_t line = first_row + u * rows_below;
    block_row[u] = 0;
    if (a.format.block_rows > 1) {
      const int64_t batch = a.batches == 1 || line >= lines ? 0 : line / a.rows, row = line - batch * a.rows;
      block_row[u] = batch * grid_rows + ((a.window.row_phase + row) >> row_shift);
    } else if (a.format.block_rows == 1) {
      block_row[u] = line;
    }
  }
  if constexpr (Eights) {
    const int64_t across = a.format.block_rows == 0 ? 0 : (a.window.column_phase + column) >> column_shift;
    uint32_t stored[kDequantizeRows];
#pragma unroll
    for (int u = 0; u < kDequantizeRows; ++u) {
      const bool inside = first_row + u * rows_below < lines && in_row != 0;
      stored[u] = inside ? stored_scale(a, block_row[u] * grid_columns + across) : 0;
    }
#pragma unroll
    for (int u = 0; u < kDequantizeRows; ++u) scale[u] = value_of_scale(a, stored[u]);
  }
  __shared__ RunEnds<8 * sizeof(Raw) / 4, kDequantizeThreads> ends[kDequantizeRows];
  uint32_t words[kDequantizeRows][8 * sizeof(Raw) / 4];
#pragma unroll
  for (int u = 0; u < kDequantizeRows; ++u) {
    const int64_t line = first_row + u * rows_below;
    const bool inside = line < lines && in_row != 0;
    if (vectors && !inside) continue;
    float y[8];
    decode_eight<E>(codes[u], y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (!Eights) {
        if (!inside) continue;
        const int64_t at = min(column + i, a.columns - 1);
        scale[u] = value_of_scale(a, stored_scale(a, block_row[u] * grid_columns + ((a.window.column_phase + at) >> column_shift)));
      }
      y[i] = multiply(y[i], scale[u]);
    }
    const StoredValues<T, 8> values(y);
    if (vectors) {
      values.store_vectors(static_cast<Raw*>(a.out) + line * a.columns + column);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8 * sizeof(Raw) / 4; ++i) words[u][i] = values.word[i];
    ends[u].put(words[u]);
  }
  if (vectors) return;
  __syncthreads();
  const int count = 1 << shift, index = threadIdx.x & (count - 1);
  const int64_t begin = span * count * 8;
  const int last = static_cast<int>(min(a.columns - begin, int64_t{8 * count})) * static_cast<int>(sizeof(Raw));
#pragma unroll
  for (int u = 0; u < kDequantizeRows; ++u) {
    const int64_t line = first_row + u * rows_below;
    if (line >= lines) continue;
    uint8_t* out = reinterpret_cast<uint8_t*>(static_cast<Raw*>(a.out) + line * a.columns + begin);
    store_run<sizeof(Raw)>(ends[u], out, words[u], index, count, 0, last);
  }
}

}  // namespace cuda
}  // namespace blockfp
