// Tiles of 16-bit numbers in shared memory as the tensor cores and the copy engine see them: panels of 64 columns, each row of a
// panel 128 bytes, its 16-byte pieces permuted by the row (128-byte swizzle).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fq {

// Byte offset of the 16-byte piece that holds columns 8 * piece .. 8 * piece + 7 of a row of a panel.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece) { return row * 128 + ((piece ^ (row % 8)) * 16); }

// A loop invariant from which nothing may be worked out ahead of time. Addresses derived from invariants are invariant too, and the
// compiler keeps them in registers over the whole loop of a role; these kernels have none to spare, and working an address out
// again is cheap.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The block's index, read anew.
__device__ __forceinline__ int fresh_block() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// The lane, and the warp's index in its warpgroup, as such invariants.
__device__ __forceinline__ uint32_t fresh_lane() { return static_cast<uint32_t>(fresh(threadIdx.x)) % 32; }
__device__ __forceinline__ uint32_t fresh_warp() { return static_cast<uint32_t>(fresh(threadIdx.x)) / 32 % 4; }

// All threads of this warpgroup; named barriers 2 .. 5 belong to warpgroups 0 .. 3.
__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(fresh(threadIdx.x) / 128 + 2) : "memory");
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 x = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&x);
}

// Four 8 x 8 matrices, a register each, to shared memory: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// An accumulator of 64 rows (a warp has 16) and 64 columns, as wgmma leaves it: element 4 j + 2 h + e of a lane is row
// 8 h + lane / 4 and column 8 j + 2 (lane % 4) + e. Stored as rows of a 64 x 64 panel, by the 128 threads of a warpgroup.
template <typename T>
__device__ __forceinline__ void store_panel(const float* c, void* panel) {
  const uint32_t lane = fresh_lane(), warp = fresh_warp();
  const uint32_t row = 16 * warp + lane % 16;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    store_matrices(base + swizzled(row, j + lane / 16), pack<T>(c[4 * j], c[4 * j + 1]), pack<T>(c[4 * j + 2], c[4 * j + 3]),
                   pack<T>(c[4 * j + 4], c[4 * j + 5]), pack<T>(c[4 * j + 6], c[4 * j + 7]));
  }
}

// The same accumulator stored transposed: its columns become the rows of the panel.
template <typename T>
__device__ __forceinline__ void store_panel_transposed(const float* c, void* panel) {
  const uint32_t lane = fresh_lane(), warp = fresh_warp();
  const uint32_t piece = 2 * warp + lane / 8 % 2;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t row = 8 * (j + lane / 16) + lane % 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(base + swizzled(row, piece)),
                 "r"(pack<T>(c[4 * j], c[4 * j + 1])), "r"(pack<T>(c[4 * j + 2], c[4 * j + 3])),
                 "r"(pack<T>(c[4 * j + 4], c[4 * j + 5])), "r"(pack<T>(c[4 * j + 6], c[4 * j + 7]))
                 : "memory");
  }
}

// Called by one whole warp: the first `valid` rows of a tile of 64 x 64 Panels to rows row_bytes apart. For the last chunk of a
// sequence, where the copy engine would write into the next one.
template <int Panels>
__device__ __forceinline__ void store_valid_rows(const void* tile, void* out, int64_t row_bytes, int valid) {
  constexpr int kPieces = 8 * Panels;
  const uint32_t lane = fresh_lane();
#pragma unroll 1
  for (uint32_t i = lane; i < valid * kPieces; i += 32) {
    const uint32_t row = i / kPieces, piece = i % kPieces;
    const auto* from = static_cast<const char*>(tile) + piece / 8 * 8192 + swizzled(row, piece % 8);
    *reinterpret_cast<uint4*>(static_cast<char*>(out) + row * row_bytes + piece * 16) = *reinterpret_cast<const uint4*>(from);
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename T>
__device__ __forceinline__ float squares(uint32_t pair) {
  const float2 x = unpack<T>(pair);
  return x.x * x.x + x.y * x.y;
}

// Called by the 128 threads of a warpgroup, each with two neighbouring lanes for a row: 1 / sqrt(sum of squares of row r of a
// tile + 1e-6), where r = 16 warp + lane / 2, in both lanes. A thread starts at piece `lane`, so that a warp's reads cover all
// banks. Rows of zeros are fine.
template <typename T, int Panels>
__device__ __forceinline__ float row_norm(const void* tile) {
  const uint32_t lane = fresh_lane(), warp = fresh_warp();
  const uint4* row = static_cast<const uint4*>(tile) + (16 * warp + lane / 2) * 8;
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int piece = 0; piece < 4 * Panels; ++piece) {
    const uint32_t p = Panels == 2 ? (piece + lane) % 8 : 4 * (lane % 2) + (piece + lane / 2) % 4;
    const uint4 x = row[(Panels == 2 ? lane % 2 * 512 : 0) + p];
    sum[0] += squares<T>(x.x) + squares<T>(x.z);
    sum[1] += squares<T>(x.y) + squares<T>(x.w);
  }
  float total = sum[0] + sum[1];
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  return rsqrtf(total + 1e-6f);
}

// Called by the 128 threads of a warpgroup: zeroes rows valid .. 63 of a tile of 64 x 64 Panels.
template <int Panels>
__device__ __forceinline__ void zero_tail(void* tile, int valid) {
  constexpr int kPieces = 8 * Panels;
#pragma unroll 1
  for (int i = valid * kPieces + 32 * fresh_warp() + fresh_lane(); i < 64 * kPieces; i += 128) {
    const int row = i / kPieces, piece = i % kPieces;
    static_cast<uint4*>(tile)[piece / 8 * 512 + row * 8 + piece % 8] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace fq
