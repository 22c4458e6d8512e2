// What happens to accumulators between products. A 64 x 64 accumulator of a warpgroup is 32 floats a
// thread: element 4 j + 2 h + e is row 16 warp + 8 h + lane / 4, column 8 j + 2 (lane % 4) + e.
#pragma once

#include <cstdint>

#include "gates.cuh"
#include "tiles.cuh"

namespace fq {

struct Position {
  uint32_t row, column;  // of element 0
};

__device__ __forceinline__ Position position() {
  const uint32_t lane = fresh_lane();
  return {16 * fresh_warp() + lane / 4, 2 * (lane % 4)};
}

// Multiplies element (i, j) of an accumulator by rows_i rk_j e^(c_i - c_j) below the diagonal and, unless Strict, on it; the rest
// becomes 0. A warp's 16 rows meet three kinds of blocks of 16 columns. Left of the diagonal block no mask is needed, and with m
// the block's last token e^(c_i - c_m) e^(c_m - c_j) replaces an exponential per element: both exponents are <= 0.
template <bool Strict>
__device__ __forceinline__ void apply_gate(float* product, const float* factors, int row_factor) {
  const Position at = position();
  const uint32_t diagonal = at.row / 16;
  const float c[2] = {factors[kCumulative * kChunk + at.row], factors[kCumulative * kChunk + at.row + 8]};
  const float rows[2] = {factors[row_factor * kChunk + at.row], factors[row_factor * kChunk + at.row + 8]};
#pragma unroll
  for (uint32_t block = 0; block < 4; ++block) {
    float* x = product + 8 * block;  // element 4 j + 2 h + e of the block: row 8 h, column 8 j + e from the thread's first
    if (block < diagonal) {
      const float m = factors[kCumulative * kChunk + 16 * block + 15];
      const float scale[2] = {exp2_fast(c[0] - m) * rows[0], exp2_fast(c[1] - m) * rows[1]};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 y = *reinterpret_cast<const float2*>(factors + kBlockDecay * kChunk + 16 * block + 8 * j + at.column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[4 * j + 2 * h] *= y.x * scale[h];
          x[4 * j + 2 * h + 1] *= y.y * scale[h];
        }
      }
    } else if (block == diagonal) {
      const int below = static_cast<int>(at.row % 16) - static_cast<int>(at.column);  // row - column of element 0
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 y = *reinterpret_cast<const float2*>(factors + kKeyCumulative * kChunk + 16 * block + 8 * j + at.column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // An exponent of -inf rather than a select after it: no branch, and 0 whatever the product.
          const int d = below + 8 * h - 8 * j;
          x[4 * j + 2 * h] *= exp2_fast(d >= Strict ? c[h] - y.x : -INFINITY) * rows[h];
          x[4 * j + 2 * h + 1] *= exp2_fast(d >= 1 + Strict ? c[h] - y.y : -INFINITY) * rows[h];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    }
  }
}

// K K^T to the strict lower part of diag(beta) (G o K K^T), with the norms of k.
__device__ __forceinline__ void scale_key_matrix(float* product, const float* factors) {
  apply_gate<true>(product, factors, kBetaKey);
}

// Q K^T to P = scale (G o Q K^T), with the norms of q and k.
__device__ __forceinline__ void scale_query_matrix(float* product, const float* factors) {
  apply_gate<false>(product, factors, kQueryScale);
}

// An accumulator as fp32 rows ld apart.
__device__ __forceinline__ void store_key_matrix(const float* product, float* out, int ld) {
  const Position at = position();
  float* p = out + at.row * ld + at.column;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(p + 8 * h * ld + 8 * j) = make_float2(product[4 * j + 2 * h], product[4 * j + 2 * h + 1]);
}

// From the gated inverse in fp32 rows ld apart: T = inverse diag(beta) in fp32, and inverse diag(-beta rk e^c) as the 16-bit left
// operand whose product with K is -W.
template <typename T>
__device__ __forceinline__ void load_inverse(const float* inverse, int ld, const float* factors, void* weights, float* t) {
  const Position at = position();
  auto* packed = static_cast<uint32_t*>(weights);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 w = *reinterpret_cast<const float2*>(factors + kKeyWeight * kChunk + 8 * j + at.column);
    const float2 b = *reinterpret_cast<const float2*>(factors + kBeta * kChunk + 8 * j + at.column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = *reinterpret_cast<const float2*>(inverse + (at.row + 8 * h) * ld + 8 * j + at.column);
      packed[2 * j + h] = pack<T>(x.x * w.x, x.y * w.y);
      t[4 * j + 2 * h] = x.x * b.x;
      t[4 * j + 2 * h + 1] = x.y * b.y;
    }
  }
}

// Multiplies column j of an accumulator by factor_j.
__device__ __forceinline__ void scale_columns(float* x, const float* factors, int factor) {
  const float* column = factors + factor * kChunk + 2 * (fresh_lane() % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 y = *reinterpret_cast<const float2*>(column + 8 * j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[4 * j + 2 * h] *= y.x;
      x[4 * j + 2 * h + 1] *= y.y;
    }
  }
}

}  // namespace fq
