// Scales of 1-D blocks of 16 and 32, decided within a warp: the lanes that share a line's block share out the lines of their pieces.
#pragma once

#include "piece.cuh"

namespace blockfp {
namespace cuda {

// Of `Lines` lines, whose blocks lie in `Lanes` lanes, `Step` apart.
template <class E, int Block, class T, int Lines, int Lanes, int Step>
struct LineScales {
  using Share = LaneShare<Lines / kLinesPerWord<T>, Lanes, Step>;
  static constexpr int kWordCount = Lines / kLinesPerWord<T>;
  static constexpr int kMine = Share::kMine * kLinesPerWord<T>;  // lines of this lane
  static_assert(Share::kSame == 1 && kMine % 2 == 0, "each lane has lines of its own, two by two");
  // MX multipliers are powers of two, whose upper halves say all: two in a word. Others take a word each.
  static constexpr int kPerWord = Block == 32 ? 2 : 1;

  bool nan;  // some line of the warp holds one, and E has no code for it

  // `amaxes` fills words with the parts of this lane; `store` takes a line and its stored scale. Every lane of the warp must come here.
  template <class Amaxes, class Store>
  __device__ __forceinline__ void decide(Amaxes amaxes, const QuantizeArguments& a, const TensorScale& tensor, Store store) {
    uint32_t most[kWordCount], poisoned[Share::kMine];
    nan = false;
    if constexpr (E::kHasNan) {
      amaxes(std::false_type{}, most);
      Share::template reduce<T, false>(most);
    } else {
      amaxes(std::true_type{}, most);
      Share::template reduce<T, true>(most);
#pragma unroll
      for (int i = 0; i < kMine; ++i) nan = nan || magnitude<true>(most, i) > kInfinity;
#pragma unroll
      for (int i = 0; i < Share::kMine; ++i) poisoned[i] = most[i];
      nan = __any_sync(0xFFFFFFFFu, nan);
      if (nan) {
        amaxes(std::false_type{}, most);
        Share::template reduce<T, false>(most);
      }
    }
    const int first = Share::first() * kLinesPerWord<T>;
#pragma unroll
    for (int i = 0; i < kMine; i += 2) {
      uint32_t multiplier[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const BlockScale<float> scale = block_scale<E, Block>(magnitude<false>(most, i + h), a, tensor);
        const bool marked = !E::kHasNan && magnitude<true>(poisoned, i + h) > kInfinity;
        store(first + i + h, marked ? kNanMark<E, Block> : scale.stored);
        multiplier[h] = __float_as_uint(scale.multiplier);
      }
      if constexpr (kPerWord == 2) {
        mine_[i / 2] = __byte_perm(multiplier[0], multiplier[1], 0x7632);
      } else {
        mine_[i] = multiplier[0], mine_[i + 1] = multiplier[1];
      }
    }
  }

  // Words with the multipliers of all lines. Every lane of the warp must come here.
  __device__ __forceinline__ void gather(uint32_t (&words)[Lines / kPerWord]) const {
    constexpr int kOfLane = kMine / kPerWord;
#pragma unroll
    for (int i = 0; i < Lines / kPerWord; ++i) {
      words[i] = mine_[i % kOfLane];
      if constexpr (Lanes > 1) {
        const int from = threadIdx.x % 32 - Share::lane() * Step + i / kOfLane * Step;
        words[i] = __shfl_sync(0xFFFFFFFFu, words[i], from);
      }
    }
  }

  // Of a line, from gathered words.
  __device__ __forceinline__ static float multiplier(const uint32_t (&words)[Lines / kPerWord], int line) {
    if constexpr (kPerWord == 1) return __uint_as_float(words[line]);
    const uint32_t word = words[line / kPerWord];
    return __uint_as_float(line % 2 ? word & 0xFFFF0000u : word << 16);
  }

 private:
  template <bool Poison, int Count>
  __device__ __forceinline__ static int32_t magnitude(const uint32_t (&words)[Count], int line) {
    return magnitude_bits<T, Poison>(words[line / kLinesPerWord<T>], line % kLinesPerWord<T>);
  }

  uint32_t mine_[kMine / kPerWord];
};

}  // namespace cuda
}  // namespace blockfp
