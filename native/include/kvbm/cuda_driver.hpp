// CudaDriver: the functions of NVIDIA's driver that we call, found at run time: kvbm is built and runs without it.
// Immutable once made; any thread. Everything else of CUDA that another library of the process does goes on beside it:
// calls are made in the device's primary context, which torch uses too, and which is left again after each
// (`InContext`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace kvbm {

// What cuda.h declares, as far as we need it: opaque handles, results, a few numbers.
using CuResult = int;
using CuContext = void*;
using CuModule = void*;
using CuFunction = void*;
using CuStream = void*;
using CuEvent = void*;
using CuAddress = std::uint64_t;  // CUdeviceptr

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuNotReady = 600;
inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr int kCuCaptureRelaxed = 2;
inline constexpr int kCuMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int kCuMemoryType = 2;        // CU_POINTER_ATTRIBUTE_…
inline constexpr int kCuDevicePointer = 3;     // likewise
inline constexpr int kCuRangeBegin = 11;
inline constexpr int kCuRangeSize = 12;
inline constexpr unsigned kCuHostMemory = 1;

// CUmemcpyAttributes.
struct CuCopyAttributes {
  struct Location {
    int type = 0;
    int id = 0;
  };
  int order = 0;  // when the source may be read: CU_MEMCPY_SRC_ACCESS_ORDER_…
  Location source;
  Location target;
  unsigned flags = 0;
};
inline constexpr int kCuInStreamOrder = 1;
inline constexpr int kCuAtAnyTime = 3;

struct CudaDriver {
  CuResult (*cuInit)(unsigned flags);
  CuResult (*cuDeviceGet)(int* device, int ordinal);
  CuResult (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  CuResult (*cuDevicePrimaryCtxRetain)(CuContext* context, int device);
  CuResult (*cuDevicePrimaryCtxRelease_v2)(int device);
  CuResult (*cuCtxPushCurrent_v2)(CuContext context);
  CuResult (*cuCtxPopCurrent_v2)(CuContext* context);
  CuResult (*cuCtxGetStreamPriorityRange)(int* least, int* greatest);
  CuResult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CuResult (*cuModuleLoadData)(CuModule* module, const void* image);
  CuResult (*cuModuleUnload)(CuModule module);
  CuResult (*cuModuleGetFunction)(CuFunction* function, CuModule module, const char* name);
  CuResult (*cuMemAlloc_v2)(CuAddress* address, std::size_t bytes);
  CuResult (*cuMemFree_v2)(CuAddress address);
  CuResult (*cuMemHostAlloc)(void** address, std::size_t bytes, unsigned flags);
  CuResult (*cuMemFreeHost)(void* address);
  CuResult (*cuPointerGetAttribute)(void* value, int attribute, CuAddress address);
  CuResult (*cuMemcpyHtoDAsync_v2)(CuAddress target, const void* source, std::size_t bytes, CuStream stream);
  CuResult (*cuMemcpyDtoHAsync_v2)(void* target, CuAddress source, std::size_t bytes, CuStream stream);
  // Since CUDA 12.8; null where the driver is older.
  CuResult (*cuMemcpyBatchAsync)(CuAddress* targets, CuAddress* sources, std::size_t* sizes, std::size_t count,
                                 CuCopyAttributes* attributes, std::size_t* first, std::size_t attribute_count,
                                 std::size_t* failed, CuStream stream);
  CuResult (*cuStreamCreateWithPriority)(CuStream* stream, unsigned flags, int priority);
  CuResult (*cuStreamDestroy_v2)(CuStream stream);
  CuResult (*cuStreamIsCapturing)(CuStream stream, int* status);
  CuResult (*cuStreamWaitEvent)(CuStream stream, CuEvent event, unsigned flags);
  CuResult (*cuEventCreate)(CuEvent* event, unsigned flags);
  CuResult (*cuEventDestroy_v2)(CuEvent event);
  CuResult (*cuEventRecord)(CuEvent event, CuStream stream);
  CuResult (*cuEventQuery)(CuEvent event);
  CuResult (*cuLaunchKernel)(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream,
                             void** parameters, void** extra);
  CuResult (*cuGetErrorName)(CuResult result, const char** name);

  // The error's name, such as "CUDA_ERROR_OUT_OF_MEMORY", or its number.
  std::string name_of(CuResult result) const;
};

// A call that the driver refused. The message names both.
class CudaError : public std::runtime_error {
 public:
  CudaError(const CudaDriver& driver, const char* call, CuResult result);

  CuResult result() const noexcept { return result_; }

 private:
  CuResult result_;  // the call's
};

// Loads and initialises it, once for each file: it is never unloaded. Throws std::runtime_error: it is not there, lacks
// a function, or does not start.
const CudaDriver& cuda_driver(const std::string& library = "libcuda.so.1");

// Whether after such a result nothing that the device had to do will be done any more: the device, or its context, is
// gone for good.
bool means_lost(CuResult result) noexcept;

// For its life the calling thread is in a context, and its calls are allowed while another thread captures a graph.
class InContext {
 public:
  // Throws CudaError.
  InContext(const CudaDriver& driver, CuContext context);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  const CudaDriver& driver_;      // outlives it
  int mode_ = kCuCaptureRelaxed;  // the thread's own while this lives
};

}  // namespace kvbm
