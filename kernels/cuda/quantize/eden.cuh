// MS-EDEN on the GPU (blockfp/definition/eden.py): the columns of x, rotated by random signs and Hadamard's sums over groups of 128 rows,
// as codes to nearest under corrected scales.
//
// Two neighbouring lanes hold a column of a group, 64 rows each. Only the last stage of the sums leaves a lane, and none of its blocks does.
#pragma once

#include "block_scale.cuh"
#include "runs.cuh"

namespace blockfp {
namespace cuda {

constexpr int kEdenGroup = 128, kEdenRows = kEdenGroup / 2, kEdenBlocks = kEdenRows / 16;
constexpr int kEdenThreads = 256, kEdenColumns = kEdenThreads / 2;

// fp32 of one over the roots of 128, 64, 32 and 16.
constexpr float kOverRoot128 = 0x1.6a09e6p-4f, kOverRoot64 = 0.125f, kOverRoot32 = 0x1.6a09e6p-3f, kOverRoot16 = 0.25f;

__device__ __forceinline__ Words<uint32_t> folded_key(const uint32_t* key, uint32_t data) {
  return threefry2x32<uint32_t>(__ldg(key), __ldg(key + 1), 0u, data);
}

// Random bytes of elements index .. index + 3 of the unsharded array, little-endian.
__device__ __forceinline__ uint32_t random_four(const Words<uint32_t>& key, uint64_t index) {
  const uint64_t counter = index >> 3;
  const auto words = threefry2x32<uint32_t>(key.w0, key.w1, counter >> 32, static_cast<uint32_t>(counter));
  const int skip = index & 7;
  if (skip < 4) return __funnelshift_r(words.w0, words.w1, 8 * skip);
  if (skip == 4) return words.w1;
  const auto next = threefry2x32<uint32_t>(key.w0, key.w1, (counter + 1) >> 32, static_cast<uint32_t>(counter + 1));
  return __funnelshift_r(words.w1, next.w0, 8 * (skip - 4));
}

// Signs of a group of rows, of which the first has this place along the unsharded axis: 1 or -1, by the low bits of random bytes.
__device__ __forceinline__ void draw_signs(const uint32_t* key, int64_t place, float (&signs)[kEdenGroup]) {
  if (threadIdx.x >= kEdenGroup / 8) return;
  const auto own = folded_key(key, 0);
  const uint64_t counter = static_cast<uint64_t>(place) / 8 + threadIdx.x;
  const auto words = threefry2x32<uint32_t>(own.w0, own.w1, counter >> 32, static_cast<uint32_t>(counter));
#pragma unroll
  for (int i = 0; i < 8; ++i) signs[8 * threadIdx.x + i] = (i < 4 ? words.w0 : words.w1) >> (8 * (i % 4)) & 1 ? -1.0f : 1.0f;
}

// The rows of one column that a lane holds.
struct EdenPlace {
  int64_t batch, column;
  int64_t row;  // the first
  int rows;     // that x has of them
  bool whole;   // x has all rows of the group; alike in all threads of a block

  __device__ __forceinline__ EdenPlace(const Matrices& x, uint32_t spans, uint32_t groups) {
    const uint32_t line = blockIdx.x / spans, matrix = line / groups;
    const int64_t first = static_cast<int64_t>(line - matrix * groups) * kEdenGroup;
    batch = matrix;
    column = static_cast<int64_t>(blockIdx.x - line * spans) * kEdenColumns + threadIdx.x / 2;
    row = first + (is_lower() ? kEdenRows : 0);
    rows = column < x.columns ? static_cast<int>(max(min(x.rows - row, int64_t{kEdenRows}), int64_t{0})) : 0;
    whole = x.rows - first >= kEdenGroup;
  }

  // Whether this lane holds the lower half of the group.
  __device__ __forceinline__ static bool is_lower() { return threadIdx.x & 1; }
};

// The elements of a lane.
template <class T>
struct EdenColumn {
  float z[kEdenRows];

  // Their patterns.
  __device__ __forceinline__ void load(const Matrices& x, const EdenPlace& place) {
    using Raw = typename T::Raw;
    const Raw* first = static_cast<const Raw*>(x.data) + place.batch * x.batch_stride + place.row * x.row_stride + place.column * x.column_stride;
    // The exports check that it fits: with 64 bits every address would take a product of its own.
    const int32_t stride = static_cast<int32_t>(x.row_stride * static_cast<int64_t>(sizeof(Raw)));
    const auto pattern = [&](int32_t r) {
      const char* at = reinterpret_cast<const char*>(first) + static_cast<int64_t>(r) * stride;
      return __uint_as_float(__ldg(reinterpret_cast<const Raw*>(at)));
    };
    if (place.rows == kEdenRows) {
#pragma unroll
      for (int r = 0; r < kEdenRows; ++r) z[r] = pattern(r);
    } else {
#pragma unroll
      for (int r = 0; r < kEdenRows; ++r) z[r] = r < place.rows ? pattern(r) : 0.0f;
    }
  }

  // From patterns to values.
  __device__ __forceinline__ void widen_all() {
#pragma unroll
    for (int r = 0; r < kEdenRows; ++r) {
      const uint32_t raw = __float_as_uint(z[r]);
      if constexpr (T::kId == Fp16::kId) {
        z[r] = __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
      } else {
        z[r] = from_bits<float>(widen<T, float>(static_cast<int32_t>(raw)));
      }
    }
  }

  __device__ __forceinline__ int32_t amax() const {
    float most = 0.0f;
#pragma unroll
    for (int r = 0; r < kEdenRows; ++r) most = fmaxf(most, fabsf(z[r]));
    return __float_as_int(most);
  }

  // From values to rotated ones; zeros where x has no rows. Every lane of the warp comes here.
  __device__ __forceinline__ void rotate(const EdenPlace& place, const float (&signs)[kEdenGroup]) {
    const float4* own = reinterpret_cast<const float4*>(signs + (EdenPlace::is_lower() ? kEdenRows : 0));
#pragma unroll
    for (int r = 0; r < kEdenRows; r += 4) {
      const float4 four = own[r / 4];
      z[r] = signed_value(z[r], four.x), z[r + 1] = signed_value(z[r + 1], four.y);
      z[r + 2] = signed_value(z[r + 2], four.z), z[r + 3] = signed_value(z[r + 3], four.w);
    }
    if (place.rows == kEdenRows) {
#pragma unroll
      for (int h = 1; h < kEdenRows; h *= 2) sum_pairs<0, kEdenRows>(h);
    } else {
      sum_what_is_left(place.rows);
    }
    if (place.whole) {
      const float sign = EdenPlace::is_lower() ? -1.0f : 1.0f;
#pragma unroll
      for (int r = 0; r < kEdenRows; ++r) z[r] = __fmaf_rn(z[r], sign, __shfl_xor_sync(0xFFFFFFFFu, z[r], 1));
    }
#pragma unroll
    for (int k = 0; k < kEdenBlocks; ++k) {
      const float below = place.rows >= 32 * (k / 2 + 1) ? kOverRoot32 : (place.rows >= 16 * (k + 1) ? kOverRoot16 : 1.0f);
      const float factor = place.whole ? kOverRoot128 : (place.rows == kEdenRows ? kOverRoot64 : below);
#pragma unroll
      for (int i = 16 * k; i < 16 * k + 16; ++i) z[i] = multiply(z[i], factor);
    }
  }

 private:
  // A magnitude below 2^-98 becomes zero of its sign, so that no sum is subnormal.
  __device__ __forceinline__ static float signed_value(float v, float sign) {
    v = multiply(v, sign);
    return fabsf(v) < 0x1p-98f ? multiply(v, 0.0f) : v;
  }

  // One stage of the sums of `Size` rows from `First`.
  template <int First, int Size>
  __device__ __forceinline__ void sum_pairs(int h) {
#pragma unroll
    for (int i = First; i < First + Size; ++i) {
      if (i & h) continue;
      const float a = z[i], b = z[i + h];
      z[i] = add(a, b);
      z[i + h] = add(a, -b);
    }
  }

  template <int First>
  __device__ __forceinline__ void sum_block(int rows) {
    if (rows < First + 16) return;
#pragma unroll
    for (int h = 1; h < 16; h *= 2) sum_pairs<First, 16>(h);
  }

  // Of fewer than 64 rows: groups of 32 and 16, as many as there are.
  __device__ __forceinline__ void sum_what_is_left(int rows) {
    // Flipped zeros have a sign.
#pragma unroll
    for (int r = 0; r < kEdenRows; ++r) z[r] = r < rows ? z[r] : 0.0f;
    sum_block<0>(rows);
    sum_block<16>(rows);
    sum_block<32>(rows);
    if (rows >= 32) sum_pairs<0, 32>(16);
  }
};

// The amax of a block, NaN ignored, and whether it holds one.
__device__ __forceinline__ int32_t eden_block_amax(const float* z, bool& nan) {
  uint32_t most = __float_as_uint(z[0]);
#pragma unroll
  for (int i = 1; i < 16; ++i) most = larger_magnitude<Fp32, true>(most, __float_as_uint(z[i]));
  const int32_t amax = most & kMagnitude;
  nan = amax > kInfinity;
  if (!nan) return amax;
  float other = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) other = fmaxf(other, fabsf(z[i]));
  return __float_as_int(other);
}

// Adds the squares of eight elements y to one sum, and their products with twice the values of their codes to another, both as
// integers: magnitudes in steps of 2^-9, below 16.
__device__ __forceinline__ void add_eight(const float* y, uint32_t codes, uint32_t& squares, uint32_t& products) {
  // As many steps as 2^-149 stand in what is so small: the product is rounded to them, ties to even.
  uint32_t steps[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) steps[i] = __float_as_uint(multiply(fminf(fabsf(y[i]), 8191.0f / 512), 0x1p-140f));
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += steps[i] * steps[i];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Bytes 0, 1, 2, 3, 4, 6, 8 and 12, by the magnitudes of four codes.
    const uint32_t twice = __byte_perm(0x03020100u, 0x0C080604u, (codes >> (16 * half)) & 0x7777u);
    const uint32_t* four = steps + 4 * half;
    products = __dp2a_lo(__byte_perm(four[0], four[1], 0x5410), twice, products);
    products = __dp2a_hi(__byte_perm(four[2], four[3], 0x5410), twice, products);
  }
}

// Codes of a block, and its corrected scale, rounded by a random byte.
__device__ __forceinline__ int32_t encode_eden_block(const float* z, const TensorScale& tensor, int32_t byte, uint32_t* codes) {
  bool nan;
  const BlockScale<float> scale = e4m3_block_scale(eden_block_amax(z, nan), tensor);
  uint32_t squares = 0, products = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = multiply(z[8 * half + i], scale.multiplier);
    codes[half] = encode_eight<E2M1>(y).x;
    add_eight(y, codes[half], squares, products);
    if (nan) codes[half] = mark_nan(codes[half], y);
  }
  // <y, y> over <y, q>, both in steps of 2^-10, below 2^24.
  const float correction =
      products == 0 ? 1.0f : divide(static_cast<float>((squares + 128) >> 8), static_cast<float>(products));
  const int32_t corrected = encode_stochastic<E4M3, float>(multiply(e4m3_value(scale.stored), correction), byte) & 0xFF;
  return nan ? kNanMark<E2M1, 16> : (scale.stored == 0 ? 0 : corrected);
}

template <class T>
__global__ void __launch_bounds__(kEdenThreads, 2) amax_eden(const __grid_constant__ EdenAmaxArguments a, uint32_t spans, uint32_t groups) {
  __shared__ __align__(16) float signs[kEdenGroup];
  const EdenPlace place(a.x, spans, groups);
  EdenColumn<T> column;
  column.load(a.x, place);
  draw_signs(a.key, a.row + place.row / kEdenGroup * kEdenGroup, signs);
  __syncthreads();
  column.widen_all();
  const int32_t plain = a.plain == nullptr ? 0 : column.amax();
  column.rotate(place, signs);
  int32_t rotated = 0;
  if (a.blocks == nullptr) {
    rotated = column.amax();
  } else {
    const int64_t pitch = (a.x.rows + 15) / 16, at = (place.batch * a.x.columns + place.column) * pitch + place.row / 16;
#pragma unroll
    for (int k = 0; k < kEdenBlocks; ++k) {
      bool nan;
      const int32_t amax = eden_block_amax(column.z + 16 * k, nan);
      rotated = max(rotated, amax);
      if (16 * k < place.rows) a.blocks[at + k] = amax, a.nan[at + k] = nan;
    }
  }
  if (a.plain != nullptr) raise_amax(a.plain, plain);
  raise_amax(a.rotated, rotated);
}

template <class T>
__global__ void __launch_bounds__(kEdenThreads, 2)
    quantize_eden(const __grid_constant__ EdenArguments a, uint32_t spans, uint32_t groups, bool vectors) {
  constexpr int kWordsOfLane = kEdenRows / 8;
  __shared__ __align__(16) float signs[kEdenGroup];
  __shared__ TensorScale tensor;
  __shared__ Words<uint32_t> key;
  __shared__ RunEnds<kWordsOfLane, kEdenThreads> ends;
  const EdenPlace place(a.x, spans, groups);
  EdenColumn<T> column;
  column.load(a.x, place);
  draw_signs(a.key, a.window.row + place.row / kEdenGroup * kEdenGroup, signs);
  // In warps of their own, so that they go on beside the signs.
  if (threadIdx.x == 32) {
    const float multiplier = tensor_multiplier<E2M1>(__ldg(a.amax), ScaleRule::kFourOverSix);
    tensor = {multiplier, multiply(multiplier, element_max_reciprocal<E2M1>()), divide(1.0f, multiplier)};
    const bool overflows = a.overflow != nullptr && __ldg(a.overflow) >= kInfinity;
    if (blockIdx.x == 0) *a.tensor_scale = overflows ? from_bits<float>(kNan) : tensor.decode;
  }
  if (threadIdx.x == 64) key = folded_key(a.key, a.operand);
  __syncthreads();
  column.widen_all();
  column.rotate(place, signs);
  const uint64_t line = place.batch * a.window.columns + a.window.column + place.column;
  const uint32_t random = random_four(key, line * ((a.window.rows + 15) / 16) + (a.window.row + place.row) / 16);
  uint32_t codes[kWordsOfLane];
  int32_t scales[kEdenBlocks];
#pragma unroll
  for (int k = 0; k < kEdenBlocks; ++k) {
    scales[k] = encode_eden_block(column.z + 16 * k, tensor, random >> (8 * k) & 0xFF, codes + 2 * k);
  }
  const int64_t own_line = place.batch * a.x.columns + place.column, pitch = (a.x.rows + 1) / 2, blocks = (a.x.rows + 15) / 16;
  uint8_t* out = a.codes + own_line * pitch;
  uint8_t* out_scales = a.scales + own_line * blocks + place.row / 16;
  if (vectors) {
    if (place.rows == 0) return;
    // Rows end where a lane's do.
    auto* to = reinterpret_cast<uint4*>(out + place.row / 2);
    to[0] = {codes[0], codes[1], codes[2], codes[3]}, to[1] = {codes[4], codes[5], codes[6], codes[7]};
    *reinterpret_cast<uint32_t*>(out_scales) = scales[0] | scales[1] << 8 | scales[2] << 16 | scales[3] << 24;
    return;
  }
  ends.put(codes);
  __syncwarp();
  if (place.column >= a.x.columns) return;
#pragma unroll
  for (int k = 0; k < kEdenBlocks; ++k) {
    if (16 * k < place.rows) out_scales[k] = scales[k];
  }
  const int lane = EdenPlace::is_lower();
  const int64_t first = (place.row - lane * kEdenRows) / 2;
  store_run<1>(ends, out + first, codes, lane, 2, 0, static_cast<int>(min(pitch - first, int64_t{kEdenGroup / 2})));
}

}  // namespace cuda
}  // namespace blockfp
