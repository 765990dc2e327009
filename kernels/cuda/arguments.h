// Kernel arguments, and the launches that the exports call. Arguments are plain values, passed to the GPU by value.
//
// A launch only enqueues work on `stream`: it allocates nothing and waits for nothing, so it can be captured in a graph.
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

// Position of x in the unsharded matrix, for blocks (phase) and for the random index.
struct Window {
  int64_t row, column;    // of x's first element
  int64_t rows, columns;  // of the unsharded matrix
  int row_phase, column_phase;  // offset of x in its first block
};

// One direction's outputs; codes is null if the direction isn't needed.
struct Output {
  uint8_t* codes;
  void* scales;
  const uint32_t* key;  // two words, or null to round to nearest even
  int64_t scale_bytes;
  bool ordered;         // of one matrix: 1x128 scales are stored block by block (ordered_place), as products read them
};

// One direction's outputs for aligned MX operands (align.cu): FP8 codes in rows padded to a multiple of 16, scales block by
// block in rows padded to a multiple of 4. `codes` is null if the direction isn't needed.
struct AlignedOutput {
  uint8_t* codes;
  float* scales;
};

// The activation that produces the quantized elements from a gate: silu, gelu by tanh or erf, or squared ReLU.
enum class Activation { kSilu, kGeluTanh, kGeluErf, kRelu2 };

// How elements are computed from x, the gate: activation(gate), or activation(gate) * up. Each result that a PyTorch operation
// would return is rounded to the dtype.
struct Gated {
  Activation activation;
  const void* up;     // of x's dtype and shape; null: the gate alone
  int64_t up_stride;  // elements between the starts of its rows
  bool pairs;         // gate and up alternate within x's rows; `up` points to the second element
};

// How elements of the gradients of gate and up are computed. The columns of x, the gate, are those of the result: the gate's
// gradient, up's, or both side by side or in pairs.
struct GatedGradient : Gated {
  const void* gradient;     // of the activation's output, with the gate's dtype; or null
  int64_t gradient_stride;  // elements between the starts of its rows
  int64_t gate_columns;     // of the gate
  int64_t first;            // column of the result's first in the gradients side by side; 0 in pairs
};

// Rows in groups (blockfp/groups.h).
struct Groups {
  const GroupTile* tiles;  // null without groups
  int32_t* overflows;      // per group, kInfinity if it contains an Inf: its amax, or a separate word; or null
  int overflow_stride;
  int64_t count, tokens;
  int64_t columns;         // of the columnwise codes
  GroupTile own;           // in a kernel, the current tile
};

struct QuantizeArguments {
  Matrices x;
  Format format;
  Window window;
  Output row, column;           // column: of the transposed matrix
  AlignedOutput aligned_row, aligned_column;  // written instead of row and column by launch_aligned and launch_aligned_gated
  const int32_t* amax;          // of the tensor, fp32 bits; or null
  const int32_t* amax_t;        // of the transposed tensor, which differs if it is rotated
  const float* multiplier;      // per tensor, instead of amax
  bool measured;                // `recorded` has the amax, which counts where the multiplier isn't above 0
  int32_t* recorded;            // or null; initially zero. Per tensor raised to the amax of x, in blocks kInfinity if x has an Inf
  bool mark;                    // (tensor) scales become NaN if `amax` or `recorded` shows an Inf
  float* tensor_scale;          // two-level formats; or null
  float* tensor_scale_t;
  int32_t eps_bits;
  int32_t largest_bits;         // replaces an FP8 block multiplier that overflows
  bool rotate_column;           // apply the random Hadamard transform before the column direction
  bool scales_by_tile;          // store scales by tile, for order_scales.cu
  Gated gated;                  // only read by launch_gated and launch_aligned_gated
  Groups groups;
  GatedGradient gradient;       // only read by launch_gradient
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
  float* tensor_scale;          // read if scales are given
  const uint32_t* key;          // for one byte per element, or two with `keeps`
  int32_t eps_bits, largest_bits;
  bool keeps;                   // `scales` contain the previous ones, from which the new ones follow (blockfp/kept_scales.h)
  const float* kept_tensor_scale;  // the same, for two levels
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

// FP8 codes [rows, k] of one operand of a product.
struct Factor {
  const void* codes;
  const float* scales;  // one; 1x128: [k / 128, rows]; 128x128: [rows / 128, k / 128 padded to a multiple of 4]
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

// Scales of lines (rows or columns) stored by tiles of 128 x 128, a word per line and tile.
struct ScalesByTile {
  uint32_t* words;
  int64_t lines;  // of all matrices
  int tiles;      // along a line
};

// `unless`: a scale on the device, or null. If it is above 0, x isn't read, and its amax is 0.
cudaError_t launch_amax(const Matrices& x, int32_t* out, cudaStream_t stream, const float* unless = nullptr);
// out: the amax of x, and of x after the Hadamard transform of its columns.
cudaError_t launch_amax_rotated(const Matrices& x, int32_t* out, cudaStream_t stream);
// The same for an activation's output; the second amax only with `rotated`.
cudaError_t launch_amax_gated(const Matrices& x, const Gated& gated, bool rotated, int32_t* out, cudaStream_t stream,
                              const float* unless = nullptr);
// Raises history[0] to the amax unless that is Inf.
cudaError_t launch_record_amax(const int32_t* amax, float* history, cudaStream_t stream);
cudaError_t launch_amax_blocks(const AmaxBlocksArguments& a, cudaStream_t stream);
cudaError_t launch_encode(const EncodeArguments& a, cudaStream_t stream);
cudaError_t launch_dequantize(const DequantizeArguments& a, cudaStream_t stream);
// Square matrices of 8-, 6- or 4-bit codes, or of 32-bit scales (bits 32).
cudaError_t launch_transpose(const void* in, void* out, int bits, int64_t batches, int64_t rows, int64_t columns,
                             cudaStream_t stream);
// Puts scales of rows and columns in order, in place; `words` of either may be null. They were written by preceding work in the
// stream. All become NaN if `overflow` (may be null) contains kInfinity.
cudaError_t launch_order_scales(const ScalesByTile& rows, const ScalesByTile& columns, const int32_t* overflow, cudaStream_t stream);
// Sets all scales, and aligned codes, to NaN if a.recorded is kInfinity and they are to be marked. The preceding work in the
// stream must be the kernel that records it.
cudaError_t launch_spoil(const QuantizeArguments& a, cudaStream_t stream);
// Whether launch_order_scales can run: lines form whole bands, and a band fits into shared memory.
bool can_order_scales(int64_t rows, int64_t columns);
// AdamW steps of parameters; `entries` is read before the call returns.
cudaError_t launch_adamw(const StepEntry* entries, int64_t count, cudaStream_t stream);
// Writes codes of the updated masters in formats whose scales need the whole parameter's amax.
cudaError_t launch_second_pass(const StepEntry* entries, int64_t count, cudaStream_t stream);

// Keys of gradients, two words per group and direction; `key` is two int64 (wide) or int32 words. `advance` increments the step
// afterwards.
cudaError_t launch_fold_keys(const void* key, bool wide, int64_t* step, int64_t rank, int64_t groups, bool advance, void* out,
                             cudaStream_t stream);

// cuBLASLt's version, such as 130100; 0 without cuBLASLt.
int64_t cublas_version();
// Returns why a product couldn't be enqueued; "" if it was.
std::string launch_product(const ProductArguments& a, cudaStream_t stream);

// Quantizes FP8 with a scale for each whole row or column. `amaxes` is scratch, an int32 for each row, then each column, that has
// codes.
cudaError_t launch_long(QuantizeArguments a, int32_t* amaxes, cudaStream_t stream);

// One definition per element: the same file is compiled for each.
template <class E>
cudaError_t launch_rows(const QuantizeArguments& a, cudaStream_t stream);
template <class E>
cudaError_t launch_tiles(const QuantizeArguments& a, cudaStream_t stream);
// Quantizes rows in groups; a.groups.tiles is set from `words`, the output of launch_group_rows.
template <class E>
cudaError_t launch_groups(QuantizeArguments a, const int32_t* words, cudaStream_t stream);

// Quantizes an activation's output. Returns an error for elements and blocks that aren't compiled (kMadeBlock of sources.cuh).
template <class E>
cudaError_t launch_gated(const QuantizeArguments& a, cudaStream_t stream);
// Quantizes an activation's gradients by one given scale, along the columns at least (kMadeGradient).
template <class E>
cudaError_t launch_gradient(const QuantizeArguments& a, cudaStream_t stream);

// Quantizes MX, rounded to nearest, with one or both directions aligned; `row` isn't written. An activation's output is aligned
// in both.
template <class E>
cudaError_t launch_aligned(const QuantizeArguments& a, cudaStream_t stream);
template <class E>
cudaError_t launch_aligned_gated(const QuantizeArguments& a, cudaStream_t stream);
template <class E>
cudaError_t launch_aligned_groups(QuantizeArguments a, const int32_t* words, cudaStream_t stream);
// out: the activation's output for x.
cudaError_t launch_activation(const Matrices& x, const Gated& gated, void* out, cudaStream_t stream);
// Gradients of gate and up from the gradient of the activation's output, where x is the gate; their layout is that of gate and
// up.
cudaError_t launch_activation_gradient(const Matrices& gradient, const Matrices& x, const Gated& gated, const Matrices& d_x,
                                       const Gated& d_gated, cudaStream_t stream);

// Positions of groups: `words` of blockfp/groups.h, from their ends.
cudaError_t launch_group_rows(const int32_t* ends, int64_t tokens, int64_t groups, int32_t* words, cudaStream_t stream);
// out: [groups] amaxes, or with `rotated` [groups, 2], the second after the Hadamard transform of the group's columns.
cudaError_t launch_group_amax(const Matrices& x, const int32_t* words, int64_t groups, bool rotated, int32_t* out, cudaStream_t stream);
// out: fp32 [groups, columns], sums over each group's rows of a contiguous x.
cudaError_t launch_sum_groups(const Matrices& x, const int32_t* words, int64_t groups, float* out, cudaStream_t stream);
// Sets the scales of groups that a.groups.overflows marks to NaN.
cudaError_t launch_spoil_groups(const QuantizeArguments& a, const int32_t* words, cudaStream_t stream);
// Clears the rows [tokens, columns] past the last end, and the matrices [groups, size] of groups without rows; either may be
// null.
cudaError_t launch_clear_groups(const int32_t* words, int64_t tokens, int64_t groups, void* rows, int64_t row_bytes, void* matrices,
                                int64_t matrix_bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace blockfp
