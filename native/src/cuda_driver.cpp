#include "kvbm/cuda_driver.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>

#include "kvbm/words.hpp"

namespace kvbm {
namespace {

// Finds functions in a library.
class Finder {
 public:
  Finder(void* library, const std::string& name) : library_(library), name_(name) {}

  template <class Function>
  void operator()(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) {
      throw std::runtime_error(words(name_, " lacks ", name, ": the driver is too old; install one for CUDA 12"));
    }
  }

 private:
  void* library_;            // as dlopen gave it
  const std::string& name_;  // for messages
};

void find_contexts(CudaDriver& made, const Finder& find) {
  find(made.cuInit, "cuInit");
  find(made.cuDeviceGet, "cuDeviceGet");
  find(made.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  find(made.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(made.cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease_v2");
  find(made.cuCtxPushCurrent_v2, "cuCtxPushCurrent_v2");
  find(made.cuCtxPopCurrent_v2, "cuCtxPopCurrent_v2");
  find(made.cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange");
  find(made.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  find(made.cuModuleLoadData, "cuModuleLoadData");
  find(made.cuModuleUnload, "cuModuleUnload");
  find(made.cuModuleGetFunction, "cuModuleGetFunction");
  find(made.cuGetErrorName, "cuGetErrorName");
}

void find_work(CudaDriver& made, const Finder& find) {
  find(made.cuMemAlloc_v2, "cuMemAlloc_v2");
  find(made.cuMemFree_v2, "cuMemFree_v2");
  find(made.cuMemHostAlloc, "cuMemHostAlloc");
  find(made.cuMemFreeHost, "cuMemFreeHost");
  find(made.cuPointerGetAttribute, "cuPointerGetAttribute");
  find(made.cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync_v2");
  find(made.cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync_v2");
  find(made.cuStreamCreateWithPriority, "cuStreamCreateWithPriority");
  find(made.cuStreamDestroy_v2, "cuStreamDestroy_v2");
  find(made.cuStreamIsCapturing, "cuStreamIsCapturing");
  find(made.cuStreamWaitEvent, "cuStreamWaitEvent");
  find(made.cuEventCreate, "cuEventCreate");
  find(made.cuEventDestroy_v2, "cuEventDestroy_v2");
  find(made.cuEventRecord, "cuEventRecord");
  find(made.cuEventQuery, "cuEventQuery");
  find(made.cuLaunchKernel, "cuLaunchKernel");
}

std::unique_ptr<const CudaDriver> loaded(const std::string& library) {
  void* const mapped = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (mapped == nullptr) {
    const char* const why = dlerror();
    throw std::runtime_error(words("NVIDIA's driver cannot be loaded: ", why == nullptr ? library.c_str() : why));
  }
  auto made = std::make_unique<CudaDriver>();
  const Finder find(mapped, library);
  find_contexts(*made, find);
  find_work(*made, find);
  made->cuMemcpyBatchAsync = reinterpret_cast<decltype(made->cuMemcpyBatchAsync)>(dlsym(mapped, "cuMemcpyBatchAsync"));
  if (const CuResult result = made->cuInit(0); result != kCuSuccess) {
    throw std::runtime_error(words("NVIDIA's driver does not start: cuInit answers ", made->name_of(result)));
  }
  return made;
}

}  // namespace

std::string CudaDriver::name_of(CuResult result) const {
  const char* name = nullptr;
  return cuGetErrorName(result, &name) == kCuSuccess && name != nullptr ? name : words("error ", result);
}

CudaError::CudaError(const CudaDriver& driver, const char* call, CuResult result)
    : std::runtime_error(
          words(means_lost(result) ? "the GPU is lost: " : "CUDA error: ", call, " answers ", driver.name_of(result))),
      result_(result) {}

const CudaDriver& cuda_driver(const std::string& library) {
  static std::mutex mutex;
  // Threads may copy while the process ends
  static auto& drivers = *new std::map<std::string, std::unique_ptr<const CudaDriver>>;
  const std::lock_guard lock(mutex);
  auto& driver = drivers[library];
  if (driver == nullptr) {
    driver = loaded(library);
  }
  return *driver;
}

bool means_lost(CuResult result) noexcept {
  switch (result) {
    case 4:    // CUDA_ERROR_DEINITIALIZED: the process ends
    case 201:  // CUDA_ERROR_INVALID_CONTEXT: somebody reset the device
    case 214:  // CUDA_ERROR_ECC_UNCORRECTABLE
    case 220:  // CUDA_ERROR_NVLINK_UNCORRECTABLE
    case 226:  // CUDA_ERROR_CONTAINED
    case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
    case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
    case 709:  // CUDA_ERROR_CONTEXT_IS_DESTROYED
    case 710:  // CUDA_ERROR_ASSERT
    case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
    case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
    case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
    case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
    case 718:  // CUDA_ERROR_INVALID_PC
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
    case 721:  // CUDA_ERROR_TENSOR_MEMORY_LEAK
    case 810:  // CUDA_ERROR_MPS_CLIENT_TERMINATED
      return true;
    default:
      return false;
  }
}

InContext::InContext(const CudaDriver& driver, CuContext context) : driver_(driver) {
  if (const CuResult result = driver.cuCtxPushCurrent_v2(context); result != kCuSuccess) {
    throw CudaError(driver, "cuCtxPushCurrent", result);
  }
  if (driver.cuThreadExchangeStreamCaptureMode(&mode_) != kCuSuccess) {  // now it holds the thread's own
    mode_ = -1;
  }
}

InContext::~InContext() {
  if (mode_ >= 0) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  CuContext left = nullptr;
  driver_.cuCtxPopCurrent_v2(&left);
}

}  // namespace kvbm
