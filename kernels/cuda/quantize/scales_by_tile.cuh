// Layout of a tile's scales before order_scales.cu orders them.
#pragma once

#include "arguments.h"

namespace blockfp {
namespace cuda {

// Lines of a band: a tile's words of them fill a sector.
constexpr int kBandLines = 8;

// Index of a tile's word of a line, from the start of its matrices.
__device__ __forceinline__ int64_t index_by_tile(int64_t line, int64_t tile, int64_t tiles) {
  return line / kBandLines * (kBandLines * tiles) + tile * kBandLines + line % kBandLines;
}

// Keeps them in the L2 cache until they are ordered, which saves a read and a write of memory.
__device__ __forceinline__ void store_by_tile(uint32_t* words, int64_t index, uint32_t word) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(words + index), "r"(word), "l"(policy) : "memory");
}

// Reads four of them for the last time.
__device__ __forceinline__ uint4 load_by_tile(const uint32_t* words) {
  uint64_t policy;
  uint4 four;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(words), "l"(policy)
               : "memory");
  return four;
}

}  // namespace cuda
}  // namespace blockfp
