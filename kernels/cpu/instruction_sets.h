// Which instruction sets were compiled in, which this processor has, and which one is in use.
#pragma once

#include <string>
#include <vector>

#include "jobs.h"

namespace blockfp {

// Names of the instruction sets that can run here, fastest first; "scalar" is always the last.
std::vector<std::string> instruction_sets();

// Uses this one from now on; false where it cannot run here. All give the same bits.
bool use_instruction_set(const std::string& name);

// The kernels in use: by default the fastest.
const Kernels& current_kernels();

}  // namespace blockfp
