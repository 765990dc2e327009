// Products of FP8 codes and scales on Hopper: out [m, n] = a [m, k] b [n, k]^T, fp32 sums promoted with their scales every 128 of k.
//
// A persistent grid: each block takes tiles of out in turn. One thread loads by the copy engine; two warpgroups multiply, and share the
// tensor cores: while one promotes its sums, the other's products run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "blockfp/dtypes.h"
#include "gemm.h"
#include "hopper.cuh"

namespace blockfp {
namespace cuda {

constexpr int kBlockK = 128, kWarpgroup = 128, kMathGroups = 2, kRowsOfGroup = 64, kTileRows = kMathGroups * kRowsOfGroup;
constexpr int kGemmThreads = (1 + kMathGroups) * kWarpgroup;

// Shared memory for tiles of 128 rows and 128 or 192 columns.
template <int Columns>
struct GemmTile {
  static constexpr int kBytesA = kTileRows * kBlockK, kBytesB = Columns * kBlockK, kCodes = kBytesA + kBytesB;
  // Scales of a stage: those of a, then those of b. The copy engine reads from multiples of 16 bytes only: those of a begin up to three
  // rows early. It writes to multiples of 128 bytes.
  static constexpr int kSpan = kTileRows + 4, kScalesB = 160, kScales = kScalesB + Columns;
  static constexpr int kStages = 225 * 1024 / (kCodes + kScales * 4);
  static constexpr int kScalesAt = kStages * kCodes, kBarriersAt = kScalesAt + kStages * kScales * 4;
  static constexpr int kShared = kBarriersAt + kStages * 16 + 1024;
};

// The tiles of one block, one after another. Groups follow each other along the rows.
template <int Columns>
class Tiles {
 public:
  int group = -1, first_row = 0, end_row = 0;  // of the group
  int row = 0, column = 0;                     // of the tile

  __device__ explicit Tiles(const GemmArguments& p) : p_(p), wide_((p.n + Columns - 1) / Columns), next_(blockIdx.x) {}

  __device__ bool next() {
    while (next_ >= end_) {
      if (++group >= p_.groups) return false;
      first_row = end_row;
      end_row = p_.ends == nullptr ? p_.m : min(max(p_.ends[group], first_row), p_.m);
      high_ = (end_row - first_row + kTileRows - 1) / kTileRows;
      begin_ = end_;
      end_ += high_ * wide_;
    }
    // Down bands of eight tiles, so that what runs at one time shares rows and columns in L2.
    constexpr int kBand = 8;
    const int at = next_ - begin_, band = at / (kBand * wide_), in_band = at - band * kBand * wide_;
    const int height = min(kBand, high_ - band * kBand);
    row = first_row + (band * kBand + in_band % height) * kTileRows;
    column = in_band / height * Columns;
    next_ += gridDim.x;
    return true;
  }

 private:
  const GemmArguments& p_;
  const int wide_;
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
template <class A, class B, bool Squares, int Columns>
__global__ void __launch_bounds__(kGemmThreads, 1)
gemm_kernel(const GemmArguments p, const __grid_constant__ CUtensorMap codes_a, const __grid_constant__ CUtensorMap codes_b,
            const __grid_constant__ CUtensorMap scales_a, const __grid_constant__ CUtensorMap scales_b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = GemmTile<Columns>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ uint8_t unaligned[];
  // Shuffled, so that it is kept in a register and not worked out again in every loop.
  const uint32_t shared = __shfl_sync(~0u, (hopper::shared_address(unaligned) + 1023) & ~1023u, 0);
  const auto full = [&](int stage) { return shared + Tile::kBarriersAt + stage * 16; };
  const auto empty = [&](int stage) { return shared + Tile::kBarriersAt + stage * 16 + 8; };
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int blocks = (p.k + kBlockK - 1) / kBlockK;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(full(stage), 1);
      hopper::barrier_init(empty(stage), kMathGroups * 4);
    }
    hopper::barriers_ready();
  }
  __syncthreads();

  Tiles<Columns> tile(p);
  Turn<kStages> turn;
  if (warp < 4) {
    hopper::give_registers<40>();
    if (warp == 0 && lane == 0) {
      // Load.
      constexpr int kBytes = Tile::kCodes + 4 * (Tile::kSpan + (Squares ? 0 : Columns));
      while (tile.next()) {
        const int row_b = tile.group * p.n + tile.column, group_b = tile.group * (p.b_step ? blocks : 1);
        for (int block = 0; block < blocks; ++block, turn.advance()) {
          hopper::wait(empty(turn.stage), turn.parity ^ 1);
          const uint32_t codes = shared + turn.stage * Tile::kCodes, barrier = full(turn.stage);
          const uint32_t scales = shared + Tile::kScalesAt + turn.stage * Tile::kScales * 4;
          hopper::arrive_expecting(barrier, kBytes);
          hopper::load_box(codes, codes_a, block * kBlockK, tile.row, barrier);
          hopper::load_box(codes + Tile::kBytesA, codes_b, block * kBlockK, row_b, barrier);
          hopper::load_box(scales, scales_a, tile.row & ~3, block * p.a_step, barrier);
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
    const uint32_t rows_at = shared + Tile::kScalesAt + (math * kRowsOfGroup + warp % 4 * 16 + lane / 4) * 4;
    const uint32_t columns_at = shared + Tile::kScalesAt + (Tile::kScalesB + lane % 4 * 2) * 4;
    const int bands = (p.n + 127) / 128;
    float sums[Columns / 2] = {}, total[Columns / 2];
    while (tile.next()) {
#pragma unroll
      for (int i = 0; i < Columns / 2; ++i) total[i] = 0;
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
        // Multiply.
        const uint32_t tile_b = codes_at + stage * (Tile::kCodes / 16) + Tile::kBytesA / 16;
        const uint32_t tile_a = codes_at + stage * (Tile::kCodes / 16) + math * (kRowsOfGroup * kBlockK / 16);
        hopper::begin_products();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          hopper::multiply<A, B>(sums, hopper::describe(tile_a + 2 * i), hopper::describe(tile_b + 2 * i), i > 0);
        }
        hopper::end_products();
        // While the products run.
        const float upper = hopper::load(tile_rows_at + stage_scales), lower = hopper::load(tile_rows_at + stage_scales + 8 * 4);
        turn.advance();
        if (block + 1 < blocks) {
          if (Squares) next_square = hopper::load(squares + block + 1);
          if (Squares && Columns > 128) next_other = hopper::load(other_squares + block + 1);
          hopper::wait(full(turn.stage), turn.parity);
        }
        const float upper_by[3] = {upper * square, upper * (border_at_64 ? other : square), upper * other};
        const float lower_by[3] = {lower * square, lower * (border_at_64 ? other : square), lower * other};
        hopper::wait_products(sums);
        const auto release = [&] {
          __syncwarp();
          if (lane == 0) hopper::arrive(empty(stage));
        };
        if (Squares) release();
        // Promote.
#pragma unroll
        for (int i = 0; i < Columns / 2; i += 4) {
          if constexpr (Squares) {
            const float by[] = {upper_by[i / 32], lower_by[i / 32]};
#pragma unroll
            for (int j = 0; j < 4; ++j) total[i + j] += by[j / 2] * sums[i + j];
          } else {
            const float2 of_columns = hopper::load_pair(columns_at + stage_scales + i * 2 * 4);
            const float by[] = {upper * of_columns.x, upper * of_columns.y, lower * of_columns.x, lower * of_columns.y};
#pragma unroll
            for (int j = 0; j < 4; ++j) total[i + j] += by[j] * sums[i + j];
          }
        }
        if (!Squares) release();
      }
      // Store.
      if (p.bias != nullptr) add_bias(p, total, tile.group, tile.column);
      const int row = tile.row + math * kRowsOfGroup;
      if (p.dtype == Bf16::kId) {
        store_sums<Bf16>(p, total, row, tile.end_row, tile.column);
      } else if (p.dtype == Fp16::kId) {
        store_sums<Fp16>(p, total, row, tile.end_row, tile.column);
      } else {
        store_sums<Fp32>(p, total, row, tile.end_row, tile.column);
      }
    }
  }
#endif
}

}  // namespace cuda
}  // namespace blockfp
