#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace attnscope::ptx {

template <class Element>
void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static const char operation = 0;
  struct Operand {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } operand{d, a, {b0, b1}};
  emulator::warp_instruction(&operation, operand, [](Operand** lanes) {
    const auto element = [](uint32_t word, int half) {
      return to_float(Element{static_cast<uint16_t>(word >> 16 * half)});
    };
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) {
          a[g + i % 2 * 8][t + half + i / 2 * 8] = element(lanes[lane]->a[i], half);
        }
        for (int i = 0; i < 2; ++i) b[t + half + i * 8][g] = element(lanes[lane]->b[i], half);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = lanes[lane]->d[i];
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        lanes[lane]->d[i] = sum;
      }
    }
  });
}

}  // namespace attnscope::ptx
