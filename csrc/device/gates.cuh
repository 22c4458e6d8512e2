// The gate of a chunk: reading it in any dtype and domain, and its inclusive cumulative sum.
#pragma once

#include "numbers.cuh"

namespace fq {

constexpr int kChunk = 64;
constexpr float kLog2e = 1.4426950408889634f;

// Decay e^-128 is 0 in fp32. Clamping there keeps differences of cumulative sums free of inf - inf when a linear gate is
// exactly 0, without changing any result. A NaN gate passes through.
constexpr float kLogDecayFloor = -128.0f;

// Natural-log decay of one token.
__device__ __forceinline__ float load_log_decay(const void* g, int code, int64_t offset, int linear) {
  const float x = load_number(g, code, offset);
  return linear ? logf(x) : x;
}

struct TokenPair {
  float2 cumulative;  // inclusive sum of the log2 decays
  float2 beta;
};

// Called by one whole warp: tokens 2 lane and 2 lane + 1 of a chunk. Rows from `valid` on have gate 0 and beta 0.
__device__ __forceinline__ TokenPair load_gate_pair(const void* g, int g_code, int64_t g_offset, int64_t g_stride, int linear,
                                                    const void* beta, int beta_code, int64_t beta_offset,
                                                    int64_t beta_stride, int valid) {
  const int lane = threadIdx.x % 32;
  float decay[2], step[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int t = 2 * lane + j;
    decay[j] = step[j] = 0.0f;
    if (t < valid) {
      const float x = load_log_decay(g, g_code, g_offset + t * g_stride, linear);
      decay[j] = (x < kLogDecayFloor ? kLogDecayFloor : x) * kLog2e;
      step[j] = load_number(beta, beta_code, beta_offset + t * beta_stride);
    }
  }
  float sum = decay[0] + decay[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += below;
  }
  return {make_float2(sum - decay[1], sum), make_float2(step[0], step[1])};
}

// Called by one whole warp: the cumulative log2 decay and beta of a chunk.
__device__ __forceinline__ void gate_chunk(const void* g, int g_code, int64_t g_offset, int64_t g_stride, int linear,
                                           const void* beta, int beta_code, int64_t beta_offset, int64_t beta_stride,
                                           int valid, float* cumulative, float* beta_out) {
  const int lane = threadIdx.x % 32;
  const TokenPair pair =
      load_gate_pair(g, g_code, g_offset, g_stride, linear, beta, beta_code, beta_offset, beta_stride, valid);
  reinterpret_cast<float2*>(cumulative)[lane] = pair.cumulative;
  reinterpret_cast<float2*>(beta_out)[lane] = pair.beta;
}

// Factors of the rows and columns of a chunk's products, one vector of kChunk floats each. With c the cumulative decay and rq,
// rk the reciprocal norms of q and k (1 without normalisation):
enum Factor : int {
  kCumulative,   // c in base 2
  kKeyNorm,      // rk
  kBeta,         // beta
  kBetaKey,      // beta rk
  kQueryScale,   // scale rq
  kOutputDecay,  // scale rq e^c
  kStateDecay,   // rk e^(c_C - c)
  kMinusDecay,   // -e^c
  kFactors
};

// Called by one whole warp, with rq and rk in place where normalise is set.
__device__ __forceinline__ void chunk_factors(const TokenPair& pair, float scale, int normalise, const float* rq,
                                              const float* rk, float* factors) {
  const int lane = threadIdx.x % 32;
  const float total = __shfl_sync(0xffffffffu, pair.cumulative.y, 31);
  float2 q = make_float2(1.0f, 1.0f), k = q;
  if (normalise) {
    q = reinterpret_cast<const float2*>(rq)[lane];
    k = reinterpret_cast<const float2*>(rk)[lane];
  }
  const float2 c = pair.cumulative, b = pair.beta;
  const float2 decay = make_float2(exp2_fast(c.x), exp2_fast(c.y));
  const auto put = [&](int factor, float x, float y) {
    reinterpret_cast<float2*>(factors + factor * kChunk)[lane] = make_float2(x, y);
  };
  put(kCumulative, c.x, c.y);
  put(kKeyNorm, k.x, k.y);
  put(kBeta, b.x, b.y);
  put(kBetaKey, b.x * k.x, b.y * k.y);
  put(kQueryScale, scale * q.x, scale * q.y);
  put(kOutputDecay, scale * q.x * decay.x, scale * q.y * decay.y);
  put(kStateDecay, k.x * exp2_fast(total - c.x), k.y * exp2_fast(total - c.y));
  put(kMinusDecay, -decay.x, -decay.y);
}

// Called by one whole warp: the gate of a chunk as fp32 natural-log decay, rows `out_stride` apart.
__device__ __forceinline__ void store_gate(const void* g, int g_code, int64_t g_offset, int64_t g_stride, int linear,
                                           float* out, int64_t out_offset, int64_t out_stride, int valid) {
  for (int t = threadIdx.x % 32; t < valid; t += 32)
    out[out_offset + t * out_stride] = load_log_decay(g, g_code, g_offset + t * g_stride, linear);
}

}  // namespace fq
