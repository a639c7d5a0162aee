#include <map>
#include <mutex>
#include <utility>

#include "attn/tile_counter.h"

namespace attnscope {
namespace {

using StreamKey = std::pair<int, unsigned long long>;  // device and stream id

// Allocates a counter and sets it to zero, on a side stream: it waits for no other work.
cudaError_t allocate(TileCounter** counter) {
  void* memory = nullptr;
  cudaStream_t side = nullptr;
  cudaError_t error = cudaMalloc(&memory, sizeof(TileCounter));
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, sizeof(TileCounter), side);
  if (error == cudaSuccess) error = cudaStreamSynchronize(side);
  if (side != nullptr) cudaStreamDestroy(side);
  if (error == cudaSuccess) *counter = static_cast<TileCounter*>(memory);
  return error;
}

}  // namespace

cudaError_t tile_counter(int device, cudaStream_t stream, TileCounter** counter) {
  static std::mutex mutex;
  static std::map<StreamKey, TileCounter*> counters;
  thread_local StreamKey last_key{-1, 0};
  thread_local TileCounter* last = nullptr;

  *counter = nullptr;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone) return error;
  unsigned long long id = 0;  // a handle may be reused after its stream is destroyed; an id is not
  error = cudaStreamGetId(stream, &id);
  if (error != cudaSuccess) return error;
  const StreamKey key{device, id};
  if (key != last_key) {
    const std::lock_guard<std::mutex> lock(mutex);
    TileCounter*& entry = counters[key];
    if (entry == nullptr) {
      // Another thread may be capturing in global mode, where this thread may not allocate.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
      error = allocate(&entry);
      cudaThreadExchangeStreamCaptureMode(&mode);
      if (error != cudaSuccess) return error;
    }
    last = entry;
    last_key = key;
  }
  *counter = last;
  return cudaSuccess;
}

}  // namespace attnscope
