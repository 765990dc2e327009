// Dequantizes a tile: the factors of each row of blocks, then the values of its rows. Included by each instruction set's file.
#pragma once

#include "amax_tasks.h"
#include "pack_rows.h"
#include "quantize_tasks.h"
#include "row_codes.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// Computes the factors of one row of blocks; returns whether all are ordinary (see decode_row).
template <ScaleRule R>
bool factors_of_blocks(const DequantizeJob& job, int64_t at, int64_t blocks, Factors* factors) {
  bool ordinary = true;
  for (int64_t b = 0; b < blocks; ++b) {
    int32_t stored;
    if constexpr (kFp32Scale<R>) {
      stored = static_cast<const int32_t*>(job.scales)[at + b];
    } else {
      stored = static_cast<const uint8_t*>(job.scales)[at + b];
    }
    const float scale = decode_scale<R, float>(stored, job.tensor_scale);
    factors[b] = split_scale(scale);
    ordinary &= is_ordinary(scale);
  }
  return ordinary;
}

BLOCKFP_HD bool factors_by_rule(const DequantizeJob& job, int64_t at, int64_t blocks, Factors* factors) {
  switch (job.format.rule) {
    case ScaleRule::kFp32:
    case ScaleRule::kPow2:
      return factors_of_blocks<ScaleRule::kFp32>(job, at, blocks, factors);
    case ScaleRule::kE8m0Ceil:
    case ScaleRule::kE8m0Floor:
      return factors_of_blocks<ScaleRule::kE8m0Ceil>(job, at, blocks, factors);
    case ScaleRule::kE4m3:
    case ScaleRule::kE4m3Guarded:
    case ScaleRule::kFourOverSix:
    case ScaleRule::kFourOverSix448:
    case ScaleRule::kFourOverSixMse:
    case ScaleRule::kFourOverSix448Mse:
      return factors_of_blocks<ScaleRule::kE4m3>(job, at, blocks, factors);
  }
  return false;
}

template <class E, class T>
void dequantize_task(const DequantizeJob& job, int64_t task, void* scratch) {
  using P = Packing<E::kBits>;
  const Tiling& t = job.tiling;
  const Tile tile(t, task);
  const Scratch memory(t, scratch);
  Factors* factors = reinterpret_cast<Factors*>(memory.factors);
  const int64_t row_bytes = P::row_bytes(t.columns);
  const int shift = block_shift(job.format);
  bool ordinary = job.format.per_tensor() && factors_by_rule(job, 0, 1, factors);
  for_block_rows(job.format, t, tile, [&](int64_t first, int64_t rows, int64_t block_row) {
    if (!job.format.per_tensor()) {
      const int64_t at = (tile.batch * t.grid_rows + block_row) * t.grid_columns + tile.first_block(job.format);
      ordinary = factors_by_rule(job, at, tile.blocks(job.format), factors);
    }
    for (int64_t r = first; r < first + rows; ++r) {
      const int64_t row = tile.batch * t.rows + tile.row + r;
      const uint8_t* codes = job.codes + row * row_bytes + P::row_bytes(tile.column);
      if constexpr (E::kBits != 8) {
        unpack_row<E::kBits>(codes, tile.columns, memory.codes);
        codes = memory.codes;
      }
      auto* out = static_cast<typename T::Raw*>(job.out) + row * t.columns + tile.column;
      decode_row<E, T>(codes, tile.columns, factors, ordinary, tile.column_phase, shift, out);
    }
  });
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
