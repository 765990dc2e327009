// Matrices whose rows are sorted by group, such as the tokens of experts: where the codes and scales of each group lie.
//
// The groups' ends are int32 [groups] in device memory, ascending, as torch's grouped_mm takes them: group g has rows ends[g - 1] to ends[g]
// of x [tokens, features], and may have none. Rows past the last end belong to nobody, and what stands for them is never written.
// A group is a tensor of its own: blocks of both directions begin at its first row, and so do its rotation and the indices of its random
// bytes; it has its own amax, scale of the whole tensor, and key.
//
//   along the rows      codes [tokens, features], packed, as those of the whole x
//                       scales of 1xb: [tokens, features / b]
//   along the columns   codes [features, columns], packed: each group's rows are filled up with rows of zeros to a multiple of 128, so that
//                       its columns begin at padded_ends[g - 1] and every operand of a product is aligned
//                       scales of 1xb: [features, columns / b]
//   square blocks       scales [columns / b, features / b] and [features / b, columns / b]: a group's begin at padded_ends[g - 1] / b
//   one scale           scales [groups], of two levels tensor_scale [groups]
//
// Scales of 1x128 lie as products take them, block after block: [features / 128, tokens] and [columns / 128, features], the last axis
// filled up to a multiple of 4 floats. Blocks that are zeros alone have the scale that a block of zeros has.
//
// `columns` is group_columns(tokens, groups), what the host knows; padded_ends int32 [groups], multiples of 128, are found on the device
// (export group_rows). A product over rows takes ends, one that contracts them (for each group's weight) takes padded_ends.
#pragma once

#include <cstdint>

namespace blockfp {

constexpr int kGroupUnit = 128;

// Columns of the codes along the columns: enough for any ends.
inline int64_t group_columns(int64_t tokens, int64_t groups) {
  return (tokens + groups * (kGroupUnit - 1)) / kGroupUnit * kGroupUnit;
}

// Tiles of kGroupUnit rows, of which each begins in the group it belongs to and an empty group has one: enough for any ends.
inline int64_t group_tiles(int64_t tokens, int64_t groups) { return tokens / kGroupUnit + groups; }

// What group_rows writes of each tile.
struct GroupTile {
  int32_t group;         // negative past the last one
  int32_t row;           // of the tile's first row, in its group
  int32_t first_row;     // of its group, in x
  int32_t rows;          // of its group
  int32_t first_column;  // of its group, along the columns
  int32_t unused[3];
};

// Words of what group_rows writes: ends, padded_ends, filled up to a multiple of 8, and the table of tiles.
constexpr int kTileWords = sizeof(GroupTile) / 4;
inline int64_t group_table(int64_t groups) { return (2 * groups + kTileWords - 1) / kTileWords * kTileWords; }
inline int64_t group_words(int64_t tokens, int64_t groups) { return group_table(groups) + kTileWords * group_tiles(tokens, groups); }

// The table of tiles, in what group_rows wrote.
inline const GroupTile* tiles_of_groups(const int32_t* words, int64_t groups) {
  return reinterpret_cast<const GroupTile*>(words + group_table(groups));
}

}  // namespace blockfp
