// Argument checks of exports that write aligned MX operands.
#pragma once

#include "../aligned.cuh"
#include "on_device.h"

namespace blockfp {
namespace cuda {

inline Format aligned_format(int64_t element, int64_t block_rows, int64_t block_columns, int64_t rule) {
  check(element <= E2M1::kId && block_rows == 1 && block_columns == 32,
        "only MXFP8, MXFP6 and MXFP4 in blocks of 1x32 are aligned as they are quantized; the format has element ", element,
        " and blocks of ", block_rows, "x", block_columns);
  return checked_format(element, block_rows, block_columns, rule);
}

// Aligned codes and scales of matrices with `lines` lines of `length` elements.
inline AlignedOutput aligned_output(const char* name, const MaybeTensor& codes, const char* scales_name, const MaybeTensor& scales,
                                    DLDevice device, int64_t matrices, int64_t lines, int64_t length) {
  check_array(codes, name, device, matrices * lines * ceil_div(length, kAlignedUnit) * kAlignedUnit, 8,
              "FP8 codes, in rows of a multiple of 16");
  check_array(scales, scales_name, device, matrices * ceil_div(length, 128) * ceil_div(lines, 4) * 4, 32,
              "a float32 for every line and 128 of its codes");
  check(has(codes) == has(scales), name, " and ", scales_name, " come together, and one is missing");
  check(aligned(data_of<void>(codes)), name, " must begin on a multiple of 16 bytes");
  return {data_of<uint8_t>(codes), data_of<float>(scales)};
}

// Columnwise codes and scales as by `quantize`, with `lines` lines of `length` codes.
inline Output stored_output(const MaybeTensor& codes, const MaybeTensor& scales, DLDevice device, const Format& format, int64_t matrices,
                            int64_t lines, int64_t length) {
  check_array(codes, "stored_t", device, matrices * lines * code_row_bytes(format.element, length), 8, "packed codes of x transposed");
  const int64_t count = matrices * lines * ceil_div(length, format.block_columns);
  check_array(scales, "stored_scales_t", device, count, format.scale_bits(), "a scale for each block of x transposed");
  check(has(codes) == has(scales), "stored_t and stored_scales_t come together, and one is missing");
  check(aligned(data_of<void>(codes)) && aligned(data_of<void>(scales)), "stored_t and its scales must begin on multiples of 16 bytes");
  return {data_of<uint8_t>(codes), data_of<void>(scales), nullptr, has(codes) ? count : 0};
}

}  // namespace cuda
}  // namespace blockfp
