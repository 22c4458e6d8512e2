#include "partition.h"

#include <cuda_pipeline.h>

#include "device/sequence.cuh"
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
  __shared__ int warp_sums[kThreads / 32], longest_s, lengths_s[kKept];
  __shared__ float cost_s[kMostParts];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int* slots = p.table + 4 * p.part_count;
  int* chains = slots + p.slots;
  for (int i = tid; i < p.part_count; i += kThreads) reinterpret_cast<int4*>(p.table)[i] = make_int4(-1, 0, 0, -1);
  for (int i = tid; i < p.slots; i += kThreads) slots[i] = -1, chains[i] = 0;
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

  int part = 0, slot = 0;  // of the sequences of earlier rounds
  for (int begin = 0; begin < p.sequences; begin += kThreads) {
    const int n = begin + tid, tokens = n < p.sequences ? fq::sequence_length(p.cu_seqlens, p.cu_code, n, p.tokens) : 0;
    const int length = (tokens + kChunk - 1) / kChunk, parts = n < p.sequences ? parts_of(length, limit) : 0;
    const int ends = max(parts - 1, 0);
    int all;
    const int first_part = block_sum(parts, warp_sums, &all) - parts + part;
    part += all;
    const int first_slot = block_sum(ends, warp_sums, &all) - ends + slot;
    slot += all;
    if (ends > 0) chains[first_slot] = ends;
    for (int i = 0; i < parts; ++i) {
      const int from = static_cast<int>(static_cast<int64_t>(length) * i / parts) * kChunk;
      const int to = i < ends ? static_cast<int>(static_cast<int64_t>(length) * (i + 1) / parts) * kChunk : tokens;
      reinterpret_cast<int4*>(p.table)[first_part + i] = make_int4(n, from, to - from, i > 0 ? first_slot + i - 1 : -1);
      if (i < ends) slots[first_slot + i] = first_part + i;
    }
  }
}

constexpr int kColumns = 16;   // of the state that a block of the scan owns
constexpr int kScanThreads = 512;
constexpr int kScanStages = 3;  // transfer matrices on their way

// Shared memory of the scan: the matrices, the columns of the state, and partial sums.
template <int Dim>
struct ScanShared {
  static constexpr int kLd = Dim + 4;
  float m[kScanStages][Dim][kLd];
  float s[Dim][kColumns];
  float partial[Dim][kColumns];
};

// A block follows one sequence and head through its slots, for 16 columns of the state. A thread makes 2 rows x 4 columns of half a sum.
template <int Dim>
__global__ void __launch_bounds__(kScanThreads) scan_kernel(PartitionParams p) {
  static_assert(Dim * 4 == kScanThreads);
  extern __shared__ __align__(16) char shared[];
  auto& memory = *reinterpret_cast<ScanShared<Dim>*>(shared);
  constexpr int kSlices = Dim / kColumns;
  const int slice = blockIdx.x % kSlices, head = blockIdx.x / kSlices % p.heads, slot = blockIdx.x / kSlices / p.heads;
  const int length = p.table[4 * p.part_count + p.slots + slot];
  if (length < 2) return;  // not the first slot of a sequence, or nothing follows
  const auto matrix = [&](int i, int which) {
    return p.ends + ((static_cast<int64_t>(slot + i) * 2 + which) * p.heads + head) * (Dim * Dim);
  };
  const int tid = threadIdx.x, half = tid / (kScanThreads / 2), row = tid % (kScanThreads / 2) / 4 * 2, column = tid % 4 * 4;
  const auto fetch = [&](int i) {
    if (i < length) {
      const float* m = matrix(i, 1);
      for (int x = tid; x < Dim * Dim / 4; x += kScanThreads)
        __pipeline_memcpy_async(&memory.m[i % kScanStages][x / (Dim / 4)][x % (Dim / 4) * 4], m + 4 * x, 16);
    }
    __pipeline_commit();
  };
  for (int i = 1; i < kScanStages; ++i) fetch(i);
  if (half == 0)
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<float4*>(&memory.s[row + r][column]) =
          *reinterpret_cast<const float4*>(matrix(0, 0) + (row + r) * Dim + slice * kColumns + column);
  for (int i = 1; i < length; ++i) {
    float* out = matrix(i, 0) + row * Dim + slice * kColumns + column;
    // What the part adds goes into one of the two halves of the sum.
    float4 sum[2] = {};
    if (half == 0)
      for (int r = 0; r < 2; ++r) sum[r] = *reinterpret_cast<const float4*>(out + r * Dim);
    fetch(i + kScanStages - 1);
    __pipeline_wait_prior(kScanStages - 1);
    __syncthreads();
    const float(*m)[ScanShared<Dim>::kLd] = &memory.m[i % kScanStages][row];
    float4 product[2] = {};
#pragma unroll 4
    for (int k = half * (Dim / 2); k < (half + 1) * (Dim / 2); k += 4) {
      const float4 a[2] = {*reinterpret_cast<const float4*>(&m[0][k]), *reinterpret_cast<const float4*>(&m[1][k])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 s = *reinterpret_cast<const float4*>(&memory.s[k + j][column]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float x = j == 0 ? a[r].x : j == 1 ? a[r].y : j == 2 ? a[r].z : a[r].w;
          product[r].x += x * s.x, product[r].y += x * s.y, product[r].z += x * s.z, product[r].w += x * s.w;
        }
      }
    }
    for (int r = 0; r < 2; ++r) sum[r].x += product[r].x, sum[r].y += product[r].y, sum[r].z += product[r].z, sum[r].w += product[r].w;
    if (half == 1)
      for (int r = 0; r < 2; ++r) *reinterpret_cast<float4*>(&memory.partial[row + r][column]) = sum[r];
    __syncthreads();
    if (half == 0) {
      for (int r = 0; r < 2; ++r) {
        const float4 other = *reinterpret_cast<const float4*>(&memory.partial[row + r][column]);
        sum[r].x += other.x, sum[r].y += other.y, sum[r].z += other.z, sum[r].w += other.w;
        *reinterpret_cast<float4*>(&memory.s[row + r][column]) = sum[r];
        *reinterpret_cast<float4*>(out + r * Dim) = sum[r];
      }
    }
    __syncthreads();
  }
}

}  // namespace

void launch_partition(const PartitionParams& p, cudaStream_t stream) {
  partition_kernel<<<1, kThreads, 0, stream>>>(p);
  check_launch("partition");
}

void launch_scan(const PartitionParams& p, int dim, cudaStream_t stream) {
  if (dim != 128) throw std::invalid_argument("the scan is built for K = V = 128");
  constexpr int kBytes = sizeof(ScanShared<128>);
  allow_shared_memory<scan_kernel<128>>(kBytes);
  scan_kernel<128><<<p.slots * p.heads * (128 / kColumns), kScanThreads, kBytes, stream>>>(p);
  check_launch("scan");
}

}  // namespace flash_qla
