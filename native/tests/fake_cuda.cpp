// A stand-in for NVIDIA's driver, for tests without a GPU: a shared library with the functions of CudaDriver. Streams
// are queues, and what is queued is done, a few steps at each question, in an order that streams and events allow; the
// kernel is the very source, run on the CPU. `fake_cuda_set` and `fake_cuda_fail` make it a device that is slow,
// captures a graph, refuses calls or dies.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

struct Dim {
  unsigned x = 1;
};
thread_local Dim blockIdx;
thread_local Dim threadIdx;
thread_local Dim blockDim;
thread_local Dim gridDim;
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

}  // namespace

#define __device__ static
#define __global__
namespace kernel {
#include "../cuda/ring_kernel.cu"
}  // namespace kernel

namespace {

using Result = int;
constexpr Result kInvalid = 1;
constexpr Result kNoMemory = 2;
constexpr Result kNotReady = 600;
constexpr Result kIllegalAddress = 700;
constexpr Result kCaptureUnsupported = 900;

struct Ticket {
  bool done = false;
};
using TicketPointer = std::shared_ptr<Ticket>;

struct Event {
  TicketPointer last;
};

struct Op {
  std::function<void()> work;  // null: wait
  TicketPointer waits;
  std::string words;
};

struct Stream {
  int number = 0;
  int priority = 0;
  std::deque<Op> ops;
};

struct State {
  std::mutex mutex;
  std::map<std::string, long long> settings{{"steps", 1}, {"die_after", -1}, {"memory", 1LL << 40}};
  std::map<std::string, long long> counts;
  std::map<std::string, std::pair<long long, Result>> failing;  // call → which coming one, answers what
  Stream null_stream;
  std::set<Stream*> streams{&null_stream};
  std::vector<Stream*> order{&null_stream};
  std::map<void*, std::size_t> memory;
  std::set<Event*> events;
  std::string log;
  TicketPointer engine;
  bool dead = false;
  std::size_t turn = 0;
  int made = 0;
  int modules = 0;
};

State& state() {
  static State& made = *new State;
  return made;
}

thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL
thread_local std::vector<void*> contexts;

bool step(State& s) {
  for (std::size_t tried = 0; tried < s.order.size(); ++tried) {
    Stream* const stream = s.order[s.turn++ % s.order.size()];
    if (stream->ops.empty()) {
      continue;
    }
    Op& op = stream->ops.front();
    if (op.waits != nullptr && !op.waits->done) {
      continue;
    }
    if (s.settings["die_after"] == 0) {
      s.dead = true;
      return false;
    }
    if (op.work) {
      if (s.settings["die_after"] > 0) {
        --s.settings["die_after"];
      }
      op.work();
    }
    if (!op.words.empty()) {
      s.log += op.words + '\n';
    }
    stream->ops.pop_front();
    return true;
  }
  return false;
}

// What every call does first: counts itself, and answers what it was told to.
Result entered(State& s, const char* call, bool unsafe = false, bool needs_context = true) {
  ++s.counts[call];
  if (auto found = s.failing.find(call);
      found != s.failing.end() && found->second.first > 0 && --found->second.first == 0) {
    const Result result = found->second.second;
    s.failing.erase(found);
    return result;
  }
  if (auto always = s.failing.find(call); always != s.failing.end() && always->second.first < 0) {
    return always->second.second;
  }
  if (s.dead) {
    return kIllegalAddress;
  }
  if (unsafe && s.settings["capturing"] != 0 && capture_mode != 2) {
    ++s.counts["broken captures"];
    return kCaptureUnsupported;
  }
  if (needs_context && contexts.empty()) {
    ++s.counts["calls without a context"];
    return 201;
  }
  return 0;
}

Stream* stream_of(State& s, void* handle) { return handle == nullptr ? &s.null_stream : static_cast<Stream*>(handle); }

}  // namespace

#define FAKE __attribute__((visibility("default")))
#define ENTER(...)                                                    \
  State& s = state();                                                 \
  const std::lock_guard lock(s.mutex);                                \
  if (const Result refused = entered(s, __VA_ARGS__); refused != 0) { \
    return refused;                                                   \
  }

extern "C" {

FAKE void fake_cuda_reset() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.settings = {{"steps", 1}, {"die_after", -1}, {"memory", 1LL << 40}};
  s.counts.clear();
  s.failing.clear();
  s.log.clear();
  s.dead = false;
  s.engine = nullptr;
  for (Stream* const stream : s.streams) {
    stream->ops.clear();
  }
}
FAKE void fake_cuda_set(const char* name, long long value) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.settings[name] = value;
}
FAKE void fake_cuda_fail(const char* call, long long which, int result) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (which == 0) {
    s.failing.erase(call);
  } else {
    s.failing[call] = {which, result};
  }
}
FAKE long long fake_cuda_count(const char* call) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.counts[call];
}
FAKE long long fake_cuda_live() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return static_cast<long long>(s.memory.size() + s.events.size() + s.streams.size() - 1) + s.modules;
}
FAKE const char* fake_cuda_log() { return state().log.c_str(); }
// Work of an engine's on a stream, which is over once it is let go.
FAKE void fake_cuda_block(void* stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.engine == nullptr) {
    s.engine = std::make_shared<Ticket>();
  }
  stream_of(s, stream)->ops.push_back({[] {}, s.engine, "engine"});
}
FAKE void fake_cuda_unblock() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.engine != nullptr) {
    s.engine->done = true;
  }
  s.engine = nullptr;
}

FAKE Result cuInit(unsigned) {
  ENTER("cuInit", false, false)
  return 0;
}
FAKE Result cuGetErrorName(Result result, const char** name) {
  static const std::map<Result, const char*> names{{kNoMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalid : 0;
}
FAKE Result cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet", false, false)
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
FAKE Result cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER("cuDeviceGetAttribute", false, false)
  *value = attribute == 16 ? 132 : 0;
  return 0;
}
FAKE Result cuDevicePrimaryCtxRetain(void** context, int) {
  ENTER("cuDevicePrimaryCtxRetain", false, false)
  *context = &s;
  return 0;
}
FAKE Result cuDevicePrimaryCtxRelease_v2(int) {
  ENTER("cuDevicePrimaryCtxRelease", false, false)
  return 0;
}
FAKE Result cuCtxPushCurrent_v2(void* context) {
  ENTER("cuCtxPushCurrent", false, false)
  contexts.push_back(context);
  return 0;
}
FAKE Result cuCtxPopCurrent_v2(void** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  if (!contexts.empty()) {
    contexts.pop_back();
  }
  return 0;
}
FAKE Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER("cuCtxGetStreamPriorityRange")
  *least = 0;
  *greatest = -5;
  return 0;
}
FAKE Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
FAKE Result cuModuleLoadData(void** module, const void* image) {
  ENTER("cuModuleLoadData", true)
  ++s.modules;
  *module = &s;
  return std::strstr(static_cast<const char*>(image), ".entry kvbm_ring") == nullptr ? 218 : 0;
}
FAKE Result cuModuleUnload(void*) {
  ENTER("cuModuleUnload", true)
  --s.modules;
  return 0;
}
FAKE Result cuModuleGetFunction(void** function, void*, const char* name) {
  ENTER("cuModuleGetFunction")
  *function = &s;
  return std::strcmp(name, "kvbm_ring") == 0 ? 0 : 500;
}
FAKE Result cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  ENTER("cuMemAlloc", true)
  if (static_cast<long long>(bytes) > s.settings["memory"]) {
    return kNoMemory;
  }
  void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0xAB, bytes);
  s.memory[memory] = bytes;
  *address = reinterpret_cast<std::uint64_t>(memory);
  return 0;
}
FAKE Result cuMemFree_v2(std::uint64_t address) {
  ENTER("cuMemFree", true)
  if (s.memory.erase(reinterpret_cast<void*>(address)) == 0) {
    return kInvalid;
  }
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
FAKE Result cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  ENTER("cuMemHostAlloc", true)
  *address = std::malloc(bytes);
  s.memory[*address] = bytes;
  return 0;
}
FAKE Result cuMemFreeHost(void* address) {
  ENTER("cuMemFreeHost", true)
  if (s.memory.erase(address) == 0) {
    return kInvalid;
  }
  std::free(address);
  return 0;
}
// The host's memory that was registered: one stretch, in pieces of "range bytes" where that is not 0.
FAKE Result cuPointerGetAttribute(void* value, int attribute, std::uint64_t address) {
  ENTER("cuPointerGetAttribute")
  const auto begin = static_cast<std::uint64_t>(s.settings["rows begin"]);
  const auto end = static_cast<std::uint64_t>(s.settings["rows end"]);
  if (address < begin || address >= end) {
    return kInvalid;
  }
  const auto range =
      s.settings["range bytes"] == 0 ? end - begin : static_cast<std::uint64_t>(s.settings["range bytes"]);
  const std::uint64_t range_begin = begin + (address - begin) / range * range;
  switch (attribute) {
    case 2:
      *static_cast<unsigned*>(value) = 1;
      return 0;
    case 3:
      *static_cast<std::uint64_t*>(value) = address;
      return 0;
    case 11:
      *static_cast<std::uint64_t*>(value) = range_begin;
      return 0;
    case 12:
      *static_cast<std::size_t*>(value) = std::min(range, end - range_begin);
      return 0;
    default:
      return kInvalid;
  }
}
FAKE Result cuMemcpyHtoDAsync_v2(std::uint64_t target, const void* source, std::size_t bytes, void* stream) {
  ENTER("cuMemcpyHtoDAsync")
  Stream* const on = stream_of(s, stream);
  on->ops.push_back({[=] { std::memcpy(reinterpret_cast<void*>(target), source, bytes); }, nullptr,
                     "to device " + std::to_string(bytes) + " on " + std::to_string(on->number)});
  return 0;
}
FAKE Result cuMemcpyDtoHAsync_v2(void* target, std::uint64_t source, std::size_t bytes, void* stream) {
  ENTER("cuMemcpyDtoHAsync")
  Stream* const on = stream_of(s, stream);
  on->ops.push_back({[=] { std::memcpy(target, reinterpret_cast<const void*>(source), bytes); }, nullptr,
                     "to host " + std::to_string(bytes) + " on " + std::to_string(on->number)});
  return 0;
}
FAKE Result cuMemcpyBatchAsync(std::uint64_t* targets, std::uint64_t* sources, std::size_t* sizes, std::size_t count,
                               int* order, std::size_t*, std::size_t attribute_count, std::size_t*, void* stream) {
  ENTER("cuMemcpyBatchAsync")
  Stream* const on = stream_of(s, stream);
  if (stream == nullptr || attribute_count != 1 || (*order != 1 && *order != 3)) {
    return kInvalid;
  }
  for (std::size_t index = count; index > 0; --index) {  // in any order
    const auto [target, source, bytes] = std::tuple(targets[index - 1], sources[index - 1], sizes[index - 1]);
    on->ops.push_back(
        {[=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); }, nullptr,
         "of a batch " + std::to_string(bytes) + " on " + std::to_string(on->number)});
  }
  return 0;
}
FAKE Result cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
  ENTER("cuStreamCreateWithPriority")
  auto* const made = new Stream{++s.made, priority, {}};
  s.streams.insert(made);
  s.order.push_back(made);
  *stream = made;
  return 0;
}
FAKE Result cuStreamDestroy_v2(void* stream) {
  ENTER("cuStreamDestroy")
  auto* const gone = static_cast<Stream*>(stream);
  if (s.streams.erase(gone) == 0) {
    return kInvalid;
  }
  std::erase(s.order, gone);
  delete gone;
  return 0;
}
FAKE Result cuStreamIsCapturing(void* stream, int* status) {
  ENTER("cuStreamIsCapturing")
  *status = s.settings["captured stream"] != 0 && s.settings["captured stream"] == reinterpret_cast<long long>(stream)
                ? 1
                : 0;
  return 0;
}
FAKE Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
  ENTER("cuStreamWaitEvent")
  if (const TicketPointer& ticket = static_cast<Event*>(event)->last; ticket != nullptr) {
    stream_of(s, stream)->ops.push_back({nullptr, ticket, ""});
  }
  return 0;
}
FAKE Result cuEventCreate(void** event, unsigned) {
  ENTER("cuEventCreate")
  auto* const made = new Event;
  s.events.insert(made);
  *event = made;
  return 0;
}
FAKE Result cuEventDestroy_v2(void* event) {
  ENTER("cuEventDestroy")
  if (s.events.erase(static_cast<Event*>(event)) == 0) {
    return kInvalid;
  }
  delete static_cast<Event*>(event);
  return 0;
}
FAKE Result cuEventRecord(void* event, void* stream) {
  ENTER("cuEventRecord")
  auto ticket = std::make_shared<Ticket>();
  static_cast<Event*>(event)->last = ticket;
  stream_of(s, stream)->ops.push_back({[ticket] { ticket->done = true; }, nullptr, ""});
  return 0;
}
FAKE Result cuEventQuery(void* event) {
  ENTER("cuEventQuery", true)
  for (long long steps = s.settings["held"] != 0 ? 0 : s.settings["steps"]; steps > 0 && step(s); --steps) {
  }
  if (s.dead) {
    return kIllegalAddress;
  }
  const TicketPointer& ticket = static_cast<Event*>(event)->last;
  return ticket == nullptr || ticket->done ? 0 : kNotReady;
}
FAKE Result cuLaunchKernel(void*, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                           void* stream, void** parameters, void**) {
  ENTER("cuLaunchKernel")
  Stream* const on = stream_of(s, stream);
  const auto* const pieces = *static_cast<const kernel::Piece* const*>(parameters[0]);
  const auto* const slots = *static_cast<const long long* const*>(parameters[1]);
  const kernel::Lot lot = *static_cast<const kernel::Lot*>(parameters[2]);
  on->ops.push_back({[=] {
                       gridDim.x = grid;
                       blockDim.x = block;
                       for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
                         for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {
                           kernel::kvbm_ring(pieces, slots, lot);
                         }
                       }
                     },
                     nullptr,
                     std::string(lot.gathers != 0 ? "pack " : "unpack ") + std::to_string(lot.pieces) + " by " +
                         std::to_string(grid) + " on " + std::to_string(on->number) + " priority " +
                         std::to_string(on->priority)});
  return 0;
}

}  // extern "C"
