// The query block kernel for AVX2. The standard headers come above the pragma, so that whatever
// they define inline stays usable on any machine.
#if defined(__x86_64__)

#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx2,fma")

#define ATTNSCOPE_ISA avx2
#define ATTNSCOPE_VECTOR_BYTES 32
#define ATTNSCOPE_TILE_VECTORS 2
#include "cpu/block_kernel.h"

#endif
