// Products of FP8 codes and scales on Hopper: out [m, n] = a [m, k] b [n, k]^T, fp32 sums promoted with their scales every 128 of k.
//
// A persistent grid: each block takes tiles of out in turn. One thread loads by the copy engine; two warpgroups multiply, and share the
// tensor cores: while one promotes its sums, the other's products run. A cluster's blocks have neighbouring tiles of the same rows:
// each loads a part of a for all of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "blockfp/dtypes.h"
#include "gemm.h"
#include "hopper.cuh"

namespace blockfp {
namespace cuda {

constexpr int kBlockK = 128, kTileN = 128, kWarpgroup = 128, kMathGroups = 2;
constexpr int kGemmThreads = (1 + kMathGroups) * kWarpgroup;

// A tile has kMathGroups * Waves * 64 rows; a warpgroup multiplies 64 of them at a time.
template <int Waves>
struct GemmTile {
  static constexpr int kRows = kMathGroups * Waves * 64;
  static constexpr int kStages = Waves == 2 ? 4 : 6;
  static constexpr int kBytesA = kRows * kBlockK, kBytesB = kTileN * kBlockK, kCodes = kBytesA + kBytesB;
  // Scales of a stage: those of a by spans of 128 rows, then those of b. The copy engine reads from multiples of 16 bytes only: a span
  // begins up to three rows early. It writes to multiples of 128 bytes.
  static constexpr int kSpan = 128 + 4, kSpanStride = 160, kScalesB = Waves * kSpanStride, kScales = kScalesB + kTileN;
  static constexpr int kScalesAt = kStages * kCodes, kBarriersAt = kScalesAt + kStages * kScales * 4;
  static constexpr int kShared = kBarriersAt + kStages * 16 + 1024;
};

// The tiles of one cluster, one after another. Groups follow each other along the rows.
template <int Rows, int Cluster>
class Tiles {
 public:
  int group = -1, first_row = 0, end_row = 0;  // of the group
  int row = 0, column = 0;                     // of the tile

  __device__ Tiles(const GemmArguments& p, int rank)
      : p_(p), rank_(rank), wide_((p.n + kTileN * Cluster - 1) / (kTileN * Cluster)), next_(blockIdx.x / Cluster) {}

  __device__ bool next() {
    while (next_ >= end_) {
      if (++group >= p_.groups) return false;
      first_row = end_row;
      end_row = p_.ends == nullptr ? p_.m : min(max(p_.ends[group], first_row), p_.m);
      high_ = (end_row - first_row + Rows - 1) / Rows;
      begin_ = end_;
      end_ += high_ * wide_;
    }
    // Down bands of eight tiles, so that what runs at one time shares rows and columns in L2.
    constexpr int kBand = 8;
    const int at = next_ - begin_, band = at / (kBand * wide_), in_band = at - band * kBand * wide_;
    const int height = min(kBand, high_ - band * kBand);
    row = first_row + (band * kBand + in_band % height) * Rows;
    column = (in_band / height * Cluster + rank_) * kTileN;
    next_ += gridDim.x / Cluster;
    return true;
  }

 private:
  const GemmArguments& p_;
  const int rank_, wide_;
  int next_, begin_ = 0, end_ = 0, high_ = 0;
};

// Which stage is next, and the parity of its barriers' phase.
template <int Stages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float value_at(const void* x, int dtype, int64_t i) {
  if (dtype == Fp32::kId) return static_cast<const float*>(x)[i];
  const uint32_t raw = static_cast<const uint16_t*>(x)[i];
  return dtype == Bf16::kId ? __uint_as_float(raw << 16) : __half2float(__ushort_as_half(raw));
}

// Four neighbouring elements of T.
template <class T>
struct Four {
  typename T::Raw raw[4];
};

template <class T>
__device__ __forceinline__ void set(Four<T>& four, int i, float x) {
  if constexpr (T::kId == Fp32::kId) four.raw[i] = __float_as_uint(x);
  if constexpr (T::kId == Fp16::kId) four.raw[i] = __half_as_ushort(__float2half_rn(x));
  if constexpr (T::kId == Bf16::kId) four.raw[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Stores 64 x 128 sums of a warpgroup, whose first row and column are given; rows from end_row on belong to others.
template <class T>
__device__ __forceinline__ void store_sums(const GemmArguments& p, float (&sums)[64], int row, int end_row, int column) {
  using Vector = std::conditional_t<T::kId == Fp32::kId, uint4, uint2>;
  const int lane = threadIdx.x % 32, odd = lane & 1;
  row += threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  column += odd * 8 + lane / 2 % 2 * 4;
#pragma unroll
  for (int span = 0; span < 64; span += 8) {
#pragma unroll
    for (int i = span; i < span + 4; i += 2) {
      // Of two spans of eight columns a thread has two columns each; neighbours swap, so that it has four of one.
      const float taken[] = {__shfl_xor_sync(~0u, odd ? sums[i] : sums[i + 4], 1),
                             __shfl_xor_sync(~0u, odd ? sums[i + 1] : sums[i + 5], 1)};
      float v[] = {odd ? taken[0] : sums[i], odd ? taken[1] : sums[i + 1], odd ? sums[i + 4] : taken[0],
                   odd ? sums[i + 5] : taken[1]};
      const int r = row + (i - span) * 4, c = column + span * 2;
      typename T::Raw* const to = static_cast<typename T::Raw*>(p.out) + (static_cast<int64_t>(r) * p.n + c);
      const int count = r < end_row ? p.n - c : 0;
      if (p.accumulate) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < count) v[j] += value_at(to, T::kId, j);
        }
      }
      Four<T> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) set(four, j, v[j]);
      if (p.vectors) {
        if (count > 0) *reinterpret_cast<Vector*>(to) = bit_cast<Vector>(four);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < count) to[j] = four.raw[j];
        }
      }
    }
  }
}

__device__ __forceinline__ void add_bias(const GemmArguments& p, float (&sums)[64], int group, int column) {
  column += threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = column + i * 2 + j;
      const float bias = c < p.n ? value_at(p.bias, p.bias_dtype, static_cast<int64_t>(group) * p.n + c) : 0;
      sums[i + j] += bias, sums[i + 2 + j] += bias;
    }
  }
}

// Squares: whether b has a scale for every 128 of its rows, which are columns of out; else each has its own.
template <class A, class B, bool Squares, int Waves, int Cluster>
__global__ void __launch_bounds__(kGemmThreads, 1)
gemm_kernel(const GemmArguments p, const __grid_constant__ CUtensorMap codes_a, const __grid_constant__ CUtensorMap codes_b,
            const __grid_constant__ CUtensorMap scales_a, const __grid_constant__ CUtensorMap scales_b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = GemmTile<Waves>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ uint8_t unaligned[];
  const uint32_t shared = (hopper::shared_address(unaligned) + 1023) & ~1023u;
  const float* const all_scales =
      reinterpret_cast<const float*>(unaligned + (shared - hopper::shared_address(unaligned)) + Tile::kScalesAt);
  const auto full = [&](int stage) { return shared + Tile::kBarriersAt + stage * 16; };
  const auto empty = [&](int stage) { return shared + Tile::kBarriersAt + stage * 16 + 8; };
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = Cluster > 1 ? static_cast<int>(hopper::cluster_rank()) : 0;
  const int blocks = (p.k + kBlockK - 1) / kBlockK;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(full(stage), 1);
      hopper::barrier_init(empty(stage), kMathGroups * 4 * Cluster);
    }
    hopper::barriers_ready();
  }
  __syncthreads();
  if constexpr (Cluster > 1) hopper::cluster_sync();

  Tiles<Tile::kRows, Cluster> tile(p, rank);
  Turn<kStages> turn;
  if (warp < 4) {
    hopper::give_registers<40>();
    if (warp == 0 && lane == 0) {
      // Load.
      constexpr int kPart = Tile::kRows / Cluster, kBytes = Tile::kCodes + 4 * (Waves * Tile::kSpan + (Squares ? 0 : kTileN));
      while (tile.next()) {
        const int row_b = tile.group * p.n + tile.column, group_b = tile.group * (p.b_step ? blocks : 1);
        for (int block = 0; block < blocks; ++block, turn.advance()) {
          hopper::wait(empty(turn.stage), turn.parity ^ 1);
          const uint32_t codes = shared + turn.stage * Tile::kCodes, barrier = full(turn.stage);
          const uint32_t scales = shared + Tile::kScalesAt + turn.stage * Tile::kScales * 4;
          hopper::arrive_expecting(barrier, kBytes);
          if constexpr (Cluster == 1) {
            hopper::load_box(codes, codes_a, block * kBlockK, tile.row, barrier);
          } else {
            hopper::load_box_to((1 << Cluster) - 1, codes + rank * kPart * kBlockK, codes_a, block * kBlockK,
                                tile.row + rank * kPart, barrier);
          }
          hopper::load_box(codes + Tile::kBytesA, codes_b, block * kBlockK, row_b, barrier);
#pragma unroll
          for (int i = 0; i < Waves; ++i) {
            hopper::load_box(scales + i * Tile::kSpanStride * 4, scales_a, (tile.row & ~3) + i * 128, block * p.a_step, barrier);
          }
          if constexpr (!Squares) {
            hopper::load_box(scales + Tile::kScalesB * 4, scales_b, tile.column, group_b + block * p.b_step, barrier);
          }
        }
      }
    }
  } else {
    hopper::take_registers<232>();
    const int math = warp / 4 - 1;
    float sums[64] = {}, total[Waves][64];
    while (tile.next()) {
#pragma unroll
      for (int wave = 0; wave < Waves; ++wave) {
#pragma unroll
        for (int i = 0; i < 64; ++i) total[wave][i] = 0;
      }
      const int bands = (p.n + kTileN - 1) / kTileN;
      const float* const squares = p.b_squares + (tile.group * bands + min(tile.column / kTileN, bands - 1)) * p.b_squares_stride;
      float next_square = Squares ? squares[0] : 1;
      for (int block = 0; block < blocks; ++block, turn.advance()) {
        const float square = next_square;
        if (Squares && block + 1 < blocks) next_square = squares[block + 1];
        const uint32_t codes = shared + turn.stage * Tile::kCodes;
        const float* const scales = all_scales + turn.stage * Tile::kScales;
        hopper::wait(full(turn.stage), turn.parity);
#pragma unroll
        for (int wave = 0; wave < Waves; ++wave) {
          // Multiply.
          const int part = (math * Waves + wave) * 64;
          const uint64_t a = hopper::describe(codes + part * kBlockK), b = hopper::describe(codes + Tile::kBytesA);
          hopper::begin_products();
#pragma unroll
          for (int i = 0; i < 4; ++i) hopper::multiply<A, B>(sums, a + 2 * i, b + 2 * i, i > 0);
          hopper::end_products();
          const float* const of_row = scales + part / 128 * Tile::kSpanStride + part % 128 + warp % 4 * 16 + lane / 4 + (tile.row & 3);
          const float upper = of_row[0] * square, lower = of_row[8] * square;
          hopper::wait_products<0>(sums);
          const auto release = [&] {
            __syncwarp();
            if (lane < Cluster) hopper::arrive_at(empty(turn.stage), lane);
          };
          if (Squares && wave == Waves - 1) release();
          // Promote.
#pragma unroll
          for (int i = 0; i < 64; i += 4) {
            float2 of_columns = {1, 1};
            if (!Squares) of_columns = *reinterpret_cast<const float2*>(scales + Tile::kScalesB + i * 2 + lane % 4 * 2);
            total[wave][i] += (Squares ? upper : upper * of_columns.x) * sums[i];
            total[wave][i + 1] += (Squares ? upper : upper * of_columns.y) * sums[i + 1];
            total[wave][i + 2] += (Squares ? lower : lower * of_columns.x) * sums[i + 2];
            total[wave][i + 3] += (Squares ? lower : lower * of_columns.y) * sums[i + 3];
          }
          if (!Squares && wave == Waves - 1) release();
        }
      }
      // Store.
      if (p.bias != nullptr) {
#pragma unroll
        for (int wave = 0; wave < Waves; ++wave) add_bias(p, total[wave], tile.group, tile.column);
      }
      const auto store_tile = [&](auto dtype) {
#pragma unroll
        for (int wave = 0; wave < Waves; ++wave) {
          store_sums<decltype(dtype)>(p, total[wave], tile.row + (math * Waves + wave) * 64, tile.end_row, tile.column);
        }
      };
      if (p.dtype == Bf16::kId) {
        store_tile(Bf16{});
      } else if (p.dtype == Fp16::kId) {
        store_tile(Fp16{});
      } else {
        store_tile(Fp32{});
      }
    }
  }
  // No block leaves while another may still write to its shared memory.
  if constexpr (Cluster > 1) hopper::cluster_sync();
#endif
}

}  // namespace cuda
}  // namespace blockfp
