// cuBLAS and cuBLASLt without a GPU: handles exist, and a product is noted by the name of its function.
#include "log.h"

#include <cstdlib>
#include <cstring>

static thread_local void* stream = nullptr;  // that the thread's handle was last given

static int new_description(void** d) {
  *d = calloc(1, 256);
  return 0;
}
static int drop_description(void* d) {
  free(d);
  return 0;
}
static int product(const char* name) {
  cuda_log_note("product", stream, 0, name);
  return 0;
}

API int cublasCreate_v2(void** handle) { return new_description(handle); }
API int cublasDestroy_v2(void* handle) { return drop_description(handle); }
API int cublasSetStream_v2(void*, void* s) {
  stream = s;
  return 0;
}
API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }

API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulDescCreate(void** d, int, int) { return new_description(d); }
API int cublasLtMatmulDescDestroy(void* d) { return drop_description(d); }
API int cublasLtMatrixLayoutCreate(void** d, int type, unsigned long, unsigned long, long) {
  new_description(d);
  *static_cast<int*>(*d) = type;
  return 0;
}
API int cublasLtMatrixLayoutDestroy(void* d) { return drop_description(d); }
API int cublasLtMatmulPreferenceCreate(void** d) { return new_description(d); }
API int cublasLtMatmulPreferenceDestroy(void* d) { return drop_description(d); }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* result, int* found) {
  memset(result, 0, 88);
  *found = 1;
  return 0;
}

static bool is_float8(void* layout) {
  int type = *static_cast<int*>(layout);  // of cudaDataType
  return type == 28 || type == 29;        // e4m3, e5m2
}
API int cublasLtMatmul(void*, void*, void*, void*, void* a, void*, void* b, ...) {
  return product(is_float8(a) && is_float8(b) ? "cublasLtMatmul of float8" : "cublasLtMatmul");
}

#define PRODUCT(name) \
  API int name(...) { return product(#name); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDotEx)
