// Positions of groups of rows, and small operations by group: amaxes, scales of groups with an Inf, clearing of rows without a
// group. Launches don't depend on the groups' ends, which are in device memory.
#include <algorithm>

#include "../aligned.cuh"
#include "blockfp/hadamard.h"
#include "hadamard.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

constexpr int kRowsThreads = 1024, kWarps = kRowsThreads / 32;

// Padding units along the columns, and tiles.
struct Counts {
  int32_t units, tiles;
};

// Inclusive scan over the block's threads. `warps` is reused, so threads synchronize before and after.
template <class T, class Shuffle, class Combine>
__device__ __forceinline__ T scan(T own, T (&warps)[kWarps], Shuffle shuffle, Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = shuffle(own, distance);
    if (lane >= distance) own = combine(other, own);
  }
  if (lane == 31) warps[warp] = own;
  __syncthreads();
  for (int i = 0; i < warp; ++i) own = combine(warps[i], own);
  __syncthreads();
  return own;
}

__device__ __forceinline__ int32_t scan_largest(int32_t own, int32_t (&warps)[kWarps]) {
  return scan(own, warps, [](int32_t v, int d) { return __shfl_up_sync(~0u, v, d); }, [](int32_t a, int32_t b) { return max(a, b); });
}

__device__ __forceinline__ Counts scan_sums(Counts own, Counts (&warps)[kWarps]) {
  const auto shuffle = [](Counts v, int d) { return Counts{__shfl_up_sync(~0u, v.units, d), __shfl_up_sync(~0u, v.tiles, d)}; };
  return scan(own, warps, shuffle, [](Counts a, Counts b) { return Counts{a.units + b.units, a.tiles + b.tiles}; });
}

__device__ __forceinline__ int32_t divide_up(int32_t a, int32_t b) { return a / b + (a % b != 0); }

// A single thread block: each thread has a group, and they advance together.
__global__ void __launch_bounds__(kRowsThreads) group_rows(const int32_t* ends, int32_t tokens, int32_t groups, int32_t* words,
                                                           GroupTile* tiles, int32_t most_tiles) {
  __shared__ int32_t largest[kWarps];
  __shared__ Counts sums[kWarps];
  __shared__ int32_t starts[kRowsThreads + 1];  // of the groups, in x
  __shared__ Counts before[kRowsThreads + 1];   // each group's totals of the groups before
  __shared__ int32_t carried_end;
  __shared__ Counts carried;
  if (threadIdx.x == 0) carried_end = 0, carried = {0, 0};
  __syncthreads();
  for (int32_t first = 0; first < groups; first += kRowsThreads) {
    const int32_t group = first + threadIdx.x;
    const bool is_group = group < groups;
    // Ends that descend or are outside of x are clamped to the previous end or to x.
    int32_t end = is_group ? min(max(ends[group], 0), tokens) : 0;
    end = max(scan_largest(end, largest), carried_end);
    starts[threadIdx.x + 1] = end;
    if (threadIdx.x == 0) starts[0] = carried_end;
    __syncthreads();
    const int32_t units = divide_up(end - starts[threadIdx.x], kGroupUnit);
    Counts sum = scan_sums(is_group ? Counts{units, max(units, 1)} : Counts{0, 0}, sums);
    const Counts base = carried;
    sum = {sum.units + base.units, sum.tiles + base.tiles};
    before[threadIdx.x + 1] = sum;
    if (threadIdx.x == 0) before[0] = base;
    __syncthreads();
    if (is_group) words[group] = end, words[groups + group] = sum.units * kGroupUnit;
    if (threadIdx.x == kRowsThreads - 1) carried_end = end, carried = sum;
    for (int32_t i = threadIdx.x / 32; i < kRowsThreads && first + i < groups; i += kWarps) {
      GroupTile tile{first + i, 0, starts[i], starts[i + 1] - starts[i], before[i].units * kGroupUnit, {}};
      for (int32_t j = before[i].tiles + threadIdx.x % 32; j < before[i + 1].tiles; j += 32) {
        tile.row = (j - before[i].tiles) * kGroupUnit;
        tiles[j] = tile;
      }
    }
    __syncthreads();
  }
  const GroupTile none{-1, 0, 0, 0, 0, {}};
  for (int32_t i = carried.tiles + threadIdx.x; i < most_tiles; i += kRowsThreads) tiles[i] = none;
}

constexpr int kAmaxThreads = 256, kAmaxColumns = 8 * 32;

// Amaxes of groups: a block has a tile, a thread eight columns of sixteen rows.
template <class T, bool Rotated>
__global__ void __launch_bounds__(kAmaxThreads) group_amax(const __grid_constant__ Matrices x, const GroupTile* tiles, int across,
                                                           bool vectors, int32_t* out) {
  const GroupTile tile = tiles[blockIdx.x / across];
  if (tile.group < 0) return;
  const int64_t column = static_cast<int64_t>(blockIdx.x % across) * kAmaxColumns + threadIdx.x % 32 * 8;
  const int first = tile.row + threadIdx.x / 32 * kHadamardGroup, left = min(tile.rows - first, kHadamardGroup);
  const int count = static_cast<int>(max(min(x.columns - column, int64_t{8}), int64_t{0}));
  const auto* data = static_cast<const typename T::Raw*>(x.data) + (tile.first_row + first) * x.row_stride + column;
  Eight<T> part[kHadamardGroup];
#pragma unroll
  for (int r = 0; r < kHadamardGroup; ++r) {
    part[r] = zeros<T>();
    if (r >= left || count == 0) continue;
    part[r] = vectors && count == 8 ? load_vector<T>(data + r * x.row_stride) : load_anywhere<T>(data + r * x.row_stride, count);
  }
  int32_t most[2] = {0, 0};
  const auto largest_of_part = [&] {
    Eight<T> all = part[0];
#pragma unroll
    for (int r = 1; r < kHadamardGroup; ++r) {
#pragma unroll
      for (int i = 0; i < kWords<T>; ++i) all.word[i] = larger_magnitude<T, false>(all.word[i], part[r].word[i]);
    }
    return lanes_max<32>(largest<T, false>(all));
  };
  most[0] = largest_of_part();
  if constexpr (Rotated) {
    if (left == kHadamardGroup) rotate_columns<T>(part);
    most[1] = largest_of_part();
  }
  constexpr int kAmaxes = Rotated ? 2 : 1;
  __shared__ int32_t warps[kAmaxes][kAmaxThreads / 32];
#pragma unroll
  for (int i = 0; i < kAmaxes; ++i) {
    if (threadIdx.x % 32 == 0) warps[i][threadIdx.x / 32] = most[i];
  }
  __syncthreads();
  if (threadIdx.x >= kAmaxes) return;
  int32_t of_block = 0;
#pragma unroll
  for (int i = 0; i < kAmaxThreads / 32; ++i) of_block = max(of_block, warps[threadIdx.x][i]);
  int32_t* to = out + tile.group * kAmaxes + threadIdx.x;
  // Most blocks find a larger value there already and skip the atomic.
  if (of_block > *static_cast<volatile int32_t*>(to)) atomicMax(to, of_block);
}

constexpr int kSumThreads = 256, kSumColumns = 64, kSumLanes = kSumThreads / kSumColumns;

// Sums over a group's rows: a block has some columns of a group, and a thread every fourth row of one.
template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_groups(const typename T::Raw* x, int64_t columns, const int32_t* ends, float* out) {
  __shared__ float parts[kSumLanes][kSumColumns];
  const int group = blockIdx.y, in_block = threadIdx.x % kSumColumns, lane = threadIdx.x / kSumColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + in_block;
  const int64_t begin = group == 0 ? 0 : ends[group - 1], end = ends[group];
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = begin + lane; row < end; row += kSumLanes) sum += __int_as_float(widen<T, float>(x[row * columns + column]));
  }
  parts[lane][in_block] = sum;
  __syncthreads();
  if (lane != 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kSumLanes; ++i) sum += parts[i][in_block];
  out[group * columns + column] = sum;
}

constexpr int kSpoilThreads = kGroupUnit;

__device__ __forceinline__ void spoil(void* scales, int64_t index, bool bytes) {
  if (bytes) {
    static_cast<uint8_t*>(scales)[index] = 0xFF;
  } else {
    static_cast<uint32_t*>(scales)[index] = 0x7FFFFFFF;
  }
}

// Sets the aligned codes and scales of a tile's rows and columns to NaN.
__device__ __forceinline__ void spoil_aligned(const QuantizeArguments& a, const GroupTile& tile) {
  constexpr uint8_t kNanCode = E4M3::kNanCode;
  const auto filled = [](int64_t length, int64_t unit) { return (length + unit - 1) / unit * unit; };
  const int64_t columns = a.x.columns;
  if (a.aligned_row.codes != nullptr) {
    const int64_t pitch = filled(columns, kAlignedUnit), lines = filled(a.groups.tokens, 4), first = tile.first_row + tile.row;
    for (int r = 0; r < min(tile.rows - tile.row, kGroupUnit); ++r) {
      for (int64_t i = threadIdx.x; i < columns; i += kSpoilThreads) {
        a.aligned_row.codes[(first + r) * pitch + i] = kNanCode;
        if (i % 128 == 0) a.aligned_row.scales[i / 128 * lines + first + r] = shared_scale(0);
      }
    }
  }
  if (a.aligned_column.codes != nullptr && tile.rows > 0) {
    const int64_t first = tile.first_column + tile.row, lines = filled(columns, 4);
    for (int64_t line = 0; line < columns; ++line) a.aligned_column.codes[line * a.groups.columns + first + threadIdx.x] = kNanCode;
    for (int64_t line = threadIdx.x; line < lines; line += kSpoilThreads) {
      a.aligned_column.scales[first / 128 * lines + line] = shared_scale(0);
    }
  }
}

// A block has a tile of 128 rows, whose scales become NaN if the group contains an Inf.
__global__ void __launch_bounds__(kSpoilThreads) spoil_groups(const __grid_constant__ QuantizeArguments a) {
  const GroupTile tile = a.groups.tiles[blockIdx.x];
  if (tile.group < 0 || a.groups.overflows[tile.group * a.groups.overflow_stride] != kInfinity) return;
  spoil_aligned(a, tile);
  const bool bytes = a.format.scale_bits() == 8;
  if (a.format.per_tensor() || a.format.two_levels()) {
    if (threadIdx.x == 0 && tile.row == 0) {
      if (a.format.two_levels()) {
        spoil(a.tensor_scale, tile.group, false), spoil(a.tensor_scale_t, tile.group, false);
      } else {
        if (a.row.codes != nullptr) spoil(a.row.scales, tile.group, false);
        if (a.column.codes != nullptr) spoil(a.column.scales, tile.group, false);
      }
    }
    return;
  }
  const int block = a.format.block_columns;
  const int64_t across = (a.x.columns + block - 1) / block, pitch = a.groups.columns / block;
  const int64_t at = (tile.first_column + tile.row) / block;
  const int down = kGroupUnit / block;
  const auto fours = [](int64_t lines) { return (lines + 3) / 4 * 4; };
  if (a.row.codes != nullptr) {
    if (a.format.square()) {
      for (int64_t i = threadIdx.x; i < down * across; i += kSpoilThreads) spoil(a.row.scales, at * across + i, bytes);
    } else {
      const int rows = min(tile.rows - tile.row, kGroupUnit);
      const int64_t first = tile.first_row + tile.row;
      for (int64_t i = threadIdx.x; i < rows * across; i += kSpoilThreads) {
        const int64_t row = first + i / across, column = i % across;
        spoil(a.row.scales, block == 128 ? column * fours(a.groups.tokens) + row : row * across + column, bytes);
      }
    }
  }
  if (a.column.codes != nullptr) {
    const int64_t lines = a.format.square() ? across : a.x.columns;
    for (int64_t i = threadIdx.x; i < lines * down; i += kSpoilThreads) {
      const int64_t line = i / down, column = at + i % down;
      spoil(a.column.scales, block == 128 && !a.format.square() ? column * fours(a.x.columns) + line : line * pitch + column, bytes);
    }
  }
}

constexpr int kClearThreads = 256, kClearOfRows = 264, kClearOfMatrix = 32;

__device__ __forceinline__ void clear(char* begin, int64_t bytes, int64_t first, int64_t step) {
  // Rows of 16-bit elements begin at any even address.
  if ((reinterpret_cast<uintptr_t>(begin) | bytes) % 16 == 0) {
    for (int64_t i = first; i < bytes / 16; i += step) reinterpret_cast<uint4*>(begin)[i] = uint4{};
  } else {
    for (int64_t i = first; i < bytes / 2; i += step) reinterpret_cast<uint16_t*>(begin)[i] = 0;
  }
}

__global__ void __launch_bounds__(kClearThreads) clear_rows(const int32_t* last, int64_t tokens, char* rows, int64_t row_bytes) {
  const int64_t end = *last;
  if (end < tokens) {
    clear(rows + end * row_bytes, (tokens - end) * row_bytes, static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x,
          static_cast<int64_t>(gridDim.x) * kClearThreads);
  }
}

// A few thread blocks per group's matrix.
__global__ void __launch_bounds__(kClearThreads) clear_matrices(const int32_t* ends, char* matrices, int64_t matrix_bytes) {
  const int64_t group = blockIdx.x / kClearOfMatrix, own = blockIdx.x % kClearOfMatrix;
  if (ends[group] == (group == 0 ? 0 : ends[group - 1])) {
    clear(matrices + group * matrix_bytes, matrix_bytes, own * kClearThreads + threadIdx.x, kClearOfMatrix * kClearThreads);
  }
}

}  // namespace

cudaError_t launch_group_rows(const int32_t* ends, int64_t tokens, int64_t groups, int32_t* words, cudaStream_t stream) {
  if (groups == 0) return cudaSuccess;
  // Rows and columns are 32-bit counts.
  if (group_columns(tokens, groups) > INT32_MAX) return cudaErrorInvalidValue;
  auto* tiles = const_cast<GroupTile*>(tiles_of_groups(words, groups));
  group_rows<<<1, kRowsThreads, 0, stream>>>(ends, static_cast<int32_t>(tokens), static_cast<int32_t>(groups), words, tiles,
                                             static_cast<int32_t>(group_tiles(tokens, groups)));
  return cudaGetLastError();
}

cudaError_t launch_group_amax(const Matrices& x, const int32_t* words, int64_t groups, bool rotated, int32_t* out, cudaStream_t stream) {
  const size_t bytes = sizeof(int32_t) * groups * (rotated ? 2 : 1);
  if (cudaError_t error = cudaMemsetAsync(out, 0, bytes, stream); error != cudaSuccess) return error;
  if (x.rows * x.columns * groups == 0) return cudaSuccess;
  const int64_t across = ceil_div(x.columns, kAmaxColumns), blocks = across * group_tiles(x.rows, groups);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const GroupTile* tiles = tiles_of_groups(words, groups);
  return with_dtype(x.dtype, [&](auto dtype) {
    using T = decltype(dtype);
    const auto kernel = rotated ? group_amax<T, true> : group_amax<T, false>;
    kernel<<<blocks, kAmaxThreads, 0, stream>>>(x, tiles, static_cast<int>(across), vectors_fit(x), out);
    return cudaGetLastError();
  });
}

cudaError_t launch_sum_groups(const Matrices& x, const int32_t* words, int64_t groups, float* out, cudaStream_t stream) {
  const int64_t across = ceil_div(x.columns, kSumColumns);
  if (groups * across == 0) return cudaSuccess;
  if (groups > 65535 || across > kMostBlocks) return cudaErrorInvalidConfiguration;
  return with_dtype(x.dtype, [&](auto dtype) {
    using T = decltype(dtype);
    const dim3 blocks(static_cast<unsigned>(across), static_cast<unsigned>(groups));
    sum_groups<T><<<blocks, kSumThreads, 0, stream>>>(static_cast<const typename T::Raw*>(x.data), x.columns, words, out);
    return cudaGetLastError();
  });
}

cudaError_t launch_spoil_groups(const QuantizeArguments& a, const int32_t* words, cudaStream_t stream) {
  if (a.groups.count == 0) return cudaSuccess;
  QuantizeArguments own = a;
  own.groups.tiles = tiles_of_groups(words, a.groups.count);
  const int64_t blocks = group_tiles(a.groups.tokens, a.groups.count);
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  spoil_groups<<<blocks, kSpoilThreads, 0, stream>>>(own);
  return cudaGetLastError();
}

cudaError_t launch_clear_groups(const int32_t* words, int64_t tokens, int64_t groups, void* rows, int64_t row_bytes, void* matrices,
                                int64_t matrix_bytes, cudaStream_t stream) {
  if (groups == 0) {
    return rows == nullptr || tokens * row_bytes == 0 ? cudaSuccess : cudaMemsetAsync(rows, 0, tokens * row_bytes, stream);
  }
  if (groups * kClearOfMatrix > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (rows != nullptr) {
    clear_rows<<<kClearOfRows, kClearThreads, 0, stream>>>(words + groups - 1, tokens, static_cast<char*>(rows), row_bytes);
  }
  if (matrices != nullptr) {
    clear_matrices<<<groups * kClearOfMatrix, kClearThreads, 0, stream>>>(words, static_cast<char*>(matrices), matrix_bytes);
  }
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace blockfp
