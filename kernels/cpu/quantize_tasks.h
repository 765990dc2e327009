// Quantizes a tile: for each row of blocks the amaxes, then scales, then codes. Included by each instruction set's file.
#pragma once

#include "amax_tasks.h"
#include "choose_scales.h"
#include "pack_rows.h"
#include "row_codes.h"

namespace blockfp {
namespace BLOCKFP_ISA {

template <class E, ScaleRule R>
BLOCKFP_HD BlockScale<F> scale_of(const QuantizeJob& job, I amax) {
  if constexpr (kFp32Scale<R>) {
    return fp8_scale<E, R, F>(amax, job.eps_bits, job.largest);
  } else if constexpr (kE8m0Scale<R>) {
    return e8m0_scale<E, R, F>(amax);
  } else {
    return e4m3_scale<E, F>(amax, job.multiplier, job.tensor_scale, R);
  }
}

// Writes the stored scales of one row of blocks.
template <class E, ScaleRule R>
void write_scales(const QuantizeJob& job, const Scratch& memory, int64_t blocks, int64_t at) {
  if constexpr (kFp32Scale<R>) {
    memcpy(static_cast<float*>(job.scales) + at, memory.stored, 4 * blocks);
  } else {
    uint8_t* out = static_cast<uint8_t*>(job.scales) + at;
    for (int64_t b = 0; b < blocks; ++b) {
      out[b] = static_cast<uint8_t>(!E::kHasNan && memory.nan[b] ? kNanScale<R> : memory.stored[b]);
    }
  }
}

// Multipliers and stored scales of one row of blocks.
template <class E, ScaleRule R>
void scales_of_blocks(const QuantizeJob& job, const Scratch& memory, int64_t blocks, int64_t at) {
  for (int64_t b = 0; b < blocks; b += kLanes) {
    const BlockScale<F> scale = scale_of<E, R>(job, load<I>(memory.amax + b));
    store(memory.stored + b, scale.stored);
    store(memory.multipliers + b, scale.multiplier);
  }
  write_scales<E, R>(job, memory, blocks, at);
}

// Derives a row's scales from the previous ones, one by one.
template <class E>
void kept_scales_of_blocks(const QuantizeJob& job, const Scratch& memory, int64_t blocks, int64_t at) {
  const ScaleRule rule = job.format.rule;
  const bool bytes = job.format.scale_bits() == 8;
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t& byte = static_cast<uint8_t*>(job.scales)[at + b];
    int32_t& word = static_cast<int32_t*>(job.scales)[at + b];
    int32_t stored = bytes ? byte : word;
    if (job.format.two_levels()) {
      stored = kept_e4m3_scale<E>(stored, memory.amax[b], job.kept);
      if (memory.nan[b]) stored = kNanScale<ScaleRule::kE4m3>;
    } else if (bytes) {
      stored = kept_e8m0_scale<E>(stored, memory.amax[b]);
      if (!E::kHasNan && memory.nan[b]) stored = kNanScale<ScaleRule::kE8m0Ceil>;
    } else {
      stored = kept_fp32_scale<E>(stored, memory.amax[b]);
    }
    if (bytes) {
      byte = static_cast<uint8_t>(stored);
    } else {
      word = stored;
    }
    memory.multipliers[b] = stored_multiplier(rule, stored, job.tensor_scale);
  }
}

template <class E>
BLOCKFP_HD void scales_by_rule(const QuantizeJob& job, const Scratch& memory, int64_t blocks, int64_t at) {
  switch (job.format.rule) {
    case ScaleRule::kFp32:
      return scales_of_blocks<E, ScaleRule::kFp32>(job, memory, blocks, at);
    case ScaleRule::kPow2:
      return scales_of_blocks<E, ScaleRule::kPow2>(job, memory, blocks, at);
    case ScaleRule::kE8m0Ceil:
      return scales_of_blocks<E, ScaleRule::kE8m0Ceil>(job, memory, blocks, at);
    case ScaleRule::kE8m0Floor:
      return scales_of_blocks<E, ScaleRule::kE8m0Floor>(job, memory, blocks, at);
    case ScaleRule::kE4m3:
      return scales_of_blocks<E, ScaleRule::kE4m3>(job, memory, blocks, at);
    case ScaleRule::kE4m3Guarded:
      return scales_of_blocks<E, ScaleRule::kE4m3Guarded>(job, memory, blocks, at);
    case ScaleRule::kFourOverSix:
    case ScaleRule::kFourOverSix448:
    case ScaleRule::kFourOverSixMse:
    case ScaleRule::kFourOverSix448Mse:
      return write_scales<E, ScaleRule::kE4m3>(job, memory, blocks, at);  // `choose_scales` has computed them
  }
}

// Right shift from a column to its block, since block lengths are powers of two; 62 if all columns are one block.
BLOCKFP_HD int block_shift(const Format& format) {
  return format.per_tensor() ? 62 : __builtin_ctz(static_cast<unsigned>(format.block_columns));
}

template <class E, class T, int Random>
void quantize_task(const QuantizeJob& job, int64_t task, int64_t next, void* scratch) {
  using P = Packing<E::kBits>;
  const Tiling& t = job.tiling;
  const Tile tile(t, task);
  const Scratch memory(t, scratch);
  const Elements<T> x = elements_of<T>(job.x, tile, memory.gathered);
  const auto* next_tile = next < t.tasks() ? first_of<T>(job.x, Tile(t, next)) : x.data;
  const int64_t blocks = tile.blocks(job.format), row_bytes = P::row_bytes(t.columns);
  const int shift = block_shift(job.format);
  if (job.format.per_tensor()) memory.multipliers[0] = job.multiplier;
  for_block_rows(job.format, t, tile, [&](int64_t first, int64_t rows, int64_t block_row) {
    if (!job.format.per_tensor()) {
      const int64_t at = (tile.batch * t.grid_rows + block_row) * t.grid_columns + tile.first_block(job.format);
      if (job.given_blocks != nullptr) {
        memcpy(memory.amax, job.given_blocks + at, 4 * blocks);
        if (job.given_nan != nullptr) memcpy(memory.nan, job.given_nan + at, 4 * blocks);
      } else {
        amax_of_blocks(x, first, rows, tile.columns, tile.column_phase, job.format.block_columns, memory.largest,
                       memory.amax, memory.nan);
      }
      // Vector loads read beyond the last block.
      memset(memory.amax + blocks, 0, 16 * sizeof(*memory.amax));
      if constexpr (E::kId == E2M1::kId) {
        if (job.format.four_over_six() && !job.keeps) {
          const int64_t row_in_block = (t.row_phase + tile.row + first) % job.format.block_rows;
          choose_scales<E, T>(job, x, memory, first, rows, row_in_block, tile.columns, tile.column_phase, blocks, at);
        }
      }
      if (job.keeps) {
        kept_scales_of_blocks<E>(job, memory, blocks, at);
      } else {
        scales_by_rule<E>(job, memory, blocks, at);
      }
    }
    for (int64_t r = first; r < first + rows; ++r) {
      const uint8_t* random = nullptr;
      if constexpr (Random > 0) {
        const uint64_t row = tile.batch * job.index_rows + job.first_row + tile.row + r;
        const uint64_t index = row * job.index_columns + job.first_column + tile.column;
        random = random_row<Random>(job.key0, job.key1, index, tile.columns, memory.random);
      }
      uint8_t* out = job.codes + (tile.batch * t.rows + tile.row + r) * row_bytes + P::row_bytes(tile.column);
      uint8_t* codes = E::kBits == 8 ? out : memory.codes;
      const int64_t later = r + rows;
      const typename T::Raw* ahead = later < tile.rows ? x.row(later) : next_tile + (later - tile.rows) * job.x.row_stride();
      encode_row<E, T, Random>(x.row(r), tile.columns, memory.multipliers, tile.column_phase, shift, ahead, random,
                                   codes);
      if constexpr (E::kBits != 8) pack_row<E::kBits>(codes, tile.columns, out);
    }
  });
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
