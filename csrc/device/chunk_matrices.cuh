// What happens to accumulators between products. A 64 x 64 accumulator of a warpgroup is 32 floats a
// thread: element 4 j + 2 h + e is row 16 warp + 8 h + lane / 4, column 8 j + 2 (lane % 4) + e.
#pragma once

#include <cstdint>

#include "gates.cuh"
#include "tiles.cuh"
#include "triangular_mma.cuh"

namespace fq {

struct Position {
  uint32_t row, column;  // of element 0
};

__device__ __forceinline__ Position position() {
  const uint32_t lane = fresh_lane();
  return {16 * fresh_warp() + lane / 4, 2 * (lane % 4)};
}

// Gates a product of a chunk, K K^T or Q K^T: the element of row i and column j takes rows_i rk_j e^(c_i - c_j) below the
// diagonal, and on it unless Strict. Calls below(block, j, h, x, y) and on_diagonal(block, j, h, x, y) with the elements (8 h, 8 j)
// and (8 h, 8 j + 1), counted from the thread's first, of each block of 16 columns left of the diagonal block and of that one. Left
// of the diagonal block no mask is needed, and with m the block's last token e^(c_i - c_m) e^(c_m - c_j) replaces an exponential per
// element: both exponents are <= 0. On it, an exponent of -inf masks: no branch, and 0 whatever the product.
template <bool Strict, typename Below, typename OnDiagonal>
__device__ __forceinline__ void apply_gate(const float* product, const float* factors, int row_factor, Below below,
                                           OnDiagonal on_diagonal) {
  const Position at = position();
  const uint32_t diagonal = at.row / 16;
  const float* f = factors + at.row;
  const float c[2] = {f[kCumulative * kChunk], f[kCumulative * kChunk + 8]};
  const float rows[2] = {f[row_factor * kChunk], f[row_factor * kChunk + 8]};
  const float* columns = factors + at.column;
#pragma unroll
  for (uint32_t block = 0; block < 3; ++block) {
    if (block >= diagonal) break;
    const float m = factors[kCumulative * kChunk + 16 * block + 15];
    const float scale[2] = {exp2_fast(c[0] - m) * rows[0], exp2_fast(c[1] - m) * rows[1]};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 y = *reinterpret_cast<const float2*>(columns + kBlockDecay * kChunk + 16 * block + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = product + 8 * block + 4 * j + 2 * h;
        below(block, j, h, x[0] * y.x * scale[h], x[1] * y.y * scale[h]);
      }
    }
  }
  const int distance = static_cast<int>(at.row % 16) - static_cast<int>(at.column);  // row - column of element 0
#pragma unroll
  for (uint32_t block = 0; block < 4; ++block) {
    if (block != diagonal) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 y = *reinterpret_cast<const float2*>(columns + kKeyCumulative * kChunk + 16 * block + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = product + 8 * block + 4 * j + 2 * h;
        const int d = distance + 8 * h - 8 * j;
        on_diagonal(block, j, h, x[0] * (exp2_fast(d >= Strict ? c[h] - y.x : -INFINITY) * rows[h]),
                    x[1] * (exp2_fast(d >= 1 + Strict ? c[h] - y.y : -INFINITY) * rows[h]));
      }
    }
  }
}

// K K^T to diag(beta) (G o K K^T) below the diagonal, as the blocks that invert_halves takes.
__device__ __forceinline__ void gate_keys(const float* product, const float* factors, float* blocks) {
  const Position at = position();
  const uint32_t diagonal = at.row / 16, row = at.row % 16;
  float* out = blocks + block_offset(diagonal, 0) + row * kBlockLd + at.column;
  float* corner = blocks + block_offset(diagonal, diagonal) + at.column * kBlockLd + row;  // transposed
  apply_gate<true>(
      product, factors, kBetaKey,
      [&](uint32_t block, int j, int h, float x, float y) {
        *reinterpret_cast<float2*>(out + block * kBlockFloats + 8 * h * kBlockLd + 8 * j) = make_float2(tf32(x), tf32(y));
      },
      [&](uint32_t, int j, int h, float x, float y) {
        corner[8 * j * kBlockLd + 8 * h] = x;
        corner[(8 * j + 1) * kBlockLd + 8 * h] = y;
      });
}

// Q K^T to P = scale (G o Q K^T), as 16 registers of 16-bit pairs in the order of store_packed.
template <typename T>
__device__ __forceinline__ void gate_queries(const float* product, const float* factors, uint32_t* packed) {
  const auto put = [&](uint32_t block, int j, int h, float x, float y) { packed[4 * block + 2 * j + h] = pack<T>(x, y); };
#pragma unroll
  for (int i = 0; i < 16; ++i) packed[i] = 0;
  apply_gate<false>(product, factors, kQueryScale, put, put);
}

// 16-bit pairs to a panel: register 2 j + h of a thread is row 16 warp + 8 h + lane / 4, columns 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void store_packed(const uint32_t* packed, void* panel) {
  const uint32_t lane = fresh_lane(), row = 16 * fresh_warp() + lane % 16;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    store_matrices(base + swizzled(row, j + lane / 16), packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
}

// T = inverse diag(beta) as a 16-bit panel, from the blocks of the gated inverse, of which invert_halves has made the two on the
// diagonal.
template <typename T>
__device__ __forceinline__ void store_inverse(const float* blocks, const float* factors, void* panel) {
  const Position at = position();
  const uint32_t lane = fresh_lane(), diagonal = at.row / 16;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
  const uint32_t panel_row = 16 * diagonal + lane % 16;
  const float* in = blocks + block_offset(diagonal, 0) + at.row % 16 * kBlockLd + at.column;
  const float* beta = factors + kBeta * kChunk + at.column;
  // x[2 j + h]: elements (8 h, 8 j) and (8 h, 8 j + 1) from the thread's first.
  const auto put = [&](uint32_t block, const float2(&x)[4]) {
    uint32_t t[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 b = *reinterpret_cast<const float2*>(beta + 16 * block + 8 * (i / 2));
      t[i] = pack<T>(x[i].x * b.x, x[i].y * b.y);
    }
    store_matrices(base + swizzled(panel_row, 2 * block + lane / 16), t[0], t[1], t[2], t[3]);
  };
  const auto stored = [&](uint32_t block) {
    float2 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = *reinterpret_cast<const float2*>(in + block * kBlockFloats + 8 * (i % 2) * kBlockLd + 8 * (i / 2));
    put(block, x);
  };
  const auto nothing = [&](uint32_t block) { store_matrices(base + swizzled(panel_row, 2 * block + lane / 16), 0, 0, 0, 0); };
  if (diagonal >= 2) {
    float z[2][2][4];
    invert_below(blocks, diagonal, lane, z);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = make_float2(-z[n][i / 2][2 * (i % 2)], -z[n][i / 2][2 * (i % 2) + 1]);
      put(n, x);
    }
    stored(2);
    if (diagonal == 3) stored(3);
    else nothing(3);
  } else {
    stored(0);
    if (diagonal == 1) stored(1);
    else nothing(1);
    nothing(2);
    nothing(3);
  }
}

// In place: a panel of 64 tokens and 64 columns of V becomes V - (diag(rk e^c) x)^T, for an accumulator x of those columns and
// tokens. Where V is not `present` it counts as 0.
template <typename T>
__device__ __forceinline__ void subtract_from_values(void* panel, const float* x, const float* factors, int present = 1) {
  const uint32_t lane = fresh_lane(), piece = 2 * fresh_warp() + lane / 8 % 2;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
  const float* column = factors + kKeyDecay * kChunk + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t address = base + swizzled(8 * (j + lane / 16) + lane % 8, piece);
    uint32_t v[4] = {0, 0, 0, 0};
    if (present)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                   : "r"(address)
                   : "memory");
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(column + 8 * (j + n));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 y = unpack<T>(v[2 * n + h]);
        const float* z = x + 4 * (j + n) + 2 * h;
        v[2 * n + h] = pack<T>(y.x - z[0] * f.x, y.y - z[1] * f.y);
      }
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
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
