// Runs a call's tasks on the CPU's cores.
#pragma once

#include <cstdint>
#include <functional>

namespace blockfp {

// Calls body(task, next, scratch) for task 0 .. tasks - 1 in any order, on a number of threads that suits `work` (bytes read
// and written), in the floating-point mode that the arithmetic requires. `next` is this thread's following task, or a number
// that is no task. `scratch` belongs to one thread and has `scratch_bytes` bytes.
void run_tasks(int64_t tasks, int64_t work, int64_t scratch_bytes,
               const std::function<void(int64_t task, int64_t next, void* scratch)>& body);

// Requests large pages for a large output, as NumPy does for its arrays: the first writes to 32 MiB of small pages cost more
// than quantizing. This is only a hint, and memory that was already written to isn't affected.
void expect_writes(void* data, int64_t bytes);

// The maximum number of threads of a call.
int thread_limit();

// Sets the maximum number of threads of a call; 0 allows as many as the process may run on. Returns the limit in use.
int set_threads(int threads);

}  // namespace blockfp
