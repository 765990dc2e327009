// Layout of codes and scales of matrices whose rows are sorted by group, such as experts' tokens.
//
// The groups' ends are int32 [groups] in device memory, ascending, as torch's grouped_mm takes them: group g has rows ends[g -
// 1] to ends[g] of x [tokens, features], and may be empty. Rows past the last end belong to no group, and their results are
// never written. A group is quantized like a separate tensor: blocks in both directions, rotation and random indices begin at
// its first row, and it has its own amax, tensor scale and key.
//
//   along the rows      codes [tokens, features], packed as for the whole x
//                       scales of 1xb: [tokens, features / b]
//   along the columns   codes [features, columns], packed: each group's rows are padded with zeros to a multiple of 128, so that its
//                       columns begin at padded_ends[g - 1] and every operand of a product is aligned
//                       scales of 1xb: [features, columns / b]
//   square blocks       scales [columns / b, features / b] and [features / b, columns / b]: a group's begin at padded_ends[g - 1] / b
//   one scale           scales [groups], with two levels tensor_scale [groups]
//
// Scales of 1x128 are stored as products read them, block by block: [features / 128, tokens] and [columns / 128, features], the
// last axis padded to a multiple of 4 floats. Blocks of padding have the scale of a block of zeros.
//
// `columns` is group_columns(tokens, groups), which the host knows; padded_ends, int32 [groups] and multiples of 128, are
// computed on the device (export group_rows). Products over rows take ends; products that contract rows (each group's weight)
// take padded_ends.
#pragma once

#include <cstdint>

namespace blockfp {

constexpr int kGroupUnit = 128;

// Number of columns of columnwise codes, enough for any ends.
inline int64_t group_columns(int64_t tokens, int64_t groups) {
  return (tokens + groups * (kGroupUnit - 1)) / kGroupUnit * kGroupUnit;
}

// Number of tiles of kGroupUnit rows, enough for any ends; each tile begins in its group, and an empty group has one.
inline int64_t group_tiles(int64_t tokens, int64_t groups) { return tokens / kGroupUnit + groups; }

// Written by group_rows for each tile.
struct GroupTile {
  int32_t group;         // negative past the last one
  int32_t row;           // the tile's first row in its group
  int32_t first_row;     // the group's first row in x
  int32_t rows;          // rows of the group
  int32_t first_column;  // the group's first column along the columns
  int32_t unused[3];
};

// Words that group_rows writes: ends, padded_ends, padding to a multiple of 8, and the table of tiles.
constexpr int kTileWords = sizeof(GroupTile) / 4;
inline int64_t group_table(int64_t groups) { return (2 * groups + kTileWords - 1) / kTileWords * kTileWords; }
inline int64_t group_words(int64_t tokens, int64_t groups) { return group_table(groups) + kTileWords * group_tiles(tokens, groups); }

// The table of tiles in the output of group_rows.
inline const GroupTile* tiles_of_groups(const int32_t* words, int64_t groups) {
  return reinterpret_cast<const GroupTile*>(words + group_table(groups));
}

}  // namespace blockfp
