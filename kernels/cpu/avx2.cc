// The kernels for AVX2 and F16C.
#define BLOCKFP_ISA avx2
#define BLOCKFP_ISA_NAME "avx2"

#include "kernel_table.h"
