// Hopper's instructions (sm_90a): barriers in shared memory, bulk tensor copies, warpgroup matrix products.
//
// Matrices in shared memory are tiles of 128-byte rows with the 128-byte swizzle, each at a multiple of 1024 bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "blockfp/elements.h"
#include "gemm.h"

namespace blockfp {
namespace cuda {
namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float load(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ int load_number(uint32_t address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store(uint32_t address, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Loads from device memory, not before preceding instructions.
__device__ __forceinline__ float load(const float* from) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

// Barriers: a phase ends after `count` arrivals and once the announced bytes have arrived.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialized barriers visible to the copy engine.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef BLOCKFP_BOUND_WAITS
  const long long start = clock64();
#endif
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#ifdef BLOCKFP_BOUND_WAITS
    if (clock64() - start > 1000000000ll) __trap();
#endif
  }
}

// Copies.

// Copies a box of a matrix, from the given column and row, into shared memory; zeros beyond the matrix. Its bytes arrive at
// `barrier`.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(&map), "r"(barrier), "r"(column), "r"(row)
               : "memory");
}

// Warpgroup products.

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Descriptor of a tile from its shared-memory address over 16: 128-byte swizzle, eight rows every 1024 bytes. Adding 2 moves 32
// bytes along the rows.
__device__ __forceinline__ uint64_t describe(uint32_t tile) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = static_cast<uint64_t>(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | tile;
}

// Orders this thread's accesses to accumulators before the following products.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define BLOCKFP_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLOCKFP_32(d, i)                                                                                     \
  BLOCKFP_4(d, i), BLOCKFP_4(d, i + 4), BLOCKFP_4(d, i + 8), BLOCKFP_4(d, i + 12), BLOCKFP_4(d, i + 16), \
      BLOCKFP_4(d, i + 20), BLOCKFP_4(d, i + 24), BLOCKFP_4(d, i + 28)
#define BLOCKFP_64(d) BLOCKFP_32(d, 0), BLOCKFP_32(d, 32)
#define BLOCKFP_96(d) BLOCKFP_64(d), BLOCKFP_32(d, 64)

// Waits until at most `Pending` committed groups of products are unfinished. Naming the finished groups' sums keeps their uses
// after the wait.
template <int Pending>
__device__ __forceinline__ void wait_products(float (&sums)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : BLOCKFP_64(sums) : "n"(Pending) : "memory");
}

// The same for products that add to the same sums, which are only read once all have finished.
template <int Pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <int Pending>
__device__ __forceinline__ void wait_products(float (&sums)[96]) {
  asm volatile("wgmma.wait_group.sync.aligned %96;" : BLOCKFP_96(sums) : "n"(Pending) : "memory");
}

#define BLOCKFP_MULTIPLY_128(kinds, transposed)                                                                               \
  asm volatile(                                                                                                               \
      "{\n.reg .pred more;\nsetp.ne.b32 more, %66, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n128" kinds                                                                            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                              \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                      \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                      \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                                     \
      "%64, %65, more, 1, 1" transposed ";\n}"                                                                                \
      : BLOCKFP_64(sums)                                                                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(more)))

#define BLOCKFP_MULTIPLY_192(kinds, transposed)                                                                               \
  asm volatile(                                                                                                               \
      "{\n.reg .pred more;\nsetp.ne.b32 more, %98, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n192" kinds                                                                            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                              \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                      \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                      \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                      \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                      \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "                                     \
      "%96, %97, more, 1, 1" transposed ";\n}"                                                                                \
      : BLOCKFP_96(sums)                                                                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(more)))

// sums [64, N] = a [64, 32] b [N, 32]^T for codes, or 16 values each, added to sums if `more`. A thread of lane l in warp w of
// its group holds, for rows 16 w + l / 4 (+ 8 for i & 2), columns 8 (i / 4) + 2 (l % 4) + (i & 1).
template <class A, class B, int Sums>
__device__ __forceinline__ void multiply(float (&sums)[Sums], uint64_t a, uint64_t b, bool more) {
#define BLOCKFP_MULTIPLY(kinds, transposed)   \
  if constexpr (Sums == 64) {                 \
    BLOCKFP_MULTIPLY_128(kinds, transposed);  \
  } else {                                    \
    BLOCKFP_MULTIPLY_192(kinds, transposed);  \
  }
  if constexpr (A::kId == Values::kId) {
    BLOCKFP_MULTIPLY("k16.f32.bf16.bf16", ", 0, 0")
  } else if constexpr (A::kId == E4M3::kId) {
    if constexpr (B::kId == E4M3::kId) {
      BLOCKFP_MULTIPLY("k32.f32.e4m3.e4m3", "")
    } else {
      BLOCKFP_MULTIPLY("k32.f32.e4m3.e5m2", "")
    }
  } else if constexpr (B::kId == E4M3::kId) {
    BLOCKFP_MULTIPLY("k32.f32.e5m2.e4m3", "")
  } else {
    BLOCKFP_MULTIPLY("k32.f32.e5m2.e5m2", "")
  }
}

#undef BLOCKFP_MULTIPLY
#undef BLOCKFP_MULTIPLY_192
#undef BLOCKFP_MULTIPLY_128
#undef BLOCKFP_96
#undef BLOCKFP_64
#undef BLOCKFP_32
#undef BLOCKFP_4

}  // namespace hopper
}  // namespace cuda
}  // namespace blockfp
