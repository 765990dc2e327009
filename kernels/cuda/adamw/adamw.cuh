// An AdamW step of many parameters in one launch: a thread block takes a tile of one of them, updates masters and moments as
// they stream through, finds the amaxes of the tile's blocks from the new masters, and writes codes and scales.
//
// A warp takes whole rows of a tile of 128 columns, four columns per lane, so every load and store is a run of 64 to 512 bytes.
// A block of 1x128 (FP8 moments too) is then a warp's row, and one of 1x32 eight lanes: their codes are written at once. Square
// blocks span warps, so the new masters wait for their scale in shared memory; in registers they would halve the number of
// threads, and so of loads in flight.
#pragma once

#include "moments.cuh"

namespace blockfp {
namespace cuda {

// What a launch writes besides masters and moments. 16-bit copies use kNothing, whose tiles have no blocks.
enum class Blocks { kNothing, kRows, kSquare32, kSquare128 };

constexpr int kStepColumns = 128;
template <Blocks B>
constexpr int kStepWarps = B == Blocks::kSquare128 ? 8 : 4;
template <Blocks B>
constexpr int kStepRows = B == Blocks::kSquare128 ? 16 : 8;  // per warp
template <Blocks B>
constexpr int kStepTileRows = kStepWarps<B> * kStepRows<B>;
// As many threads as a multiprocessor's registers allow, at 80 each.
template <Blocks B>
constexpr int kStepBlocks = 768 / (32 * kStepWarps<B>);
template <Blocks B>
constexpr bool kSquare = B == Blocks::kSquare32 || B == Blocks::kSquare128;
template <Blocks B>
constexpr int kStepShared = kSquare<B> ? kStepTileRows<B> * kStepColumns * sizeof(float) : 0;

// Parameters of one launch, passed by value, so that captured graphs contain them. (The limit was 4 KB before CUDA 12.1; it is
// 32,764 bytes.)
constexpr int kStepMost = 128;
struct StepLaunch {
  int count;
  uint32_t first_tile[kStepMost + 1];
  bool vectors[kStepMost];  // whether rows and pointers allow access to four elements at a time
  StepEntry entry[kStepMost];
};
static_assert(sizeof(StepLaunch) <= 32764, "a launch's arguments");

// Calls body with the codes' element.
template <Blocks B, class Body>
__device__ __forceinline__ void with_step_element(int element, Body body) {
  if (element == E4M3::kId) return body(E4M3{});
  if (B == Blocks::kSquare128 || element == E5M2::kId) return body(E5M2{});
  if constexpr (B != Blocks::kSquare128) {
    if (element == E3M2::kId) return body(E3M2{});
    if (element == E2M3::kId) return body(E2M3{});
    if (element == E2M1::kId) return body(E2M1{});
    body(Int8{});
  }
}

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

// Position of a thread's elements.
struct StepPlace {
  int64_t line;    // its first row, with matrices stacked
  int64_t column;
  int rows;        // number of its warp's rows that exist
  int count;       // number of its four columns that exist
};

// Stores a scale; called by one thread of its block.
template <class E>
__device__ __forceinline__ void put_scale(const StepEntry& e, int64_t grid_row, int64_t column, const BlockScale<float>& scale, bool nan) {
  const int64_t grid_columns = (e.columns + e.block_columns - 1) / e.block_columns;
  const int64_t at = grid_row * grid_columns + column / e.block_columns;
  if (e.rule > static_cast<int>(ScaleRule::kPow2)) {
    static_cast<uint8_t*>(e.out_scales)[at] = nan && !E::kHasNan ? 0xFF : scale.stored;
  } else {
    static_cast<int32_t*>(e.out_scales)[at] = scale.stored;
  }
}

// Stores the codes of a thread's four elements of a row.
template <class E>
__device__ __forceinline__ void put_codes(const StepEntry& e, int64_t line, const StepPlace& p, const Four& w, float multiplier, bool nan) {
  const auto value_of = [&](int i) { return i < 4 ? w.x[i < 4 ? i : 0] : 0.0f; };
  const uint32_t codes = encode_scaled<E, Rounding::kNearest>(value_of, multiplier, nan, nullptr, 0).x;
  const int64_t pitch = Packing<E::kBits>::row_bytes(e.columns);
  uint8_t* out = static_cast<uint8_t*>(e.out) + line * pitch + p.column / 4 * (E::kBits / 2);
  if (E::kBits == 8 && p.count == 4 && pitch % 4 == 0) {
    __stcs(reinterpret_cast<uint32_t*>(out), codes);
  } else if (E::kBits == 4 && p.count == 4 && pitch % 2 == 0) {
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(codes);
  } else {
    const int bytes = packed_bytes<E::kBits>(p.count);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < bytes) out[i] = codes >> (8 * i);
    }
  }
}

// Stores codes and scale of a row in blocks of 1x32 or 1x128; all lanes of the warp must call it.
__device__ __forceinline__ void write_row(const StepEntry& e, int64_t line, const StepPlace& p, const Four& w) {
  const bool wide = e.block_columns == 128;
  const int32_t eighth = lanes_max<8>(largest_of(w)), amax = wide ? lanes_max<4, 8>(eighth) : eighth;
  const uint32_t group = wide ? 0xFFFFFFFFu : 0xFFu << (threadIdx.x % 32 / 8 * 8);
  const bool nan = (__ballot_sync(0xFFFFFFFFu, any_nan(w)) & group) != 0;
  if (p.count == 0) return;
  with_step_element<Blocks::kRows>(e.element, [&](auto element) {
    using E = decltype(element);
    const BlockScale<float> scale = scale_by_rule<E>(e, amax);
    if (threadIdx.x % (wide ? 32 : 8) == 0) put_scale<E>(e, line, p.column, scale, nan);
    put_codes<E>(e, line, p, w, scale.multiplier, nan);
  });
}

// Stores codes and scales of a tile of square blocks. `most` and `nan` are of this thread's elements, whose new masters are in
// `kept`.
template <Blocks B>
__device__ __forceinline__ void write_square(const StepEntry& e, const StepPlace& p, int64_t grid_row, int32_t most, bool nan,
                                             const float4* kept) {
  constexpr int kLanes = B == Blocks::kSquare32 ? 8 : 32, kBlocks = 32 / kLanes;
  __shared__ int32_t amaxes[kStepWarps<B>][kBlocks];
  __shared__ bool nans[kStepWarps<B>][kBlocks];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = lane / kLanes;
  most = lanes_max<kLanes>(most);
  const uint32_t group = kLanes == 32 ? 0xFFFFFFFFu : 0xFFu << (block * 8);
  nan = (__ballot_sync(0xFFFFFFFFu, nan) & group) != 0;
  if (lane % kLanes == 0) amaxes[warp][block] = most, nans[warp][block] = nan;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kStepWarps<B>; ++other) {
    most = max(most, amaxes[other][block]);
    nan |= nans[other][block];
  }
  if (p.count == 0) return;
  with_step_element<B>(e.element, [&](auto element) {
    using E = decltype(element);
    const BlockScale<float> scale = scale_by_rule<E>(e, most);
    if (threadIdx.x < 32 && lane % kLanes == 0) put_scale<E>(e, grid_row, p.column, scale, nan);
#pragma unroll 2
    for (int r = 0; r < p.rows; ++r) {
      const float4 w = kept[r * 32];
      put_codes<E>(e, p.line + r, p, {{w.x, w.y, w.z, w.w}}, scale.multiplier, nan);
    }
  });
}

// One tile. `kept`: this thread's shared memory, for square blocks.
template <Moments M, Blocks B, bool Vectors>
__device__ __forceinline__ void step_tile(const StepEntry& e, const StepCoefficients& c, int64_t tile, float4* kept) {
  constexpr int kTogether = 2;  // rows whose loads are in flight together
  constexpr int kBytes = kMomentBytes<M>;
  const int64_t across = (e.columns + kStepColumns - 1) / kStepColumns, down = (e.rows + kStepTileRows<B> - 1) / kStepTileRows<B>;
  const int64_t grid_row = tile / across, batch = grid_row / down;
  const int64_t row = grid_row % down * kStepTileRows<B> + threadIdx.x / 32 * kStepRows<B>;
  StepPlace p;
  p.line = batch * e.rows + row;
  p.column = tile % across * kStepColumns + threadIdx.x % 32 * 4;
  p.rows = static_cast<int>(max(min(e.rows - row, int64_t{kStepRows<B>}), int64_t{0}));
  p.count = static_cast<int>(max(min(e.columns - p.column, int64_t{4}), int64_t{0}));
  const bool still = c.still(), wide_gradient = e.gradient_dtype == Fp32::kId;
  const int64_t moment_blocks = (e.columns + kMomentBlock - 1) / kMomentBlock;
  const bool fours = ((e.total_columns | e.first_column) & 3) == 0;
  [[maybe_unused]] MomentKeys keys{};
  if constexpr (M != Moments::kFp32) keys = {key_of(e, kRoundFirst), key_of(e, kRoundSecond)};
  int32_t most = 0;
  bool nan = false;
#pragma unroll 1
  for (int r0 = 0; r0 < p.rows; r0 += kTogether) {
    Raw gradient[kTogether], weight[kTogether], first[kTogether], second[kTogether];
    float first_scale[kTogether], second_scale[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int count = r0 + k < p.rows ? p.count : 0;
      const int64_t at = (p.line + r0 + k) * e.columns + p.column;
      gradient[k] = wide_gradient ? load_raw<4, Vectors>(e.gradient, at, count) : load_raw<2, Vectors>(e.gradient, at, count);
      weight[k] = load_raw<4, Vectors>(e.weight, at, count);
      first[k] = load_raw<kBytes, Vectors>(e.first, at, count);
      second[k] = load_raw<kBytes, Vectors>(e.second, at, count);
      if constexpr (M == Moments::kFp8) {
        const int64_t scale_at = (p.line + r0 + k) * moment_blocks + p.column / kMomentBlock;
        first_scale[k] = count > 0 ? e.first_scales[scale_at] : 0.0f;
        second_scale[k] = count > 0 ? e.second_scales[scale_at] : 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int r = r0 + k;
      if (r >= p.rows) continue;  // a warp's lanes share their rows
      const int64_t line = p.line + r, at = line * e.columns + p.column;
      Four g, w = floats_of<Fp32>(weight[k]);
      if (wide_gradient) {
        g = floats_of<Fp32>(gradient[k]);
      } else {
        g = e.gradient_dtype == Bf16::kId ? floats_of<Bf16>(gradient[k]) : floats_of<Fp16>(gradient[k]);
      }
      Four m = moment_of<M, false>(first[k], first_scale[k]), v = moment_of<M, true>(second[k], second_scale[k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) adamw_step<float>(w.x[i], m.x[i], v.x[i], g.x[i], c);
      RandomPair random{};
      if constexpr (M != Moments::kFp32) random = random_pair(keys, e.random_index(batch, row + r, p.column), fours);
      store_raw<kBytes, Vectors>(e.first, at, p.count, kept_moment<M, false>(m, random.first, first_scale[k]));
      store_raw<kBytes, Vectors>(e.second, at, p.count, kept_moment<M, true>(v, random.second, second_scale[k]));
      if constexpr (M == Moments::kFp8) {
        if (threadIdx.x % 32 == 0) {
          const int64_t scale_at = line * moment_blocks + p.column / kMomentBlock;
          e.first_scales[scale_at] = first_scale[k], e.second_scales[scale_at] = second_scale[k];
        }
      }
      if (still) continue;
      store_raw<4, Vectors>(e.weight, at, p.count, raw_of(w));
      if constexpr (kSquare<B>) {
        kept[r * 32] = make_float4(w.x[0], w.x[1], w.x[2], w.x[3]);
        most = max(most, largest_of(w));
        nan |= any_nan(w);
      } else if constexpr (B == Blocks::kRows) {
        write_row(e, line, p, w);
      } else if (e.output == static_cast<int>(StepOutput::kCopy)) {
        Raw copy{};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t bits = canonical<float>(to_bits(w.x[i]));
          const uint32_t pattern = e.out_dtype == Bf16::kId ? narrow<Bf16, float>(bits) : narrow<Fp16, float>(bits);
          copy.word[i / 2] |= (pattern & 0xFFFF) << (16 * (i % 2));
        }
        store_raw<2, Vectors>(e.out, at, p.count, copy);
      } else if (e.output == static_cast<int>(StepOutput::kAmax)) {
        most = max(most, largest_of(w));
      }
    }
  }
  if constexpr (B == Blocks::kNothing) {
    if (e.output == static_cast<int>(StepOutput::kAmax)) raise_amax(static_cast<int32_t*>(e.out_scales), most);
  }
  if constexpr (kSquare<B>) {
    if (!still) write_square<B>(e, p, grid_row, most, nan, kept);
  }
}

// The entry that a thread block's tile belongs to.
__device__ __forceinline__ int entry_of(const StepLaunch& a) {
  int index = 0;
  for (int above = a.count; above - index > 1;) {
    const int middle = (index + above) / 2;
    (a.first_tile[middle] <= blockIdx.x ? index : above) = middle;
  }
  return index;
}

template <Moments M, Blocks B>
__global__ void __launch_bounds__(32 * kStepWarps<B>, kStepBlocks<B>) adamw(const __grid_constant__ StepLaunch a) {
  extern __shared__ float4 masters[];
  const int index = entry_of(a);
  const StepEntry& e = a.entry[index];
  const StepCoefficients c = e.coefficients_at != nullptr ? *e.coefficients_at : e.coefficients;
  if (c.skip != 0.0f) return;
  const int64_t tile = blockIdx.x - a.first_tile[index];
  float4* kept = masters + threadIdx.x / 32 * kStepRows<B> * 32 + threadIdx.x % 32;
  if (a.vectors[index]) {
    step_tile<M, B, true>(e, c, tile, kept);
  } else {
    step_tile<M, B, false>(e, c, tile, kept);
  }
}

}  // namespace cuda
}  // namespace blockfp
