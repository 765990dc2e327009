// The kernels for AVX-512 (F, BW, DQ, VL).
#define BLOCKFP_ISA avx512
#define BLOCKFP_ISA_NAME "avx512"

#include "kernel_table.h"
