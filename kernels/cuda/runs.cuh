// Runs of bytes that lie at any address: read and written in the vectors of memory that hold them.
//
// A vector that holds a wanted byte lies in memory that is there, so whole ones are read; of those that are written in part, only the
// wanted bytes are.
#pragma once

#include <cstdint>

namespace blockfp {
namespace cuda {

// `Words` words from any address that is a multiple of `Unit` bytes, read in vectors of `Granule` bytes; only those of which one of the
// first `bytes` bytes is wanted. What lies behind these bytes is arbitrary.
template <int Words, int Granule, int Unit>
__device__ __forceinline__ void load_run(const void* from, int bytes, uint32_t (&out)[Words]) {
  static_assert(Granule == 4 || Granule == 16, "words or vectors of four");
  constexpr int kOfGranule = Granule / 4, kRead = (Words + kOfGranule - 1) / kOfGranule * kOfGranule + kOfGranule;
  const uint32_t before = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) % Granule;
  const char* base = static_cast<const char*>(from) - before;
  const int end = bytes > 0 ? static_cast<int>(before) + bytes : 0;
  uint32_t word[kRead + 1];
  word[kRead] = 0;
#pragma unroll
  for (int i = 0; i < kRead; i += kOfGranule) {
    if constexpr (Granule == 16) {
      uint4 part{};
      if (4 * i < end) part = __ldg(reinterpret_cast<const uint4*>(base + 4 * i));
      word[i] = part.x, word[i + 1] = part.y, word[i + 2] = part.z, word[i + 3] = part.w;
    } else {
      word[i] = 4 * i < end ? __ldg(reinterpret_cast<const uint32_t*>(base + 4 * i)) : 0;
    }
  }
  if constexpr (Granule == 16) {
#pragma unroll
    for (int i = 0; i < Words + 2; ++i) word[i] = before & 8 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < Words + 1; ++i) word[i] = before & 4 ? word[i + 1] : word[i];
  }
#pragma unroll
  for (int i = 0; i < Words; ++i) out[i] = Unit == 4 ? word[i] : __funnelshift_r(word[i], word[i + 1], 8 * (before & 3));
}

// Writes the runs of neighbouring lanes as one run. `out`: where its first byte would lie, a multiple of `Unit` bytes; of its bytes `first`
// to `last` - 1 are written. `lane`: of `lanes`, a power of two; all of them come here.
//
// Each lane writes the vectors of memory that begin in its own bytes or just before; what the last lane has left the first one writes.
template <int Unit, int Words>
__device__ __forceinline__ void store_run(uint8_t* out, const uint32_t (&word)[Words], int lane, int lanes, int first, int last) {
  constexpr int kGranule = Words % 4 == 0 ? 16 : (Words == 2 ? 8 : 4), kOfGranule = kGranule / 4;
  const uint32_t turn = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out)) % kGranule;  // alike in all lanes
  uint32_t all[kOfGranule + Words];  // what the lane before has last, then this one's
#pragma unroll
  for (int i = 0; i < kOfGranule; ++i) all[i] = __shfl_sync(0xFFFFFFFFu, word[Words - kOfGranule + i], lane == 0 ? lanes - 1 : lane - 1, lanes);
#pragma unroll
  for (int i = 0; i < Words; ++i) all[kOfGranule + i] = word[i];
  if constexpr (kGranule == 16) {
#pragma unroll
    for (int i = kOfGranule + Words - 1; i >= 2; --i) all[i] = turn & 8 ? all[i - 2] : all[i];
  }
  if constexpr (kGranule >= 8) {
#pragma unroll
    for (int i = kOfGranule + Words - 1; i >= 1; --i) all[i] = turn & 4 ? all[i - 1] : all[i];
  }
  if constexpr (Unit < 4) {
#pragma unroll
    for (int i = kOfGranule + Words - 1; i >= 1; --i) all[i] = __funnelshift_l(all[i - 1], all[i], 8 * (turn & 3));
  }
#pragma unroll
  for (int v = 0; v < Words; v += kOfGranule) {
    const uint32_t* vector = all + kOfGranule + v;
    const int begin = 4 * (lane * Words + v) - static_cast<int>(turn);
    if (begin >= first && begin + kGranule <= last) {
      if constexpr (kGranule == 16) {
        *reinterpret_cast<uint4*>(out + begin) = {vector[0], vector[1], vector[2], vector[3]};
      } else if constexpr (kGranule == 8) {
        *reinterpret_cast<uint2*>(out + begin) = {vector[0], vector[1]};
      } else {
        *reinterpret_cast<uint32_t*>(out + begin) = vector[0];
      }
      continue;
    }
#pragma unroll
    for (int b = 0; b < kGranule; b += Unit) {
      int at = begin + b;
      if (at < 0) at += 4 * Words * lanes;
      if (at < first || at >= last) continue;
      const uint32_t part = vector[b / 4] >> (8 * (b % 4));
      if constexpr (Unit == 1) {
        out[at] = part;
      } else if constexpr (Unit == 2) {
        *reinterpret_cast<uint16_t*>(out + at) = part;
      } else {
        *reinterpret_cast<uint32_t*>(out + at) = part;
      }
    }
  }
}

// Copies lines of `Bytes` bytes from shared memory to wherever they lie, by all threads of a block: `word_at(line, index)` reads a word.
// `out`: where the first byte of line 0 would lie. Of `Lines` lines, `pitch` bytes apart, those from `first_line` to `last_line` - 1 are
// written, and of each the bytes `first` to `last` - 1.
template <int Bytes, int Lines, int Threads, class WordAt>
__device__ __forceinline__ void copy_runs(uint8_t* out, int64_t pitch, int first_line, int last_line, int first, int last, WordAt word_at) {
  constexpr int kWords = Bytes / 4, kLanes = kWords % 32 == 0 ? 32 : (kWords % 16 == 0 ? 16 : 8);
  static_assert(kWords % kLanes == 0, "lanes share out a line evenly");
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int line = threadIdx.x / kLanes; line < Lines; line += Threads / kLanes) {
    if (line < first_line || line >= last_line) continue;
    uint8_t* to = out + line * pitch;
    const int turn = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 4);
#pragma unroll
    for (int index = lane; index < kWords; index += kLanes) {
      const uint32_t word = __funnelshift_l(word_at(line, index == 0 ? kWords - 1 : index - 1), word_at(line, index), 8 * turn);
      const int begin = 4 * index - turn;
      if (begin >= first && begin + 4 <= last) {
        *reinterpret_cast<uint32_t*>(to + begin) = word;
        continue;
      }
      // The first word, turned, has the line's end in front.
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int at = begin + b < 0 ? begin + b + Bytes : begin + b;
        if (at >= first && at < last) to[at] = word >> (8 * b);
      }
    }
  }
}

}  // namespace cuda
}  // namespace blockfp
