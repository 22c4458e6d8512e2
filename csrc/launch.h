// Helpers of the generated launchers: tensor maps, shared memory limits, errors.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_qla {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled, found through the runtime so that the library does not need libcuda to load.
EncodeTiled encode_tiled();

[[noreturn]] void throw_cuda_error(const char* what, cudaError_t error);
[[noreturn]] void throw_tensor_map_error(const char* tensor, CUresult result);

inline void check_cuda(const char* what, cudaError_t error) {
  if (error != cudaSuccess) throw_cuda_error(what, error);
}

// Launch errors of the launch just made; an earlier asynchronous error shows here too.
inline void check_launch(const char* kernel) { check_cuda(kernel, cudaGetLastError()); }

// Sizes in elements and strides in bytes, innermost dimension first; the innermost is contiguous and has no stride.
template <int Rank>
CUtensorMap encode_tensor_map(const char* tensor, void* base, int dtype, const int64_t (&sizes)[Rank],
                              const int64_t (&strides)[Rank - 1], const int (&box)[Rank], const int (&element_strides)[Rank],
                              int interleave, int swizzle, int l2_promotion, int oob_fill) {
  cuuint64_t size[Rank], stride[Rank - 1];
  cuuint32_t extent[Rank], step[Rank];
  for (int i = 0; i < Rank; ++i) {
    size[i] = static_cast<cuuint64_t>(sizes[i]);
    extent[i] = static_cast<cuuint32_t>(box[i]);
    step[i] = static_cast<cuuint32_t>(element_strides[i]);
    if (i + 1 < Rank) stride[i] = static_cast<cuuint64_t>(strides[i]);
  }
  CUtensorMap map;
  const CUresult result = encode_tiled()(
      &map, static_cast<CUtensorMapDataType>(dtype), Rank, base, size, stride, extent, step,
      static_cast<CUtensorMapInterleave>(interleave), static_cast<CUtensorMapSwizzle>(swizzle),
      static_cast<CUtensorMapL2promotion>(l2_promotion), static_cast<CUtensorMapFloatOOBfill>(oob_fill));
  if (result != CUDA_SUCCESS) throw_tensor_map_error(tensor, result);
  return map;
}

// A block gets more than 48 KiB of dynamic shared memory only after asking for it, once per kernel and device.
template <auto Kernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> done{0};
  int device = 0;
  check_cuda("cudaGetDevice", cudaGetDevice(&device));
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (done.load(std::memory_order_relaxed) & bit)) return;
  check_cuda("cudaFuncSetAttribute(MaxDynamicSharedMemorySize)",
             cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (device < 64) done.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace flash_qla
