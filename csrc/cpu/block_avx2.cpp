// The block kernels for AVX2. Standard headers are included above the pragma, so that their
// inline functions are compiled for the baseline and run on any machine.
#if defined(__x86_64__)

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx2,fma")

#define ATTNSCOPE_ISA avx2
#define ATTNSCOPE_VECTOR_BYTES 32
#define ATTNSCOPE_TILE_VECTORS 2
#include "cpu/block_kernels.h"

#endif
