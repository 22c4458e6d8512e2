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

// Called by one whole warp. cumulative[i] = sum_{j <= i} log2 decay of token j; rows from `valid` on have gate 0 and beta 0.
// Lane l owns the neighbouring tokens 2l and 2l + 1.
__device__ __forceinline__ void gate_chunk(const void* g, int g_code, int64_t g_offset, int64_t g_stride, int linear,
                                           const void* beta, int beta_code, int64_t beta_offset, int64_t beta_stride,
                                           int valid, float* cumulative, float* beta_out) {
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
  reinterpret_cast<float2*>(cumulative)[lane] = make_float2(sum - decay[1], sum);
  reinterpret_cast<float2*>(beta_out)[lane] = make_float2(step[0], step[1]);
}

// Called by one whole warp: the gate of a chunk as fp32 natural-log decay, rows `out_stride` apart.
__device__ __forceinline__ void store_gate(const void* g, int g_code, int64_t g_offset, int64_t g_stride, int linear,
                                           float* out, int64_t out_offset, int64_t out_stride, int valid) {
  for (int t = threadIdx.x % 32; t < valid; t += 32)
    out[out_offset + t * out_stride] = load_log_decay(g, g_code, g_offset + t * g_stride, linear);
}

}  // namespace fq
