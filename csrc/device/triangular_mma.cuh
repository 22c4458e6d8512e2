// The inverse of a 64 x 64 unit lower triangular matrix by one warpgroup, with tensor core products.
//
// The matrix lies in shared memory as its ten 16 x 16 blocks on and below the diagonal, fp32, rows kBlockLd floats apart: no two
// lanes of a fragment load share a bank.
#pragma once

#include <cstdint>

#include "tiles.cuh"

namespace fq {

constexpr int kBlock = 16;
constexpr int kBlockLd = 20;
constexpr int kBlockFloats = kBlock * kBlockLd;
constexpr int kBlocks = 10;

__device__ __forceinline__ int block_offset(int row, int column) { return (row * (row + 1) / 2 + column) * kBlockFloats; }

// The tensor core drops the low 13 bits of a tf32 operand; adding half of what it drops makes that a rounding. Applied once,
// where an operand is stored or passed on; products read the bits as they are.
__device__ __forceinline__ float tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// c += a b for a 16 x 8, b 8 x 8, c 16 x 8.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A 16 x 16 block as left operand. The tensor core's k = 0 .. 7 are columns 0, 2, 4, 6, 1, 3, 5, 7 of each half: an order of the
// sum that a product's result already has, so that products chain in registers.
struct LeftBlock {
  float a[2][4];

  __device__ __forceinline__ void load(const float* block, int lane) {
    const float* p = block + lane / 4 * kBlockLd + 2 * (lane % 4);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 top = *reinterpret_cast<const float2*>(p + 8 * k);
      const float2 bottom = *reinterpret_cast<const float2*>(p + 8 * k + 8 * kBlockLd);
      a[k][0] = top.x, a[k][1] = bottom.x, a[k][2] = top.y, a[k][3] = bottom.y;
    }
  }

  __device__ __forceinline__ void take(const float (&c)[2][4]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) a[k][0] = tf32(c[k][0]), a[k][1] = tf32(c[k][2]), a[k][2] = tf32(c[k][1]), a[k][3] = tf32(c[k][3]);
  }
};

// c += a b; c[n] holds columns 8 n .. 8 n + 7.
__device__ __forceinline__ void multiply_block(float (&c)[2][4], const LeftBlock& left, const float* b, int lane) {
  const float* p = b + 2 * (lane % 4) * kBlockLd + lane / 4;
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_tf32(c[n], left.a[k], p[8 * k * kBlockLd + 8 * n], p[(8 * k + 1) * kBlockLd + 8 * n]);
}

__device__ __forceinline__ void store_negative(float* block, const float (&c)[2][4], int lane) {
  float* p = block + lane / 4 * kBlockLd + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    *reinterpret_cast<float2*>(p + 8 * n) = make_float2(tf32(-c[n][0]), tf32(-c[n][1]));
    *reinterpret_cast<float2*>(p + 8 * n + 8 * kBlockLd) = make_float2(tf32(-c[n][2]), tf32(-c[n][3]));
  }
}

// In place, by half a warp: m holds the transpose of the strict lower part of a 16 x 16 matrix and zeros, and becomes the unit
// lower triangular inverse, not transposed. Forward substitution in fp32, a column a lane: once an element is known it leaves all
// later ones of its column, which do not wait for each other.
__device__ __forceinline__ void invert_diagonal_block(float* m, int column) {
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock - 1; ++i) {
#pragma unroll
    for (int j = (i + 1) / 4 * 4; j < kBlock; j += 4) {
      const float4 l = *reinterpret_cast<const float4*>(m + i * kBlockLd + j);
      if (j > i) x[j] -= l.x * x[i];
      if (j + 1 > i) x[j + 1] -= l.y * x[i];
      if (j + 2 > i) x[j + 2] -= l.z * x[i];
      if (j + 3 > i) x[j + 3] -= l.w * x[i];
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) m[i * kBlockLd + column] = tf32(x[i]);
}

// The first step, in place: the strict lower part of L (its diagonal blocks transposed, the others rounded to tf32) becomes
// (I + L)^-1 in its two 32 x 32 blocks on the diagonal, rounded to tf32. Called by warps 0 and 1 of a warpgroup, a block each.
// Products are tf32, accumulated in fp32: with X the inverses of the diagonal blocks, the block below becomes -X22 L21 X11.
__device__ __forceinline__ void invert_halves(float* m) {
  const int d = 2 * fresh_warp(), lane = fresh_lane();
  invert_diagonal_block(m + block_offset(d + lane / 16, d + lane / 16), lane % 16);
  __syncwarp();
  LeftBlock left;
  float y[2][4] = {}, z[2][4] = {};
  left.load(m + block_offset(d + 1, d + 1), lane);
  multiply_block(y, left, m + block_offset(d + 1, d), lane);
  left.take(y);
  multiply_block(z, left, m + block_offset(d, d), lane);
  __syncwarp();
  store_negative(m + block_offset(d + 1, d), z, lane);
}

// The second step: z[n] becomes the negative of block n of the inverse in row 2 or 3, n = 0, 1. Called by warps 2 and 3, once the first
// step is there for all to see; each needs only its own row, so nothing is stored.
__device__ __forceinline__ void invert_below(const float* m, int row, int lane, float (&z)[2][2][4]) {
  LeftBlock left;
  float y[2][2][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (2 + k > row) continue;
    left.load(m + block_offset(row, 2 + k), lane);
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply_block(y[n], left, m + block_offset(2 + k, n), lane);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) z[n][i][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    left.take(y[k]);
#pragma unroll
    for (int n = 0; n <= k; ++n) multiply_block(z[n], left, m + block_offset(k, n), lane);
  }
}

}  // namespace fq
