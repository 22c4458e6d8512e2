// The gate of a chunk: reading it in any dtype and domain, and its inclusive cumulative sum.
#pragma once

#include "numbers.cuh"
#include "tiles.cuh"

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

// Factors of the rows and columns of a chunk's products, one vector of kChunk floats each. With c the cumulative decay and rq,
// rk the reciprocal norms of q and k (1 without normalisation):
enum Factor : int {
  kCumulative,     // c in base 2
  kKeyCumulative,  // c - log2 rk: 2^(c_i - this_j) is rk_j e^(c_i - c_j)
  kBeta,           // beta
  kBetaKey,        // beta rk
  kQueryScale,     // scale rq
  kBlockDecay,     // rk e^(c_m - c), m the last token of the same block of 16
  kKeyDecay,       // rk e^c
  kOutputDecay,    // scale rq e^c
  kStateDecay,     // rk e^(c_C - c)
  kFactors
};

// The decay e^(c_C) of each chunk in flight.
__device__ __forceinline__ float* chunk_totals() {
  __shared__ float totals[4];
  return totals;
}

__device__ __forceinline__ float chunk_total(int stage) { return chunk_totals()[stage]; }

// Called by one whole warp: gate and beta of tokens 2 lane and 2 lane + 1, as they are stored; 0 from `valid` on. Nothing
// waits for the loads here: the values are used a chunk later.
__device__ __forceinline__ void read_gates(float* raw, const void* g, int g_code, int64_t g_offset, int64_t g_stride,
                                           const void* beta, int beta_code, int64_t beta_offset, int64_t beta_stride,
                                           int valid) {
  const int first = 2 * static_cast<int>(fresh_lane());
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int t = first + j;
    raw[j] = t < valid ? load_number(g, g_code, g_offset + t * g_stride) : 0.0f;
    raw[2 + j] = t < valid ? load_number(beta, beta_code, beta_offset + t * beta_stride) : 0.0f;
  }
}

// Called by one whole warp: turns the gates that read_gates gave into their inclusive sum in base 2.
__device__ __forceinline__ void sum_gates(float* raw, int linear, int valid) {
  const int lane = fresh_lane();
  float decay[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float x = linear && 2 * lane + j < valid ? logf(raw[j]) : raw[j];
    decay[j] = (x < kLogDecayFloor ? kLogDecayFloor : x) * kLog2e;
  }
  float sum = decay[0] + decay[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += below;
  }
  raw[0] = sum - decay[1];
  raw[1] = sum;
}

// Called by one whole warp with what sum_gates left: the factors of rows that are normalised already, and the decay of the chunk.
__device__ __forceinline__ void put_factors(const float* raw, float scale, float* factors, int stage) {
  const int lane = fresh_lane();
  const float2 c = make_float2(raw[0], raw[1]), e = make_float2(exp2_fast(c.x), exp2_fast(c.y));
  const float last = __shfl_sync(0xffffffffu, c.y, 31), block_last = __shfl_sync(0xffffffffu, c.y, lane | 7);
  const auto put = [&](int factor, float x, float y) {
    reinterpret_cast<float2*>(factors + factor * kChunk)[lane] = make_float2(x, y);
  };
  put(kCumulative, c.x, c.y);
  put(kKeyCumulative, c.x, c.y);
  put(kBeta, raw[2], raw[3]);
  put(kBetaKey, raw[2], raw[3]);
  put(kQueryScale, scale, scale);
  put(kBlockDecay, exp2_fast(block_last - c.x), exp2_fast(block_last - c.y));
  put(kKeyDecay, e.x, e.y);
  put(kOutputDecay, scale * e.x, scale * e.y);
  put(kStateDecay, exp2_fast(last - c.x), exp2_fast(last - c.y));
  if (lane == 31) chunk_totals()[stage] = e.y;
}

// Called by the 128 threads of a warpgroup after put_factors: bring in the reciprocal norms of the rows of k and of q.
template <typename T, int Panels>
__device__ __forceinline__ void apply_key_norms(const void* k, float* factors) {
  const float norm = row_norm<T, Panels>(k);
  const uint32_t lane = fresh_lane();
  if (lane % 2 == 0) {
    float* f = factors + 16 * fresh_warp() + lane / 2;
    f[kKeyCumulative * kChunk] -= __log2f(norm);
    f[kBetaKey * kChunk] *= norm;
    f[kBlockDecay * kChunk] *= norm;
    f[kKeyDecay * kChunk] *= norm;
    f[kStateDecay * kChunk] *= norm;
  }
}

template <typename T, int Panels>
__device__ __forceinline__ void apply_query_norms(const void* q, float* factors) {
  const float norm = row_norm<T, Panels>(q);
  const uint32_t lane = fresh_lane();
  if (lane % 2 == 0) {
    float* f = factors + 16 * fresh_warp() + lane / 2;
    f[kQueryScale * kChunk] *= norm;
    f[kOutputDecay * kChunk] *= norm;
  }
}

// Called by one whole warp: the gate of a chunk as fp32 natural-log decay, rows `out_stride` apart.
__device__ __forceinline__ void store_gate(const void* g, int g_code, int64_t g_offset, int64_t g_stride, int linear,
                                           float* out, int64_t out_offset, int64_t out_stride, int valid) {
  for (int t = threadIdx.x % 32; t < valid; t += 32)
    out[out_offset + t * out_stride] = load_log_decay(g, g_code, g_offset + t * g_stride, linear);
}

}  // namespace fq
