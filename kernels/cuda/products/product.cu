// Products of FP8 codes and scales by cuBLASLt, which is looked up when the first one runs: this library loads without it.
#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include "arguments.h"
#include "blockfp/elements.h"
#include "cublas_lt.h"

namespace blockfp {
namespace cuda {
namespace {

using namespace cublas_lt;

// The one that the process has already is its framework's; else what the loader finds.
void* open_library() {
  for (const int mode : {RTLD_NOLOAD, 0}) {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (void* found = dlopen(name, RTLD_LAZY | RTLD_LOCAL | mode)) return found;
    }
  }
  return nullptr;
}

Functions find_functions() {
  Functions f;
  void* library = open_library();
  if (library == nullptr) return f;
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    complete = complete && symbol != nullptr;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  size_t (*version)() = nullptr;
  find(version, "cublasLtGetVersion");
  find(f.create, "cublasLtCreate");
  find(f.desc_create, "cublasLtMatmulDescCreate");
  find(f.desc_destroy, "cublasLtMatmulDescDestroy");
  find(f.desc_set, "cublasLtMatmulDescSetAttribute");
  find(f.layout_create, "cublasLtMatrixLayoutCreate");
  find(f.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(f.preference_create, "cublasLtMatmulPreferenceCreate");
  find(f.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(f.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(f.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(f.matmul, "cublasLtMatmul");
  if (complete) f.version = version();
  return f;
}

const Functions& functions() {
  static const Functions found = find_functions();
  return found;
}

std::string failed(const char* call, int status) { return std::string(call) + " returned status " + std::to_string(status); }

// A handle for each device, kept for the life of the process; null where none can be made, and why is in `wrong`.
Handle handle_of(int device, cudaStream_t stream, std::string& wrong) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  Handle& handle = handles[device];
  if (handle != nullptr) return handle;
  // It allocates, which a capture forbids.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) {
    cudaGetLastError();
    wrong = "the first product on a device makes cuBLASLt's handle, which can't be captured in a graph: run one before";
    return nullptr;
  }
  if (const int status = functions().create(&handle); status != 0) {
    handle = nullptr;
    wrong = failed("cublasLtCreate", status);
  }
  return handle;
}

// What cuBLASLt makes for one call.
using Owned = std::unique_ptr<void, int (*)(void*)>;

template <class Create, class... Arguments>
Owned make(int (*destroy)(void*), Create create, Arguments... arguments) {
  void* made = nullptr;
  if (create(&made, arguments...) != 0) made = nullptr;
  return Owned(made, destroy);
}

cudaDataType code_type(int element) { return element == E5M2::kId ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3; }

cudaDataType value_type(int dtype) {
  return dtype == Bf16::kId ? CUDA_R_16BF : (dtype == Fp16::kId ? CUDA_R_16F : CUDA_R_32F);
}

int scale_mode(int block_rows) {
  if (block_rows == 0) return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  return block_rows == 1 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// The largest power of two up to 256 that divides an address.
uint32_t alignment(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

}  // namespace

int64_t cublas_version() { return static_cast<int64_t>(functions().version); }

std::string launch_product(const ProductArguments& p, cudaStream_t stream) {
  const Functions& f = functions();
  if (f.version == 0) return "libcublasLt.so.13 or .12 was not found";
  std::string wrong;
  const Handle handle = handle_of(p.device, stream, wrong);
  if (handle == nullptr) return wrong;
  // cuBLASLt counts columns first: it computes out^T = b a^T, its own A being b.
  const Owned desc = make(f.desc_destroy, f.desc_create, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const Owned a = make(f.layout_destroy, f.layout_create, code_type(p.b.element), p.k, p.n, p.k);
  const Owned b = make(f.layout_destroy, f.layout_create, code_type(p.a.element), p.k, p.m, p.k);
  const Owned d = make(f.layout_destroy, f.layout_create, value_type(p.dtype), p.n, p.m, p.n);
  const Owned preference = make(f.preference_destroy, f.preference_create);
  if (!desc || !a || !b || !d || !preference) return "cuBLASLt made no descriptor";
  bool set = true;
  const auto describe = [&](int attribute, const auto& value) {
    set = set && f.desc_set(desc.get(), attribute, &value, sizeof(value)) == 0;
  };
  const auto prefer = [&](int attribute, const auto& value) {
    set = set && f.preference_set(preference.get(), attribute, &value, sizeof(value)) == 0;
  };
  describe(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  describe(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast));
  describe(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scales);
  describe(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scales);
  // Releases before 12.8 have no modes, and a scale for each tensor.
  if (p.a.block_rows != 0 || p.b.block_rows != 0) {
    describe(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(p.b.block_rows));
    describe(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(p.a.block_rows));
  }
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, p.workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b.codes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a.codes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.out));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.out));
  if (!set) return "cuBLASLt refused an attribute; scales of blocks need CUDA 12.9 or later";
  HeuristicResult found{};
  int count = 0;
  const int status = f.heuristic(handle, desc.get(), a.get(), b.get(), d.get(), d.get(), preference.get(), 1, &found, &count);
  if (status != 0) return "cuBLASLt has no algorithm for this product: " + failed("cublasLtMatmulAlgoGetHeuristic", status);
  if (count == 0 || found.state != 0) {
    return "cuBLASLt has no algorithm for this product: it found " + std::to_string(count) + ", with status " + std::to_string(found.state);
  }
  const float one = 1.0f, zero = 0.0f;
  const int done = f.matmul(handle, desc.get(), &one, p.b.codes, a.get(), p.a.codes, b.get(), &zero, p.out, d.get(), p.out,
                            d.get(), &found.algo, p.workspace, p.workspace_bytes, stream);
  return done == 0 ? "" : failed("cublasLtMatmul", done);
}

}  // namespace cuda
}  // namespace blockfp
