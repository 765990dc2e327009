// Packs codes: two 4-bit codes per byte, low nibble first; four 6-bit codes per three bytes, first code in the low bits. A
// row's last byte or three bytes are padded with zero codes.
#pragma once

#include "lanes.h"

namespace blockfp {

// kGroup codes share kGroupBytes bytes.
template <int Bits>
struct Packing {
  static_assert(Bits == 8 || Bits == 6 || Bits == 4, "codes have 8, 6 or 4 bits");
  static constexpr int kGroup = Bits == 8 ? 1 : (Bits == 6 ? 4 : 2);
  static constexpr int kGroupBytes = Bits == 6 ? 3 : 1;

  // Bytes of a row of `columns` codes.
  BLOCKFP_HD static constexpr int64_t row_bytes(int64_t columns) { return (columns + kGroup - 1) / kGroup * kGroupBytes; }
};

// Packs a group of codes into a little-endian word of kGroupBytes bytes. Bits above a code's `Bits` must be zero.
template <int Bits>
BLOCKFP_HD uint32_t pack_group(const uint8_t* codes) {
  uint32_t word = 0;
  for (int i = 0; i < Packing<Bits>::kGroup; ++i) word |= static_cast<uint32_t>(codes[i]) << (Bits * i);
  return word;
}

template <int Bits>
BLOCKFP_HD void unpack_group(uint32_t word, uint8_t* codes) {
  for (int i = 0; i < Packing<Bits>::kGroup; ++i) codes[i] = (word >> (Bits * i)) & ((1u << Bits) - 1);
}

}  // namespace blockfp
