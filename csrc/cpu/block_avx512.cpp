// The block kernels for AVX-512. Standard headers are included above the pragma, so that their
// inline functions are compiled for the baseline and run on any machine.
#if defined(__x86_64__)

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")

#define ATTNSCOPE_ISA avx512
#define ATTNSCOPE_VECTOR_BYTES 64
#define ATTNSCOPE_TILE_VECTORS 4
#include "cpu/block_kernels.h"

#endif
