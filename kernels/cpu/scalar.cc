// The kernels for the compiler's default target: the shared headers with one element per lane type.
#define BLOCKFP_ISA scalar
#define BLOCKFP_ISA_NAME "scalar"

#include "kernel_table.h"
