// Delayed scaling's update (`update` of blockfp/definition/scaling.py) of all operands at once.
//
//   update_scales(options, newest?, arrays..) -> index
//       options: int32 [n, 2] in host memory: per operand, the fp32 bits of MAX * 2^-margin, and whether only its newest amax counts.
//       newest: int32 [n], the bits of the newest amaxes, reduced over ranks; None: they are in the histories. arrays: per operand its
//       history, float32 [length], newest first, and its scale, float32 [1], both changed in place. Returns the index of the first array
//       that doesn't fit, isn't contiguous, isn't on the first one's device, or shares an earlier one's memory, and changes nothing;
//       otherwise -1.
//   newest_amaxes(out, arrays..) -> index
//       out: int32 [n], the bits of the histories' first entries. arrays and index: as above.
//
// A launch's operands are passed by value, so captured graphs contain them, and nothing on the device must outlive the call.
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "blockfp/scales.h"
#include "on_device.h"

namespace blockfp {
namespace cuda {
namespace {

using tvm::ffi::AnyView;

constexpr int kUpdateThreads = 256;  // per operand: a history has 1,024 entries by default
constexpr int kMostOperands = 512;

struct Operand {
  int32_t* history;  // fp32 bits
  float* scale;
  int32_t length, counted;  // entries of the history, and how many of them determine the scale
  float target;
};

struct Operands {
  int32_t* newest;  // or null
  Operand of[kMostOperands];
};
static_assert(sizeof(Operands) <= 32764, "a launch's arguments");

__global__ void __launch_bounds__(kUpdateThreads) update_kernel(const __grid_constant__ Operands operands) {
  const Operand& own = operands.of[blockIdx.x];
  __shared__ int32_t largest;
  const int32_t newest = operands.newest == nullptr ? *own.history : operands.newest[blockIdx.x];
  if (newest == 0) return;  // nothing was recorded; the same in all threads
  if (threadIdx.x == 0) largest = newest;
  int32_t amax = newest;
  // Every entry moves one place to the front. All threads read theirs before any writes.
  for (int first = 1; first < own.length; first += kUpdateThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool there = i < own.length;
    if (there && i < own.counted) amax = larger(amax, own.history[i]);
    const int32_t next = i + 1 < own.length ? own.history[i + 1] : newest;
    __syncthreads();
    if (there) own.history[i] = next;
  }
  __syncthreads();
  amax = __reduce_max_sync(0xFFFFFFFF, amax);
  if (threadIdx.x % 32 == 0) atomicMax(&largest, amax);
  __syncthreads();
  if (threadIdx.x > 0) return;
  own.history[0] = 0;
  *own.scale = delayed_scale<float>(largest, own.target, *own.scale);
}

__global__ void __launch_bounds__(kMostOperands) newest_kernel(const __grid_constant__ Operands operands) {
  operands.newest[threadIdx.x] = *operands.of[threadIdx.x].history;
}

// The operands of a call. `misfit`: the index of the first array that doesn't fit, or -1.
struct Arrays {
  std::vector<Operand> operands;
  int64_t misfit;
};

Arrays arrays_of(const AnyView* arguments, int64_t count) {
  check(count > 0 && count % 2 == 0, "arrays must be a history and a scale of each operand; there are ", count);
  Arrays found{std::vector<Operand>(count / 2), -1};
  std::unordered_set<const void*> taken(count);
  const DLDevice device = arguments[0].cast<TensorView>().device();
  for (int64_t i = 0; i < count; ++i) {
    const TensorView x = arguments[i].cast<TensorView>();
    const DLDataType dtype = x.dtype();
    void* data = data_of<void>(x);
    const bool fits = i % 2 == 0 ? x.numel() >= 1 && x.numel() <= INT32_MAX - kUpdateThreads : x.numel() == 1;
    if (!fits || dtype.code != kDLFloat || dtype.bits != 32 || dtype.lanes != 1 || !x.IsContiguous() || !same_device(x.device(), device) ||
        !aligned(data, 4) || !taken.insert(data).second) {
      found.misfit = i;
      return found;
    }
    Operand& own = found.operands[i / 2];
    if (i % 2 == 0) {
      own.history = static_cast<int32_t*>(data);
      own.length = static_cast<int32_t>(x.numel());
    } else {
      own.scale = static_cast<float*>(data);
    }
  }
  return found;
}

// Calls launch(operands, count) for as many operands at a time as a launch takes.
template <class Launch>
void launch_all(const OnDevice& on, const std::vector<Operand>& operands, int32_t* newest, Launch launch) {
  Operands some;
  for (size_t first = 0; first < operands.size(); first += kMostOperands) {
    const size_t count = std::min(operands.size() - first, static_cast<size_t>(kMostOperands));
    some.newest = newest == nullptr ? nullptr : newest + first;
    std::copy_n(operands.begin() + first, count, some.of);
    launch(some, static_cast<unsigned>(count));
    on.done(cudaGetLastError());
  }
}

int64_t update_scales(const AnyView* arguments, int32_t count) {
  check(count >= 4, "update_scales takes options, newest and arrays");
  const TensorView options = arguments[0].cast<TensorView>();
  const MaybeTensor newest = arguments[1].cast<MaybeTensor>();
  Arrays arrays = arrays_of(arguments + 2, count - 2);
  const int64_t operands = static_cast<int64_t>(arrays.operands.size());
  check_array(options, "options", {kDLCPU, 0}, 2 * operands, 32, "two int32 for each operand");
  if (arrays.misfit >= 0) return arrays.misfit;
  const OnDevice on(arguments[2].cast<TensorView>(), "arrays");
  check_array(newest, "newest", on.device, operands, 32, "an int32 for each operand");
  const int32_t* option = data_of<const int32_t>(options);
  for (Operand& own : arrays.operands) {
    own.target = bit_cast<float>(*option++);
    own.counted = *option++ != 0 ? 1 : own.length;
  }
  launch_all(on, arrays.operands, data_of<int32_t>(newest),
             [&](const Operands& some, unsigned blocks) { update_kernel<<<blocks, kUpdateThreads, 0, on.stream>>>(some); });
  return -1;
}

int64_t newest_amaxes(const AnyView* arguments, int32_t count) {
  check(count >= 3, "newest_amaxes takes out and arrays");
  const Arrays arrays = arrays_of(arguments + 1, count - 1);
  if (arrays.misfit >= 0) return arrays.misfit;
  const TensorView out = arguments[0].cast<TensorView>();
  const OnDevice on(arguments[1].cast<TensorView>(), "arrays");
  check_array(out, "out", on.device, static_cast<int64_t>(arrays.operands.size()), 32, "an int32 for each operand");
  launch_all(on, arrays.operands, data_of<int32_t>(out),
             [&](const Operands& some, unsigned threads) { newest_kernel<<<1, threads, 0, on.stream>>>(some); });
  return -1;
}

}  // namespace
}  // namespace cuda
}  // namespace blockfp

BLOCKFP_EXPORT_PACKED(newest_amaxes)
BLOCKFP_EXPORT_PACKED(update_scales)
