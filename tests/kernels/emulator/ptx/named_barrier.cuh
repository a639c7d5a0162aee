#pragma once
#include "emulator.h"

namespace attnscope::ptx {

inline void named_barrier(int id, int threads) { emulator::barrier(id, threads); }

}  // namespace attnscope::ptx
