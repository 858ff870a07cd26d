// A CUDA runtime without a GPU. Device memory is the host's, a kernel does nothing, and every call is noted in a log.
//
// Values are therefore garbage. Order, number, memory and streams are real: torch's dispatch, its caching allocator,
// ProcessGroupNCCL, Inductor and Triton run as they are. What is not defined here becomes a stub (tests/cuda/build.py).
#include "log.h"

#include <dlfcn.h>
#include <driver_types.h>
#include <sys/mman.h>
#include <vector_types.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Event {
  const char* kind;
  void* stream;
  size_t bytes;
  const char* name;
};
struct Block {
  size_t bytes;
  Memory memory;
};

// Never destroyed: torch's own destructors call the runtime after those of this library would have run.
struct State {
  std::recursive_mutex lock;
  std::vector<Event> log;
  std::unordered_map<const void*, const char*> kernels;  // by the address of their host function
  std::map<char*, Block> blocks;                         // by their first byte
  size_t device_bytes = 0, pinned_bytes = 0, pinned_peak = 0;
};
State& state() {
  static auto* it = new State;
  return *it;
}
using Guard = std::lock_guard<std::recursive_mutex>;

std::atomic<bool> logging{false};
std::atomic<size_t> next_handle{0x100};
enum class Capture { none, on, broken };
thread_local Capture capture = Capture::none;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

constexpr size_t DEVICE_BYTES = 85520809984;  // of an H100 with 80 GB; the other cards are shown with as much

// A card that is shown: CUDA_LOG_CARD names one, else it is the H100.
struct Card {
  const char* name;
  int major, multiprocessors, shared_optin, shared, l2;  // bytes, of a block, of a multiprocessor and of the cache
};
constexpr Card CARDS[] = {{"H100", 9, 132, 232448, 233472, 52428800},
                          {"A100", 8, 108, 166912, 167936, 41943040},
                          {"B200", 10, 148, 232448, 233472, 132644864}};
const Card& card() {
  static const Card* it = [] {
    const char* name = getenv("CUDA_LOG_CARD");
    for (auto& c : CARDS)
      if (name && !strcmp(name, c.name)) return &c;
    return CARDS;
  }();
  return *it;
}

template <class T>
void note(const char* kind, T stream, size_t bytes = 0, const char* name = "") {
  cuda_log_note(kind, (void*)stream, bytes, name);
}

cudaError_t failed(cudaError_t error) { return last_error = error; }

void* new_handle() { return (void*)(next_handle++ << 4); }

// The host waits. While a graph is captured that is refused, as a GPU refuses it.
cudaError_t waits(const char* kind, void* stream) {
  note(kind, stream);
  if (capture == Capture::none) return cudaSuccess;
  note("capture violation", stream, 0, kind);
  capture = Capture::broken;
  return failed(cudaErrorStreamCaptureUnsupported);
}

int devices() {
  const char* text = getenv("CUDA_LOG_DEVICES");
  return text ? atoi(text) : 1;
}

const char* kernel_name(const void* function) {
  auto found = state().kernels.find(function);
  return found == state().kernels.end() ? "?" : found->second;
}

// A stream reads or writes memory of the device, which must not go back to the allocator meanwhile.
void touch(void* stream, const void* p) {
  if (logging && memory_of(p) == Memory::device) cuda_log_note("touch", stream, (size_t)p, "");
}

size_t blocks_of(dim3 grid) { return (size_t)grid.x * grid.y * grid.z; }

const char* direction(void* to, const void* from) {
  static const char* names[3][3] = {{"pageable to pageable", "pageable to pinned", "pageable to device"},
                                    {"pinned to pageable", "pinned to pinned", "pinned to device"},
                                    {"device to pageable", "device to pinned", "device to device"}};
  return names[(int)memory_of(from)][(int)memory_of(to)];
}

}  // namespace

// The log, which Python reads by ctypes (tests/cuda/log.py).

API void cuda_log_note(const char* kind, void* stream, size_t bytes, const char* name) {
  if (!logging) return;
  Guard guard(state().lock);
  state().log.push_back({kind, stream, bytes, name});
}
API void cuda_log_start() {
  Guard guard(state().lock);
  state().log.clear();
  logging = true;
}
API void cuda_log_stop() { logging = false; }
API void cuda_log_mark(const char* name) { note("mark", (void*)0, 0, strdup(name)); }
API size_t cuda_log_pinned_peak() { return state().pinned_peak; }
API int cuda_log_write(const char* path) {
  Guard guard(state().lock);
  FILE* file = fopen(path, "w");
  if (!file) return 1;
  for (auto& e : state().log) fprintf(file, "%s\t%p\t%zu\t%s\n", e.kind, e.stream, e.bytes, e.name ? e.name : "");
  return fclose(file);
}

// Memory

void* take(size_t bytes, Memory memory) {
  size_t length = bytes ? bytes : 1;
  void* p = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  Guard guard(state().lock);
  state().blocks[(char*)p] = {length, memory};
  if (memory == Memory::device) {
    state().device_bytes += length;
  } else {
    state().pinned_bytes += length;
    if (state().pinned_bytes > state().pinned_peak) state().pinned_peak = state().pinned_bytes;
  }
  return p;
}
void release(void* p) {
  Guard guard(state().lock);
  auto found = state().blocks.find((char*)p);
  if (found == state().blocks.end()) return;
  auto [bytes, memory] = found->second;
  (memory == Memory::device ? state().device_bytes : state().pinned_bytes) -= bytes;
  munmap(p, bytes);
  state().blocks.erase(found);
}
Memory memory_of(const void* p) {
  Guard guard(state().lock);
  auto after = state().blocks.upper_bound((char*)p);
  if (after == state().blocks.begin()) return Memory::pageable;
  auto& [start, block] = *--after;
  return (char*)p < start + block.bytes ? block.memory : Memory::pageable;
}
bool skips(size_t bytes) {
  static bool lazy = getenv("CUDA_LOG_LAZY") != nullptr;
  return lazy && bytes > 65536;
}

API cudaError_t cudaMalloc(void** p, size_t n) {
  bool fits = state().device_bytes + n <= DEVICE_BYTES;
  *p = fits ? take(n, Memory::device) : nullptr;
  note("malloc", (void*)0, n);
  return *p ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
// Addresses and memory apart, for the driver (driver.cpp): an expandable segment is a range of addresses that grows.
API void* cuda_log_reserve(size_t bytes) {
  void* p = take(bytes, Memory::device);
  Guard guard(state().lock);
  if (p) state().device_bytes -= bytes;  // addresses take no memory
  return p;
}
API void cuda_log_unreserve(void* p, size_t bytes) {
  Guard guard(state().lock);
  state().device_bytes += bytes;
  release(p);
}
API bool cuda_log_create(size_t bytes) {
  Guard guard(state().lock);
  bool fits = state().device_bytes + bytes <= DEVICE_BYTES;
  if (fits) state().device_bytes += bytes;
  note("malloc", (void*)0, bytes);
  return fits;
}
API void cuda_log_delete(size_t bytes) {
  Guard guard(state().lock);
  state().device_bytes -= bytes;
  note("free", (void*)0);
}
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaError_t cudaFree(void* p) {
  if (p) note("free", (void*)0);
  release(p);
  return cudaSuccess;
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  *p = take(n, Memory::pinned);
  note("host malloc", (void*)0, n);
  return *p ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFreeHost(void* p) {
  release(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void*, size_t n, unsigned) {
  note("host register", (void*)0, n);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = DEVICE_BYTES;
  *free = DEVICE_BYTES - state().device_bytes;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  Memory memory = memory_of(p);
  a->type = (cudaMemoryType)memory;  // unregistered, host, device: the same numbers
  if (memory != Memory::pageable) a->devicePointer = (void*)p;
  if (memory == Memory::pinned) a->hostPointer = (void*)p;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, int, cudaStream_t stream) {
  note("copy", stream, n, direction(to, from));
  touch(stream, from);
  touch(stream, to);
  if (!skips(n)) memmove(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, int) {
  cudaError_t error = waits("copy and wait", nullptr);
  memmove(to, from, n);
  return error;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
  note("copy", stream, n, "device to another");
  if (!skips(n)) memmove(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, int, cudaStream_t stream) {
  note("copy", stream, width * height, direction(to, from));
  for (size_t i = 0; i < height; i++) memmove((char*)to + i * to_pitch, (char*)from + i * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) {
  note("fill", stream, n);
  if (!skips(n)) memset(to, value, n);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t n) { return cudaMemsetAsync(to, value, n, nullptr); }

// Kernels: each has a name and a stream, and does nothing.

struct Launch {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local Launch pushed;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  state().kernels[host] = name;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(void**)stream = pushed.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3, void**, size_t, cudaStream_t stream) {
  note("kernel", stream, blocks_of(grid), kernel_name(f));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(void* f, dim3 grid, dim3 block, void** a, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(f, grid, block, a, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* f, void**) {
  note("kernel", config->stream, blocks_of(config->gridDim), kernel_name(f));
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*f)(void*), void* argument) {
  note("host function", stream);
  f(argument);
  return cudaSuccess;
}
API cudaError_t cudaLibraryLoadData(void** library, ...) {
  *library = (void*)8;
  return cudaSuccess;
}
API cudaError_t cudaLibraryGetKernel(void** kernel, void*, const char*) {
  *kernel = (void*)8;
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->ptxVersion = a->binaryVersion = 10 * card().major;
  a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = card().shared_optin;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static void* symbols = take(1 << 16, Memory::device);
  *p = symbols;
  return cudaSuccess;
}

// Devices

API int cuda_log_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return card().major;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return card().multiprocessors;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card().shared_optin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card().shared;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return card().l2;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrUnifiedAddressing: return 1;
    default: return 0;
  }
}
API cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = cuda_log_attribute(attribute);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "no GPU, shown as a card like the %s", card().name);
  p->totalGlobalMem = DEVICE_BYTES;
  p->major = card().major;
  p->multiProcessorCount = card().multiprocessors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = card().shared_optin;
  p->sharedMemPerMultiprocessor = card().shared;
  p->regsPerMultiprocessor = p->regsPerBlock = 65536;
  p->l2CacheSize = card().l2;
  p->memoryBusWidth = 5120;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->textureAlignment = 512;
  p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = devices();
  return *n ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device != current_device) note("set device", (void*)0, device);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t e) {
  static thread_local char text[64];
  snprintf(text, sizeof text, "error %d of the CUDA without a GPU", (int)e);
  return text;
}
API const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, void* r) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  *f = driver ? dlsym(driver, name) : nullptr;
  if (r) *(int*)r = *f ? 0 : 1;
  return cudaSuccess;
}

// Streams and events: all is done as soon as it is asked for, so a wait only has to be noted.

API cudaError_t cudaStreamCreate(void** stream) {
  *stream = new_handle();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamCreateWithPriority(void** stream, unsigned, int) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() { return waits("device wait", nullptr); }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waits("stream wait", stream); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waits("event wait", event); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  note("event done", event);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  note("wait event", stream, (size_t)event);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, void (*f)(cudaStream_t, cudaError_t, void*), void* a,
                                      unsigned) {
  f(stream, cudaSuccess, a);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(void** event) {
  *event = new_handle();
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(void** event, unsigned) { return cudaEventCreate(event); }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  note("record event", stream, (size_t)event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}

// Graphs: a capture is noted, and what may not happen within it breaks it.

static const auto A_GRAPH = (void*)64;

API cudaError_t cudaStreamIsCapturing(cudaStream_t, int* status) {
  *status = capture != Capture::none;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, int* status, unsigned long long* id, void** graph,
                                         void* dependencies, void* edges, size_t* n) {
  *status = capture != Capture::none;
  if (id) *id = 7;
  if (graph) *graph = A_GRAPH;
  if (dependencies) *(void**)dependencies = nullptr;
  if (edges) *(void**)edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  capture = Capture::on;
  note("begin capture", stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, void** graph) {
  bool broken = capture == Capture::broken;
  *graph = A_GRAPH;
  capture = Capture::none;
  note("end capture", stream);
  return broken ? failed(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(void** executable, ...) {
  *executable = A_GRAPH;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(void*, cudaStream_t stream) {
  note("graph", stream);
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(void*, void**, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaUserObjectCreate(void** object, ...) {
  *object = A_GRAPH;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(void** pool, int) {
  *pool = A_GRAPH;
  return cudaSuccess;
}
API cudaError_t cudaIpcGetMemHandle(...) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenMemHandle(...) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcGetEventHandle(...) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenEventHandle(...) { return cudaErrorNotSupported; }
