#include <map>
#include <mutex>
#include <utility>

#include "attn/tile_counter.h"

namespace attnscope {
namespace {

constexpr int kChunk = 4096;  // counters allocated at a time

using StreamKey = std::pair<int, unsigned long long>;  // device and stream id

struct Pool {
  TileCounter* chunk = nullptr;
  int used = kChunk;
};

// A chunk of counters at zero. By a side stream, so that no other work is waited for.
cudaError_t allocate(TileCounter** chunk) {
  void* memory = nullptr;
  cudaStream_t side = nullptr;
  cudaError_t error = cudaMalloc(&memory, kChunk * sizeof(TileCounter));
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, kChunk * sizeof(TileCounter), side);
  if (error == cudaSuccess) error = cudaStreamSynchronize(side);
  if (side != nullptr) cudaStreamDestroy(side);
  if (error == cudaSuccess) *chunk = static_cast<TileCounter*>(memory);
  return error;
}

cudaError_t take(Pool& pool, TileCounter** counter) {
  if (pool.used == kChunk) {
    // While any thread captures in global mode, only a thread in relaxed mode may allocate.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t error = allocate(&pool.chunk);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    pool.used = 0;
  }
  *counter = pool.chunk + pool.used++;
  return cudaSuccess;
}

}  // namespace

cudaError_t tile_counter(int device, cudaStream_t stream, TileCounter** counter) {
  static std::mutex mutex;
  static std::map<int, Pool> pools;  // by device
  static std::map<StreamKey, TileCounter*> counters;
  thread_local StreamKey last_key{-1, 0};
  thread_local TileCounter* last = nullptr;

  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) return error;
  if (capture != cudaStreamCaptureStatusNone) {
    const std::lock_guard<std::mutex> lock(mutex);
    return take(pools[device], counter);
  }
  unsigned long long id = 0;  // a handle may be reused after its stream is destroyed; an id is not
  error = cudaStreamGetId(stream, &id);
  if (error != cudaSuccess) return error;
  const StreamKey key{device, id};
  if (key != last_key) {
    const std::lock_guard<std::mutex> lock(mutex);
    TileCounter*& entry = counters[key];
    if (entry == nullptr) {
      error = take(pools[device], &entry);
      if (error != cudaSuccess) return error;
    }
    last = entry;
    last_key = key;
  }
  *counter = last;
  return cudaSuccess;
}

}  // namespace attnscope
