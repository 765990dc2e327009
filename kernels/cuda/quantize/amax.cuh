// The largest magnitude of a tensor, and of each block of a grid: integer maxima, ignoring NaN.
#pragma once

#include "gated.cuh"
#include "hadamard.cuh"

namespace blockfp {
namespace cuda {

constexpr int kAmaxThreads = 512, kRotatedThreads = 256;

// Contiguous x, `Unroll` groups of eight elements per thread. The end of x is read first, so that the cache ends with what a
// cast reads first.
template <class T, int Unroll>
__global__ void __launch_bounds__(kAmaxThreads) amax_flat(const typename T::Raw* x, int64_t elements, bool vectors, int32_t* out) {
  __shared__ int32_t warps[kAmaxThreads / 32];
  const int64_t first = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * (kAmaxThreads * Unroll) + threadIdx.x;
  Eight<T> part[Unroll];
#pragma unroll
  for (int u = 0; u < Unroll; ++u) {
    const int64_t index = first + u * kAmaxThreads;
    const int count = static_cast<int>(max(min(elements - 8 * index, int64_t{8}), int64_t{0}));
    part[u] = vectors && count == 8 ? load_vector<T>(x + 8 * index) : load_anywhere<T>(x + 8 * index, count);
  }
#pragma unroll
  for (int u = 1; u < Unroll; ++u) {
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) part[0].word[i] = larger_magnitude<T, false>(part[0].word[i], part[u].word[i]);
  }
  const int32_t of_warp = lanes_max<32>(largest<T, false>(part[0]));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int32_t most = lanes_max<32>(threadIdx.x < kAmaxThreads / 32 ? warps[threadIdx.x] : 0);
  // Most blocks find a larger value there already and skip the atomic.
  if (threadIdx.x == 0 && most > *static_cast<volatile int32_t*>(out)) atomicMax(out, most);
}

// Whether a scale exists, which makes an amax needless; the same in all threads.
__device__ __forceinline__ bool is_known(const float* unless) { return unless != nullptr && __float_as_int(__ldg(unless)) > 0; }

// The same for an activation's output: `Unroll` eights per thread, and again, a grid further on.
template <class T, int Unroll>
__global__ void __launch_bounds__(kAmaxThreads) amax_gated(const __grid_constant__ Matrices x, const __grid_constant__ Gated gated,
                                                           int64_t eights, int32_t* out, const float* unless) {
  __shared__ int32_t warps[kAmaxThreads / 32];
  if (is_known(unless)) return;
  constexpr int64_t kStep = kAmaxThreads * Unroll;
  const int64_t across = x.columns / 8;
  int32_t most = 0;
  for (int64_t first = blockIdx.x * kStep + threadIdx.x; first - threadIdx.x < eights; first += gridDim.x * kStep) {
    GateAndUp<T> parts[Unroll];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      const int64_t index = first + u * kAmaxThreads, row = index / across;
      parts[u].gate = parts[u].up = zeros<T>();
      if (index < eights) parts[u].load(x, gated, row, (index - row * across) * 8);
    }
    with_activation(gated.activation, [&](auto activation) {
#pragma unroll
      for (int u = 0; u < Unroll; ++u) most = max(most, largest<T, false>(parts[u].template made<decltype(activation)::value>(gated)));
    });
  }
  most = lanes_max<32>(most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  most = lanes_max<32>(threadIdx.x < kAmaxThreads / 32 ? warps[threadIdx.x] : 0);
  if (threadIdx.x == 0 && most > *static_cast<volatile int32_t*>(out)) atomicMax(out, most);
}

// Sources of amax_rotated: x itself, or an activation's output.
struct PlainEights {
  bool vectors;

  template <class T>
  __device__ __forceinline__ Eight<T> at(const Matrices& x, int64_t batch, int64_t row, int64_t column) const {
    const auto* data = static_cast<const typename T::Raw*>(x.data) + batch * x.batch_stride + row * x.row_stride + column;
    const int count = static_cast<int>(min(x.columns - column, int64_t{8}));
    return vectors && count == 8 ? load_vector<T>(data) : load_anywhere<T>(data, count);
  }
};

struct GatedEights {
  Gated gated;

  template <class T>
  __device__ __forceinline__ Eight<T> at(const Matrices& x, int64_t, int64_t row, int64_t column) const {
    GateAndUp<T> both;
    Eight<T> out;
    both.load(x, gated, row, column);
    with_activation(gated.activation, [&](auto activation) { out = both.template made<decltype(activation)::value>(gated); });
    return out;
  }
};

// The amax of the source, and of its rotated columns: a thread has eight columns of sixteen rows.
template <class T, class Eights>
__global__ void __launch_bounds__(kRotatedThreads)
    amax_rotated(const __grid_constant__ Matrices x, const __grid_constant__ Eights eights, int64_t across, int64_t groups, int32_t* out) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRotatedThreads + threadIdx.x;
  const int64_t column = index % across * 8, group = index / across % groups, batch = index / across / groups;
  int32_t plain = 0, rotated = 0;
  if (batch < x.batches) {
    Eight<T> part[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const int64_t row = group * 16 + r;
      part[r] = row < x.rows ? eights.template at<T>(x, batch, row, column) : zeros<T>();
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) plain = max(plain, largest<T, false>(part[r]));
    if (group * 16 + 16 <= x.rows) rotate_columns<T>(part);
#pragma unroll
    for (int r = 0; r < 16; ++r) rotated = max(rotated, largest<T, false>(part[r]));
  }
  raise_amax(out, plain);
  raise_amax(out + 1, rotated);
}

// fp32 bits of an element of matrices with any strides.
template <class T>
__device__ __forceinline__ int32_t element_bits(const Matrices& x, int64_t batch, int64_t row, int64_t column) {
  const auto* data = static_cast<const typename T::Raw*>(x.data);
  return widen<T, float>(data[batch * x.batch_stride + row * x.row_stride + column * x.column_stride]);
}

// Any strides; a warp takes a row at a time.
template <class T>
__global__ void __launch_bounds__(kAmaxThreads) amax_general(const __grid_constant__ Matrices x, int32_t* out, const float* unless) {
  if (is_known(unless)) return;
  int32_t most = 0;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kAmaxThreads / 32);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (kAmaxThreads / 32) + threadIdx.x / 32; row < x.batches * x.rows;
       row += warps) {
    const int64_t batch = row / x.rows;
    for (int64_t column = threadIdx.x % 32; column < x.columns; column += 32) {
      const int32_t bits = element_bits<T>(x, batch, row - batch * x.rows, column) & kMagnitude;
      most = max(most, bits > kInfinity ? 0 : bits);
    }
  }
  raise_amax(out, most);
}

// A warp per block of the grid.
template <class T>
__global__ void __launch_bounds__(kAmaxThreads) amax_blocks(const __grid_constant__ AmaxBlocksArguments a, int64_t grid_rows,
                                                            int64_t grid_columns) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kAmaxThreads / 32) + threadIdx.x / 32;
  if (block >= a.x.batches * grid_rows * grid_columns) return;
  const int64_t across = block % grid_columns, down = block / grid_columns % grid_rows, batch = block / grid_columns / grid_rows;
  int32_t most = 0, nan = 0;
  const int wide = a.format.per_row() ? static_cast<int>(a.x.columns) : a.format.block_columns;
  for (int i = threadIdx.x % 32; i < a.format.block_rows * wide; i += 32) {
    const int64_t row = down * a.format.block_rows + i / wide - a.window.row_phase;
    const int64_t column = across * a.format.block_columns + i % wide - a.window.column_phase;
    if (row < 0 || row >= a.x.rows || column < 0 || column >= a.x.columns) continue;
    const int32_t bits = element_bits<T>(a.x, batch, row, column) & kMagnitude;
    nan |= bits > kInfinity;
    most = max(most, bits > kInfinity ? 0 : bits);
  }
  most = lanes_max<32>(most);
  nan = lanes_max<32>(nan);
  if (threadIdx.x % 32 != 0) return;
  a.blocks[block] = most;
  if (a.nan != nullptr) a.nan[block] = nan;
  if (a.tensor != nullptr && most > __ldcg(a.tensor)) atomicMax(a.tensor, most);
}

}  // namespace cuda
}  // namespace blockfp
