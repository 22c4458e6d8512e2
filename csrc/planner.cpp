#include "planner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace flash_qla {

namespace {

constexpr KernelInfo kKernels[] = {
#define FLASH_QLA_KERNEL(name, kernel, K, V, dtype, block_v, threads, shared) \
  {#name, #kernel, K, V, DType::dtype, block_v, threads, shared},
#include "generated/kernels.def"
#undef FLASH_QLA_KERNEL
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Microseconds of one chunk in one thread block of chunk_fwd_train that owns `block_v` columns, measured on an H200
// (docs/design-notes.md): a part that every slice repeats (Q K^T, K K^T, the inverse) and a part that shrinks with the slice.
double chunk_cost(int64_t block_v) { return 6.9 + 4.3 * static_cast<double>(block_v) / 128.0; }

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
  // Two kernels share the forward pass: one keeps what the backward pass reads, the other, faster one keeps nothing.
  const char* wanted = problem.train ? "chunk_fwd_train" : "chunk_fwd";
  ForwardPlan plan;
  double best = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < kernels.size(); ++i) {
    const KernelInfo& kernel = kernels[i];
    if (std::strcmp(kernel.kernel, wanted) != 0 || kernel.k != problem.k || kernel.v != problem.v ||
        kernel.dtype != problem.dtype)
      continue;
    const int64_t grid = problem.sequences * problem.heads_v * ceil_div(problem.v, kernel.block_v);
    // One block a multiprocessor: the tiles of two do not fit in its shared memory.
    const double waves = static_cast<double>(ceil_div(grid, problem.multiprocessors));
    const double cost = waves * chunk_cost(kernel.block_v);
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
