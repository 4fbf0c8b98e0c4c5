// Errors: the last of each thread is kept until somebody asks for it.
#include "emulator.h"

#include <cstdio>

std::recursive_mutex mutex;

static thread_local cudaError_t last = cudaSuccess;

cudaError_t failed(cudaError_t error) {
  last = error;
  return error;
}

cudaError_t refused(cudaError_t error, const char* what) {
  fprintf(stderr, "emulated GPU: %s: error %d, %s\n", what, (int)error, cudaGetErrorString(error));
  return failed(error);
}

// What PyTorch's libraries name, and nothing here does: emulate.py makes functions that call this.
API int emulator_refuses(const char* what) { return refused(cudaErrorNotSupported, what); }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
      return "pointer does not correspond to a registered memory region";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default:
      return "an error that has no words in tests/gpu/emulator/errors.cpp";
  }
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

API cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError() { return last; }
