// The GPU: what is known of it, and the kernels of PyTorch's libraries, which it does not run.
#include "emulator.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <string>

static const int multiprocessors = 132;  // as an H200 has

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : refused(cudaErrorInvalidDevice, "cudaSetDevice");
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  size_t free;
  *found = {};
  strcpy(found->name, "emulated GPU");
  found->major = 9;
  found->minor = 0;
  found->multiProcessorCount = multiprocessors;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerBlock = 48 << 10;
  found->unifiedAddressing = 1;
  return cudaMemGetInfo(&free, &found->totalGlobalMem);
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMultiProcessorCount, multiprocessors},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
  };
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int) {
  snprintf(name, size, "0000:00:00.0");
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

// Kernels: each is known by the address of a function of the host, and has a name.

static std::map<const void*, std::string> names;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  Lock lock(mutex);
  names[function] = name;
}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API char __cudaInitModule(void**) { return 0; }

API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = *block = dim3(1, 1, 1);
  *shared_bytes = 0;
  *(cudaStream_t*)stream = nullptr;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

// A kernel that is launched would have done something, so ../emulated_gpu.py lacks an operator. But one only waits.
static cudaError_t launched(const void* kernel) {
  Lock lock(mutex);
  const std::string& name = names[kernel];
  if (name.find("spin_kernel") != std::string::npos) return cudaSuccess;
  return refused(cudaErrorNotSupported, ("PyTorch's kernel " + name).c_str());
}

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(kernel);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launched(kernel);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}

// The driver, of which PyTorch asks whether it is in use. All its other functions only fail.

static int no_function_of_the_driver() { return cudaErrorNotSupported; }

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  bool is_asked = strcmp(name, "cuDevicePrimaryCtxGetState") == 0;
  *function = is_asked ? (void*)cuDevicePrimaryCtxGetState : (void*)no_function_of_the_driver;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
