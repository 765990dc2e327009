// Products of FP8 codes and scales on Hopper: out [m, n] = a [m, k] b [n, k]^T, with fp32 sums promoted with their scales every
// 128 of k. Also of bfloat16 values, whose sums stay in the matrix units; k counts bytes there, as everywhere below.
//
// The grid is persistent: each block draws tiles of out one after another, so that none waits for a block that other kernels
// (NCCL's) keep from starting. One thread draws tiles and issues copies; two warpgroups multiply and share the tensor cores:
// while one promotes its sums, the other's products run.
#pragma once

#include "blockfp/elements.h"
#include "gemm_store.cuh"
#include "hopper.cuh"

namespace blockfp {
namespace cuda {

constexpr int kBlockK = 128, kWarpgroup = 128, kMathGroups = 2, kRowsOfGroup = 64, kTileRows = kMathGroups * kRowsOfGroup;
constexpr int kGemmThreads = (1 + kMathGroups) * kWarpgroup;

// A tile of out, 128 rows high, and its shared memory. Wide: a warpgroup multiplies two blocks of k at a time, so that products
// of one block run while it promotes those of the other.
template <int Columns, bool Wide, Scaling S>
struct GemmTile {
  static constexpr Scaling kScaling = S;
  static constexpr bool kRowsOfB = S == Scaling::kRows || S == Scaling::kBands;
  static constexpr bool kScaled = S != Scaling::kTensor && S != Scaling::kValues;
  static constexpr bool kWide = Wide;
  // Number of blocks of k in 128 columns of a group.
  static constexpr int kBlocksOfUnit = S == Scaling::kValues ? 2 : 1;
  static constexpr int kColumns = Columns, kSums = Columns / 2;
  static constexpr int kBytesA = kTileRows * kBlockK, kCodes = kBytesA + Columns * kBlockK;
  // Scales of a stage: a's, then b's. The copy engine reads only from multiples of 16 bytes, so a's begin up to three rows
  // early. It writes to multiples of 128 bytes.
  static constexpr int kSpan = kTileRows + 4, kScalesB = 160;
  static constexpr int kScales = !kScaled ? 0 : kScalesB + (kRowsOfB ? Columns : 0);
  static constexpr int kLoaded = kCodes + (!kScaled ? 0 : 4 * (kSpan + (kRowsOfB ? Columns : 0)));
  static constexpr int kStages = 225 * 1024 / (kCodes + kScales * 4);
  static constexpr int kScalesAt = kStages * kCodes, kBarriersAt = kScalesAt + kStages * kScales * 4;
  static constexpr int kTilesAt = kBarriersAt + kStages * 16;  // the tile that begins with a stage
  static constexpr int kShared = kTilesAt + kStages * 4 + 1024;
};

// Enumerates the tiles by number, group by group.
template <class Tile>
class Tiles {
 public:
  int group = -1, row = 0, column = 0, end_row = 0;  // rows of a: the tile's first, and the end of its group's
  int first_block = 0, blocks;                       // of k

  __device__ explicit Tiles(const GemmArguments& p)
      : blocks(p.along_k ? 0 : (p.k + kBlockK - 1) / kBlockK),
        p_(p),
        wide_((p.n + Tile::kColumns - 1) / Tile::kColumns) {}

  // Advances to a later tile; returns false if there are fewer, and `count()` is then known.
  __device__ bool at(int number) {
    while (number >= end_) {
      if (++group >= p_.groups) return false;
      const int before = end_of_group_, most = p_.along_k ? 0x7FFFFFFF : p_.m;
      end_of_group_ = p_.ends == nullptr ? most : min(max(p_.ends[group], before), most);
      const int entries = end_of_group_ - before;
      if (p_.along_k) {
        first_block += blocks;
        blocks = min(((entries - 1) / kBlockK + (entries > 0)) * Tile::kBlocksOfUnit, p_.k / kBlockK - first_block);
      } else {
        first_row_ = before, end_row = end_of_group_;
      }
      if (p_.along_k) end_row = p_.m;
      high_ = (end_row - first_row_ + kTileRows - 1) / kTileRows;
      begin_ = end_;
      end_ += high_ * wide_;
    }
    // In bands of sixteen tiles, so that concurrent tiles share rows and columns in L2.
    constexpr int kBand = 16;
    const int in_group = number - begin_, band = in_group / (kBand * wide_), in_band = in_group - band * kBand * wide_;
    const int height = min(kBand, high_ - band * kBand);
    row = first_row_ + (band * kBand + in_band % height) * kTileRows;
    column = in_band / height * Tile::kColumns;
    return true;
  }

  __device__ int count() const { return end_; }

 private:
  const GemmArguments& p_;
  const int wide_;
  int begin_ = 0, end_ = 0, high_ = 0, first_row_ = 0, end_of_group_ = 0;
};

// Read by the math warps in place of a tile's number when no tile is left.
constexpr int kNoTile = -1;

// A block's sequence of tile numbers: from a counter that all blocks share and that is zero between launches, or, without one,
// every gridDim.x-th number.
class Draws {
 public:
  __device__ explicit Draws(int32_t* counter) : counter_(counter), last_(static_cast<int>(blockIdx.x - gridDim.x)) {}

  __device__ int next() { return last_ = counter_ == nullptr ? last_ + static_cast<int>(gridDim.x) : atomicAdd(counter_, 1); }

  // Called with a block's first number beyond the tiles, after which it draws no more. The last block to do so resets the
  // counter.
  __device__ void end(int number, int tiles) {
    if (counter_ != nullptr && number == tiles + static_cast<int>(gridDim.x) - 1) *counter_ = 0;
  }

 private:
  int32_t* counter_;
  int last_;
};

// The next stage, and the parity of its barriers' phase.
template <int Stages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

// The scales of b for a tile of columns, one per 128 x 128, block after block of k: 192 columns are in two bands of 128,
// divided at column 64 or 128.
template <class Tile>
class Squares {
 public:
  float first = 1, second = 1;  // of the two bands, in the block that was read last
  bool border_at_64 = false;

  __device__ Squares(const GemmArguments& p, const Tiles<Tile>& tile) : step_(p.square_block) {
    if constexpr (Tile::kScaling == Scaling::kSquares) {
      const int bands = (p.n + 127) / 128, band = min(tile.column / 128, bands - 1);
      const bool other = Tile::kColumns > 128 && band + 1 < bands;
      border_at_64 = Tile::kColumns > 128 && tile.column % 128 != 0;
      first_ = p.squares + tile.group * p.square_group + band * p.square_row + tile.first_block * step_;
      second_ = first_ + other * p.square_row;
    }
  }

  __device__ __forceinline__ void read() {
    if constexpr (Tile::kScaling == Scaling::kSquares) {
      first = hopper::load(first_);
      first_ += step_;
      if constexpr (Tile::kColumns > 128) {
        second = hopper::load(second_);
        second_ += step_;
      }
    }
  }

 private:
  const float *first_ = nullptr, *second_ = nullptr;
  int64_t step_;
};

// Factors of a thread's sums of one block of k, for its upper and lower row. kSquares: one for each 64 columns.
struct Factors {
  float upper[3], lower[3];
};

// total += sums times their scales. Every operation is named, so that no compiler joins or separates any: the order and the
// rounding are defined in blockfp/definition/products.py.
template <Scaling S, int Sums>
__device__ __forceinline__ void promote(float (&total)[Sums], const float (&sums)[Sums], const Factors& by, uint32_t columns_at) {
  float upper = 0, lower = 0;
#pragma unroll
  for (int i = 0; i < Sums; i += 4) {
    if constexpr (S == Scaling::kBands) {
      if (i % 16 == 0) {
        // The scale of this thread's first column stands for all 32.
        const float of_band = hopper::load(columns_at + i * 2 * 4);
        upper = __fmul_rn(by.upper[0], of_band), lower = __fmul_rn(by.lower[0], of_band);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i + j] = __fmaf_rn(j < 2 ? upper : lower, sums[i + j], total[i + j]);
    } else if constexpr (S == Scaling::kTensor) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i + j] = __fadd_rn(total[i + j], sums[i + j]);
    } else if constexpr (S == Scaling::kSquares) {
      const float scales[] = {by.upper[i / 32], by.lower[i / 32]};
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i + j] = __fmaf_rn(scales[j / 2], sums[i + j], total[i + j]);
    } else {
      const float2 of_columns = hopper::load_pair(columns_at + i * 2 * 4);
      const float scales[] = {__fmul_rn(by.upper[0], of_columns.x), __fmul_rn(by.upper[0], of_columns.y),
                              __fmul_rn(by.lower[0], of_columns.x), __fmul_rn(by.lower[0], of_columns.y)};
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i + j] = __fmaf_rn(scales[j], sums[i + j], total[i + j]);
    }
  }
}

// sums = 64 rows of a times the tile's columns of b over one block of k, added to sums if `more`; not finished on return.
template <class A, class B, int Sums>
__device__ __forceinline__ void multiply_block(float (&sums)[Sums], uint32_t a, uint32_t b, bool more = false) {
  hopper::begin_products();
#pragma unroll
  for (int i = 0; i < kBlockK / 32; ++i) {
    hopper::multiply<A, B>(sums, hopper::describe(a + 2 * i), hopper::describe(b + 2 * i), i > 0 || more);
  }
  hopper::end_products();
}

// Finishes a warpgroup's 64 rows of sums.
template <Scaling S, int Sums>
__device__ __forceinline__ void finish_rows(const GemmArguments& p, float (&sums)[Sums], int group, Place at) {
  if constexpr (S == Scaling::kTensor || S == Scaling::kValues) {
    const float by_a = p.a_factor[group * p.a_factor_step], by_b = p.b_factor[group * p.b_factor_step];
#pragma unroll
    for (int i = 0; i < Sums; ++i) sums[i] = __fmul_rn(__fmul_rn(sums[i], by_a), by_b);
  }
  if (p.bias != nullptr) add_bias(p, sums, group, at.column);
  store(p, sums, at);
}

template <class A, class B, class Tile>
__global__ void __launch_bounds__(kGemmThreads, 1)
gemm_kernel(const GemmArguments p, const __grid_constant__ CUtensorMap codes_a, const __grid_constant__ CUtensorMap codes_b,
            const __grid_constant__ CUtensorMap scales_a, const __grid_constant__ CUtensorMap scales_b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr Scaling kScaling = Tile::kScaling;
  constexpr int kSums = Tile::kSums;
  extern __shared__ uint8_t unaligned[];
  // Shuffled, so that the compiler keeps it in a register instead of recomputing it in every loop.
  const uint32_t shared = __shfl_sync(~0u, (hopper::shared_address(unaligned) + 1023) & ~1023u, 0);
  const auto full = [&](int stage) { return shared + Tile::kBarriersAt + stage * 16; };
  const auto empty = [&](int stage) { return shared + Tile::kBarriersAt + stage * 16 + 8; };
  const auto tile_at = [&](int stage) { return shared + Tile::kTilesAt + stage * 4; };
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      hopper::barrier_init(full(stage), 1);
      hopper::barrier_init(empty(stage), kMathGroups * 4);
    }
    hopper::barriers_ready();
  }
  __syncthreads();

  Tiles<Tile> tile(p);
  Turn<Tile::kStages> turn;
  if (warp < 4) {
    hopper::give_registers<40>();
    if (warp == 0 && lane == 0) {
      // Load.
      Draws draws(p.next_tile);
      int number = draws.next();
      while (tile.at(number)) {
        // Draws the next number while the codes are loaded.
        const int later = draws.next();
        const int row_b = p.along_k ? tile.column : tile.group * p.n + tile.column;
        const int group_b = p.along_k ? 0 : tile.group * (p.b_step ? tile.blocks : 1);
        if (tile.blocks <= 0) {
          hopper::wait(empty(turn.stage), turn.parity ^ 1);
          hopper::store(tile_at(turn.stage), number);
          hopper::arrive(full(turn.stage));
          turn.advance();
        }
        for (int i = 0; i < tile.blocks; ++i, turn.advance()) {
          const int block = tile.first_block + i;
          hopper::wait(empty(turn.stage), turn.parity ^ 1);
          const uint32_t codes = shared + turn.stage * Tile::kCodes, barrier = full(turn.stage);
          const uint32_t scales = shared + Tile::kScalesAt + turn.stage * Tile::kScales * 4;
          if (i == 0) hopper::store(tile_at(turn.stage), number);
          hopper::arrive_expecting(barrier, Tile::kLoaded);
          hopper::load_box(codes, codes_a, block * kBlockK, tile.row, barrier);
          hopper::load_box(codes + Tile::kBytesA, codes_b, block * kBlockK, row_b, barrier);
          if constexpr (Tile::kScaled) {
            hopper::load_box(scales, scales_a, tile.row & ~3, block * p.a_step, barrier);
          }
          if constexpr (Tile::kRowsOfB) {
            hopper::load_box(scales + Tile::kScalesB * 4, scales_b, tile.column, group_b + block * p.b_step, barrier);
          }
        }
        number = later;
      }
      draws.end(number, tile.count());
      hopper::wait(empty(turn.stage), turn.parity ^ 1);
      hopper::store(tile_at(turn.stage), kNoTile);
      hopper::arrive(full(turn.stage));
    }
  } else {
    hopper::take_registers<232>();
    const int first_row = (warp / 4 - 1) * kRowsOfGroup;
    const uint32_t codes_at = __shfl_sync(~0u, (shared & 0x3FFFF) / 16, 0);
    const uint32_t rows_at = shared + Tile::kScalesAt + (first_row + warp % 4 * 16 + lane / 4) * 4;
    const uint32_t columns_at = shared + Tile::kScalesAt + (Tile::kScalesB + lane % 4 * 2) * 4;
    const auto multiply = [&](float(&sums)[kSums], int stage, bool more = false) {
      const uint32_t codes = codes_at + stage * (Tile::kCodes / 16);
      multiply_block<A, B>(sums, codes + first_row * (kBlockK / 16), codes + Tile::kBytesA / 16, more);
    };
    const auto scales_of = [](int stage) { return static_cast<uint32_t>(stage * Tile::kScales * 4); };
    const auto release = [&](int stage) {
      __syncwarp();
      if (lane == 0) hopper::arrive(empty(stage));
    };
    float total[kSums];
    const auto finish = [&](float(&sums)[kSums], int stage, const Factors& by) {
      if (!Tile::kRowsOfB) release(stage);
      promote<kScaling>(total, sums, by, columns_at + scales_of(stage));
      if (Tile::kRowsOfB) release(stage);
    };
    while (true) {
      hopper::wait(full(turn.stage), turn.parity);
      const int number = __shfl_sync(~0u, hopper::load_number(tile_at(turn.stage)), 0);
      if (number == kNoTile) break;
      tile.at(number);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] = 0;
      Squares<Tile> squares(p, tile);
      const uint32_t tile_rows_at = rows_at + (tile.row & 3) * 4;
      const int blocks = tile.blocks;
      // Uses the squares that were read last.
      const auto factors = [&](int stage) {
        if constexpr (kScaling == Scaling::kTensor) return Factors{};
        const uint32_t at = tile_rows_at + scales_of(stage);
        const float upper = hopper::load(at), lower = hopper::load(at + 8 * 4);
        if constexpr (Tile::kRowsOfB) return Factors{{upper}, {lower}};
        const float first = squares.first, second = squares.second, middle = squares.border_at_64 ? second : first;
        return Factors{{__fmul_rn(upper, first), __fmul_rn(upper, middle), __fmul_rn(upper, second)},
                       {__fmul_rn(lower, first), __fmul_rn(lower, middle), __fmul_rn(lower, second)}};
      };
      if constexpr (kScaling == Scaling::kValues) {
        int before = -1;
        for (int block = 0; block < blocks; ++block, turn.advance()) {
          hopper::wait(full(turn.stage), turn.parity);
          multiply(total, turn.stage, block > 0);
          hopper::wait_products<1>();
          if (block > 0) release(before);
          before = turn.stage;
        }
        hopper::wait_products<0>(total);
        if (blocks > 0) release(before);
      } else if constexpr (Tile::kWide) {
        float first[kSums] = {}, second[kSums] = {};
        int block = 0;
        for (; block + 1 < blocks; block += 2) {
          const int stage = turn.stage;
          turn.advance();
          const int later = turn.stage;
          hopper::wait(full(stage), turn.parity ^ (later == 0));
          multiply(first, stage);
          hopper::wait(full(later), turn.parity);
          multiply(second, later);
          turn.advance();
          squares.read();
          const Factors by = factors(stage);
          squares.read();
          const Factors then_by = factors(later);
          hopper::wait_products<1>(first);
          finish(first, stage, by);
          hopper::wait_products<0>(second);
          finish(second, later, then_by);
        }
        if (block < blocks) {
          hopper::wait(full(turn.stage), turn.parity);
          multiply(first, turn.stage);
          squares.read();
          const Factors by = factors(turn.stage);
          hopper::wait_products<0>(first);
          finish(first, turn.stage, by);
          turn.advance();
        }
      } else if (blocks > 0) {
        float sums[kSums] = {};
        squares.read();
        hopper::wait(full(turn.stage), turn.parity);
        for (int block = 0; block < blocks; ++block) {
          const int stage = turn.stage;
          multiply(sums, stage);
          const Factors by = factors(stage);
          turn.advance();
          // In a branch with a loop, which the compiler doesn't move among the products.
          if (block + 1 < blocks) {
            squares.read();
            hopper::wait(full(turn.stage), turn.parity);
          }
          hopper::wait_products<0>(sums);
          finish(sums, stage, by);
        }
      }
      if (blocks <= 0) {
        release(turn.stage);
        turn.advance();
      }
      // Store.
      const int64_t above = p.along_k ? static_cast<int64_t>(tile.group) * p.m : 0;
      finish_rows<kScaling>(p, total, tile.group, {above + tile.row + first_row, above + tile.end_row, tile.column});
    }
  }
#endif
}

}  // namespace cuda
}  // namespace blockfp
