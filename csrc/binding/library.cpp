// Every schema of the project, in one place. Implementations register themselves beside their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(attnscope, m) {
  // q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] -> out [B, Sq, Hq, Dv], lse [B, Hq,
  // Sq]; packed: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], cu_seqlens int32 [B + 1] -> out
  // [Tq, Hq, Dv], lse [Hq, Tq]. A row that sees no key has out = 0 and lse = -inf. `kernel_name`
  // ("sm80", "sm90") forces a kernel; "auto" takes the best one for the device. (An argument called
  // `kernel` would collide with one of Inductor's own.)
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
      "*, float scale, int max_seqlen_q=0, int max_seqlen_k=0, bool causal=False, "
      "int window_left=-1, int window_right=-1, float softcap=0.0, str kernel_name=\"auto\") "
      "-> (Tensor out, Tensor lse)");
  // The tile table of every CUDA kernel in this build, as JSON.
  m.def("kernels() -> str");
}
