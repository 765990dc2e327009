// Creates tensor maps and chooses the kernel.
#include <algorithm>
#include <map>
#include <mutex>

#include "driver.h"
#include "gemm.cuh"
#include "launch.h"

namespace blockfp {
namespace cuda {
namespace {

// A matrix in device memory, and the box of it that is loaded at once.
struct Box {
  const void* data;
  int64_t rows, columns, stride;  // in elements
  int box_rows, box_columns;
  int bytes;                      // of an element: 1 for codes, which are swizzled, or 4
  bool operator==(const Box& o) const {
    return data == o.data && rows == o.rows && columns == o.columns && stride == o.stride && box_rows == o.box_rows &&
           box_columns == o.box_columns && bytes == o.bytes;
  }
};

// Creates a tensor map; false on failure. Training reuses the same arrays, so each thread caches a few maps.
bool map_of(const Box& box, CUtensorMap* map) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  struct Entry {
    Box box{};
    CUtensorMap map;
  };
  constexpr int kEntries = 256;
  static thread_local Entry entries[kEntries];
  const uint64_t key = reinterpret_cast<uint64_t>(box.data) / 16 + box.rows * 31 + box.columns * 7 + box.box_rows * 3 + box.box_columns;
  Entry& entry = entries[(key * 0x9E3779B97F4A7C15ull) >> 56];
  if (entry.box == box) {
    *map = entry.map;
    return true;
  }
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[] = {size(box.columns), size(box.rows)}, strides[] = {size(box.stride * box.bytes)};
  const cuuint32_t shape[] = {static_cast<cuuint32_t>(box.box_columns), static_cast<cuuint32_t>(box.box_rows)}, steps[] = {1, 1};
  const bool codes = box.bytes == 1;
  entry.box = Box{};
  if (encode == nullptr ||
      encode(&entry.map, codes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<void*>(box.data),
             sizes, strides, shape, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             codes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return false;
  }
  entry.box = box;
  *map = entry.map;
  return true;
}

// The current device's number of multiprocessors; 0 unless it is Hopper, whose instructions no other generation has.
int multiprocessors() {
  static std::mutex mutex;
  static std::map<int, int> counts;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, fresh] = counts.try_emplace(device, 0);
  if (fresh) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major == 9 && minor == 0) cudaDeviceGetAttribute(&entry->second, cudaDevAttrMultiProcessorCount, device);
  }
  return entry->second;
}

// Zero except while a product draws tiles from it; the product's last block resets it.
constexpr int kCounters = 1 << 16;
__device__ int32_t counters[kCounters];

// Within its scope, calls that are forbidden during captures (of this or another thread) don't invalidate them.
class Relaxed {
 public:
  Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The counter of a product that is about to be launched. A stream's products run one after another and share one. Each product
// of a CUDA graph has its own, because the graph may run concurrently with the stream that it was captured on. Null if none is
// left, or if in doubt.
int32_t* counter_for(cudaStream_t stream) {
  struct OfDevice {
    int32_t* first = nullptr;
    int taken = 0;
    std::map<unsigned long long, int> of_streams;
  };
  static std::mutex mutex;
  static std::map<int, OfDevice> devices;
  int device = 0;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (cudaGetDevice(&device) != cudaSuccess || cudaStreamIsCapturing(stream, &capturing) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  const bool captured = capturing != cudaStreamCaptureStatusNone;
  const Relaxed relaxed;
  const std::lock_guard<std::mutex> lock(mutex);
  OfDevice& own = devices[device];
  void* first = own.first;
  unsigned long long id = 0;  // the id of no stream, not even of a destroyed one
  if ((first == nullptr && cudaGetSymbolAddress(&first, counters) != cudaSuccess) ||
      (!captured && cudaStreamGetId(stream, &id) != cudaSuccess)) {
    cudaGetLastError();
    return nullptr;
  }
  own.first = static_cast<int32_t*>(first);
  const auto known = captured ? own.of_streams.end() : own.of_streams.find(id);
  if (known != own.of_streams.end()) return own.first + known->second;
  if (own.taken == kCounters) return nullptr;
  if (!captured) own.of_streams.emplace(id, own.taken);
  return own.first + own.taken++;
}

Box box_of_codes(const GemmOperand& x, int64_t rows, int64_t k, int box_rows) {
  return {x.codes, rows, k, k, box_rows, kBlockK, 1};
}

Box box_of_scales(const GemmOperand& x, int64_t groups, int64_t rows, int64_t blocks, int box_rows) {
  const int64_t filled = ceil_div(rows, 4) * 4;
  return {x.scales, groups * blocks, rows, filled, 1, box_rows, 4};
}

// Upper bound, since each group may end within a tile.
int64_t tiles_of(const GemmArguments& p, int columns) {
  const int64_t high = p.along_k ? ceil_div(p.m, kTileRows) * p.groups : ceil_div(p.m, kTileRows) + p.groups - 1;
  return high * ceil_div(p.n, columns);
}

template <class A, class B, class Tile>
cudaError_t launch(GemmArguments p, const GemmOperand& a, const GemmOperand& b, cudaStream_t stream) {
  const auto kernel = gemm_kernel<A, B, Tile>;
  const int64_t blocks = ceil_div(p.k, kBlockK), matrices = p.along_k ? 1 : p.groups;
  CUtensorMap codes_a, codes_b, scales_a{}, scales_b{};
  const bool mapped =
      map_of(box_of_codes(a, p.m, p.k, kTileRows), &codes_a) &&
      map_of(box_of_codes(b, matrices * p.n, p.k, Tile::kColumns), &codes_b) &&
      (!Tile::kScaled || map_of(box_of_scales(a, 1, p.m, p.a_step ? blocks : 1, Tile::kSpan), &scales_a)) &&
      (!Tile::kRowsOfB ||
       map_of(box_of_scales(b, matrices, p.n, p.b_step ? blocks : 1, Tile::kColumns), &scales_b));
  if (!mapped) return cudaErrorInvalidValue;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kShared);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles_of(p, Tile::kColumns), multiprocessors())));
  p.next_tile = counter_for(stream);
  kernel<<<grid, kGemmThreads, Tile::kShared, stream>>>(p, codes_a, codes_b, scales_a, scales_b);
  return cudaGetLastError();
}

// Wide tiles move fewer bytes per product and are 6% faster (H200); narrow tiles give work to more blocks at the end.
TileShape shape_for(const GemmArguments& p) {
  const auto time = [&](int columns) { return ceil_div(tiles_of(p, columns), multiprocessors()) * columns; };
  return 16 * time(192) <= 17 * time(128) ? TileShape::k128x192 : TileShape::kWide128x128;
}

template <class A, class B, Scaling S>
cudaError_t launch_shape(const GemmArguments& p, const GemmOperand& a, const GemmOperand& b, TileShape shape, cudaStream_t stream) {
  if (shape == TileShape::kAny) shape = shape_for(p);
  if (shape == TileShape::k128x192) return launch<A, B, GemmTile<192, false, S>>(p, a, b, stream);
  if (shape == TileShape::kWide128x128) return launch<A, B, GemmTile<128, S != Scaling::kValues, S>>(p, a, b, stream);
  return cudaErrorInvalidValue;
}

template <class A, class B>
cudaError_t launch_scaling(const GemmArguments& p, const GemmOperand& a, const GemmOperand& b, Scaling scaling, TileShape shape,
                           cudaStream_t stream) {
  switch (scaling) {
    case Scaling::kTensor:
      return launch_shape<A, B, Scaling::kTensor>(p, a, b, shape, stream);
    case Scaling::kRows:
      return launch_shape<A, B, Scaling::kRows>(p, a, b, shape, stream);
    case Scaling::kBands:
      return launch_shape<A, B, Scaling::kBands>(p, a, b, shape, stream);
    default:
      return launch_shape<A, B, Scaling::kSquares>(p, a, b, shape, stream);
  }
}

}  // namespace

cudaError_t launch_gemm(const GemmArguments& p, const GemmOperand& a, const GemmOperand& b, Scaling scaling, TileShape shape,
                        cudaStream_t stream) {
  if (multiprocessors() == 0) return cudaErrorNotSupported;
  if (scaling == Scaling::kValues) return launch_shape<Values, Values, Scaling::kValues>(p, a, b, shape, stream);
#ifdef BLOCKFP_ONLY_E4M3  // compiles a quarter of the kernels, for development
  return launch_scaling<E4M3, E4M3>(p, a, b, scaling, shape, stream);
#else
  if (a.element == E4M3::kId) {
    return b.element == E4M3::kId ? launch_scaling<E4M3, E4M3>(p, a, b, scaling, shape, stream)
                                  : launch_scaling<E4M3, E5M2>(p, a, b, scaling, shape, stream);
  }
  return b.element == E4M3::kId ? launch_scaling<E5M2, E4M3>(p, a, b, scaling, shape, stream)
                                : launch_scaling<E5M2, E5M2>(p, a, b, scaling, shape, stream);
#endif
}

}  // namespace cuda
}  // namespace blockfp
