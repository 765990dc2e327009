// Threefry-2x32 with 20 rounds (Salmon et al., 2011): the random bytes of stochastic rounding.
//
// Element i of the unsharded array takes byte i & 7 of the two words for counter i >> 3, little-endian, first word first.
// Elements that take two bytes use half i & 3 of the words for counter i >> 2.
#pragma once

#include "lanes.h"

namespace blockfp {

// U: uint32_t, or a vector of them.
template <class U>
struct Words {
  U w0, w1;
};

template <class U>
BLOCKFP_HD Words<U> threefry2x32(uint32_t k0, uint32_t k1, U x0, U x1) {
  const uint32_t schedule[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x0 = x0 + schedule[0];
  x1 = x1 + schedule[1];
  BLOCKFP_UNROLL
  for (int block = 0; block < 5; ++block) {
    BLOCKFP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = rotations[block & 1][i];
      x0 = x0 + x1;
      x1 = ((x1 << r) | (x1 >> (32 - r))) ^ x0;
    }
    x0 = x0 + schedule[(block + 1) % 3];
    x1 = x1 + (schedule[(block + 2) % 3] + static_cast<uint32_t>(block + 1));
  }
  return {x0, x1};
}

// Random byte of one element.
BLOCKFP_HD int32_t random_byte(uint32_t k0, uint32_t k1, uint64_t index) {
  const uint64_t counter = index >> 3;
  const Words<uint32_t> words = threefry2x32<uint32_t>(k0, k1, counter >> 32, static_cast<uint32_t>(counter));
  const uint32_t word = (index & 4) ? words.w1 : words.w0;
  return (word >> (8 * (index & 3))) & 0xFF;
}

// Two random bytes of one element.
BLOCKFP_HD int32_t random_half(uint32_t k0, uint32_t k1, uint64_t index) {
  const uint64_t counter = index >> 2;
  const Words<uint32_t> words = threefry2x32<uint32_t>(k0, k1, counter >> 32, static_cast<uint32_t>(counter));
  return ((index & 2) ? words.w1 : words.w0) >> (16 * (index & 1)) & 0xFFFF;
}

}  // namespace blockfp
