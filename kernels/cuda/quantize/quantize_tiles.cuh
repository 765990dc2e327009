// Quantizes along the rows (transposed codes), along both axes in one read, and in square blocks.
//
// A thread block has a tile, a thread a piece of it (tile_piece.cuh), read from a source (sources.cuh). There are three
// kernels, by who determines a scale (tile_scales.cuh, wide_scales.cuh): one scale for both directions; a warp, for short
// blocks; all warps, for blocks as long as the tile. Each loads, computes scales and codes of the rows, then of the columns,
// which are stored through shared memory (tile_codes.cuh).
#pragma once

#include "four_over_six.cuh"
#include "hadamard.cuh"
#include "sources.cuh"
#include "tile_codes.cuh"
#include "tile_scales.cuh"
#include "wide_scales.cuh"

namespace blockfp {
namespace cuda {

// This block's tile in a grid of `across` x `down` tiles per matrix: down `strip` tiles, then across, so that tiles written
// together are adjacent in the codes of both directions.
__device__ __forceinline__ TileOrigin tile_of_block(const Window& window, uint32_t across, uint32_t down, uint32_t strip) {
  const uint32_t matrix = across * down, batch = blockIdx.x / matrix, in_matrix = blockIdx.x - batch * matrix;
  const uint32_t top = in_matrix / (across * strip) * strip, in_strip = in_matrix - top * across, tall = min(down - top, strip);
  return {batch, static_cast<int64_t>(top + in_strip % tall) * kTileRows - window.row_phase,
          static_cast<int64_t>(in_strip / tall) * kTileColumns - window.column_phase};
}

// Thread blocks that a multiprocessor's registers allow. Codes below a byte take more steps, and more warps to hide them;
// random bytes, and codes under two scales, take registers.
template <class E, class T, Rounding R, bool Chooses = false>
constexpr int kTileBlocks = sizeof(typename T::Raw) == 4 || R == Rounding::kStochastic ? 2 : (E::kBits < 8 && !Chooses ? 4 : 3);

// Allows the launch of the kernel that orders or marks the scales (launch_early), which waits for this kernel's end itself.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// A tile's codes, and the scale of a block that is the whole tile, in shared memory.
template <class E, int Block, Rounding R>
struct StagedSquare {
  StagedCodes<E, R> codes;
  std::conditional_t<Block == 128, TileScale<E>, Nothing> scale;
};

// Scale and codes of a piece, with one scale for both directions: of the tensor, or of square blocks.
template <int Block, bool Chooses, class E, class T, Rounding R>
__device__ __forceinline__ void quantize_square(const Piece<E, T, R>& piece, const TensorScale& tensor, StagedSquare<E, Block, R>& shared) {
  const QuantizeArguments& a = piece.a;
  using Codes = PieceCodes<E, T, R, kRange<Block>>;
  BlockScale<float> scale{0, tensor.multiplier};
  int32_t amax = 0;
  bool nan = false;
  KnownCodes chosen;
  if constexpr (Block == 0) {
    if (a.recorded != nullptr) raise_amax(a.recorded, piece.template amax<false>());
  } else {
    if constexpr (Block == 128) scale = shared.scale.decide(piece);
    if constexpr (Block < 128) {
      amax = amax_of_square<Block>(piece, nan);
      if constexpr (Chooses) {
        const auto encode = [&](float multiplier, auto put) {
          const bool care = nan || exceeds_range<Block>(amax, multiplier);
          if constexpr (kToNearest<R>) Codes(piece, care, tensor).rows([=](int) { return multiplier; }, put);
        };
        scale = choose_square(piece, amax, tensor, chosen, encode);
      } else {
        scale = block_scale<E, Block>(amax, a, tensor);
      }
    }
    if constexpr (Block != 16) {
      if (kOfGroups<R> || a.recorded != nullptr) note_overflow<R>(a, piece.template amax<false>());
    }
    store_square_scale<Block>(piece, nan ? kNanMark<E, Block> : scale.stored);
  }
  if constexpr (Chooses && kToNearest<R>) {
    encode_both(piece, chosen, scale.multiplier, shared.codes);
  } else {
    const bool care = nan || exceeds_range<Block>(amax, scale.multiplier);
    encode_both(piece, Codes(piece, care, tensor), scale.multiplier, shared.codes);
  }
  if (a.column.codes == nullptr) return;
  __syncthreads();
  shared.codes.columns.copy_out(piece);
}

// One scale for both directions; `Chooses`: by 4-over-6.
template <class E, int Block, class T, Rounding R, class Source, bool Chooses>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, T, R, Chooses>)
    quantize_one_scale(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, uint32_t strip, bool vectors) {
  __shared__ __align__(16) StagedSquare<E, Block, R> shared;
  Piece<E, T, R> piece(a, tile_of_block(a.window, across, down, strip));
  Source::load(piece, vectors);
  quantize_square<Block, Chooses>(piece, tensor_scales<E, Block>(a, blockIdx.x == 0).rows, shared);
}

// A tile's codes and its stored scales, in shared memory.
template <class E, int Block, Rounding R>
struct StagedLines {
  StagedCodes<E, R> codes;
  StoredScales<E, Block> scales;
};

// Scales and codes of a piece: of its rows, then of its columns. (In the kernel's own body, the compiler would schedule it
// differently.)
template <int Block, class E, class T, Rounding R>
__device__ __forceinline__ void quantize_lines(Piece<E, T, R>& piece, const TensorScales& tensor, StagedLines<E, Block, R>& shared) {
  const QuantizeArguments& a = piece.a;
  if (a.row.codes != nullptr) {
    LineScales<E, Block, T, kDepth, Block / 8, 1> scales;
    scales.decide([&](auto poison, auto& words) { piece.template row_amaxes<decltype(poison)::value>(words); }, a, tensor.rows,
                  [&](int r, int32_t stored) { shared.scales.put_row(piece.place.row + r, piece.place.column, stored); });
    RowOutput<E, T, R> out(piece, shared.codes);
    encode_rows(piece, scales, tensor.rows, [&](int r, uint2 codes) { out.put(r, codes); });
    out.finish();
  }
  if constexpr (Block == 16) {
    const int64_t sixteen = piece.tile.row + piece.place.row / 16 * 16;  // first of the rows that are rotated together
    if (a.rotate_column) rotate_columns<T>(piece.x, sixteen + 16 <= a.x.rows && (Piece<E, T, R>::kWhole || sixteen >= 0));
  }
  LineScales<E, Block, T, 8, Block / kDepth, 8> scales;
  const auto amaxes = [&](auto poison, auto& words) {
    constexpr bool kPoison = decltype(poison)::value;
    piece.template column_amaxes<kPoison>(words);
    if constexpr (Block != 16) {
      if (kOfGroups<R> || a.recorded != nullptr) note_overflow<R>(a, largest_of<T, kPoison>(words));
    }
  };
  scales.decide(amaxes, a, tensor.columns,
                [&](int j, int32_t stored) { shared.scales.put_column(piece.place.column + j, piece.place.row, stored); });
  encode_columns(piece, scales, tensor.columns, staged(piece, shared.codes));
  if (!kOfGroups<R> && a.column.codes == nullptr) return;
  __syncthreads();
  if (!kOfGroups<R> || a.column.codes != nullptr) shared.codes.columns.copy_out(piece);
  shared.scales.copy_out(piece);
}

// Blocks of 1x16 and 1x32, whose scales a warp determines.
template <class E, int Block, class T, Rounding R, class Source>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, T, R>)
    quantize_within_warps(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, uint32_t strip, bool vectors) {
  if (a.scales_by_tile) launch_dependents();
  __shared__ __align__(16) StagedLines<E, Block, R> shared;
  Piece<E, T, R> piece(a, tile_of_block(a.window, across, down, strip));
  Source::load(piece, vectors);
  quantize_lines(piece, tensor_scales<E, Block>(a, blockIdx.x == 0), shared);
}

// A tile's codes, and its scales (WideScales or LongScales), in shared memory.
template <class E, Rounding R, class Scales>
struct StagedWide {
  StagedCodes<E, R> codes;
  Scales scales;
};

// quantize_lines for lines that have one scale each in a tile.
template <class E, class T, Rounding R, class Scales>
__device__ __forceinline__ void quantize_wide_lines(const Piece<E, T, R>& piece, StagedWide<E, R, Scales>& shared) {
  const QuantizeArguments& a = piece.a;
  shared.scales.decide(piece);
  const PieceCodes<E, T, R, Range::kAny> codes(piece, false, {});
  float multipliers[8];
  if (a.row.codes != nullptr) {
    RowOutput<E, T, R> out(piece, shared.codes);
    shared.scales.read_rows(piece.place.row, multipliers);
    codes.rows([&](int r) { return multipliers[r]; }, [&](int r, uint2 c) { out.put(r, c); });
    out.finish();
  }
  if (a.column.codes == nullptr) return;
  shared.scales.read_columns(piece.place.column, multipliers);
  codes.columns([&](int j) { return multipliers[j]; }, staged(piece, shared.codes));
  __syncthreads();
  shared.codes.columns.copy_out(piece);
}

// Blocks of 1x128, and whole lines.
template <class E, class T, Rounding R, class Source, class Scales = WideScales<E, T, R>>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, T, R>)
    quantize_across_warps(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, uint32_t strip, bool vectors) {
  if (a.scales_by_tile || a.mark) launch_dependents();
  __shared__ __align__(16) StagedWide<E, R, Scales> shared;
  Piece<E, T, R> piece(a, tile_of_block(a.window, across, down, strip));
  Source::load(piece, vectors);
  quantize_wide_lines(piece, shared);
}

}  // namespace cuda
}  // namespace blockfp
