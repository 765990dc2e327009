// An AdamW step of many parameters in one launch: a thread block takes a tile of one of them, updates masters and moments as they
// stream through, keeps the new masters in registers, finds the amaxes of the tile's blocks, and writes codes and scales.
//
// A warp takes whole rows of a tile of 128 columns, four columns a lane: every load and store is a run of 64 to 512 bytes. So a block of
// 1x128 (FP8 moments too) is a row of a warp, one of 1x32 eight lanes, and one of 32x32 meets in shared memory.
#pragma once

#include "blockfp/adamw.h"
#include "blockfp/scales.h"
#include "codes.cuh"
#include "vectors.cuh"

namespace blockfp {
namespace cuda {

// What a launch writes beside masters and moments. Copies in 16 bits go with kNothing, whose tiles have no blocks.
enum class Blocks { kNothing, kRows, kSquare32, kSquare128 };

constexpr int kStepColumns = 128;
template <Blocks B>
constexpr int kStepWarps = B == Blocks::kSquare128 ? 8 : 4;
// Rows a warp takes: as many as keep the new masters in registers.
template <Blocks B>
constexpr int kStepRows = B == Blocks::kSquare128 ? 16 : 8;
template <Blocks B>
constexpr int kStepTileRows = kStepWarps<B> * kStepRows<B>;

// Parameters of one launch, passed by value: what a graph captures is whole. (4 KB were the limit before CUDA 12.1; it is 32,764 bytes.)
constexpr int kStepMost = 128;
struct StepLaunch {
  int count;
  uint32_t first_tile[kStepMost + 1];
  bool vectors[kStepMost];  // rows and pointers allow four elements at a time
  StepEntry entry[kStepMost];
};
static_assert(sizeof(StepLaunch) <= 32764, "a launch's arguments");

struct Four {
  float x[4];
};

template <class Word>
__device__ __forceinline__ Word stream_load(const void* p) {
  return __ldcs(static_cast<const Word*>(p));
}

// Elements at .. at + 3 of an array of T; those from `count` on are 0.
template <class T>
__device__ __forceinline__ Four load_four(const void* data, int64_t at, bool vectors, int count) {
  using Raw = typename T::Raw;
  const Raw* p = static_cast<const Raw*>(data) + at;
  Four out;
  if constexpr (T::kId == Fp32::kId) {
    if (vectors) {
      const float4 v = stream_load<float4>(p);
      return {v.x, v.y, v.z, v.w};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[i] = i < count ? __uint_as_float(p[i]) : 0.0f;
  } else {
    uint32_t raw[4];
    if (vectors) {
      const uint2 v = stream_load<uint2>(p);
      raw[0] = v.x & 0xFFFF, raw[1] = v.x >> 16, raw[2] = v.y & 0xFFFF, raw[3] = v.y >> 16;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = i < count ? p[i] : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[i] = from_bits<float>(widen<T, float>(static_cast<int32_t>(raw[i])));
  }
  return out;
}

__device__ __forceinline__ Four load_gradient(const StepEntry& e, int64_t at, bool vectors, int count) {
  if (e.gradient_dtype == Bf16::kId) return load_four<Bf16>(e.gradient, at, vectors, count);
  if (e.gradient_dtype == Fp32::kId) return load_four<Fp32>(e.gradient, at, vectors, count);
  return load_four<Fp16>(e.gradient, at, vectors, count);
}

__device__ __forceinline__ void store_floats(float* data, int64_t at, const Four& v, bool vectors, int count) {
  if (vectors) {
    __stcs(reinterpret_cast<float4*>(data + at), make_float4(v.x[0], v.x[1], v.x[2], v.x[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) data[at + i] = v.x[i];
    }
  }
}

__device__ __forceinline__ void store_halves(void* data, int64_t at, const uint32_t (&raw)[4], bool vectors, int count) {
  uint16_t* p = static_cast<uint16_t*>(data) + at;
  if (vectors) {
    __stcs(reinterpret_cast<uint2*>(p), make_uint2(raw[0] | (raw[1] << 16), raw[2] | (raw[3] << 16)));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) p[i] = raw[i];
    }
  }
}

// Four bytes from `at` on as one word; those from `count` on are 0.
__device__ __forceinline__ uint32_t load_bytes(const void* data, int64_t at, bool vectors, int count) {
  const uint8_t* p = static_cast<const uint8_t*>(data) + at;
  if (vectors) return stream_load<uint32_t>(p);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) word |= static_cast<uint32_t>(p[i]) << (8 * i);
  }
  return word;
}

__device__ __forceinline__ void store_bytes(void* data, int64_t at, uint32_t word, bool whole, int count) {
  uint8_t* p = static_cast<uint8_t*>(data) + at;
  if (whole) {
    __stcs(reinterpret_cast<uint32_t*>(p), word);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) p[i] = word >> (8 * i);
    }
  }
}

// Random bytes of elements index .. index + 3, little-endian.
__device__ __forceinline__ uint32_t random_four(const Words<uint32_t>& key, uint64_t index) {
  const uint64_t counter = index >> 3;
  const auto words = threefry2x32<uint32_t>(key.w0, key.w1, counter >> 32, static_cast<uint32_t>(counter));
  const int skip = index & 7;
  if (skip % 4 == 0) return skip == 0 ? words.w0 : words.w1;
  if (skip < 4) return __funnelshift_r(words.w0, words.w1, 8 * skip);
  const auto next = threefry2x32<uint32_t>(key.w0, key.w1, (counter + 1) >> 32, static_cast<uint32_t>(counter + 1));
  return __funnelshift_r(words.w1, next.w0, 8 * (skip - 4));
}

__device__ __forceinline__ int32_t largest_of(const Four& v) {
  int32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t magnitude = __float_as_int(v.x[i]) & kMagnitude;
    most = max(most, magnitude > kInfinity ? 0 : magnitude);
  }
  return most;
}

// A moment of four elements, as it is kept.
template <Moments M, bool Second>
struct Kept {
  void* data;
  float* scales;
  Words<uint32_t> key;

  // Every lane of the warp comes here with the same row.
  __device__ __forceinline__ Four load(int64_t at, int64_t scale_at, bool vectors, int count) const {
    if constexpr (M == Moments::kFp32) {
      return load_four<Fp32>(data, at, vectors, count);
    } else if constexpr (M == Moments::kBf16) {
      return load_four<Bf16>(data, at, vectors, count);
    } else {
      const uint32_t codes = load_bytes(data, at, vectors, count);
      const float scale = scales[scale_at];
      Four out;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out.x[i] = multiply(decode<E4M3, float>((codes >> (8 * i)) & 0xFF), scale);
        if constexpr (Second) out.x[i] = multiply(out.x[i], out.x[i]);
      }
      return out;
    }
  }

  __device__ __forceinline__ void store(Four v, int64_t at, int64_t scale_at, uint64_t index, bool vectors, int count) const {
    if constexpr (M == Moments::kFp32) {
      store_floats(static_cast<float*>(data), at, v, vectors, count);
    } else {
      const uint32_t random = random_four(key, index);
      if constexpr (M == Moments::kBf16) {
        uint32_t raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = narrow_stochastic<float>(v.x[i], (random >> (8 * i)) & 0xFF);
        store_halves(data, at, raw, vectors, count);
      } else {
        if constexpr (Second) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v.x[i] = square_root(v.x[i]);
        }
        const auto scale = fp8_scale<E4M3, ScaleRule::kPow2, float>(lanes_max<32>(largest_of(v)), 0, kFp32Max);
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word |= encode_moment<Second, float>(v.x[i], scale.multiplier, (random >> (8 * i)) & 0xFF) << (8 * i);
        }
        store_bytes(data, at, word, vectors, count);
        if (threadIdx.x % 32 == 0) scales[scale_at] = from_bits<float>(scale.stored);
      }
    }
  }
};

// Stored scale and multiplier of a block of E.
template <class E>
__device__ __forceinline__ BlockScale<float> scale_by_rule(const StepEntry& e, int32_t amax) {
  switch (static_cast<ScaleRule>(e.rule)) {
    case ScaleRule::kFp32:
      return fp8_scale<E, ScaleRule::kFp32, float>(amax, 0, e.largest_bits);
    case ScaleRule::kPow2:
      return fp8_scale<E, ScaleRule::kPow2, float>(amax, 0, e.largest_bits);
    case ScaleRule::kE8m0Ceil:
      return e8m0_scale<E, ScaleRule::kE8m0Ceil, float>(amax);
    default:
      return e8m0_scale<E, ScaleRule::kE8m0Floor, float>(amax);
  }
}

// Where a thread's elements lie.
struct StepPlace {
  int64_t batch, row, column;  // of its first element
  int count;                   // columns of its four that there are
};

// The amax of a block from the parts of its threads; its upper bit says that one of them holds a NaN.
template <Blocks B>
__device__ __forceinline__ uint32_t block_amax(const Four* weight, int rows, int lanes, uint32_t* shared) {
  uint32_t most = 0;
  bool nan = false;
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    most = max(most, static_cast<uint32_t>(largest_of(weight[r])));
#pragma unroll
    for (int i = 0; i < 4; ++i) nan |= weight[r].x[i] != weight[r].x[i];
  }
  // A NaN goes along as the highest bit of one maximum and is taken off after it; the amaxes beside it need a second.
  int32_t amax = lanes == 8 ? lanes_max<8>(most) : lanes_max<32>(most);
  const uint32_t group = lanes == 8 ? 0xFFu << (threadIdx.x % 32 / 8 * 8) : 0xFFFFFFFFu;
  uint32_t out = static_cast<uint32_t>(amax) | ((__ballot_sync(0xFFFFFFFFu, nan) & group) != 0 ? 0x80000000u : 0u);
  if constexpr (B == Blocks::kSquare32 || B == Blocks::kSquare128) {
    constexpr int kParts = B == Blocks::kSquare32 ? 4 : 1;
    const int part = threadIdx.x % 32 / lanes;
    if (threadIdx.x % lanes == 0) shared[threadIdx.x / 32 * kParts + part] = out;
    __syncthreads();
    uint32_t flag = 0;
    most = 0;
#pragma unroll
    for (int w = 0; w < kStepWarps<B>; ++w) {
      const uint32_t other = shared[w * kParts + part];
      flag |= other & 0x80000000u;
      most = max(most, other & kMagnitude);
    }
    out = most | flag;
  }
  return out;
}

// Codes of one row of a thread's elements.
template <class E>
__device__ __forceinline__ void store_codes(const StepEntry& e, const StepPlace& p, int r, const Four& weight, float multiplier, bool nan) {
  const auto value_of = [&](int i) { return i < 4 ? weight.x[i < 4 ? i : 0] : 0.0f; };
  const uint2 codes = encode_scaled<E, Rounding::kNearest>(value_of, multiplier, nan, nullptr, 0);
  const int64_t pitch = Packing<E::kBits>::row_bytes(e.columns);
  uint8_t* out = static_cast<uint8_t*>(e.out) + (p.batch * e.rows + p.row + r) * pitch + p.column / 4 * (E::kBits / 2);
  const int bytes = packed_bytes<E::kBits>(p.count);
  if (E::kBits == 8 && p.count == 4 && pitch % 4 == 0) {
    __stcs(reinterpret_cast<uint32_t*>(out), codes.x);
  } else if (E::kBits == 4 && p.count == 4 && pitch % 2 == 0) {
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(codes.x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < bytes) out[i] = codes.x >> (8 * i);
    }
  }
}

// Scales and codes of a tile, from the new masters in the registers of its threads.
template <Blocks B, class E>
__device__ __forceinline__ void write_codes(const StepEntry& e, const StepPlace& p, const Four (&weight)[kStepRows<B>], uint32_t* shared) {
  const bool bytes = e.rule > static_cast<int>(ScaleRule::kPow2);
  const int lanes = e.block_columns / 4;
  const int64_t grid_columns = (e.columns + e.block_columns - 1) / e.block_columns;
  const auto put_scale = [&](int64_t grid_row, const BlockScale<float>& scale, bool nan) {
    const int64_t at = grid_row * grid_columns + p.column / e.block_columns;
    if (bytes) {
      static_cast<uint8_t*>(e.out_scales)[at] = nan ? 0xFF : scale.stored;
    } else {
      static_cast<int32_t*>(e.out_scales)[at] = scale.stored;
    }
  };
  const bool writes = threadIdx.x % lanes == 0 && p.count > 0;
  if constexpr (B == Blocks::kRows) {
#pragma unroll
    for (int r = 0; r < kStepRows<B>; ++r) {
      if (p.row + r >= e.rows) break;
      const uint32_t amax = block_amax<B>(weight + r, 1, lanes, shared);
      const BlockScale<float> scale = scale_by_rule<E>(e, amax & kMagnitude);
      const bool nan = !E::kHasNan && (amax >> 31);
      if (writes) put_scale(p.batch * e.rows + p.row + r, scale, nan);
      if (p.count > 0) store_codes<E>(e, p, r, weight[r], scale.multiplier, nan);
    }
  } else {
    constexpr int kLanes = B == Blocks::kSquare32 ? 8 : 32;
    const uint32_t amax = block_amax<B>(weight, kStepRows<B>, kLanes, shared);
    const BlockScale<float> scale = scale_by_rule<E>(e, amax & kMagnitude);
    const bool nan = !E::kHasNan && (amax >> 31);
    const int64_t grid_rows = (e.rows + kStepTileRows<B> - 1) / kStepTileRows<B>;
    if (writes && threadIdx.x < 32) put_scale(p.batch * grid_rows + p.row / kStepTileRows<B>, scale, nan);
#pragma unroll
    for (int r = 0; r < kStepRows<B>; ++r) {
      if (p.row + r < e.rows && p.count > 0) store_codes<E>(e, p, r, weight[r], scale.multiplier, nan);
    }
  }
}

template <Moments M, Blocks B>
__global__ void __launch_bounds__(32 * kStepWarps<B>, B == Blocks::kSquare128 ? 2 : 4) adamw(const __grid_constant__ StepLaunch a) {
  constexpr int kRows = kStepRows<B>, kTogether = 2;  // rows whose loads are under way together
  __shared__ uint32_t shared[kStepWarps<B> * 4];
  int index = 0;
  for (int above = a.count; above - index > 1;) {
    const int middle = (index + above) / 2;
    (a.first_tile[middle] <= blockIdx.x ? index : above) = middle;
  }
  const StepEntry& e = a.entry[index];
  const StepCoefficients c = e.coefficients_at != nullptr ? *e.coefficients_at : e.coefficients;
  if (c.skip != 0.0f) return;
  const int64_t tile = blockIdx.x - a.first_tile[index];
  const int64_t across = (e.columns + kStepColumns - 1) / kStepColumns, down = (e.rows + kStepTileRows<B> - 1) / kStepTileRows<B>;
  StepPlace p;
  p.column = tile % across * kStepColumns + threadIdx.x % 32 * 4;
  p.row = tile / across % down * kStepTileRows<B> + threadIdx.x / 32 * kRows;
  p.batch = tile / across / down;
  p.count = static_cast<int>(max(min(e.columns - p.column, int64_t{4}), int64_t{0}));
  const bool vectors = a.vectors[index] && p.count == 4, still = c.still();
  Kept<M, false> first{e.first, e.first_scales, {}};
  Kept<M, true> second{e.second, e.second_scales, {}};
  if constexpr (M != Moments::kFp32) {
    const uint32_t step = e.step_at != nullptr ? static_cast<uint32_t>(*e.step_at) : static_cast<uint32_t>(e.step);
    first.key = rounding_key(e.key0, e.key1, step, e.parameter, kRoundFirst);
    second.key = rounding_key(e.key0, e.key1, step, e.parameter, kRoundSecond);
  }
  const int64_t moment_blocks = (e.columns + kMomentBlock - 1) / kMomentBlock;
  Four weight[kRows];
#pragma unroll
  for (int r0 = 0; r0 < kRows; r0 += kTogether) {
    Four gradient[kTogether], m[kTogether], v[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      weight[r0 + k] = gradient[k] = m[k] = v[k] = Four{};
      const int64_t row = p.batch * e.rows + p.row + r0 + k, at = row * e.columns + p.column;
      const int64_t scale_at = row * moment_blocks + p.column / kMomentBlock;
      if (p.row + r0 + k < e.rows && p.count > 0) {
        gradient[k] = load_gradient(e, at, vectors, p.count);
        weight[r0 + k] = load_four<Fp32>(e.weight, at, vectors, p.count);
        m[k] = first.load(at, scale_at, vectors, p.count);
        v[k] = second.load(at, scale_at, vectors, p.count);
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (p.row + r0 + k >= e.rows) continue;  // a warp's lanes share their rows
      const int64_t row = p.batch * e.rows + p.row + r0 + k, at = row * e.columns + p.column;
      const int64_t scale_at = row * moment_blocks + p.column / kMomentBlock;
      const uint64_t random = e.random_index(p.batch, p.row + r0 + k, p.column);
      Four& w = weight[r0 + k];
#pragma unroll
      for (int i = 0; i < 4; ++i) adamw_step<float>(w.x[i], m[k].x[i], v[k].x[i], gradient[k].x[i], c);
      first.store(m[k], at, scale_at, random, vectors, p.count);
      second.store(v[k], at, scale_at, random, vectors, p.count);
      if (still) continue;
      store_floats(e.weight, at, w, vectors, p.count);
      if (B == Blocks::kNothing && e.output == static_cast<int>(StepOutput::kCopy)) {
        uint32_t raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t bits = canonical<float>(to_bits(w.x[i]));
          raw[i] = (e.out_dtype == Bf16::kId ? narrow<Bf16, float>(bits) : narrow<Fp16, float>(bits)) & 0xFFFF;
        }
        store_halves(e.out, at, raw, vectors, p.count);
      }
    }
  }
  if constexpr (B != Blocks::kNothing) {
    if (still) return;
    if constexpr (B == Blocks::kSquare128) {
      if (e.element == E4M3::kId) return write_codes<B, E4M3>(e, p, weight, shared);
      return write_codes<B, E5M2>(e, p, weight, shared);
    } else {
      switch (e.element) {
        case E4M3::kId:
          return write_codes<B, E4M3>(e, p, weight, shared);
        case E5M2::kId:
          return write_codes<B, E5M2>(e, p, weight, shared);
        case E3M2::kId:
          return write_codes<B, E3M2>(e, p, weight, shared);
        case E2M3::kId:
          return write_codes<B, E2M3>(e, p, weight, shared);
        case E2M1::kId:
          return write_codes<B, E2M1>(e, p, weight, shared);
        default:
          return write_codes<B, Int8>(e, p, weight, shared);
      }
    }
  }
}

}  // namespace cuda
}  // namespace blockfp
