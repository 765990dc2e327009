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

constexpr int kBlockK = 128, kWarpgroup = 128, kMathGroups = 2;
constexpr int kGemmThreads = (1 + kMathGroups) * kWarpgroup;

// A tile has kMathGroups * Waves * 64 rows, of which a warpgroup multiplies 64 at a time, and 128 or 192 columns.
template <int Waves, int Columns>
struct GemmTile {
  static constexpr int kRows = kMathGroups * Waves * 64;
  static constexpr int kBytesA = kRows * kBlockK, kBytesB = Columns * kBlockK, kCodes = kBytesA + kBytesB;
  // Scales of a stage: those of a by spans of 128 rows, then those of b. The copy engine reads from multiples of 16 bytes only: a span
  // begins up to three rows early. It writes to multiples of 128 bytes.
  static constexpr int kSpan = 128 + 4, kSpanStride = 160, kScalesB = Waves * kSpanStride, kScales = kScalesB + Columns;
  static constexpr int kStages = 225 * 1024 / (kCodes + kScales * 4);
  static constexpr int kScalesAt = kStages * kCodes, kBarriersAt = kScalesAt + kStages * kScales * 4;
  static constexpr int kShared = kBarriersAt + kStages * 16 + 1024;
};

// The tiles of one cluster, one after another. Groups follow each other along the rows.
template <int Rows, int Columns, int Cluster>
class Tiles {
 public:
  int group = -1, first_row = 0, end_row = 0;  // of the group
  int row = 0, column = 0;                     // of the tile

  __device__ Tiles(const GemmArguments& p, int rank)
      : p_(p), rank_(rank), wide_((p.n + Columns * Cluster - 1) / (Columns * Cluster)), next_(blockIdx.x / Cluster) {}

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
    column = (in_band / height * Cluster + rank_) * Columns;
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

template <class T>
__device__ __forceinline__ typename T::Raw rounded(float x) {
  if constexpr (T::kId == Fp32::kId) return __float_as_uint(x);
  if constexpr (T::kId == Fp16::kId) return __half_as_ushort(__float2half_rn(x));
  if constexpr (T::kId == Bf16::kId) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Stores a warpgroup's 64 rows of sums, whose first row and column are given; rows from end_row on belong to others.
template <class T, int Sums>
__device__ __forceinline__ void store_sums(const GemmArguments& p, float (&sums)[Sums], int row, int end_row, int column) {
  using Raw = typename T::Raw;
  struct alignas(4 * sizeof(Raw)) Four {
    Raw raw[4];
  };
  const int lane = threadIdx.x % 32, odd = lane & 1;
  // Of two spans of eight columns a thread has two columns each; neighbours swap, so that it has four of one.
#pragma unroll
  for (int i = 0; i < Sums; ++i) {
    if (i % 8 >= 4) continue;
    const float taken = __shfl_xor_sync(~0u, odd ? sums[i] : sums[i + 4], 1);
    sums[i] = odd ? taken : sums[i];
    sums[i + 4] = odd ? sums[i + 4] : taken;
  }
  row += threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  column += odd * 8 + lane / 2 % 2 * 4;
  Raw* const out = static_cast<Raw*>(p.out) + (static_cast<int64_t>(row) * p.n + column);
  if (p.vectors && !p.accumulate) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Raw* const to = out + half * 8 * static_cast<int64_t>(p.n);
      const int count = row + half * 8 < end_row ? p.n - column : 0;
#pragma unroll
      for (int i = half * 2; i < Sums; i += 8) {
        const Four four{rounded<T>(sums[i]), rounded<T>(sums[i + 1]), rounded<T>(sums[i + 4]), rounded<T>(sums[i + 5])};
        if (i / 8 * 16 < count) *reinterpret_cast<Four*>(to + i / 8 * 16) = four;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Sums; ++i) {
    const int half = i / 2 % 2, at = i / 8 * 16 + i / 4 % 2 * 2 + i % 2;
    if (row + half * 8 < end_row && column + at < p.n) {
      Raw* const to = out + half * 8 * static_cast<int64_t>(p.n) + at;
      *to = rounded<T>(sums[i] + (p.accumulate ? value_at(to, T::kId, 0) : 0));
    }
  }
}

template <int Sums>
__device__ __forceinline__ void add_bias(const GemmArguments& p, float (&sums)[Sums], int group, int column) {
  column += threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < Sums; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = column + i * 2 + j;
      const float bias = c < p.n ? value_at(p.bias, p.bias_dtype, static_cast<int64_t>(group) * p.n + c) : 0;
      sums[i + j] += bias, sums[i + 2 + j] += bias;
    }
  }
}

// Squares: whether b has a scale for every 128 of its rows, which are columns of out; else each has its own.
template <class A, class B, bool Squares, int Waves, int Columns, int Cluster>
__global__ void __launch_bounds__(kGemmThreads, 1)
gemm_kernel(const GemmArguments p, const __grid_constant__ CUtensorMap codes_a, const __grid_constant__ CUtensorMap codes_b,
            const __grid_constant__ CUtensorMap scales_a, const __grid_constant__ CUtensorMap scales_b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = GemmTile<Waves, Columns>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ uint8_t unaligned[];
  // Shuffled, so that it is kept in a register and not worked out again in every loop.
  const uint32_t shared = __shfl_sync(~0u, (hopper::shared_address(unaligned) + 1023) & ~1023u, 0);
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

  Tiles<Tile::kRows, Columns, Cluster> tile(p, rank);
  Turn<kStages> turn;
  if (warp < 4) {
    hopper::give_registers<40>();
    if (warp == 0 && lane == 0) {
      // Load.
      constexpr int kPart = Tile::kRows / Cluster, kBytes = Tile::kCodes + 4 * (Waves * Tile::kSpan + (Squares ? 0 : Columns));
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
    const uint32_t codes_at = __shfl_sync(~0u, (shared & 0x3FFFF) / 16, 0);
    const uint32_t rows_at = shared + Tile::kScalesAt + (math * (Waves == 2 ? Tile::kSpanStride : 64) + warp % 4 * 16 + lane / 4) * 4;
    const uint32_t columns_at = shared + Tile::kScalesAt + (Tile::kScalesB + lane % 4 * 2) * 4;
    const int bands = (p.n + 127) / 128;
    float sums[Columns / 2] = {}, total[Waves][Columns / 2];
    while (tile.next()) {
#pragma unroll
      for (int wave = 0; wave < Waves; ++wave) {
#pragma unroll
        for (int i = 0; i < Columns / 2; ++i) total[wave][i] = 0;
      }
      // 192 columns lie in two bands of 128, whose border is at 64 or 128.
      const int band = min(tile.column / 128, bands - 1), other_band = Columns > 128 && band + 1 < bands;
      const bool border_at_64 = Columns > 128 && tile.column % 128 != 0;
      const float* const squares = p.b_squares + (tile.group * bands + band) * p.b_squares_stride;
      const float* const other_squares = squares + other_band * p.b_squares_stride;
      float next_square = Squares ? squares[0] : 1, next_other = Squares && Columns > 128 ? other_squares[0] : 1;
      const uint32_t tile_rows_at = rows_at + (tile.row & 3) * 4;
      hopper::wait(full(turn.stage), turn.parity);
      for (int block = 0; block < blocks; ++block) {
        const float square = next_square, other = next_other;
        const int stage = turn.stage;
        const uint32_t stage_scales = stage * Tile::kScales * 4;
#pragma unroll
        for (int wave = 0; wave < Waves; ++wave) {
          // Multiply.
          const uint32_t tile_b = codes_at + stage * (Tile::kCodes / 16) + Tile::kBytesA / 16;
          const uint32_t tile_a = codes_at + stage * (Tile::kCodes / 16) + (math * Waves + wave) * (64 * kBlockK / 16);
          hopper::begin_products();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            hopper::multiply<A, B>(sums, hopper::describe(tile_a + 2 * i), hopper::describe(tile_b + 2 * i), i > 0);
          }
          hopper::end_products();
          const uint32_t at = tile_rows_at + stage_scales + wave * 64 * 4;
          const float upper = hopper::load(at), lower = hopper::load(at + 8 * 4);
          if (wave == Waves - 1) {
            // While the products run.
            turn.advance();
            if (block + 1 < blocks) {
              if (Squares) next_square = hopper::load(squares + block + 1);
              if (Squares && Columns > 128) next_other = hopper::load(other_squares + block + 1);
              hopper::wait(full(turn.stage), turn.parity);
            }
          }
          float upper_by[3] = {upper * square, upper * (border_at_64 ? other : square), upper * other};
          float lower_by[3] = {lower * square, lower * (border_at_64 ? other : square), lower * other};
          hopper::wait_products(sums);
          const auto release = [&] {
            __syncwarp();
            if (lane < Cluster) hopper::arrive_at(empty(stage), lane);
          };
          if (Squares && wave == Waves - 1) release();
          // Promote.
#pragma unroll
          for (int i = 0; i < Columns / 2; i += 4) {
            if constexpr (Squares) {
              const float by[] = {upper_by[i / 32], lower_by[i / 32]};
#pragma unroll
              for (int j = 0; j < 4; ++j) total[wave][i + j] += by[j / 2] * sums[i + j];
            } else {
              const float2 of_columns = hopper::load_pair(columns_at + stage_scales + i * 2 * 4);
              const float by[] = {upper * of_columns.x, upper * of_columns.y, lower * of_columns.x, lower * of_columns.y};
#pragma unroll
              for (int j = 0; j < 4; ++j) total[wave][i + j] += by[j] * sums[i + j];
            }
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
