// The two small kernels of a split forward (csrc/partition.h says what for).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_qla {

struct PartitionParams {
  const void* cu_seqlens = nullptr;
  int cu_code = 0;
  int sequences = 0, tokens = 0, heads = 0, multiprocessors = 0;
  int part_count = 0, slots = 0;
  int* table = nullptr;   // [4 * part_count + 3 * slots]
  float* ends = nullptr;  // [slots, 2, heads, K, V]
};

// Fills the table.
void launch_partition(const PartitionParams& p, cudaStream_t stream);

// Turns N of every slot into the state at its end, for K = V = dim.
void launch_scan(const PartitionParams& p, int dim, cudaStream_t stream);

}  // namespace flash_qla
