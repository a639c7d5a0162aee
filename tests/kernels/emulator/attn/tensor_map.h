#pragma once

namespace attnscope {

struct TensorMap {
  int head_step, batch_step;
};

}  // namespace attnscope
