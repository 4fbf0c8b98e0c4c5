// CUDA's runtime library without a GPU: memory is the host's, streams do all at once, and kernels are not run.
//
// PyTorch's own operators are done on the CPU by ../emulated_gpu.py. What is as strict as CUDA here is what may be asked
// for: which memory there is, what is pinned, who waits for whom, and what is forbidden while a graph is captured.
#pragma once
#include <cuda_runtime_api.h>
#include <mutex>

#define API extern "C"

// Of all that is known here. What has it may call what takes it, too.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// errors.cpp

// Return an error, and keep it as the last one of this thread.
cudaError_t failed(cudaError_t error);
// The same, and say on stderr what was asked for: nothing that Embedrock or PyTorch should do.
cudaError_t refused(cudaError_t error, const char* what);

// memory.cpp

// Whether all of some memory is the GPU's, or pinned.
bool is_known_memory(const void* address);

// streams.cpp: each returns cudaSuccess, or why something may not be done now. A capture is broken by the attempt.

// What might break a capture, of whichever stream: as memory that is allocated, or a wait of the host.
cudaError_t check_beside_captures(const char* what);
// What is done on a stream.
cudaError_t check_stream(cudaStream_t stream, const char* what);
// What waits for a stream, or asks how far it is.
cudaError_t check_waits_for(cudaStream_t stream, const char* what);
// A copy on a stream between two addresses.
cudaError_t check_copy(cudaStream_t stream, const void* to, const void* from);
