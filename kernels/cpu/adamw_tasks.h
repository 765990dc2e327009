// An AdamW step on a tile: masters and moments in pieces of 128 columns, then the tile's codes while it is still in the cache.
// Included by each instruction set's file, after quantize_tasks.h.
#pragma once

#include "blockfp/adamw.h"
#include "quantize_tasks.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// Random bytes of one piece, two per element, for each moment.
struct PieceRandom {
  static constexpr int kBytes = 2 * kMomentBlock + 8 + 8 * kLanes;
  const uint8_t *first, *second;
  uint8_t memory[2][kBytes];
};

// Loads a moment of a piece as fp32 from its storage. Fp8 stores the second moment's square root.
template <Moments M, bool Second>
BLOCKFP_HD void load_moment(const void* kept, float scale, int64_t at, float* out) {
  for (int i = 0; i < kMomentBlock; i += kLanes) {
    if constexpr (M == Moments::kFp32) {
      store(out + i, load<F>(static_cast<const float*>(kept) + at + i));
    } else if constexpr (M == Moments::kBf16) {
      store(out + i, load_floats<Bf16>(static_cast<const uint16_t*>(kept) + at + i));
    } else {
      const F root = multiply(decode<E4M3, F>(load_bytes(static_cast<const uint8_t*>(kept) + at + i)), splat<F>(scale));
      store(out + i, Second ? multiply(root, root) : root);
    }
  }
}

// Stores a moment of a piece; returns the scale of an FP8 piece.
template <Moments M, bool Second>
BLOCKFP_HD float store_moment(float* moment, const uint8_t* random, void* kept, int64_t at) {
  if constexpr (M == Moments::kFp32) {
    memcpy(static_cast<float*>(kept) + at, moment, sizeof(float) * kMomentBlock);
    return 0.0f;
  } else if constexpr (M == Moments::kBf16) {
    for (int i = 0; i < kMomentBlock; i += kLanes) {
      const I pattern = narrow_stochastic<F>(load<F>(moment + i), load_halves(random + 2 * i));
      int32_t lanes[kLanes];
      store(lanes, pattern);
      for (int k = 0; k < kLanes; ++k) static_cast<uint16_t*>(kept)[at + i + k] = static_cast<uint16_t>(lanes[k]);
    }
    return 0.0f;
  } else {
    if constexpr (Second) {
      for (int i = 0; i < kMomentBlock; i += kLanes) store(moment + i, square_root(load<F>(moment + i)));
    }
    uint32_t patterns[kMomentBlock];
    memcpy(patterns, moment, sizeof(patterns));
    uint32_t most = largest_pattern<Fp32>(patterns, kMomentBlock);
    if (most > Fp32::kRawInfinity) most = largest_number(Elements<Fp32>{patterns, 0}, 0, 1, 0, kMomentBlock);
    const auto scale = fp8_scale<E4M3, ScaleRule::kPow2, float>(static_cast<int32_t>(most), 0, kFp32Max);
    for (int i = 0; i < kMomentBlock; i += kUnit) {
      I codes[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int k = i + v * kLanes;
        codes[v] = encode_moment<Second, F>(load<F>(moment + k), splat<F>(scale.multiplier), load_halves(random + 2 * k));
      }
      store_codes(codes, static_cast<uint8_t*>(kept) + at + i);
    }
    return from_bits<float>(scale.stored);
  }
}

// 128 columns. Arrays begin at element `at`, their scales at `scale_at`.
template <class T, Moments M>
void step_piece(const StepEntry& e, const StepCoefficients& c, int64_t at, int64_t scale_at, const PieceRandom& random,
                const void* gradient, float* weight, void* first, void* second, void* out) {
  alignas(64) float m[kMomentBlock], v[kMomentBlock];
  float first_scale = 0, second_scale = 0;
  if constexpr (M == Moments::kFp8) first_scale = e.first_scales[scale_at], second_scale = e.second_scales[scale_at];
  load_moment<M, false>(first, first_scale, at, m);
  load_moment<M, true>(second, second_scale, at, v);
  for (int i = 0; i < kMomentBlock; i += kLanes) {
    F w = load<F>(weight + at + i), first_lanes = load<F>(m + i), second_lanes = load<F>(v + i);
    adamw_step<F>(w, first_lanes, second_lanes, load_floats<T>(static_cast<const typename T::Raw*>(gradient) + at + i), c);
    store(weight + at + i, w);
    store(m + i, first_lanes);
    store(v + i, second_lanes);
  }
  first_scale = store_moment<M, false>(m, random.first, first, at);
  second_scale = store_moment<M, true>(v, random.second, second, at);
  if constexpr (M == Moments::kFp8) e.first_scales[scale_at] = first_scale, e.second_scales[scale_at] = second_scale;
  if (out == nullptr || c.still()) return;
  for (int i = 0; i < kMomentBlock; i += kLanes) {
    const F w = load<F>(weight + at + i);
    if (e.out_dtype == Bf16::kId) store_floats<Bf16>(w, static_cast<uint16_t*>(out) + at + i);
    if (e.out_dtype == Fp16::kId) store_floats<Fp16>(w, static_cast<uint16_t*>(out) + at + i);
  }
}

// Fewer than 128 columns: copied to whole pieces and back.
template <class T, Moments M>
void step_part(const StepEntry& e, const StepCoefficients& c, int64_t at, int64_t scale_at, const PieceRandom& random, int64_t n,
               void* out) {
  constexpr int kMoment = M == Moments::kFp32 ? 4 : (M == Moments::kBf16 ? 2 : 1);
  constexpr int64_t kGradient = sizeof(typename T::Raw);
  alignas(64) char gradient[kGradient * kMomentBlock] = {}, first[kMoment * kMomentBlock] = {}, second[kMoment * kMomentBlock] = {};
  alignas(64) float weight[kMomentBlock] = {};
  alignas(64) uint16_t copy[kMomentBlock] = {};
  memcpy(gradient, static_cast<const char*>(e.gradient) + at * kGradient, n * kGradient);
  memcpy(first, static_cast<char*>(e.first) + at * kMoment, n * kMoment);
  memcpy(second, static_cast<char*>(e.second) + at * kMoment, n * kMoment);
  memcpy(weight, e.weight + at, n * sizeof(float));
  step_piece<T, M>(e, c, 0, scale_at, random, gradient, weight, first, second, out == nullptr ? nullptr : copy);
  memcpy(static_cast<char*>(e.first) + at * kMoment, first, n * kMoment);
  memcpy(static_cast<char*>(e.second) + at * kMoment, second, n * kMoment);
  memcpy(e.weight + at, weight, n * sizeof(float));
  if (out != nullptr && !c.still()) memcpy(static_cast<uint16_t*>(out) + at, copy, n * sizeof(uint16_t));
}

template <class T, Moments M>
void step_tile(const StepJob& job, const Tile& tile) {
  const StepEntry& e = job.entry;
  const StepCoefficients c = e.coefficients;
  void* out = e.output == static_cast<int>(StepOutput::kCopy) ? e.out : nullptr;
  const int64_t moment_blocks = (e.columns + kMomentBlock - 1) / kMomentBlock;
  PieceRandom random{};
  for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
    const int64_t row = tile.batch * e.rows + r;
    for (int64_t column = tile.column; column < tile.column + tile.columns; column += kMomentBlock) {
      const int64_t left = tile.column + tile.columns - column, n = left < kMomentBlock ? left : kMomentBlock;
      if constexpr (M != Moments::kFp32) {
        const uint64_t index = e.random_index(tile.batch, r, column);
        random.first = random_row<2>(job.first_key[0], job.first_key[1], index, kMomentBlock, random.memory[0]);
        random.second = random_row<2>(job.second_key[0], job.second_key[1], index, kMomentBlock, random.memory[1]);
      }
      const int64_t at = row * e.columns + column, scale_at = row * moment_blocks + column / kMomentBlock;
      if (n == kMomentBlock) {
        step_piece<T, M>(e, c, at, scale_at, random, e.gradient, e.weight, e.first, e.second, out);
      } else {
        step_part<T, M>(e, c, at, scale_at, random, n, out);
      }
    }
  }
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
