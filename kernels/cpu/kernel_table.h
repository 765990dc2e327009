// The function table of one instruction set, instantiated for every element, dtype and rounding. Included by avx512.cc,
// avx2.cc, scalar.cc.
#pragma once

#include "adamw_tasks.h"
#include "blockfp/dispatch.h"
#include "blockfp/hadamard.h"
#include "dequantize_tasks.h"
#include "product_tasks.h"
#include "quantize_tasks.h"

namespace blockfp {
namespace BLOCKFP_ISA {

void tensor_amax(const AmaxJob& job, int64_t task, void* scratch) {
  with_dtype(job.x.dtype, [&](auto dtype) { tensor_amax_task<decltype(dtype)>(job, task, scratch); });
}

void block_amax(const AmaxJob& job, int64_t task, void* scratch) {
  with_dtype(job.x.dtype, [&](auto dtype) { block_amax_task<decltype(dtype)>(job, task, scratch); });
}

void quantize(const QuantizeJob& job, int64_t task, int64_t next, void* scratch) {
  with_element(job.format.element, [&](auto element) {
    with_dtype(job.x.dtype, [&](auto dtype) {
      using E = decltype(element);
      using T = decltype(dtype);
      if (job.random == 1) {
        quantize_task<E, T, 1>(job, task, next, scratch);
      } else if (job.random == 0) {
        quantize_task<E, T, 0>(job, task, next, scratch);
      } else if constexpr (T::kId == Fp32::kId) {
        quantize_task<E, T, 2>(job, task, next, scratch);
      }
    });
  });
}

void dequantize(const DequantizeJob& job, int64_t task, void* scratch) {
  with_element(job.format.element, [&](auto element) {
    with_dtype(job.dtype, [&](auto dtype) { dequantize_task<decltype(element), decltype(dtype)>(job, task, scratch); });
  });
}

// Rotates one row in groups of 16; copies a tail of fewer than 16.
void rotate(const RotateJob& job, int64_t row) {
  with_dtype(job.x.dtype, [&](auto dtype) {
    using T = decltype(dtype);
    using Raw = typename T::Raw;
    const int64_t batch = row / job.rows, columns = job.columns;
    const Raw* x =
        static_cast<const Raw*>(job.x.data) + job.x.batch_offset(batch) + row % job.rows * job.x.row_stride();
    const int64_t stride = job.x.column_stride();
    Raw* out = static_cast<Raw*>(job.out) + row * columns;
    int64_t c = 0;
    for (; c + kHadamardGroup <= columns; c += kHadamardGroup) {
      float group[kHadamardGroup];
      for (int i = 0; i < kHadamardGroup; ++i) {
        group[i] = bit_cast<float>(widen<T, float>(static_cast<int32_t>(x[(c + i) * stride])));
      }
      hadamard16<float>(group);
      for (int i = 0; i < kHadamardGroup; ++i) {
        out[c + i] = static_cast<Raw>(narrow<T, float>(canonical<float>(to_bits(group[i]))));
      }
    }
    for (; c < columns; ++c) out[c] = x[c * stride];
  });
}

// One tile of a step, including its codes.
void step(const StepJob& job, int64_t task, int64_t next, void* scratch) {
  const Tile tile(job.tiling, task);
  with_dtype(job.entry.gradient_dtype, [&](auto dtype) {
    using T = decltype(dtype);
    switch (static_cast<Moments>(job.entry.moments)) {
      case Moments::kFp32:
        return step_tile<T, Moments::kFp32>(job, tile);
      case Moments::kBf16:
        return step_tile<T, Moments::kBf16>(job, tile);
      case Moments::kFp8:
        return step_tile<T, Moments::kFp8>(job, tile);
    }
  });
  const bool codes = job.entry.output == static_cast<int>(StepOutput::kCodes);
  if (codes && !job.entry.coefficients.still()) quantize(job.quantize, task, next, scratch);
}

extern const Kernels kernels;
const Kernels kernels = {BLOCKFP_ISA_NAME, tensor_amax, block_amax, quantize, dequantize, rotate, step, product};

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
