/* Kernels, copies and cuBLAS on the device of no_device.c: they do nothing, so torch's own code for
   CUDA runs and requests the same memory from its allocator as on a GPU.  Values read back from the
   device are 0, and true if they have one byte. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <cuda.h>
#include <cuda_runtime_api.h>


/* Launches */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  const char *capability = getenv("NO_DEVICE_CAPABILITY");
  int major = 9, minor = 0;
  if (capability) sscanf(capability, "%d.%d", &major, &minor);
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 10 * major + minor;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int threads, size_t s) { *count = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int threads, size_t s, unsigned flags) { *count = 2; return cudaSuccess; }
/* Memory */
static int on_device(const void *p) { return (unsigned long long)p >= 0x100000000000ULL && (unsigned long long)p < 0x300000000000ULL; }
static cudaError_t copy(void *to, const void *from, size_t size) {
  if (!on_device(to)) { if (on_device(from)) memset(to, size == 1, size); else memmove(to, from, size); }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) { return copy(to, from, size); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { *p = malloc(size); return cudaSuccess; }
cudaError_t cudaMallocHost(void **p, size_t size) { *p = malloc(size); return cudaSuccess; }
cudaError_t cudaFreeHost(void *p) { free(p); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->type = on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
/* Events and streams */
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = (cudaEvent_t)malloc(8); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = (cudaEvent_t)malloc(8); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = (cudaStream_t)malloc(8); return cudaSuccess; }
/* cuBLAS */
int cublasCreate_v2(void **h) { *h = malloc(8); return 0; }
int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
int cublasLtMatmulDescCreate(void **d, int a, int b) { *d = malloc(8); return 0; }
int cublasLtMatmulPreferenceCreate(void **d) { *d = malloc(8); return 0; }
int cublasLtMatrixLayoutCreate(void **d, int t, unsigned long long r, unsigned long long c, long long l) { *d = malloc(8); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *A, void *B, void *C, void *D, void *pref, int want, char *results, int *count) { memset(results, 0, 80); *count = 1; return 0; }
