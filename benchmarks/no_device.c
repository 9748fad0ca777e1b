/* A stub of the CUDA runtime and driver with a device of 1 TiB: it returns as many addresses as
   torch's caching allocator requests, without memory.  It replaces libcudart (LD_PRELOAD),
   libcuda.so.1 and libnvidia-ml.so.1.  Addresses ascend, in steps of 2 MiB.  NO_DEVICE_CAPABILITY
   (9.0) and NO_DEVICE_NAME describe the device. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#define STEP 0x200000ULL

static uintptr_t end = 0x100000000000ULL;

static uintptr_t take(size_t size) {
  uintptr_t address = end;
  end += (size + STEP - 1) / STEP * STEP + STEP;
  return address;
}

cudaError_t cudaGetDeviceCount(int *count) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = !visible || *visible;
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13030; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  const char *name = getenv("NO_DEVICE_NAME");
  strcpy(found->name, name ? name : "no device");
  const char *capability = getenv("NO_DEVICE_CAPABILITY");
  found->major = 9;
  if (capability) sscanf(capability, "%d.%d", &found->major, &found->minor);
  found->totalGlobalMem = 1ULL << 40;
  found->multiProcessorCount = found->major == 9 ? 132 : 108;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = found->major == 9 ? 232448 : 166912;
  found->sharedMemPerMultiprocessor = found->sharedMemPerBlockOptin + 1024;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->l2CacheSize = 50 << 20;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) {
  struct cudaDeviceProp found;
  cudaGetDeviceProperties(&found, device);
  *value = what == cudaDevAttrMultiProcessorCount ? found.multiProcessorCount
           : what == cudaDevAttrMaxThreadsPerMultiProcessor ? found.maxThreadsPerMultiProcessor
           : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? found.sharedMemPerBlockOptin
           : what == cudaDevAttrMaxSharedMemoryPerBlock ? found.sharedMemPerBlock
           : what == cudaDevAttrComputeCapabilityMajor ? found.major
           : what == cudaDevAttrComputeCapabilityMinor ? found.minor
           : what == cudaDevAttrMaxGridDimX ? found.maxGridSize[0]
           : what == cudaDevAttrMaxGridDimY || what == cudaDevAttrMaxGridDimZ ? 65535
           : what == cudaDevAttrWarpSize ? 32
           : what == cudaDevAttrMaxThreadsPerBlock ? 1024 : 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *name, int size, int device) {
  strcpy(name, "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = *total = 1ULL << 40;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **pointer, size_t size) {
  *pointer = (void *)take(size);
  return cudaSuccess;
}
cudaError_t cudaFree(void *pointer) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13030; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)16; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "no device";
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                        unsigned long long flags) {
  *address = take(size);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                       const CUmemAllocationProp *how, unsigned long long flags) {
  static unsigned long long number = 0;
  *handle = ++number;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *how,
                            CUmemAllocationGranularity_flags option) {
  *size = STEP;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *how,
                        size_t count) {
  return CUDA_SUCCESS;
}
static CUresult done(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **found, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
  static const struct { const char *name; void *function; } known[] = {
      {"cuMemAddressReserve", cuMemAddressReserve}, {"cuMemCreate", cuMemCreate},
      {"cuMemGetAllocationGranularity", cuMemGetAllocationGranularity},
      {"cuDeviceGet", cuDeviceGet},            {"cuDeviceGetAttribute", cuDeviceGetAttribute},
      {"cuCtxGetCurrent", cuCtxGetCurrent},
      {"cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState}};
  *found = done;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(symbol, known[i].name)) *found = known[i].function;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = (void *)16;
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13030; return 0; }
/* Not supported (3). */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 3; }
