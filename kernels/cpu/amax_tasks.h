// Largest magnitudes, ignoring NaN, of blocks and of the whole tensor. Included by each instruction set's file.
//
// NaN's patterns are above Inf's. So the largest pattern is found without testing for NaN, and elements are tested one by one
// only if that pattern is above Inf.
#pragma once

#include <cstring>

#include "jobs.h"
#include "largest_magnitude.h"

namespace blockfp {
namespace BLOCKFP_ISA {

// A tile's elements: rows are `stride` apart, columns adjacent.
template <class T>
struct Elements {
  const typename T::Raw* data;
  int64_t stride;

  const typename T::Raw* row(int64_t r) const { return data + r * stride; }
};

// The tile's first element in the input.
template <class T>
BLOCKFP_HD const typename T::Raw* first_of(const Input& x, const Tile& tile) {
  return static_cast<const typename T::Raw*>(x.data) + x.batch_offset(tile.batch) + tile.row * x.row_stride() +
         tile.column * x.column_stride();
}

// The tile in place, or copied to `scratch` if columns aren't adjacent.
template <class T>
Elements<T> elements_of(const Input& x, const Tile& tile, void* scratch) {
  using Raw = typename T::Raw;
  const int64_t rows = x.row_stride(), columns = x.column_stride();
  const Raw* first = first_of<T>(x, tile);
  if (columns == 1 || tile.columns <= 1) return {first, rows};
  Raw* copy = static_cast<Raw*>(scratch);
  // In squares, so that whole cache lines are read and written; rows are often a large power of two apart.
  constexpr int64_t kSide = 32;
  alignas(64) Raw square[kSide][kSide];
  for (int64_t r0 = 0; r0 < tile.rows; r0 += kSide) {
    const int64_t height = tile.rows - r0 < kSide ? tile.rows - r0 : kSide;
    for (int64_t c0 = 0; c0 < tile.columns; c0 += kSide) {
      const int64_t width = tile.columns - c0 < kSide ? tile.columns - c0 : kSide;
      for (int64_t c = 0; c < width; ++c) {
        const Raw* column = first + r0 * rows + (c0 + c) * columns;
        for (int64_t r = 0; r < height; ++r) square[r][c] = column[r * rows];
      }
      for (int64_t r = 0; r < height; ++r) {
        std::memcpy(copy + (r0 + r) * tile.columns + c0, square[r], width * sizeof(Raw));
      }
    }
  }
  return {copy, tile.columns};
}

template <class T>
BLOCKFP_HD int32_t bits_of(uint32_t pattern) {
  return widen<T, float>(static_cast<int32_t>(pattern));
}

// Largest pattern of some rows and columns; NaN counts as 0.
template <class T>
uint32_t largest_number(const Elements<T>& x, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  uint32_t most = 0;
  for (int64_t r = row; r < row + rows; ++r) {
    for (int64_t c = column; c < column + columns; ++c) {
      const uint32_t magnitude = x.row(r)[c] & T::kRawMagnitude;
      if (magnitude <= T::kRawInfinity && magnitude > most) most = magnitude;
    }
  }
  return most;
}

// Largest magnitude pattern of each column over some rows.
template <class T>
void largest_of_columns(const Elements<T>& x, int64_t row, int64_t rows, int64_t columns, typename T::Raw* __restrict__ largest) {
  using Raw = typename T::Raw;
  // Eight rows at a time, so that the running maxima are read and written once for all of them.
  const int64_t end = row + rows;
  const auto larger = [](Raw a, Raw b) { return a > b ? a : b; };
  for (int64_t r = row; r < end; r += 8) {
    const auto at = [&](int64_t k) { return x.row(r + k < end ? r + k : end - 1); };
    const Raw *p0 = at(0), *p1 = at(1), *p2 = at(2), *p3 = at(3), *p4 = at(4), *p5 = at(5), *p6 = at(6), *p7 = at(7);
    for (int64_t c = 0; c < columns; ++c) {
      const auto pair = [c, larger](const Raw* p, const Raw* q) {
        return larger(p[c] & T::kRawMagnitude, q[c] & T::kRawMagnitude);
      };
      const Raw most = larger(larger(pair(p0, p1), pair(p2, p3)), larger(pair(p4, p5), pair(p6, p7)));
      largest[c] = r == row ? most : larger(largest[c], most);
    }
  }
}

// amax bits and NaN flags of one row of blocks: `rows` rows of the tile, starting at `row`.
template <class T>
void amax_of_blocks(const Elements<T>& x, int64_t row, int64_t rows, int64_t columns, int64_t phase, int64_t block,
                    void* scratch, int32_t* amax, int32_t* nan) {
  using Raw = typename T::Raw;
  const Raw* values = x.row(row);
  if (rows > 1) {
    Raw* largest = static_cast<Raw*>(scratch);
    largest_of_columns(x, row, rows, columns, largest);
    values = largest;
  }
  int64_t column = 0;
  for (int64_t b = 0; column < columns; ++b) {
#if defined(__AVX512BW__) || defined(__AVX2__)
    if constexpr (sizeof(Raw) == 2) {
      const bool whole = b > 0 || phase == 0;
      while (whole && column + 8 * block <= columns && amax_of_eight<T>(values + column, block, amax + b)) {
        memset(nan + b, 0, 8 * sizeof(*nan));
        b += 8;
        column += 8 * block;
      }
      if (column == columns) break;
    }
#endif
    int64_t end = (b + 1) * block - phase;
    end = end < columns ? end : columns;
    uint32_t most = largest_pattern<T>(values + column, end - column);
    nan[b] = most > T::kRawInfinity;
    if (nan[b]) most = largest_number(x, row, rows, column, end - column);
    amax[b] = bits_of<T>(most);
    column = end;
  }
}

template <class T>
void tensor_amax_task(const AmaxJob& job, int64_t task, void* scratch) {
  const Tile tile(job.tiling, task);
  const Elements<T> x = elements_of<T>(job.x, tile, Scratch(job.tiling, scratch).gathered);
  uint32_t most = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    uint32_t row = largest_pattern<T, true>(x.row(r), tile.columns);
    if (row > T::kRawInfinity) row = largest_number(x, r, 1, 0, tile.columns);
    most = row > most ? row : most;
  }
  const int32_t bits = bits_of<T>(most);
  int32_t seen = __atomic_load_n(job.tensor, __ATOMIC_RELAXED);
  while (bits > seen &&
         !__atomic_compare_exchange_n(job.tensor, &seen, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Calls body(first row in the tile, number of rows, row of the block grid) for each row of blocks in a tile.
template <class Body>
BLOCKFP_HD void for_block_rows(const Format& format, const Tiling& t, const Tile& tile, Body body) {
  const int64_t block_rows = format.per_tensor() ? 1 : format.block_rows;
  for (int64_t r = 0; r < tile.rows;) {
    const int64_t global = t.row_phase + tile.row + r;
    int64_t rows = block_rows - global % block_rows;
    rows = rows < tile.rows - r ? rows : tile.rows - r;
    body(r, rows, global / block_rows);
    r += rows;
  }
}

template <class T>
void block_amax_task(const AmaxJob& job, int64_t task, void* scratch) {
  const Tiling& t = job.tiling;
  const Tile tile(t, task);
  const Scratch memory(t, scratch);
  const Elements<T> x = elements_of<T>(job.x, tile, memory.gathered);
  for_block_rows(job.format, t, tile, [&](int64_t row, int64_t rows, int64_t block_row) {
    amax_of_blocks(x, row, rows, tile.columns, tile.column_phase, job.format.block_columns, memory.largest, memory.amax,
                   memory.nan);
    const int64_t at = (tile.batch * t.grid_rows + block_row) * t.grid_columns + tile.first_block(job.format);
    const int64_t blocks = tile.blocks(job.format);
    memcpy(job.blocks + at, memory.amax, 4 * blocks);
    if (job.nan != nullptr) memcpy(job.nan + at, memory.nan, 4 * blocks);
  });
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
