#include "planner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace flash_qla {

namespace {

constexpr KernelInfo kKernels[] = {
#define FLASH_QLA_KERNEL(name, kernel, K, V, dtype, block_v, train, threads, shared) \
  {#name, #kernel, K, V, DType::dtype, block_v, train, threads, shared},
#include "generated/kernels.def"
#undef FLASH_QLA_KERNEL
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Microseconds of one chunk in one thread block, measured on an H200 (docs/design-notes.md). In chunk_fwd, part of it (Q K^T, K K^T,
// the inverse) is repeated by every slice of V and part shrinks with the slice.
double chunk_cost(const KernelInfo& kernel) {
  return 6.9 + 4.3 * static_cast<double>(kernel.block_v) / 128.0;
}

bool is_forward(const KernelInfo& kernel) {
  return std::strcmp(kernel.kernel, "chunk_fwd") == 0;
}

}  // namespace

const std::vector<KernelInfo>& built_kernels() {
  static const std::vector<KernelInfo> kernels(std::begin(kKernels), std::end(kKernels));
  return kernels;
}

const std::vector<HeadConfig>& built_head_configs() {
  static const std::vector<HeadConfig> configs = [] {
    std::vector<HeadConfig> unique;
    for (const KernelInfo& kernel : built_kernels()) {
      const auto same = [&](const HeadConfig& c) {
        return c.K == kernel.k && c.V == kernel.v && c.dtype == kernel.dtype;
      };
      if (std::none_of(unique.begin(), unique.end(), same)) unique.push_back({kernel.k, kernel.v, kernel.dtype});
    }
    return unique;
  }();
  return configs;
}

int64_t state_rows_per_batch(int64_t tokens, int64_t sequences, bool varlen) {
  return varlen ? tokens / kChunkTokens + sequences : ceil_div(tokens, kChunkTokens);
}

ForwardPlan plan_forward(const ForwardProblem& problem, const std::vector<KernelInfo>& kernels) {
  ForwardPlan plan;
  plan.max_chunks = ceil_div(problem.tokens, kChunkTokens);
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < kernels.size(); ++i) {
    const KernelInfo& kernel = kernels[i];
    if (!is_forward(kernel) || kernel.k != problem.k || kernel.v != problem.v ||
        kernel.dtype != problem.dtype || kernel.train != problem.train)
      continue;
    const int64_t grid = problem.sequences * problem.heads_v * ceil_div(problem.v, kernel.block_v);
    // One block a multiprocessor: the tiles of two do not fit in its shared memory.
    const double waves = static_cast<double>(ceil_div(grid, problem.multiprocessors));
    const double cost = waves * chunk_cost(kernel);
    if (cost < best) {
      best = cost;
      plan.kernel = static_cast<int>(i);
      plan.grid = grid;
    }
  }
  if (plan.kernel < 0) throw std::invalid_argument("no forward kernel is built for these head dimensions and this dtype");
  if (plan.grid > std::numeric_limits<int32_t>::max())
    throw std::length_error("the call needs more than 2^31 - 1 thread blocks; split the batch");
  return plan;
}

}  // namespace flash_qla
