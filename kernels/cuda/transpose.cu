// Transposes codes (also packed ones) and scales: a tile at a time through shared memory.
#include "codes.cuh"
#include "launch.h"
#include "runs.cuh"

namespace blockfp {
namespace cuda {

constexpr int kTransposeThreads = 256;
constexpr int kTransposeTile = 64;

// fp32 scales, [rows, columns].
__global__ void __launch_bounds__(kTransposeThreads) transpose_words(const uint32_t* in, uint32_t* out, int64_t rows, int64_t columns,
                                                                     int64_t across, int64_t down) {
  // A word of padding per row keeps the tile's columns in different banks.
  __shared__ uint32_t tile[kTransposeTile][kTransposeTile + 1];
  const int64_t matrix = across * down, batch = blockIdx.x / matrix, in_matrix = blockIdx.x % matrix;
  const int64_t row0 = in_matrix / across * kTransposeTile, column0 = in_matrix % across * kTransposeTile;
  in += batch * rows * columns;
  out += batch * rows * columns;
#pragma unroll
  for (int i = threadIdx.x; i < kTransposeTile * kTransposeTile; i += kTransposeThreads) {
    const int r = i / kTransposeTile, c = i % kTransposeTile;
    if (row0 + r < rows && column0 + c < columns) tile[r][c] = in[(row0 + r) * columns + column0 + c];
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kTransposeTile * kTransposeTile; i += kTransposeThreads) {
    const int c = i / kTransposeTile, r = i % kTransposeTile;
    if (row0 + r < rows && column0 + c < columns) out[(column0 + c) * rows + row0 + r] = tile[r][c];
  }
}

// Codes: eight adjacent threads have eight rows each, of kOfThread columns, and 32 such rows of threads are above each other.
template <int Bits>
struct CodeTile {
  static constexpr int kOfThread = Bits == 4 ? 32 : 16;         // columns
  static constexpr int kWords = kOfThread * Bits / 32;          // per row of a thread
  static constexpr int kRows = 256, kColumns = 8 * kOfThread;
  static constexpr int kBytes = kRows * Bits / 8;               // per transposed line
  // Padding by a vector per thread's lines keeps adjacent threads in different banks.
  static constexpr int kPad = 16;
  __align__(16) uint8_t bytes[kColumns * kBytes + 8 * kPad];

  __device__ __forceinline__ static int place(int column) { return column * kBytes + column / kOfThread * kPad; }
};

// Spreads four 6-bit codes, 24 bits, to bytes; higher bits are dropped.
__device__ __forceinline__ uint32_t spread_six(uint32_t codes) {
  const uint32_t twelve = (codes & 0xFFFu) | ((codes << 4) & 0xFFF0000u);
  return (twelve & 0x003F003Fu) | ((twelve << 2) & 0x3F003F00u);
}

__device__ __forceinline__ uint32_t gather_six(uint32_t bytes) {
  const uint32_t twelve = (bytes & 0x003F003Fu) | ((bytes & 0x3F003F00u) >> 2);
  return (twelve & 0xFFFu) | ((twelve >> 4) & 0xFFF000u);
}

// Transposes eight rows of eight packed codes.
template <int Bits>
__device__ __forceinline__ void turn_eight(uint2 (&rows)[8], uint2 (&columns)[8]) {
  if constexpr (Bits == 6) {
#pragma unroll
    for (int r = 0; r < 8; ++r) rows[r] = {spread_six(rows[r].x), spread_six(__funnelshift_r(rows[r].x, rows[r].y, 24))};
    transpose_eight<8>(rows, columns);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t low = gather_six(columns[c].x), high = gather_six(columns[c].y);
      columns[c] = {low | (high << 24), high >> 8};
    }
  } else {
    transpose_eight<Bits>(rows, columns);
  }
}

template <int Bits>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_codes(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns, int64_t across, int64_t down, bool vectors_in,
                    bool vectors_out) {
  using Tile = CodeTile<Bits>;
  constexpr int kWords = Tile::kWords;
  __shared__ Tile tile;
  const int64_t matrix = across * down, batch = blockIdx.x / matrix, in_matrix = blockIdx.x % matrix;
  const int64_t row0 = in_matrix / across * Tile::kRows, column0 = in_matrix % across * Tile::kColumns;
  const int64_t in_pitch = Packing<Bits>::row_bytes(columns), out_pitch = Packing<Bits>::row_bytes(rows);
  const int across_tile = threadIdx.x % 8, down_tile = threadIdx.x / 8;
  const int64_t row = row0 + 8 * down_tile, byte = column0 / 8 * Bits + across_tile * 4 * kWords;
  const int left = static_cast<int>(max(min(in_pitch - byte, int64_t{4 * kWords}), int64_t{0}));
  const uint8_t* at = in + (batch * rows + row) * in_pitch + byte;
  uint32_t words[8][kWords];
  // Zeros pad the packed last rows; lines of absent columns aren't written.
  if (vectors_in && left == 4 * kWords) {
#pragma unroll
    for (int r = 0; r < 8; ++r, at += in_pitch) {
      if constexpr (kWords == 4) {
        const uint4 all = row + r < rows ? __ldg(reinterpret_cast<const uint4*>(at)) : uint4{};
        words[r][0] = all.x, words[r][1] = all.y, words[r][2] = all.z, words[r][3] = all.w;
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[r][i] = row + r < rows ? __ldg(reinterpret_cast<const uint32_t*>(at) + i) : 0;
      }
    }
  } else {
    // Without branches, so that many loads are in flight.
#pragma unroll
    for (int r = 0; r < 8; ++r, at += in_pitch) load_run<kWords, kWords == 4 ? 16 : 4, 1>(at, row + r < rows ? left : 0, words[r]);
  }
#pragma unroll
  for (int g = 0; g < Tile::kOfThread / 8; ++g) {
    uint2 eight[8], turned[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      if constexpr (Bits == 8) eight[r] = {words[r][2 * g], words[r][2 * g + 1]};
      if constexpr (Bits == 4) eight[r] = {words[r][g], 0};
      if constexpr (Bits == 6) {
        const uint2 second = {__funnelshift_r(words[r][1], words[r][kWords - 1], 16), words[r][kWords - 1] >> 16};
        eight[r] = g == 0 ? uint2{words[r][0], words[r][1]} : second;
      }
    }
    turn_eight<Bits>(eight, turned);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      store_eight<Bits>(tile.bytes + Tile::place(across_tile * Tile::kOfThread + 8 * g + c) + down_tile * Bits, turned[c]);
    }
  }
  __syncthreads();
  const int64_t first = row0 / 8 * Bits;
  out += (batch * columns + column0) * out_pitch + first;
  const int lines = static_cast<int>(min(columns - column0, int64_t{Tile::kColumns}));
  const int bytes = static_cast<int>(min(out_pitch - first, int64_t{Tile::kBytes}));
  if (!vectors_out) {
    copy_runs<Tile::kBytes, Tile::kColumns, kTransposeThreads>(
        out, out_pitch, 0, lines, 0, bytes,
        [&](int line, int word) { return *reinterpret_cast<const uint32_t*>(tile.bytes + Tile::place(line) + 4 * word); });
    return;
  }
  constexpr int kVectors = Tile::kBytes / 16, kStep = kTransposeThreads / kVectors;
  const int line0 = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
  if (16 * vector >= bytes || line0 >= kStep) return;
  out += line0 * out_pitch + 16 * vector;
#pragma unroll 8
  for (int line = line0; line < lines; line += kStep, out += kStep * out_pitch) {
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(tile.bytes + Tile::place(line) + 16 * vector);
  }
}

namespace {

template <int Bits>
cudaError_t codes(const void* in, void* out, int64_t batches, int64_t rows, int64_t columns, cudaStream_t stream) {
  using Tile = CodeTile<Bits>;
  const int64_t across = ceil_div(columns, Tile::kColumns), down = ceil_div(rows, Tile::kRows), blocks = batches * across * down;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const bool vectors_in = Packing<Bits>::row_bytes(columns) % 16 == 0 && aligned(in);
  const bool vectors_out = Packing<Bits>::row_bytes(rows) % 16 == 0 && aligned(out);
  transpose_codes<Bits><<<blocks, kTransposeThreads, 0, stream>>>(static_cast<const uint8_t*>(in), static_cast<uint8_t*>(out), rows,
                                                                  columns, across, down, vectors_in, vectors_out);
  return cudaGetLastError();
}

cudaError_t words(const void* in, void* out, int64_t batches, int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t across = ceil_div(columns, kTransposeTile), down = ceil_div(rows, kTransposeTile), blocks = batches * across * down;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  transpose_words<<<blocks, kTransposeThreads, 0, stream>>>(static_cast<const uint32_t*>(in), static_cast<uint32_t*>(out), rows, columns,
                                                            across, down);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_transpose(const void* in, void* out, int bits, int64_t batches, int64_t rows, int64_t columns,
                             cudaStream_t stream) {
  switch (bits) {
    case 4:
      return codes<4>(in, out, batches, rows, columns, stream);
    case 6:
      return codes<6>(in, out, batches, rows, columns, stream);
    case 8:
      return codes<8>(in, out, batches, rows, columns, stream);
    default:
      return words(in, out, batches, rows, columns, stream);
  }
}

}  // namespace cuda
}  // namespace blockfp
