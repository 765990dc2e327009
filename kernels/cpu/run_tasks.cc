#include "run_tasks.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "float_mode.h"

namespace blockfp {
namespace {

// Starting a thread costs about 20 us; a core moves at least 8 GB/s.
constexpr int64_t kBytesPerThread = 1 << 19;

std::atomic<int> most_threads{0};

int allowed_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

void expect_writes(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLargePage = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kLargePage * kLargePage;
  if (end > begin + kLargePage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

int thread_limit() {
  const int limit = most_threads.load();
  return limit > 0 ? limit : allowed_cores();
}

int set_threads(int threads) {
  most_threads = threads;
  return thread_limit();
}

void run_tasks(int64_t tasks, int64_t work, int64_t scratch_bytes,
               const std::function<void(int64_t task, int64_t next, void* scratch)>& body) {
  int64_t threads = std::min(tasks, work / kBytesPerThread);
  if (threads > 1) threads = std::min<int64_t>(threads, thread_limit());
  threads = std::max<int64_t>(threads, 1);
  const int64_t stride = (scratch_bytes + 63) / 64 * 64;
  const std::unique_ptr<char[]> memory(new char[threads * stride + 64]);
  char* aligned = memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 63);
  std::atomic<int64_t> unclaimed{0};
  const auto worker = [&](int64_t thread) {
    const FloatMode mode;
    int64_t task = unclaimed.fetch_add(1);
    while (task < tasks) {
      const int64_t next = unclaimed.fetch_add(1);
      body(task, next, aligned + thread * stride);
      task = next;
    }
  };
  // Threads live only during the call: a pool wouldn't survive fork, which data loaders use.
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < threads; ++i) {
    try {
      helpers.emplace_back(worker, i);
    } catch (const std::system_error&) {
      break;  // no more threads available: the existing ones do the work
    }
  }
  worker(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace blockfp
