#include "planner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "partition.h"

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

int64_t split_slots(const ForwardProblem& problem) {
  if (!problem.may_split || problem.train || problem.k != problem.v || problem.sequences > kMostSplitSequences) return 0;
  const float heads = static_cast<float>(problem.heads_v), card = static_cast<float>(problem.multiprocessors);
  // Dense batches have equal sequences. Packed ones may be one long sequence and N - 1 empty ones.
  const int64_t count = problem.varlen ? 1 : problem.sequences;
  const int64_t length = ceil_div(problem.tokens, kChunkTokens);
  const float chunks = static_cast<float>(length * count);
  const auto cost = [&](int64_t parts) {
    const float longest = static_cast<float>(ceil_div(length, parts)), ends = static_cast<float>(2 * (parts - 1) - 1);
    return SplitCost::total(chunks, longest, static_cast<float>(parts * count), parts > 1 ? ends * count : 0.0f,
                            parts > 1 ? ends * longest * count : 0.0f, static_cast<float>(parts - 1), heads, card);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= kMostParts && parts <= length; ++parts)
    if (cost(parts) < cost(best)) best = parts;
  // Of packed sequences the lengths may be even, and then the passes that find nothing to do are lost time: the worst case has to
  // gain a quarter. Several long sequences need more slots than one, so packed batches get twice as many.
  const bool unsure = problem.varlen && problem.sequences > 1;
  if (cost(1) < (unsure ? 1.25f : 1.02f) * cost(best)) return 0;
  return (best - 1) * count * (unsure ? 2 : 1);
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
  plan.part_count = problem.sequences;
  if (const int64_t slots = split_slots(problem); slots > 0) {
    for (size_t i = 0; i < kernels.size(); ++i) {
      const KernelInfo& kernel = kernels[i];
      if (std::strcmp(kernel.kernel, "chunk_ends") == 0 && kernel.k == problem.k && kernel.v == problem.v &&
          kernel.dtype == problem.dtype)
        plan.ends_kernel = static_cast<int>(i);
    }
    if (plan.ends_kernel >= 0) {
      plan.slots = slots;
      plan.part_count += slots;
      plan.grid = plan.part_count * problem.heads_v;
    }
  }
  if (plan.kernel < 0) throw std::invalid_argument("no forward kernel is built for these head dimensions and this dtype");
  if (plan.grid > std::numeric_limits<int32_t>::max())
    throw std::length_error("the call needs more than 2^31 - 1 thread blocks; split the batch");
  return plan;
}

}  // namespace flash_qla
