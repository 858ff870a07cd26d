// NCCL without a GPU: a collective is noted, and a rank receives its own values in place of the others'.
#include "log.h"

#include <cstring>

namespace {

struct Communicator {
  int size, rank;
};
struct Id {
  char bytes[128];
};

size_t bytes_of(size_t n, int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ncclInt8, ncclUint8, ncclInt32, ...
  return n * sizes[type];
}

int joined(void** communicator, int size, int rank) {
  *communicator = new Communicator{size, rank};
  cuda_log_note("communicator", *communicator, size, "");
  return 0;
}

void note(void* stream, size_t bytes, const char* name, const void* from, const void* to) {
  cuda_log_note("collective", stream, bytes, name);
  if (from) cuda_log_note("touch", stream, (size_t)from, "");
  if (to) cuda_log_note("touch", stream, (size_t)to, "");
}

void copy(void* to, const void* from, size_t bytes) {
  if (!skips(bytes) && to != from) memmove(to, from, bytes);
}

}  // namespace

API int ncclGetVersion(int* v) {
  *v = 23007;
  return 0;
}
API int ncclGetUniqueId(Id* id) {
  memset(id, 7, sizeof *id);
  return 0;
}
API int ncclCommInitRank(void** c, int size, Id, int rank) { return joined(c, size, rank); }
API int ncclCommInitRankConfig(void** c, int size, Id, int rank, void*) { return joined(c, size, rank); }
API int ncclCommInitRankScalable(void** c, int size, int rank, int, void*, void*) { return joined(c, size, rank); }
API int ncclCommSplit(Communicator* c, int, int key, void** d, void*) { return joined(d, c->size, key); }
API int ncclCommCount(Communicator* c, int* n) {
  *n = c->size;
  return 0;
}
API int ncclCommUserRank(Communicator* c, int* rank) {
  *rank = c->rank;
  return 0;
}
API int ncclCommGetAsyncError(void*, int* error) { return *error = 0; }
API const char* ncclGetErrorString(int) { return "an error of the NCCL without a GPU"; }
API const char* ncclGetLastError(void*) { return ""; }
API int ncclMemAlloc(void** p, size_t n) {
  *p = take(n, Memory::device);
  return 0;
}
API int ncclRedOpCreatePreMulSum(int* op, ...) {
  *op = 6;
  return 0;
}

API int ncclAllGather(const void* from, char* to, size_t n, int type, Communicator* c, void* stream) {
  size_t bytes = bytes_of(n, type);
  note(stream, bytes, from == to + c->rank * bytes ? "all_gather in place" : "all_gather", from, to);
  for (int i = 0; i < c->size; i++) copy(to + i * bytes, from, bytes);
  return 0;
}
API int ncclReduceScatter(const char* from, void* to, size_t n, int type, int, Communicator* c, void* stream) {
  size_t bytes = bytes_of(n, type);
  bool in_place = to == from + c->rank * bytes;
  note(stream, bytes, in_place ? "reduce_scatter in place" : "reduce_scatter", from, to);
  copy(to, from, bytes);
  return 0;
}
API int ncclAllReduce(const void* from, void* to, size_t n, int type, int, void*, void* stream) {
  note(stream, bytes_of(n, type), from == to ? "all_reduce in place" : "all_reduce", from, to);
  copy(to, from, bytes_of(n, type));
  return 0;
}
API int ncclBroadcast(const void* from, void* to, size_t n, int type, int, void*, void* stream) {
  note(stream, bytes_of(n, type), "broadcast", from, to);
  copy(to, from, bytes_of(n, type));
  return 0;
}
API int ncclReduce(const void* from, void* to, size_t n, int type, int, int, void*, void* stream) {
  note(stream, bytes_of(n, type), "reduce", from, to);
  copy(to, from, bytes_of(n, type));
  return 0;
}
API int ncclSend(const void* from, size_t n, int type, int, void*, void* stream) {
  note(stream, bytes_of(n, type), "send", from, nullptr);
  return 0;
}
API int ncclRecv(void* to, size_t n, int type, int, void*, void* stream) {
  note(stream, bytes_of(n, type), "receive", nullptr, to);
  return 0;
}
API int ncclAlltoAll(const void* from, void* to, size_t n, int type, void*, void* stream) {
  note(stream, bytes_of(n, type), "all_to_all", from, to);
  return 0;
}
