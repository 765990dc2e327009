// The kernels for whatever the compiler targets by default: the shared headers, one element at a time.
#define BLOCKFP_ISA scalar
#define BLOCKFP_ISA_NAME "scalar"

#include "kernel_table.h"
