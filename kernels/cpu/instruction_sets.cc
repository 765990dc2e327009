#include "instruction_sets.h"

#include <atomic>

namespace blockfp {

namespace scalar {
extern const Kernels kernels;
}
#if defined(BLOCKFP_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(BLOCKFP_X86)
  // __builtin_cpu_supports also tests that the operating system saves the registers.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c")) {
    found.push_back(&avx512::kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back(&avx2::kernels);
#endif
  found.push_back(&scalar::kernels);
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : runnable()) names.push_back(kernels->name);
  return names;
}

bool use_instruction_set(const std::string& name) {
  for (const Kernels* kernels : runnable()) {
    if (kernels->name == name) {
      chosen = kernels;
      return true;
    }
  }
  return false;
}

const Kernels& current_kernels() {
  const Kernels* kernels = chosen;
  if (kernels == nullptr) chosen = kernels = runnable().front();
  return *kernels;
}

}  // namespace blockfp
