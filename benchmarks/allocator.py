"""Exact CPU memory: an allocator that counts, whatever thread allocates or frees.

from allocator import peak_bytes                                # before the tensors to be measured are made
peak_bytes(lambda: torch.ones(1000) + torch.ones(1000))          # 12000

torch's profiler sees only the threads that it follows; gloo frees its buffers in its own. This one replaces torch's CPU
allocator for the process as soon as it is imported (it compiles for some seconds the first time, then comes from a
cache). It counts the bytes asked for, not the pages of the system's own allocator.
"""

import ctypes
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <c10/core/CPUAllocator.h>
#include <atomic>
#include <cstdlib>

constexpr size_t kHeader = 64;  // before each block: its size, and room that keeps the data aligned
static std::atomic<int64_t> held{0}, peak{0};

static void release(void* data) {
  if (!data) return;
  char* block = static_cast<char*>(data) - kHeader;
  held -= *reinterpret_cast<int64_t*>(block);
  std::free(block);
}

struct Counting : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    void* block = nullptr;
    if (posix_memalign(&block, kHeader, n + kHeader)) throw std::bad_alloc();
    *static_cast<int64_t*>(block) = static_cast<int64_t>(n);
    int64_t now = (held += static_cast<int64_t>(n)), most = peak;
    while (now > most && !peak.compare_exchange_weak(most, now)) {}
    void* data = static_cast<char*>(block) + kHeader;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};

static Counting counting;
extern "C" void install() { c10::SetCPUAllocator(&counting, /*priority=*/255); }
extern "C" int64_t held_bytes() { return held; }
extern "C" int64_t most_bytes() { return peak; }
extern "C" void restart() { peak = held.load(); }
"""

# ninja lies beside the interpreter, which may not be on the path
os.environ["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
# a plain library: Python's and torch's own headers would take ten times as long to compile
_path = load_inline("fzero_counting_allocator", SOURCE, is_python_module=False, no_implicit_headers=True)
_counter = ctypes.CDLL(str(_path))
_counter.install()  # tensors made before keep their own way to be freed
held_bytes, most_bytes, restart = _counter.held_bytes, _counter.most_bytes, _counter.restart
held_bytes.restype = most_bytes.restype = ctypes.c_int64


def peak_bytes(f: Callable[[], Any]) -> int:
    """Return the most bytes that were held, above what was held before, while `f()` ran."""
    before = held_bytes()
    restart()
    f()
    return most_bytes() - before
