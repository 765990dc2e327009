// The instruction sets that were compiled in, that this processor has, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "jobs.h"

namespace blockfp {

// Names of the instruction sets that can run on this machine, fastest first; "scalar" is always the last.
std::vector<std::string> instruction_sets();

// Selects an instruction set; returns false if it can't run here. All give the same bits.
bool use_instruction_set(const std::string& name);

// The selected kernels; by default the fastest.
const Kernels& current_kernels();

}  // namespace blockfp
