// Sets the floating-point mode that the arithmetic requires: round to nearest, subnormals enabled, no traps.
//
// The host process may have set another mode in this thread (torch.set_flush_denormal, XLA's thread pool, a numerical library),
// so each thread saves its mode and restores it afterwards.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace blockfp {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatMode() { __asm__ __volatile__("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "blockfp's CPU kernels need to know how this processor's floating-point mode is set"
#endif
};

}  // namespace blockfp
