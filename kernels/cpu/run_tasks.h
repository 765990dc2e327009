// Runs a call's tasks on the CPU's cores.
#pragma once

#include <cstdint>
#include <functional>

namespace blockfp {

// Calls body(task, next, scratch) for task 0 .. tasks - 1 in some order, on as many threads as `work` (bytes read and written)
// is worth, in the floating-point mode that the arithmetic needs. `next` is the task that this thread runs after this one, or a
// number that is no task. `scratch` is one thread's own, `scratch_bytes` long.
void run_tasks(int64_t tasks, int64_t work, int64_t scratch_bytes,
               const std::function<void(int64_t task, int64_t next, void* scratch)>& body);

// Asks for large pages behind a large output, as NumPy does for its own arrays: the first writes to 32 MiB of small pages cost
// more than quantizing. Only a hint, and memory that has been written to already stays as it is.
void expect_writes(void* data, int64_t bytes);

// As many threads as a call may run on.
int thread_limit();

// At most this many threads a call from now on; 0: as many as the process may run on. Returns the limit in use.
int set_threads(int threads);

}  // namespace blockfp
