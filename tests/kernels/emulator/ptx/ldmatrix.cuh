#pragma once
#include "emulator.h"

namespace attnscope::ptx {

struct MatrixOperand {
  uint32_t address;
  uint32_t* r;
};

template <bool kTranspose, bool kStore>
void move_matrices(uint32_t shared, uint32_t* r) {
  static const char operation = 0;
  MatrixOperand operand{shared, r};
  emulator::warp_instruction(&operation, operand, [](MatrixOperand** lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        for (int half = 0; half < 2; ++half) {
          int row = lane / 4, column = lane % 4 * 2 + half;
          if (kTranspose) std::swap(row, column);
          char* at = emulator::shared_at(lanes[matrix * 8 + row]->address, 16) + column * 2;
          char* own = reinterpret_cast<char*>(&lanes[lane]->r[matrix]) + half * 2;
          if (kStore) {
            std::memcpy(at, own, 2);
          } else {
            std::memcpy(own, at, 2);
          }
        }
      }
    }
  });
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  move_matrices<false, false>(shared, r);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
  move_matrices<true, false>(shared, r);
}
inline void stmatrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
  move_matrices<false, true>(shared, const_cast<uint32_t*>(r));
}

}  // namespace attnscope::ptx
