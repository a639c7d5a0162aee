#pragma once

namespace attnscope {

struct TensorMap {
  int map, head_step, batch_step;
};

}  // namespace attnscope
