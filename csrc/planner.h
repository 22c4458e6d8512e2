// Which kernel runs a call, decided from shapes and the number of multiprocessors alone. Pure host C++ without CUDA or torch, so
// that every decision is tested on machines without a GPU (csrc/bindings/planner_py.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checks.h"

namespace flash_qla {

constexpr int64_t kChunkTokens = 64;

// One line of generated/kernels.def.
struct KernelInfo {
  const char* name;
  const char* kernel;
  int64_t k, v;
  DType dtype;
  int64_t block_v;  // columns of V that one thread block owns
  int threads;
  int shared_bytes;
};

// The kernels in this library, in the order of generated/kernels.def.
const std::vector<KernelInfo>& built_kernels();

// The head dimensions and dtypes that have a forward kernel, each once, for argument checks and messages.
const std::vector<HeadConfig>& built_head_configs();

struct ForwardProblem {
  int64_t batch;      // B
  int64_t tokens;     // T
  int64_t sequences;  // N: B, or the number of packed sequences
  int64_t heads_v;    // H_v
  int64_t k, v;
  DType dtype;
  bool varlen;
  bool train;  // g_out, A (and h) are stored for the backward pass
  int multiprocessors;
  bool may_split = true;  // auto_cp: sequences may be split over the card (partition.h)
};

struct ForwardPlan {
  int kernel = -1;         // index into built_kernels()
  int64_t grid = 0;        // thread blocks
  int ends_kernel = -1;    // of chunk_ends, or -1: no sequence is split, and there is no table
  int64_t part_count = 0;  // rows of the table; N if not split
  int64_t slots = 0;       // most parts whose end another part starts from
};

// Rows of the chunk-start states h: exact for dense batches, an upper bound for packed ones (sum of ceil(len / 64) over N
// sequences never exceeds T / 64 + N).
int64_t state_rows_per_batch(int64_t tokens, int64_t sequences, bool varlen);

// Slots to reserve, 0 where splitting cannot pay. Of packed sequences the host knows the number and the sum of lengths only:
// it reserves for the worst distribution, one long sequence, and the device decides.
int64_t split_slots(const ForwardProblem& problem);

// Throws std::invalid_argument if no kernel of these head dimensions and dtype is built (argument checks come first and say
// it better). Grids beyond 2^31 - 1 blocks are refused with std::length_error.
ForwardPlan plan_forward(const ForwardProblem& problem, const std::vector<KernelInfo>& kernels);

}  // namespace flash_qla
