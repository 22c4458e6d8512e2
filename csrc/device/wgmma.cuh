// Products of one warpgroup whose operands TileLang cannot name: tiles picked at run time by which warpgroup this is. All are
// 64 rows of 16-bit numbers times a tile in shared memory with the 128-byte swizzle, accumulated in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fq {

// A matrix descriptor: address, leading and stride byte offsets in units of 16 bytes, 128-byte swizzle.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile, uint32_t leading, uint32_t stride) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  return uint64_t(address / 16 & 0x3fff) | uint64_t(leading) << 16 | uint64_t(stride) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most Pending groups of products are under way; c, of Count floats, is then in its registers.
template <int Pending, int Count>
__device__ __forceinline__ void products_wait(float* c) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define FQ_ACC8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define FQ_ACC32(c, i) FQ_ACC8(c, i), FQ_ACC8(c, i + 8), FQ_ACC8(c, i + 16), FQ_ACC8(c, i + 24)
#define FQ_LIST32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FQ_LIST64 \
  FQ_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c (+)= A B^T, 64 x 64 x 16: both tiles with k contiguous.
template <typename T>
__device__ __forceinline__ void mma_tiles(float* c, uint64_t a, uint64_t b, int accumulate) {
#define FQ_MMA(type) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" FQ_LIST32 \
      "}, %32, %33, p, 1, 1, 0, 0;\n}" \
      : FQ_ACC32(c, 0) \
      : "l"(a), "l"(b), "r"(accumulate))
  if constexpr (std::is_same_v<T, __half>) FQ_MMA("f16");
  else FQ_MMA("bf16");
#undef FQ_MMA
}

// c (+)= A B, 64 x N x 16: A in registers, B with n contiguous.
template <typename T, int N>
__device__ __forceinline__ void mma_registers(float* c, const uint32_t* a, uint64_t b, int accumulate) {
#define FQ_MMA64(type) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" FQ_LIST32 \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}" \
      : FQ_ACC32(c, 0) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define FQ_MMA128(type) \
  asm volatile( \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" FQ_LIST64 \
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}" \
      : FQ_ACC32(c, 0), FQ_ACC32(c, 32) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
  static_assert(N == 64 || N == 128);
  if constexpr (N == 64) {
    if constexpr (std::is_same_v<T, __half>) FQ_MMA64("f16");
    else FQ_MMA64("bf16");
  } else {
    if constexpr (std::is_same_v<T, __half>) FQ_MMA128("f16");
    else FQ_MMA128("bf16");
  }
#undef FQ_MMA64
#undef FQ_MMA128
}

#undef FQ_ACC8
#undef FQ_ACC32
#undef FQ_LIST32
#undef FQ_LIST64

// Starts c = A B^T for two tiles of 64 rows and K columns, in panels of 64 columns.
template <typename T, int K>
__device__ __forceinline__ void multiply_tiles(float* c, const void* a, const void* b) {
  const uint64_t da = tile_descriptor(a, 1, 64), db = tile_descriptor(b, 1, 64);
  products_begin();
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    const uint32_t offset = (k / 4 * 8192 + k % 4 * 32) / 16;
    mma_tiles<T>(c, da + offset, db + offset, k > 0);
  }
  products_end();
}

// Starts c = A B for A 64 x 64 in registers and B a tile of 64 rows and N columns, in panels of 64 columns.
template <typename T, int N>
__device__ __forceinline__ void multiply_registers(float* c, const uint32_t* a, const void* b) {
  const uint64_t db = tile_descriptor(b, 512, 64);
  products_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) mma_registers<T, N>(c, a + 4 * k, db + k * (2048 / 16), k > 0);
  products_end();
}

}  // namespace fq
