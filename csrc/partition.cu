#include "partition.h"

#include <cuda_pipeline.h>

#include <type_traits>

#include "device/sequence.cuh"
#include "device/triangular_mma.cuh"
#include "launch.h"
#include "partition_kernels.h"

namespace flash_qla {
namespace {

constexpr int kChunk = 64;
constexpr int kThreads = 256;

__device__ int chunks_of(const PartitionParams& p, int n) {
  return (fq::sequence_length(p.cu_seqlens, p.cu_code, n, p.tokens) + kChunk - 1) / kChunk;
}

// Inclusive sum over a block of kThreads; *total gets the whole.
__device__ int block_sum(int x, int* shared, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, x, d);
    if (lane >= d) x += below;
  }
  if (lane == 31) shared[warp] = x;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += shared[w];
    all += shared[w];
  }
  __syncthreads();
  *total = all;
  return before + x;
}

// Lengths in chunks are read once and kept, as far as there is room.
constexpr int kKept = 4096;

// One block: weighs the candidates, a warp each in turn, and writes the parts of the best.
__global__ void __launch_bounds__(kThreads) partition_kernel(PartitionParams p) {
  __shared__ int warp_sums[kThreads / 32], longest_s, lengths_s[kKept], first_part_s[kThreads], first_slot_s[kThreads];
  __shared__ float cost_s[kMostParts];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int* slots = p.table + 4 * p.part_count;
  int* chains = slots + p.slots;
  for (int i = tid; i < p.part_count; i += kThreads) reinterpret_cast<int4*>(p.table)[i] = make_int4(-1, 0, 0, -2);
  for (int i = tid; i < p.slots; i += kThreads) slots[i] = -1, chains[2 * i] = chains[2 * i + 1] = 0;
  if (tid == 0) longest_s = 0;
  __syncthreads();
  int longest = 0;
  for (int n = tid; n < p.sequences; n += kThreads) {
    const int length = chunks_of(p, n);
    longest = max(longest, length);
    if (n < kKept) lengths_s[n] = length;
  }
  longest = __reduce_max_sync(0xffffffffu, longest);
  if (lane == 0) atomicMax(&longest_s, longest);
  __syncthreads();
  longest = longest_s;

  for (int k = 1 + warp; k <= kMostParts; k += kThreads / 32) {
    const int limit = max((longest + k - 1) / k, 1);
    int chunks = 0, most = 0, extra = 0, end_blocks = 0, end_chunks = 0, chain = 0;
    for (int n = lane; n < p.sequences; n += 32) {
      const int length = n < kKept ? lengths_s[n] : chunks_of(p, n), parts = parts_of(length, limit);
      chunks += length;
      most = max(most, (length + parts - 1) / parts);
      extra += parts - 1;
      chain = max(chain, parts - 1);
      if (parts > 1) end_blocks += 2 * (parts - 1) - 1, end_chunks += (2 * (parts - 1) - 1) * (length / parts);
    }
    chunks = __reduce_add_sync(0xffffffffu, chunks);
    most = __reduce_max_sync(0xffffffffu, most);
    extra = __reduce_add_sync(0xffffffffu, extra);
    end_blocks = __reduce_add_sync(0xffffffffu, end_blocks);
    end_chunks = __reduce_add_sync(0xffffffffu, end_chunks);
    chain = __reduce_max_sync(0xffffffffu, chain);
    if (lane == 0)
      cost_s[k - 1] = extra > p.slots ? INFINITY
                                      : SplitCost::total(chunks, most, p.sequences + extra, end_blocks, end_chunks, chain, p.heads,
                                                         p.multiprocessors);
  }
  __syncthreads();
  // The cheapest, and of equals the one with fewest parts; every warp for itself.
  static_assert(kMostParts == 64);
  float cost = cost_s[lane];
  int best = lane;
  if (cost_s[lane + 32] < cost) cost = cost_s[lane + 32], best = lane + 32;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, cost, d);
    const int index = __shfl_xor_sync(0xffffffffu, best, d);
    if (other < cost || (other == cost && index < best)) cost = other, best = index;
  }
  const int limit = max((longest + best) / (best + 1), 1);

  int part = 0, slot = 0, chain = 0;  // of the sequences of earlier rounds
  for (int begin = 0; begin < p.sequences; begin += kThreads) {
    const int n = begin + tid, length = n >= p.sequences ? 0 : n < kKept ? lengths_s[n] : chunks_of(p, n);
    const int parts = n < p.sequences ? parts_of(length, limit) : 0, ends = max(parts - 1, 0);
    int round_parts, round_slots, round_chains;
    first_part_s[tid] = block_sum(parts, warp_sums, &round_parts) - parts + part;
    first_slot_s[tid] = block_sum(ends, warp_sums, &round_slots) - ends + slot;
    const int own_chain = block_sum(ends > 0, warp_sums, &round_chains) - (ends > 0) + chain;
    if (ends > 0) chains[2 * own_chain] = first_slot_s[tid], chains[2 * own_chain + 1] = ends;
    __syncthreads();
    for (int x = part + tid; x < part + round_parts; x += kThreads) {
      int owner = 0;  // the last sequence of the round that begins at or before part x
#pragma unroll
      for (int step = kThreads / 2; step > 0; step /= 2)
        if (begin + owner + step < p.sequences && first_part_s[owner + step] <= x) owner += step;
      const int m = begin + owner, i = x - first_part_s[owner];
      const int tokens = fq::sequence_length(p.cu_seqlens, p.cu_code, m, p.tokens), whole = (tokens + kChunk - 1) / kChunk;
      const unsigned count = parts_of(whole, limit);
      const int from = whole * unsigned(i) / count * kChunk, to = i + 1 < count ? whole * unsigned(i + 1) / count * kChunk : tokens;
      const int before = first_slot_s[owner] + i - 1;
      reinterpret_cast<int4*>(p.table)[x] = make_int4(m, from, to - from, (i > 0 ? before : -1) * 2 + (i + 1 == count));
      if (i + 1 < count) slots[before + 1] = x;
    }
    __syncthreads();
    part += round_parts, slot += round_slots, chain += round_chains;
  }
}

constexpr int kScanStages = 3;  // transfer matrices on their way

// Shared memory of the scan. Rows are padded so that a fragment's elements lie on different banks.
template <int Dim, int Columns>
struct ScanShared {
  float m[kScanStages][Dim][Dim + 4];
  float s[Dim][Columns == 8 ? 8 : Columns + 8];
};

__device__ __forceinline__ float high_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// A block follows one sequence and head through its slots, for some columns of the state; a warp makes 16 rows x 8 columns. Products
// are fp32 in three tf32 terms, high high + high low + low high: what is left out is 2^-21 of the product.
template <int Dim, int Columns>
__global__ void __launch_bounds__(Dim * Columns / 4) scan_kernel(PartitionParams p) {
  extern __shared__ __align__(16) char shared[];
  auto& memory = *reinterpret_cast<ScanShared<Dim, Columns>*>(shared);
  constexpr int kScanThreads = Dim * Columns / 4, kColumns = Columns, kSlices = Dim / Columns;
  const int slice = blockIdx.x % kSlices, head = blockIdx.x / kSlices % p.heads, chain = blockIdx.x / kSlices / p.heads;
  const int* row_of_chain = p.table + 4 * p.part_count + p.slots + 2 * chain;
  const int slot = row_of_chain[0], length = row_of_chain[1];
  if (length < 2) return;  // no such chain, or nothing follows
  const auto matrix = [&](int i, int which) {
    return p.ends + ((static_cast<int64_t>(slot + i) * 2 + which) * p.heads + head) * (Dim * Dim);
  };
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, group = lane / 4, quad = lane % 4;
  const int row = warp / (Columns / 8) * 16 + group, column = warp % (Columns / 8) * 8;
  const auto fetch = [&](int i) {
    if (i < length) {
      const float* m = matrix(i, 1);
      for (int x = tid; x < Dim * Dim / 4; x += kScanThreads)
        __pipeline_memcpy_async(&memory.m[i % kScanStages][x / (Dim / 4)][x % (Dim / 4) * 4], m + 4 * x, 16);
    }
    __pipeline_commit();
  };
  for (int i = 1; i < kScanStages; ++i) fetch(i);
  {
    const int r = tid / (Columns / 4), c = tid % (Columns / 4) * 4;
    *reinterpret_cast<float4*>(&memory.s[r][c]) = *reinterpret_cast<const float4*>(matrix(0, 0) + r * Dim + slice * kColumns + c);
  }
  for (int i = 1; i < length; ++i) {
    float* out = matrix(i, 0) + row * Dim + slice * kColumns + column + 2 * quad;
    const float2 added[2] = {*reinterpret_cast<const float2*>(out), *reinterpret_cast<const float2*>(out + 8 * Dim)};
    fetch(i + kScanStages - 1);
    __pipeline_wait_prior(kScanStages - 1);
    __syncthreads();
    const auto& m = memory.m[i % kScanStages];
    float sum[3][4] = {};
#pragma unroll 4
    for (int k = quad; k < Dim; k += 8) {
      const float a[4] = {m[row][k], m[row + 8][k], m[row][k + 4], m[row + 8][k + 4]};
      const float b[2] = {memory.s[k][column + group], memory.s[k + 4][column + group]};
      float high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) high[e] = high_part(a[e]), low[e] = a[e] - high[e];
      const float b0 = high_part(b[0]), b1 = high_part(b[1]);
      fq::mma_tf32(sum[0], high, b0, b1);
      fq::mma_tf32(sum[1], high, b[0] - b0, b[1] - b1);
      fq::mma_tf32(sum[2], low, b0, b1);
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = make_float2(sum[0][2 * h] + (sum[1][2 * h] + sum[2][2 * h]) + added[h].x,
                                   sum[0][2 * h + 1] + (sum[1][2 * h + 1] + sum[2][2 * h + 1]) + added[h].y);
      *reinterpret_cast<float2*>(&memory.s[row + 8 * h][column + 2 * quad]) = x;
      *reinterpret_cast<float2*>(out + 8 * h * Dim) = x;
    }
  }
}

}  // namespace

void launch_partition(const PartitionParams& p, cudaStream_t stream) {
  partition_kernel<<<1, kThreads, 0, stream>>>(p);
  check_launch("partition");
}

void launch_scan(const PartitionParams& p, int dim, cudaStream_t stream) {
  if (dim != 128) throw std::invalid_argument("the scan is built for K = V = 128");
  const int chains = (p.slots < p.sequences ? p.slots : p.sequences) * p.heads;
  // Narrow slices as long as the card has room for them: a block then has half the work.
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    constexpr int kBytes = sizeof(ScanShared<128, kColumns>);
    allow_shared_memory<scan_kernel<128, kColumns>>(kBytes);
    scan_kernel<128, kColumns><<<chains * (128 / kColumns), 128 * kColumns / 4, kBytes, stream>>>(p);
  };
  if (chains * 16 <= p.multiprocessors)
    launch(std::integral_constant<int, 8>{});
  else
    launch(std::integral_constant<int, 16>{});
  check_launch("scan");
}

}  // namespace flash_qla
