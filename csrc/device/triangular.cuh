// The inverse of a unit lower triangular matrix in shared memory, in fp32.
#pragma once

namespace fq {

// PER neighbouring columns, from c on, of row r of the product of two S x S blocks.
template <int S, int PER>
__device__ __forceinline__ void block_product(const float* a, const float* b, int ld, int r, int c, float (&out)[PER]) {
#pragma unroll
  for (int j = 0; j < PER; ++j) out[j] = 0.0f;
#pragma unroll 8
  for (int m = 0; m < S; ++m) {
    const float x = a[r * ld + m];
#pragma unroll
    for (int j = 0; j < PER; j += 2) {
      const float2 y = *reinterpret_cast<const float2*>(b + m * ld + c + j);
      out[j] += x * y.x;
      out[j + 1] += x * y.y;
    }
  }
}

// Merges inverted diagonal blocks of size S in pairs: the block below the diagonal becomes -X22 L21 X11.
template <int N, int S, int THREADS>
__device__ __forceinline__ void merge_level(float* m, int ld, int tid) {
  constexpr int kPer = N * S / 2 / THREADS;
  static_assert(kPer >= 2 && kPer % 2 == 0 && S % kPer == 0, "each thread owns an even number of columns");
  constexpr int kThreadsPerPair = S * S / kPer;
  const int pair = tid / kThreadsPerPair;
  const int r = tid % kThreadsPerPair / (S / kPer);
  const int c = tid % (S / kPer) * kPer;
  float* x11 = m + (pair * 2 * S) * ld + pair * 2 * S;
  float* l21 = x11 + S * ld;
  float* x22 = l21 + S;
  float product[kPer];
  block_product<S, kPer>(l21, x11, ld, r, c, product);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kPer; ++j) l21[r * ld + c + j] = product[j];
  __syncthreads();
  block_product<S, kPer>(x22, l21, ld, r, c, product);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kPer; ++j) l21[r * ld + c + j] = -product[j];
  __syncthreads();
}

// In place: m holds the strict lower part of an N x N matrix L (its upper part is 0), and becomes (I + L)^-1, diagonal
// included. Called by all THREADS threads of the block; ld is even. The caller synchronises before; the result is
// synchronised on return.
//
// The 16 x 16 diagonal blocks are inverted by forward substitution, a column a thread, and then merged to 32 and 64.
template <int N, int THREADS>
__device__ __forceinline__ void invert_unit_lower(float* m, int ld, int tid) {
  static_assert(N == 64, "two merge levels are written out below");
  constexpr int kBlock = 16;
  if (tid < N) {
    float* block = m + (tid / kBlock) * kBlock * (ld + 1);
    const int column = tid % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum -= block[i * ld + j] * x[j];
      x[i] = sum;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlock; ++i) block[i * ld + column] = x[i];
  }
  __syncthreads();
  merge_level<N, 16, THREADS>(m, ld, tid);
  merge_level<N, 32, THREADS>(m, ld, tid);
}

}  // namespace fq
