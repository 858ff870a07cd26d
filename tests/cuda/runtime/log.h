// What the parts of the CUDA without a GPU share: the log of everything that reaches them, and the memory they hand out.
#pragma once
#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

// Notes one event, if the log is on: its kind, its stream, its bytes (or its event, or its device), its name.
API void cuda_log_note(const char* kind, void* stream, size_t bytes, const char* name);
// Answers for an attribute of the device that is shown, an H100: the driver and the runtime number them alike.
API int cuda_log_attribute(int attribute);

enum class Memory { pageable, pinned, device };

// Memory of the host that stands for memory of the device; a page is taken only when it is written or read.
void* take(size_t bytes, Memory memory);
void release(void* pointer);
Memory memory_of(const void* pointer);

// Whether a copy of so many bytes is noted but not made (CUDA_LOG_LAZY=1): memory that nobody reads takes no pages.
bool skips(size_t bytes);
