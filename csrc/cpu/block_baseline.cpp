// The block kernels for any machine.
#define ATTNSCOPE_ISA baseline
#define ATTNSCOPE_VECTOR_BYTES 16
#define ATTNSCOPE_TILE_VECTORS 2
#include "cpu/block_kernels.h"
