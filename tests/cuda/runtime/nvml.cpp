// The management library of a CUDA without a GPU (libnvidia-ml.so.1). torch asks it whether memory can be shared between
// hosts before it makes an expandable segment.
#define API extern "C" __attribute__((visibility("default")))

static const int NOT_SUPPORTED = 3;

API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  static int card;
  *device = &card;
  return 0;
}
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }
