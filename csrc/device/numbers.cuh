// Loads whose dtype is known at run time only, and the fast base-2 exponential.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "codes.h"

namespace fq {

// Element `offset` of a fp32, bf16 or fp16 tensor. The code is uniform over the grid, so the branches do not diverge.
__device__ __forceinline__ float load_number(const void* base, int code, int64_t offset) {
  if (code == kFloat32) return static_cast<const float*>(base)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(base)[offset];
  return code == kBFloat16 ? __uint_as_float(uint32_t(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// 2^x in one instruction; every exponent of these kernels is <= 0, and what underflows is meant to be 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fq
