// MX operands aligned to one power of two for each 128 contracted elements, bit for bit as blockfp/definition/alignment.py says.
//
//   align(codes, scales, out, out_scales, element, block_rows, columns)
//       codes: uint8 [.., rows, bytes], of `columns` packed codes a row; scales: E8M0, in blocks of 1x32 or 32x32. out: FP8 codes, uint8
//       [.., rows, columns filled up to a multiple of 16 with zeros]; out_scales: float32 [.., columns / 128, rows filled up to a multiple
//       of 4], as `product` takes them ordered (products/product_exports.cu).
#include <type_traits>

#include "blockfp/elements.h"
#include "blockfp/packing.h"
#include "on_device.h"

namespace blockfp {
namespace cuda {
namespace {

constexpr int kAlignThreads = 256, kAlignRows = 32, kAlignColumns = 128, kChunk = 16, kChunks = kAlignColumns / kChunk;
static_assert(kAlignThreads == kAlignRows * kChunks);

struct AlignArguments {
  const uint8_t* codes;
  const uint8_t* scales;
  uint8_t* out;
  float* out_scales;
  int64_t rows, columns;
  int64_t bands, groups;  // of 32 rows and of 128 columns
  int64_t bytes, blocks;  // of a row: of packed codes, and scales
  int64_t out_columns, out_rows;
  bool vectors;           // whether rows begin where a thread's codes can be read as words
};

// Below any exponent.
constexpr int kNone = -1024;

// An FP8 code's exponent, plus 1 where its significand is above 1.75, which E4M3's largest exponent doesn't hold.
template <class Target>
__device__ __forceinline__ int exponent_of(int magnitude) {
  constexpr int kBits = Target::kMantissaBits, kLast = (1 << kBits) - 1;
  if (magnitude == 0) return kNone;
  if (magnitude <= kLast) return 31 - __clz(magnitude) + Target::kEmin - kBits;
  const bool carry = kBits == 3 && (magnitude & kLast) == kLast;
  return (magnitude >> kBits) - Target::kBias + carry;
}

// 2^exponent in both halves, for -24 .. 15.
__device__ __forceinline__ uint32_t halves_of_power(int exponent) {
  const uint32_t half = exponent >= -14 ? (exponent + 15) << 10 : 1u << (exponent + 24);
  return half | half << 16;
}

// A power of two as factors that fp16 has, 2^-24 to 2^15: two reach all that E4M3 needs, three E5M2.
struct Power {
  uint32_t factors[3];
  __device__ explicit Power(int exponent) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int part = min(max(exponent, -24), 15);
      factors[i] = halves_of_power(part);
      exponent -= part;
    }
  }
};

// Four FP8 codes times a power of two, rounded to nearest. What products of halves lose lies far below what rounds to the smallest code.
template <class Target>
__device__ __forceinline__ uint32_t shifted(uint32_t codes, const Power& by) {
#if __CUDA_ARCH__ >= 890
  uint32_t out;
  if constexpr (Target::kId == E4M3::kId) {
    asm("{.reg .b16 low, high; .reg .b32 a, b; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high;"
        " mul.rn.f16x2 a, a, %2; mul.rn.f16x2 b, b, %2; mul.rn.f16x2 a, a, %3; mul.rn.f16x2 b, b, %3;"
        " cvt.rn.satfinite.e4m3x2.f16x2 low, a; cvt.rn.satfinite.e4m3x2.f16x2 high, b; mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "r"(codes), "r"(by.factors[0]), "r"(by.factors[1]));
  } else {
    asm("{.reg .b16 low, high; .reg .b32 a, b; mov.b32 {low, high}, %1; cvt.rn.f16x2.e5m2x2 a, low; cvt.rn.f16x2.e5m2x2 b, high;"
        " mul.rn.f16x2 a, a, %2; mul.rn.f16x2 b, b, %2; mul.rn.f16x2 a, a, %3; mul.rn.f16x2 b, b, %3;"
        " mul.rn.f16x2 a, a, %4; mul.rn.f16x2 b, b, %4;"
        " cvt.rn.satfinite.e5m2x2.f16x2 low, a; cvt.rn.satfinite.e5m2x2.f16x2 high, b; mov.b32 %0, {low, high};}"
        : "=r"(out)
        : "r"(codes), "r"(by.factors[0]), "r"(by.factors[1]), "r"(by.factors[2]));
    // The conversion saturates infinities.
    const uint32_t infinite = __vcmpeq4(codes & 0x7F7F7F7Fu, 0x7C7C7C7Cu);
    out = (out & ~infinite) | (codes & infinite);
  }
  return out;
#else
  return codes;  // Only devices with FP8 matrix units multiply such operands.
#endif
}

// Sixteen codes as bytes, those from `count` on zero.
template <class E>
__device__ __forceinline__ void load_codes(const uint8_t* from, int64_t bytes_left, int count, bool vectors, uint32_t (&words)[4]) {
  constexpr int kWords = E::kBits * kChunk / 32;
  uint32_t packed[kWords] = {};
  if (vectors && count == kChunk) {
    if constexpr (kWords == 4) {
      const uint4 all = __ldg(reinterpret_cast<const uint4*>(from));
      packed[0] = all.x, packed[1] = all.y, packed[2] = all.z, packed[3] = all.w;
    } else if constexpr (kWords == 2) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
      packed[0] = both.x, packed[1] = both.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) packed[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if (i < bytes_left && count > 0) packed[i / 4] |= static_cast<uint32_t>(__ldg(from + i)) << (8 * (i % 4));
    }
  }
  if constexpr (E::kBits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = packed[i];
  } else if constexpr (E::kBits == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t even = packed[i] & 0x0F0F0F0Fu, odd = (packed[i] >> 4) & 0x0F0F0F0Fu;
      words[2 * i] = __byte_perm(even, odd, 0x5140), words[2 * i + 1] = __byte_perm(even, odd, 0x7362);
    }
  } else {
    const uint32_t fours[4] = {packed[0], (packed[0] >> 24) | (packed[1] << 8), (packed[1] >> 16) | (packed[2] << 16), packed[2] >> 8};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = (fours[i] & 0x3Fu) | ((fours[i] & 0xFC0u) << 2) | ((fours[i] & 0x3F000u) << 4) | ((fours[i] & 0xFC0000u) << 6);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = min(max(count - 4 * i, 0), 4);
    words[i] &= left == 4 ? ~0u : (1u << (8 * left)) - 1;
  }
}

// Codes of E in the low bits of four bytes as E4M3 codes of 2^-lift of their value, by moving bits; subnormals too.
template <class E>
__device__ __forceinline__ uint32_t widened(uint32_t codes) {
  if constexpr (E::kBits == 8) return codes;
  constexpr uint32_t kOnes = 0x01010101u, kSign = 1u << (E::kBits - 1);
  return ((codes & (kSign * kOnes)) << (8 - E::kBits)) | ((codes & ((kSign - 1) * kOnes)) << (3 - E::kMantissaBits));
}

// A block of threads aligns 32 rows of 128 columns, a thread 16 codes of a row.
template <class E, bool Square>
__global__ void __launch_bounds__(kAlignThreads) align_kernel(const __grid_constant__ AlignArguments a) {
  using Target = std::conditional_t<E::kId == E5M2::kId, E5M2, E4M3>;
  constexpr int kLift = Target::kBias - E::kBias;
  __shared__ int largest[kAlignThreads / 32][4];
  __shared__ float line[kAlignRows];
  const int64_t matrix = a.bands * a.groups, batch = blockIdx.x / matrix, in_matrix = blockIdx.x % matrix;
  const int64_t band = in_matrix / a.groups, group = in_matrix % a.groups;
  const int chunk = threadIdx.x % kChunks, in_band = threadIdx.x / kChunks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = band * kAlignRows + in_band, column = group * kAlignColumns + chunk * kChunk;
  const int64_t count64 = row < a.rows ? a.columns - column : 0;
  const int count = static_cast<int>(count64 < 0 ? 0 : (count64 < kChunk ? count64 : kChunk));

  uint32_t words[4];
  const int64_t first_byte = column / 8 * E::kBits;
  load_codes<E>(a.codes + (batch * a.rows + row) * a.bytes + first_byte, a.bytes - first_byte, count, a.vectors, words);
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
  int highest = scale == 0xFF ? kNone : exponent_of<Target>(magnitude) + kLift + scale;
  highest = max(highest, __shfl_xor_sync(~0u, highest, 2));
  highest = max(highest, __shfl_xor_sync(~0u, highest, 4));
  const int shared = max(highest - Target::kEmax, 0);
  const Power power(scale - shared + kLift);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = shifted<Target>(words[i], power);
    if (scale == 0xFF) {
      const int left = min(max(count - 4 * i, 0), 4);
      words[i] = 0x7F7F7F7Fu & (left == 4 ? ~0u : (1u << (8 * left)) - 1);
    }
  }
  if (row < a.rows && column < a.out_columns) {
    *reinterpret_cast<uint4*>(a.out + (batch * a.rows + row) * a.out_columns + column) = {words[0], words[1], words[2], words[3]};
  }
  // All rows of scales in whole sectors.
  if (chunk == 0) line[in_band] = __uint_as_float(shared == 0 ? 0x400000u : static_cast<uint32_t>(shared) << 23);
  __syncthreads();
  const int64_t out_row = band * kAlignRows + threadIdx.x;
  if (threadIdx.x < kAlignRows && out_row < a.out_rows) {
    a.out_scales[(batch * a.groups + group) * a.out_rows + out_row] = line[threadIdx.x];
  }
}

template <class E>
cudaError_t launch_align(const AlignArguments& a, bool square, int64_t batches, cudaStream_t stream) {
  const int64_t blocks = batches * a.bands * a.groups;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const auto kernel = square ? align_kernel<E, true> : align_kernel<E, false>;
  kernel<<<static_cast<unsigned>(blocks), kAlignThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

void align(TensorView codes, TensorView scales, TensorView out, TensorView out_scales, int64_t element, int64_t block_rows,
           int64_t columns) {
  const OnDevice on(codes, "codes");
  check(element >= E4M3::kId && element <= E2M1::kId && (block_rows == 1 || block_rows == 32),
        "only MXFP8, MXFP6 and MXFP4 in blocks of 1x32 and 32x32 are aligned; the format has element ", element, " and blocks of ",
        block_rows, " rows");
  check(codes.ndim() >= 2 && columns >= 0, "codes must be [.., rows, bytes]; they are ", describe(codes));
  AlignArguments a{};
  a.rows = codes.size(-2), a.columns = columns;
  a.bytes = code_row_bytes(static_cast<int>(element), columns), a.blocks = ceil_div(columns, 32);
  a.bands = ceil_div(a.rows, kAlignRows), a.groups = ceil_div(columns, kAlignColumns);
  a.out_columns = ceil_div(columns, kChunk) * kChunk, a.out_rows = ceil_div(a.rows, 4) * 4;
  int64_t batches = 1;
  for (int axis = 0; axis < codes.ndim() - 2; ++axis) batches *= codes.size(axis);
  check_array(codes, "codes", on.device, batches * a.rows * a.bytes, 8, "packed codes");
  check_array(scales, "scales", on.device, batches * ceil_div(a.rows, block_rows) * a.blocks, 8, "an E8M0 byte for each block");
  check_array(out, "out", on.device, batches * a.rows * a.out_columns, 8, "FP8 codes, in rows of a multiple of 16");
  check_array(out_scales, "out_scales", on.device, batches * a.groups * a.out_rows, 32, "a float32 for every row and 128 columns");
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
      return launch_align<E>(a, square, batches, on.stream);
    }
  }));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(align, align);

}  // namespace
}  // namespace cuda
}  // namespace blockfp
