// Descriptions of calls, their division into tasks, and the table of functions of each instruction set.
//
// A task is a tile of one matrix: rows and columns that stay in the cache while they are read twice. Tiles begin at block
// boundaries, so tasks share nothing.
#pragma once

#include <cstdint>

#include "blockfp/adamw.h"
#include "blockfp/dtypes.h"
#include "blockfp/kept_scales.h"
#include "blockfp/packing.h"
#include "blockfp/scales.h"

namespace blockfp {

// Division of [batches, rows, columns] into tiles.
struct Tiling {
  int64_t batches, rows, columns;
  int64_t row_phase, column_phase;  // offset of the first row and column in its block
  int64_t tile_rows, tile_columns;  // multiples of the block
  int64_t row_tiles, column_tiles;
  int64_t grid_rows, grid_columns;  // blocks of one matrix

  BLOCKFP_HD int64_t tasks() const { return batches * row_tiles * column_tiles; }
};

// One task: local coordinates of its elements and of its first block.
struct Tile {
  int64_t batch, row, rows, column, columns;
  int64_t column_phase;
  int64_t grid_column;  // column of the tile's first block's start, counted from the grid's

  BLOCKFP_HD Tile(const Tiling& t, int64_t task) {
    const int64_t column_tile = task % t.column_tiles, row_tile = task / t.column_tiles % t.row_tiles;
    batch = task / t.column_tiles / t.row_tiles;
    row = inside(row_tile * t.tile_rows - t.row_phase, t.rows);
    rows = inside((row_tile + 1) * t.tile_rows - t.row_phase, t.rows) - row;
    column = inside(column_tile * t.tile_columns - t.column_phase, t.columns);
    columns = inside((column_tile + 1) * t.tile_columns - t.column_phase, t.columns) - column;
    column_phase = column_tile == 0 ? t.column_phase : 0;
    grid_column = column_tile * t.tile_columns;
  }

  // For one row of the block grid: the column of the tile's first block, and the number of its blocks.
  BLOCKFP_HD int64_t first_block(const Format& format) const { return grid_column / format.block_columns; }
  BLOCKFP_HD int64_t blocks(const Format& format) const {
    return format.per_tensor() ? 1 : (column_phase + columns + format.block_columns - 1) / format.block_columns;
  }

 private:
  BLOCKFP_HD static int64_t inside(int64_t at, int64_t size) { return at < 0 ? 0 : (at < size ? at : size); }
};

// The input, with any strides, in elements. Leading axes are flattened, row-major.
struct Input {
  const void* data;
  int dtype;  // kId of dtypes.h
  int ndim;
  const int64_t* shape;
  const int64_t* strides;

  BLOCKFP_HD int64_t batch_offset(int64_t batch) const {
    int64_t offset = 0;
    for (int axis = ndim - 3; axis >= 0; --axis) {
      offset += batch % shape[axis] * strides[axis];
      batch /= shape[axis];
    }
    return offset;
  }
  BLOCKFP_HD int64_t row_stride() const { return strides[ndim - 2]; }
  BLOCKFP_HD int64_t column_stride() const { return strides[ndim - 1]; }
};

struct AmaxJob {
  Format format;
  Tiling tiling;
  Input x;
  int32_t* blocks;   // fp32 bits, one per block
  int32_t* nan;      // 1 if the block contains a NaN; or null
  int32_t* tensor;   // one maximum, raised atomically
};

struct QuantizeJob {
  Format format;
  Tiling tiling;
  Input x;
  uint8_t* codes;
  void* scales;
  const int32_t* given_blocks;  // amaxes reduced elsewhere, or null
  const int32_t* given_nan;     // null if the element has a NaN
  const int32_t* given_members; // 4-over-6: magnitudes of the blocks' elements, or null if x contains whole blocks
  int32_t eps_bits;
  int32_t largest;              // replaces an FP8 multiplier that overflows, fp32 bits
  float multiplier;             // per tensor: of elements; two levels: of the tensor
  float tensor_scale;           // two levels
  int32_t tensor_amax;          // 4-over-6, fp32 bits
  bool keeps;                   // `scales` contain the previous ones, from which new ones follow (blockfp/kept_scales.h)
  KeptTensorScale kept;         // the same with two levels
  int random;                   // random bytes per element: 0 rounds to nearest, 1, 2
  uint32_t key0, key1;
  int64_t first_row, first_column, index_rows, index_columns;  // offset of x in the unsharded array, and its lengths
};

struct DequantizeJob {
  Format format;
  Tiling tiling;
  const uint8_t* codes;
  const void* scales;
  float tensor_scale;
  int dtype;
  void* out;
};

struct RotateJob {
  Input x;
  int64_t rows, columns;
  void* out;
};

// An AdamW step of one parameter; `quantize` describes the quantization of its masters, if it has codes.
struct StepJob {
  StepEntry entry;
  Tiling tiling;
  QuantizeJob quantize;
  uint32_t first_key[2], second_key[2];
};

// A product of operands that were taken apart: sign * digits, the kind and the exponent of every element, as
// blockfp/definition/matrix_units.py describes them.
struct ProductJob {
  static constexpr int kColumns = 32, kRows = 32;           // of the result, in one task
  static constexpr uint8_t kZero = 1, kInfinite = 2, kNan = 3, kNegative = 4;  // kinds; 0 is a finite number

  int64_t m, n, k;
  int length, fraction, mantissa, floor, promotion;         // of the Summation; promotion 0: never
  // a [m, k]; b [tasks of columns, k, kColumns], zeros beyond n.
  const float *a_digits, *b_digits;
  const int16_t *a_exponents, *b_exponents;
  const uint8_t *a_kinds, *b_kinds;
  const uint8_t *a_special, *b_special;                     // whether a row of a, or the columns of a task, have infinities or NaN
  bool of_parts;                                            // whether scales multiply the sums of a part of k, or the whole
  const float *a_scales, *b_scales;
  int64_t a_row, a_part, b_row, b_part;                     // strides of the scales
  const float *bias, *addend;                               // [n], [m, n], or null
  float* out;

  BLOCKFP_HD int64_t column_tasks() const { return (n + kColumns - 1) / kColumns; }
  BLOCKFP_HD int64_t tasks() const { return column_tasks() * ((m + kRows - 1) / kRows); }
};

// Tasks run in any order, on any thread. `scratch` has Scratch::bytes of the tiling, 64-byte aligned. `next` is this thread's
// following task; if there is none, it is at least the number of tasks.
struct Kernels {
  const char* name;
  void (*tensor_amax)(const AmaxJob&, int64_t task, void* scratch);
  void (*block_amax)(const AmaxJob&, int64_t task, void* scratch);
  void (*quantize)(const QuantizeJob&, int64_t task, int64_t next, void* scratch);
  void (*dequantize)(const DequantizeJob&, int64_t task, void* scratch);
  void (*rotate)(const RotateJob&, int64_t row);
  void (*step)(const StepJob&, int64_t task, int64_t next, void* scratch);
  void (*product)(const ProductJob&, int64_t task);
};

// The parts of a task's scratch memory.
struct Scratch {
  void* gathered;       // the tile's elements, if the input's columns aren't adjacent
  void* largest;        // largest magnitude in each column of a row of blocks
  int32_t* amax;        // one per block; these five have room for 16 more
  int32_t* nan;
  int32_t* stored;
  float* multipliers;
  float* factors;       // two per block
  uint8_t* codes;
  uint8_t* random;

  BLOCKFP_HD Scratch(const Tiling& t, void* memory) {
    const int64_t blocks = t.tile_columns / 16 + 32;
    char* next = static_cast<char*>(memory);
    amax = reinterpret_cast<int32_t*>(take(next, 4 * blocks));
    nan = reinterpret_cast<int32_t*>(take(next, 4 * blocks));
    stored = reinterpret_cast<int32_t*>(take(next, 4 * blocks));
    multipliers = reinterpret_cast<float*>(take(next, 4 * blocks));
    factors = reinterpret_cast<float*>(take(next, 8 * blocks));
    largest = take(next, 4 * t.tile_columns);
    codes = reinterpret_cast<uint8_t*>(take(next, t.tile_columns));
    random = reinterpret_cast<uint8_t*>(take(next, 2 * t.tile_columns + 192));
    gathered = next;
  }

  // Size for a tiling, with or without the copy of a tile whose columns aren't adjacent.
  BLOCKFP_HD static int64_t bytes(const Tiling& t, bool gather) {
    return 28 * (t.tile_columns / 16 + 32) + 7 * t.tile_columns + 2048 + (gather ? 4 * t.tile_rows * t.tile_columns : 0);
  }

 private:
  // Each part has some spare room, for stores of whole vectors.
  BLOCKFP_HD static char* take(char*& next, int64_t bytes) {
    char* piece = next;
    next += (bytes + 127) / 64 * 64;
    return piece;
  }
};

}  // namespace blockfp
