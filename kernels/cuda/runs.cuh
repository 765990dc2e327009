// Runs of bytes at any address, read and written in the aligned vectors that contain them.
//
// A vector that contains a needed byte is in valid memory, so whole vectors are read; of partially written ones only the needed
// bytes are written.
#pragma once

#include <cstdint>

namespace blockfp {
namespace cuda {

// Loads `Words` words from an address that is a multiple of `Unit` bytes, in vectors of `Granule` bytes, and only those that
// contain one of the first `bytes` bytes. The rest is arbitrary.
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

// Bytes that a thread with this many words writes at once.
template <int Words>
constexpr int kRunGranule = Words % 4 == 0 ? 16 : (Words == 2 ? 8 : 4);

// Shared memory through which adjacent threads of a run exchange last words with their successors.
template <int Words, int Threads>
struct RunEnds {
  static constexpr int kShared = kRunGranule<Words> / 4;
  __align__(16) uint32_t words[Threads][kShared];

  __device__ __forceinline__ void put(const uint32_t (&word)[Words]) {
    if constexpr (kShared == 4) {
      *reinterpret_cast<uint4*>(words[threadIdx.x]) = {word[Words - 4], word[Words - 3], word[Words - 2], word[Words - 1]};
    } else if constexpr (kShared == 2) {
      *reinterpret_cast<uint2*>(words[threadIdx.x]) = {word[0], word[1]};
    } else {
      words[threadIdx.x][0] = word[Words - 1];
    }
  }
};

// Writes the words of adjacent threads as one run. `out`: the address of its first byte, a multiple of `Unit` bytes; of its
// bytes, `first` to `last` - 1 are written. `index`: of this thread among the `count` of the run; all have put their words into
// `ends` and synchronized.
//
// Each thread writes the vectors of memory that begin in its own bytes or just before; the first thread writes the last one's
// remainder.
template <int Unit, int Words, int Threads>
__device__ __forceinline__ void store_run(const RunEnds<Words, Threads>& ends, uint8_t* out, const uint32_t (&word)[Words], int index,
                                          int count, int first, int last) {
  constexpr int kGranule = kRunGranule<Words>, kOfGranule = kGranule / 4;
  const uint32_t turn = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out)) % kGranule;  // the same in all threads
  uint32_t all[kOfGranule + Words];
  const uint32_t* before = ends.words[index == 0 ? threadIdx.x + count - 1 : threadIdx.x - 1];
  if constexpr (kOfGranule == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(before);
    all[0] = four.x, all[1] = four.y, all[2] = four.z, all[3] = four.w;
  } else if constexpr (kOfGranule == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(before);
    all[0] = two.x, all[1] = two.y;
  } else {
    all[0] = *before;
  }
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
    const int begin = 4 * (index * Words + v) - static_cast<int>(turn);
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
      if (at < 0) at += 4 * Words * count;
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

// Copies lines of `Bytes` bytes from shared memory to any address, with all threads of a block; `word_at(line, index)` reads a
// word. `out`: the address of line 0's first byte. Of `Lines` lines, `pitch` bytes apart, `first_line` to `last_line` - 1 are
// written, and of each the bytes `first` to `last` - 1.
template <int Bytes, int Lines, int Threads, class WordAt>
__device__ __forceinline__ void copy_runs(uint8_t* out, int64_t pitch, int first_line, int last_line, int first, int last, WordAt word_at) {
  constexpr int kWords = Bytes / 4, kLanes = kWords % 32 == 0 ? 32 : (kWords % 16 == 0 ? 16 : 8);
  static_assert(kWords % kLanes == 0, "lanes share out a line evenly");
  const int lane = threadIdx.x % kLanes, line0 = threadIdx.x / kLanes;
  // Whole aligned words.
  uint8_t* to = out + line0 * pitch;
#pragma unroll 4
  for (int line = line0; line < Lines; line += Threads / kLanes, to += Threads / kLanes * pitch) {
    const int turn = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 4);
    const bool inside = line >= first_line && line < last_line;
#pragma unroll
    for (int i = 0; i < kWords / kLanes; ++i) {
      const int index = lane + i * kLanes, begin = 4 * index - turn;
      const uint32_t word = __funnelshift_l(word_at(line, index == 0 ? 0 : index - 1), word_at(line, index), 8 * turn);
      if (inside && begin >= first && begin + 4 <= last) *reinterpret_cast<uint32_t*>(to + begin) = word;
    }
  }
  // The remainders at the ends of the lines, a line per thread.
  for (int line = threadIdx.x; line < Lines; line += Threads) {
    if (line < first_line || line >= last_line) continue;
    uint8_t* own = out + line * pitch;
    const int turn = static_cast<int>(reinterpret_cast<uintptr_t>(own) % 4);
    const auto store_part = [&](int begin) {
#pragma unroll
      for (int at = begin; at < begin + 4; at += 2) {
        const bool low = at >= first && at < last, high = at + 1 >= first && at + 1 < last;
        if (!low && !high) continue;
        const int lower = max(at, 0), upper = min(at + 1, Bytes - 1);
        const uint32_t bytes[2] = {word_at(line, lower / 4) >> (8 * (lower % 4)) & 0xFF,
                                   word_at(line, upper / 4) >> (8 * (upper % 4)) & 0xFF};
        if (low && high) {
          *reinterpret_cast<uint16_t*>(own + at) = bytes[0] | bytes[1] << 8;
        } else {
          own[low ? at : at + 1] = low ? bytes[0] : bytes[1];
        }
      }
    };
    if (turn != 0) store_part(-turn), store_part(Bytes - turn);
    if (first > 0 && (first + turn) % 4 != 0) store_part((first + turn) / 4 * 4 - turn);
    if (last < Bytes && (last + turn) % 4 != 0) store_part((last + turn) / 4 * 4 - turn);
  }
}

}  // namespace cuda
}  // namespace blockfp
