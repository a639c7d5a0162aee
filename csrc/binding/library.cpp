// Every schema of the project, in one place. Implementations register themselves beside their code;
// attnscope/schemas.py has the same arguments as data, and loading compares the two.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(attnscope, m) {
  // q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] -> out [B, Sq, Hq, Dv], lse [B, Hq,
  // Sq]; packed: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], cu_seqlens int32 [B + 1] -> out
  // [Tq, Hq, Dv], lse [Hq, Tq]. A row that sees no key has out = 0 and lse = -inf. `variant` 80 or
  // 90 forces the kernel of that architecture; 0 takes the best one for the device. Not a string:
  // the stable headers leak 48 bytes a call for one.
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
      "*, float scale, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, bool causal=False, "
      "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, int variant=0) "
      "-> (Tensor out, Tensor lse)");
  // Gradients of one forward call, contiguous, in the shapes and dtype of q, k and v. dout is like
  // out, dlse like lse (none: zero). P = exp(s - lse) for the lse that is given, so a call may have
  // a part of the keys of a softmax. `deterministic`: the same bits in every call.
  m.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? dlse=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, *, float scale, "
      "SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, bool causal=False, SymInt window_left=-1, "
      "SymInt window_right=-1, float softcap=0.0, int variant=0, bool deterministic=False) "
      "-> (Tensor dq, Tensor dk, Tensor dv)");
  // The tile table of every CUDA kernel in this build, as JSON.
  m.def("kernels() -> str");
  // Which kernel and which row of its table serve a call of these sizes on a device, as JSON. The
  // tensors of the call have rows apart from each other (no stride of zero). `capability` is 10 *
  // major + minor. choose_backward takes a packed batch as sequences of the longest length.
#define CALL_SIZES                                                                             \
  "(*, int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, int batch, int heads_q, "     \
  "int heads_kv, bool causal, int window_left, int window_right, bool packed, float softcap, " \
  "int sms, int capability, bool deterministic) -> str"
  m.def("choose_forward" CALL_SIZES);
  m.def("choose_backward" CALL_SIZES);
#undef CALL_SIZES
}
