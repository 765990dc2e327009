// What a kernel is told, and the launches that the exports call. Plain values, passed to the GPU by value.
//
// A launch only enqueues work on `stream`: it allocates nothing and waits for nothing, so it may be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "blockfp/adamw.h"
#include "blockfp/dispatch.h"
#include "blockfp/groups.h"
#include "blockfp/scales.h"

namespace blockfp {
namespace cuda {

// A stack of matrices; strides count elements.
struct Matrices {
  const void* data;
  int dtype;  // kId of dtypes.h
  int64_t batches, rows, columns;
  int64_t batch_stride, row_stride, column_stride;
};

// Where x lies in the unsharded matrix, for blocks (phase) and for the random index.
struct Window {
  int64_t row, column;    // of x's first element
  int64_t rows, columns;  // of the unsharded matrix
  int row_phase, column_phase;  // where in its block it lies
};

// One direction's outputs; codes is null where it is not wanted.
struct Output {
  uint8_t* codes;
  void* scales;
  const uint32_t* key;  // two words, or null for nearest even
  int64_t scale_bytes;
};

// One direction's outputs of MX operands that are aligned (align.cu): FP8 codes in rows of a multiple of 16, scales block after block in rows
// of a multiple of 4. `codes` is null where it is not wanted.
struct AlignedOutput {
  uint8_t* codes;
  float* scales;
};

// An activation that makes the elements that are quantized, of a gate: silu, or gelu by tanh or by erf.
enum class Activation { kSilu, kGeluTanh, kGeluErf };

// How they are made of x, the gate: activation(gate), or activation(gate) * up. What an operation of PyTorch's would give is rounded to
// the dtype.
struct Gated {
  Activation activation;
  const void* up;     // of x's dtype and size; null: the gate alone
  int64_t up_stride;  // elements from one of its rows to the next
  bool pairs;         // gate and up alternate along the rows of x; `up` is the second element
};

// Rows in groups (blockfp/groups.h).
struct Groups {
  const GroupTile* tiles;  // null: no groups
  int32_t* overflows;      // of each group, kInfinity where it holds an Inf: its amax, or a word of its own; or null
  int overflow_stride;
  int64_t count, tokens;
  int64_t columns;         // of the codes along the columns
  GroupTile own;           // in a kernel, the tile it is at
};

struct QuantizeArguments {
  Matrices x;
  Format format;
  Window window;
  Output row, column;           // column: of the transposed matrix
  AlignedOutput aligned_row, aligned_column;  // written by launch_aligned and its kin, instead of row and of row or column
  const int32_t* amax;          // of the tensor, fp32 bits; or null
  const int32_t* amax_t;        // of the transposed one: its own where it is rotated
  const float* multiplier;      // per tensor, instead of amax
  int32_t* recorded;            // or null; zero before. Per tensor: raised to the amax of x; of blocks: kInfinity where x holds an Inf
  bool mark;                    // scales, or of two levels tensor scales, become NaN where x holds an Inf: `amax` or `recorded` tells
  float* tensor_scale;          // two-level formats; or null
  float* tensor_scale_t;
  int32_t eps_bits;
  int32_t largest_bits;         // replaces an FP8 block multiplier that overflows
  bool rotate_column;           // the random Hadamard transform before the column direction
  bool scales_by_tile;          // scales go where order_scales.cu expects them
  Gated gated;                  // read by launch_gated alone
  Groups groups;
};

struct EncodeArguments {
  Matrices x;
  Format format;
  Window window;
  uint8_t* codes;
  void* scales;
  const int32_t* blocks;        // amaxes of the block grid, already reduced; null: `scales` are given
  const int32_t* nan;
  const int32_t* amax;          // of the tensor, for two-level formats with given blocks
  float* tensor_scale;          // read where scales are given
  const uint32_t* key;          // of one byte an element, or with `keeps` of two
  int32_t eps_bits, largest_bits;
  bool keeps;                   // `scales` are those of before, from which the new ones go on (blockfp/kept_scales.h)
  const float* kept_tensor_scale;  // likewise, of two levels
};

struct AmaxBlocksArguments {
  Matrices x;
  Format format;
  Window window;
  int32_t* blocks;
  int32_t* nan;     // or null
  int32_t* tensor;  // or null
};

struct DequantizeArguments {
  const uint8_t* codes;
  const void* scales;
  const float* tensor_scale;
  Format format;
  Window window;
  int64_t batches, rows, columns;
  void* out;
  int dtype;
};

// FP8 codes [rows, k] of one side of a product.
struct Factor {
  const void* codes;
  const float* scales;  // one; of blocks of 1x128 [k / 128, rows]; of 128x128 [rows / 128, k / 128 filled up to fours]
  int element;          // kId of elements.h
  int block_rows;       // 0: one scale for the whole tensor
};

// out [m, n] = a b^T (+ bias) (+ out).
struct ProductArguments {
  Factor a, b;
  int64_t m, n, k;
  const void* bias;  // [n], or null
  int bias_dtype;    // kId of dtypes.h
  void* out;
  int dtype;
  bool accumulate;
  void* workspace;
  size_t workspace_bytes;
  bool fast;  // whether the matrix units may accumulate in reduced precision
  int device;
};

// Scales of lines (rows or columns) that lie by tiles of 128 x 128, a word for each line and tile.
struct ScalesByTile {
  uint32_t* words;
  int64_t lines;  // of all matrices
  int tiles;      // along a line
};

cudaError_t launch_amax(const Matrices& x, int32_t* out, cudaStream_t stream);
// out: the amax of x, and that of x after the Hadamard transform of its columns.
cudaError_t launch_amax_rotated(const Matrices& x, int32_t* out, cudaStream_t stream);
// The same of what an activation makes, in one call: the second of the two with `rotated` alone.
cudaError_t launch_amax_gated(const Matrices& x, const Gated& gated, bool rotated, int32_t* out, cudaStream_t stream);
// history[0]: raised to the amax, unless that is Inf.
cudaError_t launch_record_amax(const int32_t* amax, float* history, cudaStream_t stream);
cudaError_t launch_amax_blocks(const AmaxBlocksArguments& a, cudaStream_t stream);
cudaError_t launch_encode(const EncodeArguments& a, cudaStream_t stream);
cudaError_t launch_dequantize(const DequantizeArguments& a, cudaStream_t stream);
// Square matrices of 8-, 6- or 4-bit codes, or of 32-bit scales (bits 32).
cudaError_t launch_transpose(const void* in, void* out, int bits, int64_t batches, int64_t rows, int64_t columns,
                             cudaStream_t stream);
// Puts scales of rows and of columns in order, in place; `words` of either may be null. What stands before in the stream wrote them. All
// become NaN where `overflow` holds kInfinity; it may be null.
cudaError_t launch_order_scales(const ScalesByTile& rows, const ScalesByTile& columns, const int32_t* overflow, cudaStream_t stream);
// NaN for all scales, and aligned ones' codes, where a.recorded holds kInfinity and they are to be marked.
cudaError_t launch_spoil(const QuantizeArguments& a, cudaStream_t stream);
// Whether launch_order_scales can: lines come in whole bands, and a band fits into shared memory.
bool can_order_scales(int64_t rows, int64_t columns);
// One-byte scales [batches, m, n], each row standing for `repeat` of `rows` rows, in tensor-core order.
cudaError_t launch_interleave(const uint8_t* in, uint8_t* out, int64_t batches, int64_t rows, int64_t m, int64_t n,
                              int repeat, cudaStream_t stream);
// AdamW steps of parameters; `entries` is read before this returns.
cudaError_t launch_adamw(const StepEntry* entries, int64_t count, cudaStream_t stream);
// Codes of what it has updated, in formats whose scales need the amax of the whole parameter.
cudaError_t launch_second_pass(const StepEntry* entries, int64_t count, cudaStream_t stream);

// Keys of gradients, two words for each group and direction; key of two int64 (wide) or int32 words. `advance` raises the step behind it.
cudaError_t launch_fold_keys(const void* key, bool wide, int64_t* step, int64_t rank, int64_t groups, bool advance, void* out,
                             cudaStream_t stream);

// cuBLASLt's version, such as 130100; 0 where there is none.
int64_t cublas_version();
// Why a product couldn't be enqueued; empty where it was.
std::string launch_product(const ProductArguments& a, cudaStream_t stream);

// One definition for each element: each is compiled on its own, from the same file.
template <class E>
cudaError_t launch_rows(const QuantizeArguments& a, cudaStream_t stream);
template <class E>
cudaError_t launch_tiles(const QuantizeArguments& a, cudaStream_t stream);
// Of rows in groups; `a.groups` has no tiles yet, which `words`, of launch_group_rows, hold.
template <class E>
cudaError_t launch_groups(QuantizeArguments a, const int32_t* words, cudaStream_t stream);

// Of what an activation makes. An error for elements and blocks that it isn't compiled for (kMadeBlock of sources.cuh).
template <class E>
cudaError_t launch_gated(const QuantizeArguments& a, cudaStream_t stream);

// MX, rounded to nearest, of which one direction or both are aligned; there is no `row`. Of an activation's output both are.
template <class E>
cudaError_t launch_aligned(const QuantizeArguments& a, cudaStream_t stream);
template <class E>
cudaError_t launch_aligned_gated(const QuantizeArguments& a, cudaStream_t stream);
template <class E>
cudaError_t launch_aligned_groups(QuantizeArguments a, const int32_t* words, cudaStream_t stream);
// out: what an activation makes of x.
cudaError_t launch_activation(const Matrices& x, const Gated& gated, void* out, cudaStream_t stream);
// Gradients of gate and up from that of what an activation makes of them, x being the gate; they lie as gate and up do.
cudaError_t launch_activation_gradient(const Matrices& gradient, const Matrices& x, const Gated& gated, const Matrices& d_x,
                                       const Gated& d_gated, cudaStream_t stream);

// Where groups lie: `words` of blockfp/groups.h, from their ends.
cudaError_t launch_group_rows(const int32_t* ends, int64_t tokens, int64_t groups, int32_t* words, cudaStream_t stream);
// out: [groups] amaxes, or with `rotated` [groups, 2], the second after the Hadamard transform of the group's columns.
cudaError_t launch_group_amax(const Matrices& x, const int32_t* words, int64_t groups, bool rotated, int32_t* out, cudaStream_t stream);
// out: fp32 [groups, columns], sums of each group's rows of a contiguous x.
cudaError_t launch_sum_groups(const Matrices& x, const int32_t* words, int64_t groups, float* out, cudaStream_t stream);
// NaN for the scales of the groups that a.groups.overflows tells of.
cudaError_t launch_spoil_groups(const QuantizeArguments& a, const int32_t* words, cudaStream_t stream);
// Zeros for the rows [tokens, columns] past the last end, and for the matrices [groups, size] of groups without rows; either may be null.
cudaError_t launch_clear_groups(const int32_t* words, int64_t tokens, int64_t groups, void* rows, int64_t row_bytes, void* matrices,
                                int64_t matrix_bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
