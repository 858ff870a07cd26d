// The driver of a CUDA without a GPU (libcuda.so.1): modules load, functions have names, launches are noted.
//
// Its log is the one of the runtime (cudart.cpp), which is loaded before it.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

static int context = 1;
static const int OUT_OF_MEMORY = 2;

static void note(const char* kind, void* stream, size_t n, const char* name) {
  using Note = void (*)(const char*, void*, size_t, const char*);
  static auto f = (Note)dlsym(RTLD_DEFAULT, "cuda_log_note");
  if (f) f(kind, stream, n, name);
}
static int attribute(int a) {
  using Attribute = int (*)(int);
  static auto f = (Attribute)dlsym(RTLD_DEFAULT, "cuda_log_attribute");
  return f ? f(a) : 0;
}
static int give_context(void** c) {
  *c = &context;
  return 0;
}
static int give_text(const char** text) {
  *text = "an error of the driver without a GPU";
  return 0;
}

API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
API int cuGetErrorString(int, const char** text) { return give_text(text); }
API int cuGetErrorName(int, const char** text) { return give_text(text); }
API int cuGetProcAddress_v2(const char* name, void** f, int, unsigned long long, int* status) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *f = driver ? dlsym(driver, name) : nullptr;
  if (status) *status = *f ? 0 : 1;
  return *f ? 0 : 500;
}
API int cuGetProcAddress(const char* name, void** f, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, f, version, flags, nullptr);
}

API int cuDeviceGet(int* device, int i) {
  *device = i;
  return 0;
}
API int cuDeviceGetCount(int* n) {
  const char* text = getenv("CUDA_LOG_DEVICES");
  *n = text ? atoi(text) : 1;
  return 0;
}
API int cuDeviceGetName(char* text, int length, int) {
  const char* card = getenv("CUDA_LOG_CARD");
  snprintf(text, length, "no GPU, shown as a card like the %s", card ? card : "H100");
  return 0;
}
API int cuDeviceGetUuid(void* id, int) {
  memset(id, 1, 16);
  return 0;
}
API int cuDeviceTotalMem_v2(size_t* n, int) {
  *n = 85520809984;
  return 0;
}
API int cuDeviceGetAttribute(int* value, int a, int) {
  *value = attribute(a);
  return 0;
}
API int cuDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return 0;
}

API int cuCtxGetCurrent(void** c) { return give_context(c); }
API int cuCtxPopCurrent_v2(void** c) { return give_context(c); }
API int cuCtxGetDevice(int* device) { return *device = 0; }
API int cuCtxSynchronize() {
  note("device wait", nullptr, 0, "");
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** c, int) { return give_context(c); }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

API int cuModuleLoad(void** m, const char*) { return give_context(m); }
API int cuModuleLoadData(void** m, const void*) { return give_context(m); }
API int cuModuleLoadDataEx(void** m, const void*, ...) { return give_context(m); }
API int cuLibraryLoadData(void** m, ...) { return give_context(m); }
API int cuModuleGetFunction(void** f, void*, const char* name) {
  *f = strdup(name);  // a function is its name
  return 0;
}
API int cuLibraryGetKernel(void** f, void* library, const char* name) { return cuModuleGetFunction(f, library, name); }
API int cuKernelGetFunction(void** f, void* kernel) {
  *f = kernel;
  return 0;
}
API int cuModuleGetGlobal_v2(void** p, size_t* n, void*, const char*) {
  static char bytes[4096];
  if (p) *p = bytes;
  if (n) *n = sizeof bytes;
  return 0;
}
API int cuFuncGetAttribute(int* value, int a, void*) {
  int version = 10 * attribute(75);  // of the card's architecture, by CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  *value = a == 0 ? 1024 : a == 4 ? 32 : a == 5 || a == 6 ? version : 0;  // threads of a block, registers, versions
  return 0;
}
API int cuPointerGetAttribute(void* out, int a, uintptr_t p) {
  if (a == 3 || a == 4) *(uintptr_t*)out = p;  // the same address on the device and on the host
  else *(int*)out = a == 2 ? 2 : 0;            // memory of the device
  return 0;
}
// Virtual memory, of which torch makes expandable segments. A handle is its number of bytes.
template <class F>
static F* of_runtime(const char* name) {
  return (F*)dlsym(RTLD_DEFAULT, name);
}
API int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = 2 << 20;
  return 0;
}
API int cuMemAddressReserve(void** p, size_t bytes, size_t, void*, unsigned long long) {
  static auto reserve = of_runtime<void*(size_t)>("cuda_log_reserve");
  *p = reserve ? reserve(bytes) : nullptr;
  return *p ? 0 : OUT_OF_MEMORY;
}
API int cuMemAddressFree(void* p, size_t bytes) {
  static auto unreserve = of_runtime<void(void*, size_t)>("cuda_log_unreserve");
  if (unreserve) unreserve(p, bytes);
  return 0;
}
API int cuMemCreate(size_t* handle, size_t bytes, const void*, unsigned long long) {
  static auto create = of_runtime<bool(size_t)>("cuda_log_create");
  *handle = bytes;
  return create && create(bytes) ? 0 : OUT_OF_MEMORY;
}
API int cuMemRelease(size_t handle) {
  static auto remove = of_runtime<void(size_t)>("cuda_log_delete");
  if (remove) remove(handle);
  return 0;
}
API int cuMemMap(void*, size_t, size_t, size_t, unsigned long long) { return 0; }
API int cuMemSetAccess(void*, size_t, const void*, size_t) { return 0; }
API int cuMemUnmap(void* p, size_t bytes) { return madvise(p, bytes, MADV_DONTNEED); }  // the host gets its memory back
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) {
  *n = 2;
  return 0;
}
API int cuOccupancyMaxActiveClusters(int* n, void*, const void*) {
  *n = attribute(16);  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  return 0;
}
API int cuTensorMapEncodeTiled(void* map, ...) {
  memset(map, 0, 128);
  return 0;
}

API int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned, unsigned, void* stream,
                       void**, void**) {
  note("kernel", stream, (size_t)x * y * z, (const char*)f);
  return 0;
}
struct Config {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
API int cuLaunchKernelEx(const Config* c, void* f, void**, void**) {
  note("kernel", c->stream, (size_t)c->grid_x * c->grid_y * c->grid_z, (const char*)f);
  return 0;
}
