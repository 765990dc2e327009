// Aligns MX operands to one power of two per 128 contracted elements, with the bits of blockfp/definition/alignment.py.
//
//   align(codes, scales, out, out_scales, element, block_rows, columns, turned)
//       codes: uint8 [.., rows, bytes], with `columns` packed codes per row; scales: E8M0, in blocks of 1x32 or 32x32. out: FP8 codes, uint8
//       [.., rows, columns padded with zeros to a multiple of 16]; out_scales: float32 [.., columns / 128, rows padded to a multiple of 4],
//       in the order of `product` (products/product_exports.cu). turned: the same for the transposed matrix, in blocks of 32x32:
//       out [.., columns, rows padded], out_scales [.., rows / 128, columns padded].
#include "aligned.cuh"
#include "blockfp/packing.h"
#include "codes.cuh"
#include "on_device.h"
#include "runs.cuh"

namespace blockfp {
namespace cuda {
namespace {

constexpr int kAlignThreads = 256, kAlignRows = 32, kAlignColumns = 128, kChunk = kAlignedUnit, kChunks = kAlignColumns / kChunk;
static_assert(kAlignThreads == kAlignRows * kChunks);

struct AlignArguments {
  const uint8_t* codes;
  const uint8_t* scales;
  uint8_t* out;
  float* out_scales;
  int64_t rows, columns;
  int64_t bands, groups;  // of 32 rows, and of 128 columns
  int64_t bytes, blocks;  // per row: bytes of packed codes, and scales
  int64_t out_columns, out_rows;
  bool vectors;           // whether a thread's codes can be read as words
};

// A power of two as factors within fp16's range, 2^-24 to 2^15: E4M3 needs two, E5M2 three.
template <class Target>
struct Power {
  uint32_t factors[Target::kId == E4M3::kId ? 2 : 3];
  __device__ explicit Power(int exponent) {
#pragma unroll
    for (uint32_t& factor : factors) {
      const int part = min(max(exponent, -24), 15);
      factor = half_of_power(part) * 0x10001u;
      exponent -= part;
    }
  }
};

// Multiplies four FP8 codes by a power of two, rounded to nearest.
template <class Target>
__device__ __forceinline__ uint32_t shifted_any(uint32_t codes, const Power<Target>& by) {
  const uint32_t out = shifted<Target>(codes, by.factors);
  if constexpr (Target::kId == E4M3::kId) return out;
  // The conversion saturates infinities, so restore them.
  const uint32_t infinite = __vcmpeq4(codes & 0x7F7F7F7Fu, 0x7C7C7C7Cu);
  return (out & ~infinite) | (codes & infinite);
}

// Loads sixteen packed codes; if rows aren't vectors, only the first `bytes` bytes.
template <class E>
__device__ __forceinline__ void load_packed(const uint8_t* from, int bytes, bool vectors, uint32_t (&packed)[E::kBits / 2]) {
  if (!vectors) {
    load_run<E::kBits / 2, 4, 1>(from, bytes, packed);
  } else if constexpr (E::kBits == 8) {
    const uint4 all = bytes > 0 ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
    packed[0] = all.x, packed[1] = all.y, packed[2] = all.z, packed[3] = all.w;
  } else if constexpr (E::kBits == 4) {
    const uint2 both = bytes > 0 ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{};
    packed[0] = both.x, packed[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) packed[i] = bytes > 0 ? __ldg(reinterpret_cast<const uint32_t*>(from) + i) : 0;
  }
}

// Unpacks them to bytes; codes from `count` on become zero.
template <class E>
__device__ __forceinline__ void unpack(const uint32_t (&packed)[E::kBits / 2], int count, uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint2 eight{};
    if constexpr (E::kBits == 8) eight = {packed[2 * i], packed[2 * i + 1]};
    if constexpr (E::kBits == 6) eight = i == 0 ? uint2{packed[0], packed[1]} : uint2{(packed[1] >> 16) | (packed[2] << 16), packed[2] >> 16};
    if constexpr (E::kBits == 4) eight = {packed[i], 0};
    eight = bytes_of_eight<E>(eight);
    words[2 * i] = first_bytes(eight.x, count - 8 * i), words[2 * i + 1] = first_bytes(eight.y, count - 8 * i - 4);
  }
}

// A thread block aligns 32 rows of 128 columns; a thread has 16 codes of a row.
template <class E, bool Square>
__global__ void __launch_bounds__(kAlignThreads) align_kernel(const __grid_constant__ AlignArguments a) {
  using Target = AlignedElement<E>;
  __shared__ int largest[kAlignThreads / 32][4];
  __shared__ float line[kAlignRows];
  const int64_t matrix = a.bands * a.groups, batch = blockIdx.x / matrix, in_matrix = blockIdx.x % matrix;
  const int64_t band = in_matrix / a.groups, group = in_matrix % a.groups;
  const int chunk = threadIdx.x % kChunks, in_band = threadIdx.x / kChunks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = band * kAlignRows + in_band, column = group * kAlignColumns + chunk * kChunk;
  const int64_t count64 = row < a.rows ? a.columns - column : 0;
  const int count = static_cast<int>(count64 < 0 ? 0 : (count64 < kChunk ? count64 : kChunk));

  uint32_t packed[E::kBits / 2], words[4];
  const int64_t first_byte = column / 8 * E::kBits;
  const int bytes = count == 0 ? 0 : static_cast<int>(min(a.bytes - first_byte, int64_t{2 * E::kBits}));
  load_packed<E>(a.codes + (batch * a.rows + row) * a.bytes + first_byte, bytes, a.vectors, packed);
  unpack<E>(packed, count, words);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = widened<E>(words[i]);
    most = __vmaxu4(most, words[i] & 0x7F7F7F7Fu);
  }
  most = __vmaxu4(most, most >> 16);
  int magnitude = __vmaxu4(most, most >> 8) & 0xFF;
  magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 1));
  if constexpr (Square) {
    magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 8));
    magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 16));
    if (lane < kChunks) largest[warp][lane / 2] = magnitude;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAlignThreads / 32; ++i) magnitude = max(magnitude, largest[i][chunk / 2]);
  }
  // NaN and Inf count as the largest number.
  magnitude = min(magnitude, static_cast<int>(Target::kMaxCode));

  const int64_t lines = Square ? a.bands : a.rows;
  int scale = 0;
  if (column / 32 * 32 < a.columns && (Square || row < a.rows)) scale = __ldg(a.scales + (batch * lines + (Square ? band : row)) * a.blocks + column / 32);
  int highest = scale == 0xFF ? kNone : exponent_of<Target>(magnitude) + kLift<E> + scale;
  highest = max(highest, __shfl_xor_sync(~0u, highest, 2));
  highest = max(highest, __shfl_xor_sync(~0u, highest, 4));
  const int shared = shared_exponent<Target>(highest);
  const Power<Target> power(scale - shared + kLift<E>);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = shifted_any(words[i], power);
    if (scale == 0xFF) words[i] = first_bytes(0x7F7F7F7Fu, count - 4 * i);
  }
  if (row < a.rows && column < a.out_columns) {
    *reinterpret_cast<uint4*>(a.out + (batch * a.rows + row) * a.out_columns + column) = {words[0], words[1], words[2], words[3]};
  }
  // Writes all rows of scales in whole sectors.
  if (chunk == 0) line[in_band] = shared_scale(shared);
  __syncthreads();
  const int64_t out_row = band * kAlignRows + threadIdx.x;
  if (threadIdx.x < kAlignRows && out_row < a.out_rows) {
    a.out_scales[(batch * a.groups + group) * a.out_rows + out_row] = line[threadIdx.x];
  }
}

constexpr int kTurnedRows = 256, kTurnedColumns = kAlignColumns, kTurnedGroups = kTurnedRows / 128;

// Aligns the transposed matrix: a thread block has a tile, a thread eight rows of sixteen codes, a warp 32 rows.
template <class E>
__global__ void __launch_bounds__(kAlignThreads) align_turned(const __grid_constant__ AlignArguments a) {
  using Target = AlignedElement<E>;
  constexpr int kWarps = kAlignThreads / 32, kBlocks = kTurnedColumns / 32;
  // Padding by a vector per thread's lines keeps adjacent threads in different banks.
  constexpr int kBytes = kTurnedRows, kPad = 16;
  __shared__ __align__(16) uint8_t lines[kTurnedColumns * kBytes + kChunks * kPad];
  __shared__ int highest[kWarps][kBlocks];
  const auto place = [](int column) { return column * kBytes + column / kChunk * kPad; };
  const int64_t across = (a.columns + kTurnedColumns - 1) / kTurnedColumns, down = (a.rows + kTurnedRows - 1) / kTurnedRows;
  const int64_t batch = blockIdx.x / (across * down), in_matrix = blockIdx.x % (across * down);
  const int64_t row0 = in_matrix / across * kTurnedRows, column0 = in_matrix % across * kTurnedColumns;
  const int chunk = threadIdx.x % kChunks, eighth = threadIdx.x / kChunks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = row0 + 8 * eighth, column = column0 + chunk * kChunk;
  const int count = static_cast<int>(max(min(a.columns - column, int64_t{kChunk}), int64_t{0}));
  const int64_t first_byte = column / 8 * E::kBits;
  const int bytes = count == 0 ? 0 : static_cast<int>(min(a.bytes - first_byte, int64_t{2 * E::kBits}));
  uint32_t packed[8][E::kBits / 2], words[8][4];
  const auto load = [&](bool vectors) {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const uint8_t* from = a.codes + (batch * a.rows + row + r) * a.bytes + first_byte;
      load_packed<E>(from, row + r < a.rows ? bytes : 0, vectors, packed[r]);
    }
  };
  // Either loop has no branches, so that many loads are in flight.
  a.vectors ? load(true) : load(false);
  uint32_t most = 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    unpack<E>(packed[r], count, words[r]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[r][i] = widened<E>(words[r][i]);
      most = __vmaxu4(most, words[r][i] & 0x7F7F7F7Fu);
    }
  }
  most = __vmaxu4(most, most >> 16);
  int magnitude = __vmaxu4(most, most >> 8) & 0xFF;
#pragma unroll
  for (int distance = 1; distance < 32; distance = distance == 1 ? 8 : 2 * distance) {
    magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, distance));
  }
  // NaN and Inf count as the largest number.
  magnitude = min(magnitude, static_cast<int>(Target::kMaxCode));
  const int64_t band = row / 32;
  const int scale = count > 0 && band < a.bands ? __ldg(a.scales + (batch * a.bands + band) * a.blocks + column / 32) : 0;
  if (lane < kChunks && lane % 2 == 0) highest[warp][lane / 2] = scale == 0xFF ? kNone : exponent_of<Target>(magnitude) + kLift<E> + scale;
  __syncthreads();
  const auto shared_by = [&](int group, int block) {
    int most = kNone;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, highest[4 * group + i][block]);
    return shared_exponent<Target>(most);
  };
  const Power<Target> power(scale - shared_by(warp / 4, chunk / 2) + kLift<E>);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[r][i] = shifted_any(words[r][i], power);
      if (scale == 0xFF) words[r][i] = row + r < a.rows ? 0x7F7F7F7Fu : 0;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint2 rows[8], columns[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) rows[r] = {words[r][2 * half], words[r][2 * half + 1]};
    transpose_eight<8>(rows, columns);
#pragma unroll
    for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(lines + place(chunk * kChunk + 8 * half + j) + 8 * eighth) = columns[j];
  }
  __syncthreads();
  const int columns_left = static_cast<int>(min(a.columns - column0, int64_t{kTurnedColumns}));
  const int bytes_left = static_cast<int>(min(a.out_columns - row0, int64_t{kBytes}));
  constexpr int kVectors = kBytes / 16, kStep = kAlignThreads / kVectors;
  const int vector = threadIdx.x % kVectors;
  uint8_t* out = a.out + (batch * a.columns + column0) * a.out_columns + row0 + 16 * vector;
  if (16 * vector < bytes_left) {
#pragma unroll 8
    for (int line = threadIdx.x / kVectors; line < columns_left; line += kStep) {
      *reinterpret_cast<uint4*>(out + line * a.out_columns) = *reinterpret_cast<const uint4*>(lines + place(line) + 16 * vector);
    }
  }
  static_assert(kAlignThreads == kTurnedGroups * kTurnedColumns, "a thread has a scale");
  const int group = threadIdx.x / kTurnedColumns, line = threadIdx.x % kTurnedColumns;
  if (row0 / 128 + group < a.groups && column0 + line < a.out_rows) {
    const int shared = shared_by(group, line / 32);
    a.out_scales[(batch * a.groups + row0 / 128 + group) * a.out_rows + column0 + line] =
        shared_scale(shared);
  }
}

template <class E>
cudaError_t launch_align(const AlignArguments& a, bool square, bool turned, int64_t batches, cudaStream_t stream) {
  const int64_t tiles = turned ? ceil_div(a.rows, kTurnedRows) * ceil_div(a.columns, kTurnedColumns) : a.bands * a.groups;
  const int64_t blocks = batches * tiles;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const auto kernel = turned ? align_turned<E> : (square ? align_kernel<E, true> : align_kernel<E, false>);
  kernel<<<static_cast<unsigned>(blocks), kAlignThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

void align(TensorView codes, TensorView scales, TensorView out, TensorView out_scales, int64_t element, int64_t block_rows,
           int64_t columns, bool turned) {
  const OnDevice on(codes, "codes");
  check(element >= E4M3::kId && element <= E2M1::kId && (block_rows == 1 || block_rows == 32),
        "only MXFP8, MXFP6 and MXFP4 in blocks of 1x32 and 32x32 are aligned; the format has element ", element, " and blocks of ",
        block_rows, " rows");
  check(!turned || block_rows == 32, "only matrices in blocks of 32x32 are aligned turned; the blocks have ", block_rows, " rows");
  check(codes.ndim() >= 2 && columns >= 0, "codes must be [.., rows, bytes]; they are ", describe(codes));
  AlignArguments a{};
  a.rows = codes.size(-2), a.columns = columns;
  a.bytes = code_row_bytes(static_cast<int>(element), columns), a.blocks = ceil_div(columns, 32);
  const int64_t lines = turned ? columns : a.rows, length = turned ? a.rows : columns;
  a.bands = ceil_div(a.rows, kAlignRows), a.groups = ceil_div(length, kAlignColumns);
  a.out_columns = ceil_div(length, kChunk) * kChunk, a.out_rows = ceil_div(lines, 4) * 4;
  int64_t batches = 1;
  for (int axis = 0; axis < codes.ndim() - 2; ++axis) batches *= codes.size(axis);
  check_array(codes, "codes", on.device, batches * a.rows * a.bytes, 8, "packed codes");
  check_array(scales, "scales", on.device, batches * ceil_div(a.rows, block_rows) * a.blocks, 8, "an E8M0 byte for each block");
  check_array(out, "out", on.device, batches * lines * a.out_columns, 8, "FP8 codes, in rows of a multiple of 16");
  check_array(out_scales, "out_scales", on.device, batches * a.groups * a.out_rows, 32, "a float32 for every line and 128 of its codes");
  a.codes = data_of<const uint8_t>(codes), a.scales = data_of<const uint8_t>(scales);
  a.out = data_of<uint8_t>(out), a.out_scales = data_of<float>(out_scales);
  check(aligned(a.out), "out must begin on a multiple of 16 bytes");
  a.vectors = columns % kChunk == 0 && aligned(a.codes);
  const bool square = block_rows == 32;
  on.done(with_element(static_cast<int>(element), [&](auto e) {
    using E = decltype(e);
    if constexpr (E::kComplement) {
      return cudaErrorInvalidValue;
    } else {
      return launch_align<E>(a, square, turned, batches, on.stream);
    }
  }));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(align, align);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
