// Products of FP8 codes and scales by cuBLASLt, which is looked up for the first product, so that this library loads without
// it.
#include <dlfcn.h>

#include <array>
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

// The library that the process has loaded (its framework's), or else the loader's.
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

// Objects that cuBLASLt allocates.
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

// The parameters of a product except pointers.
using Question = std::array<int64_t, 15>;

struct Plan {
  Owned desc, a, b, d;
  Algorithm algorithm;
};

// A device's handle and plans, kept for the life of the process. Callers hold the mutex, also during cuBLASLt's call, because
// descriptors contain the scales' pointers.
struct OnThisDevice {
  std::mutex mutex;
  Handle handle = nullptr;
  std::map<Question, Plan> plans;
};

OnThisDevice& on_this_device(int device) {
  static std::mutex mutex;
  static std::map<int, OnThisDevice> devices;
  const std::lock_guard<std::mutex> lock(mutex);
  return devices[device];
}

// Returns why there is no handle; "" if there is one.
std::string make_handle(Handle& handle, cudaStream_t stream) {
  if (handle != nullptr) return "";
  // It allocates, which is forbidden during a capture.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) {
    cudaGetLastError();
    return "the first product on a device makes cuBLASLt's handle, which can't be captured in a graph: run one before";
  }
  const int status = functions().create(&handle);
  if (status == 0) return "";
  handle = nullptr;
  return failed("cublasLtCreate", status);
}

template <class Value>
bool describe(const Plan& plan, int attribute, const Value& value) {
  return functions().desc_set(plan.desc.get(), attribute, &value, sizeof(value)) == 0;
}

// Returns why the plan couldn't be made; "" if it was. cuBLASLt is column-major: it computes out^T = b a^T, so its A is b.
std::string make_plan(const ProductArguments& p, Handle handle, Plan& plan) {
  const Functions& f = functions();
  plan = {make(f.desc_destroy, f.desc_create, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          make(f.layout_destroy, f.layout_create, code_type(p.b.element), p.k, p.n, p.k),
          make(f.layout_destroy, f.layout_create, code_type(p.a.element), p.k, p.m, p.k),
          make(f.layout_destroy, f.layout_create, value_type(p.dtype), p.n, p.m, p.n), {}};
  const Owned preference = make(f.preference_destroy, f.preference_create);
  if (!plan.desc || !plan.a || !plan.b || !plan.d || !preference) return "cuBLASLt made no descriptor";
  bool set = describe(plan, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T) &&
             describe(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast)) &&
             describe(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scales) &&
             describe(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scales);
  // Releases before 12.8 have no scale modes, only one scale per tensor.
  if (p.a.block_rows != 0 || p.b.block_rows != 0) {
    set = set && describe(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(p.b.block_rows)) &&
          describe(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(p.a.block_rows));
  }
  if (p.bias != nullptr) {
    set = set && describe(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS) &&
          describe(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int>(value_type(p.bias_dtype))) &&
          describe(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  const auto prefer = [&](int attribute, const auto& value) {
    set = set && f.preference_set(preference.get(), attribute, &value, sizeof(value)) == 0;
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, p.workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b.codes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a.codes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.out));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.out));
  if (!set) return "cuBLASLt refused an attribute; scales of blocks need CUDA 12.9 or later";
  HeuristicResult found{};
  int count = 0;
  const int status = f.heuristic(handle, plan.desc.get(), plan.a.get(), plan.b.get(), plan.d.get(), plan.d.get(), preference.get(), 1,
                                 &found, &count);
  if (status != 0) return "cuBLASLt has no algorithm for this product: " + failed("cublasLtMatmulAlgoGetHeuristic", status);
  if (count == 0 || found.state != 0) {
    return "cuBLASLt has no algorithm for this product: it found " + std::to_string(count) + ", with status " + std::to_string(found.state);
  }
  plan.algorithm = found.algo;
  return "";
}

}  // namespace

int64_t cublas_version() { return static_cast<int64_t>(functions().version); }

std::string launch_product(const ProductArguments& p, cudaStream_t stream) {
  constexpr size_t kMostPlans = 1024;
  if (cublas_version() == 0) return "cuBLASLt was not found: neither libcublasLt.so.13 nor libcublasLt.so.12";
  OnThisDevice& on = on_this_device(p.device);
  const std::lock_guard<std::mutex> lock(on.mutex);
  if (const std::string wrong = make_handle(on.handle, stream); !wrong.empty()) return wrong;
  const Question question = {p.m, p.n, p.k, p.a.element, p.b.element, p.a.block_rows, p.b.block_rows, p.dtype,
                             p.bias == nullptr ? -1 : p.bias_dtype, p.accumulate, p.fast, static_cast<int64_t>(p.workspace_bytes),
                             alignment(p.a.codes), alignment(p.b.codes), alignment(p.out)};
  auto found = on.plans.find(question);
  if (found == on.plans.end()) {
    Plan plan{Owned(nullptr, nullptr), Owned(nullptr, nullptr), Owned(nullptr, nullptr), Owned(nullptr, nullptr), {}};
    if (const std::string wrong = make_plan(p, on.handle, plan); !wrong.empty()) return wrong;
    // Enqueued work doesn't need its plan any more.
    if (on.plans.size() >= kMostPlans) on.plans.clear();
    found = on.plans.emplace(question, std::move(plan)).first;
  }
  const Plan& plan = found->second;
  const bool set = describe(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scales) &&
                   describe(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scales) &&
                   (p.bias == nullptr || describe(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias));
  if (!set) return "cuBLASLt refused a pointer";
  const float one = 1.0f, zero = 0.0f;
  const int done = functions().matmul(on.handle, plan.desc.get(), &one, p.b.codes, plan.a.get(), p.a.codes, plan.b.get(),
                                      p.accumulate ? &one : &zero, p.out, plan.d.get(), p.out, plan.d.get(), &plan.algorithm,
                                      p.workspace, p.workspace_bytes, stream);
  return done == 0 ? "" : failed("cublasLtMatmul", done);
}

}  // namespace cuda
}  // namespace blockfp
