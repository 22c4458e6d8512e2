// The inverse of a 64 x 64 unit lower triangular matrix in shared memory by one warpgroup, with tensor core products.
#pragma once

#include <cstdint>

#include "tiles.cuh"

namespace fq {

// Named barrier `id` among `threads` threads; id 0 is __syncthreads.
template <int Id, int Threads>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}

// The tensor core drops the low 13 bits of a tf32 operand; adding half of what it drops makes that a rounding. Applied once,
// where a block of the inverse is stored; products read the bits as they are.
__device__ __forceinline__ float tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// c += a b for a 16 x 8, b 8 x 8, c 16 x 8.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c[m] = (A B) restricted to rows 16 m .. 16 m + 15 and the 8 columns at b: A is S x S at a, B is S x 8 at b.
template <int S>
__device__ __forceinline__ void column_product(const float* a, int lda, const float* b, int ldb, int lane,
                                               float (&c)[S / 16][4]) {
  const int group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int m = 0; m < S / 16; ++m)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[m][j] = 0.0f;
#pragma unroll
  for (int k = 0; k < S; k += 8) {
    const float* r = b + (k + quad) * ldb + group;
    const uint32_t right[2] = {__float_as_uint(r[0]), __float_as_uint(r[4 * ldb])};
#pragma unroll
    for (int m = 0; m < S / 16; ++m) {
      const float* p = a + (16 * m + group) * lda + k + quad;
      const uint32_t left[4] = {__float_as_uint(p[0]), __float_as_uint(p[8 * lda]), __float_as_uint(p[4]),
                                __float_as_uint(p[8 * lda + 4])};
      mma_tf32(c[m], left, right);
    }
  }
}

template <int S>
__device__ __forceinline__ void store_columns(float* out, int ld, int lane, float sign, const float (&c)[S / 16][4]) {
  const int group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int m = 0; m < S / 16; ++m) {
    float* p = out + (16 * m + group) * ld + 2 * quad;
    *reinterpret_cast<float2*>(p) = make_float2(tf32(sign * c[m][0]), tf32(sign * c[m][1]));
    *reinterpret_cast<float2*>(p + 8 * ld) = make_float2(tf32(sign * c[m][2]), tf32(sign * c[m][3]));
  }
}

// Merges two inverted S x S diagonal blocks: the block below the diagonal becomes -X22 L21 X11. A warp owns 8 columns, so its
// intermediate L21 X11 is its own; it goes to `scratch`, S rows of S + 8 floats (no two lanes of a load share a bank).
template <int S, int BarrierId>
__device__ __forceinline__ void merge_blocks(float* x11, float* scratch, int column, int ld, int lane) {
  float* l21 = x11 + S * ld;
  scratch += column;
  float c[S / 16][4];
  column_product<S>(l21, ld, x11 + column, ld, lane, c);
  store_columns<S>(scratch, S + 8, lane, 1.0f, c);
  __syncwarp();
  column_product<S>(l21 + S, ld, scratch, S + 8, lane, c);
  named_sync<BarrierId, 128>();
  store_columns<S>(l21 + column, ld, lane, -1.0f, c);
  named_sync<BarrierId, 128>();
}

// In place, by one warp: m holds the strict lower part of a 16 x 16 matrix and zeros, and becomes the unit lower triangular
// inverse, by forward substitution in fp32, a column a lane. (Halving the blocks and merging them by mma.sync was slower: each visit
// to the tensor core waits for the products of the other warpgroups.)
__device__ __forceinline__ void invert_diagonal_block(float* m, int ld, int lane) {
  constexpr int kBlock = 16;
  const int column = lane % kBlock;
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float sum[2] = {i == column ? 1.0f : 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 l = *reinterpret_cast<const float4*>(m + i * ld + j);
      sum[0] -= l.x * x[j];
      if (j + 1 < i) sum[1] -= l.y * x[j + 1];
      if (j + 2 < i) sum[0] -= l.z * x[j + 2];
      if (j + 3 < i) sum[1] -= l.w * x[j + 3];
    }
    x[i] = sum[0] + sum[1];
  }
  __syncwarp();
  if (lane < kBlock) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) m[i * ld + column] = tf32(x[i]);
  }
}

// In place: m holds the strict lower part of a 64 x 64 matrix L and zeros elsewhere, and becomes (I + L)^-1. `scratch` has 5120
// bytes. Called by the 128 threads of a warpgroup, whose writes to m are synchronised before; synchronised on return. ld is a
// multiple of 4. Products of blocks are tf32, accumulated in fp32.
template <int BarrierId>
__device__ __forceinline__ void invert_unit_lower_mma(float* m, int ld, void* scratch) {
  const int warp = fresh_warp(), lane = fresh_lane(), pair = warp / 2;
  auto* free = static_cast<float*>(scratch);
  invert_diagonal_block(m + warp * 16 * (ld + 1), ld, lane);
  named_sync<BarrierId, 128>();
  merge_blocks<16, BarrierId>(m + pair * 32 * (ld + 1), free + pair * 16 * 24, warp % 2 * 8, ld, lane);
  merge_blocks<32, BarrierId>(m, free, warp * 8, ld, lane);
}

}  // namespace fq
