#include <map>
#include <mutex>
#include <utility>

#include "attn/tile_counter.h"

namespace attnscope {
namespace {

constexpr int kChunk = 4096;  // counters allocated at a time

struct Pool {
  TileCounter* chunk = nullptr;
  int used = kChunk;
};

// Allocation is legal under another stream's capture only in relaxed mode.
TileCounter* take(Pool& pool) {
  if (pool.used == kChunk) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    void* memory = nullptr;
    cudaStream_t side = nullptr;
    const bool ok = cudaMalloc(&memory, kChunk * sizeof(TileCounter)) == cudaSuccess &&
                    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking) == cudaSuccess &&
                    cudaMemsetAsync(memory, 0, kChunk * sizeof(TileCounter), side) == cudaSuccess &&
                    cudaStreamSynchronize(side) == cudaSuccess;
    if (side != nullptr) cudaStreamDestroy(side);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (!ok) return nullptr;
    pool.chunk = static_cast<TileCounter*>(memory);
    pool.used = 0;
  }
  return pool.chunk + pool.used++;
}

}  // namespace

TileCounter* tile_counter(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<int, Pool> pools;  // by device
  static std::map<std::pair<int, unsigned long long>, TileCounter*>
      stream_counters;  // by device and stream

  int device = 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaStreamIsCapturing(stream, &capture) != cudaSuccess)
    return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (capture != cudaStreamCaptureStatusNone) return take(pools[device]);
  unsigned long long id = 0;  // a handle can come back after its stream is gone; an id cannot
  if (cudaStreamGetId(stream, &id) != cudaSuccess) return nullptr;
  TileCounter*& counter = stream_counters[{device, id}];
  if (counter == nullptr) counter = take(pools[device]);
  return counter;
}

}  // namespace attnscope
