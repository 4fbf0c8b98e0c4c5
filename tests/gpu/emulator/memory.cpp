// Memory of the GPU, of which there is only so much, and pinned memory.
#include "emulator.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

using Memories = std::map<const char*, size_t>;  // bytes by address

static const char* const bytes_wanted = getenv("EMULATED_GPU_BYTES");
static const bool is_poisoned = getenv("EMULATED_GPU_POISON") != nullptr;
static const size_t whole = bytes_wanted ? strtoull(bytes_wanted, nullptr, 10) : 64ull << 30;
static const size_t most_poisoned = 64 << 20;  // of what is larger, tests touch little
static const int poison = 0xff;                // NaN, and -1

static size_t used = 0;
// Never destroyed: PyTorch gives memory back until the process is gone.
static Memories& on_gpu = *new Memories;
static Memories& allocated_pinned = *new Memories;
static Memories& registered = *new Memories;

static bool is_in(const Memories& memories, const void* address) {
  auto next = memories.upper_bound((const char*)address);
  if (next == memories.begin()) return false;
  --next;
  return (const char*)address < next->first + next->second;
}

static bool overlaps(const Memories& memories, const void* address, size_t nbytes) {
  auto next = memories.lower_bound((const char*)address);
  bool reaches_next = next != memories.end() && next->first < (const char*)address + nbytes;
  return reaches_next || is_in(memories, address);
}

static bool is_pinned(const void* address) { return is_in(allocated_pinned, address) || is_in(registered, address); }

bool is_known_memory(const void* address) { return is_in(on_gpu, address) || is_pinned(address); }

static void* fresh_pages(size_t nbytes) {
  void* pages = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  if (is_poisoned && nbytes <= most_poisoned) memset(pages, poison, nbytes);
  return pages;
}

static cudaError_t give_back(Memories& memories, void* address, const char* what) {
  auto found = memories.find((const char*)address);
  if (found == memories.end()) return refused(cudaErrorInvalidValue, what);
  munmap(address, found->second);
  memories.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaMalloc(void** address, size_t nbytes) {
  Lock lock(mutex);
  if (cudaError_t error = check_beside_captures("cudaMalloc")) return error;
  *address = nbytes <= whole - used ? fresh_pages(nbytes) : nullptr;
  if (*address == nullptr) return failed(cudaErrorMemoryAllocation);
  on_gpu[(const char*)*address] = nbytes;
  used += nbytes;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
  Lock lock(mutex);
  if (address == nullptr) return cudaSuccess;
  if (cudaError_t error = check_beside_captures("cudaFree")) return error;
  auto found = on_gpu.find((const char*)address);
  if (found != on_gpu.end()) used -= found->second;
  return give_back(on_gpu, address, "cudaFree");
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(mutex);
  *free = whole - used;
  *total = whole;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  Lock lock(mutex);
  if (cudaError_t error = check_beside_captures("cudaHostAlloc")) return error;
  *address = fresh_pages(nbytes);
  if (*address == nullptr) return failed(cudaErrorMemoryAllocation);
  allocated_pinned[(const char*)*address] = nbytes;
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* address) {
  Lock lock(mutex);
  if (cudaError_t error = check_beside_captures("cudaFreeHost")) return error;
  return give_back(allocated_pinned, address, "cudaFreeHost");
}

API cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
  Lock lock(mutex);
  if (cudaError_t error = check_beside_captures("cudaHostRegister")) return error;
  if (overlaps(registered, address, nbytes) || overlaps(allocated_pinned, address, nbytes)) {
    return refused(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
  }
  registered[(const char*)address] = nbytes;
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* address) {
  Lock lock(mutex);
  if (cudaError_t error = check_beside_captures("cudaHostUnregister")) return error;
  if (registered.erase((const char*)address)) return cudaSuccess;
  return refused(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Lock lock(mutex);
  *found = {};
  if (!is_known_memory(address)) {
    found->type = cudaMemoryTypeUnregistered;
    found->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  found->devicePointer = (void*)address;
  found->type = is_pinned(address) ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->hostPointer = is_pinned(address) ? (void*)address : nullptr;
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  Lock lock(mutex);
  if (cudaError_t error = check_copy(stream, to, from)) return error;
  memmove(to, from, nbytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind) {
  if (cudaError_t error = check_beside_captures("cudaMemcpy")) return error;
  return cudaMemcpyAsync(to, from, nbytes, kind, nullptr);
}

API cudaError_t cudaMemsetAsync(void* to, int byte, size_t nbytes, cudaStream_t stream) {
  Lock lock(mutex);
  if (cudaError_t error = check_stream(stream, "cudaMemsetAsync")) return error;
  memset(to, byte, nbytes);
  return cudaSuccess;
}

API cudaError_t cudaMemset(void* to, int byte, size_t nbytes) {
  if (cudaError_t error = check_beside_captures("cudaMemset")) return error;
  return cudaMemsetAsync(to, byte, nbytes, nullptr);
}
