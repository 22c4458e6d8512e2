// The ops on CUDA tensors: torch's stable C interface on one side, checks, planner and launchers on the other.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "checks.h"
#include "device/codes.h"
#include "launch.h"
#include "partition_kernels.h"
#include "planner.h"
#include "registry.h"

// A torch without CUDA does not have this symbol; the library must load there all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace flash_qla {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

DType to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return DType::fp32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::fp16;
    case ScalarType::Double: return DType::fp64;
    case ScalarType::Char: return DType::int8;
    case ScalarType::Short: return DType::int16;
    case ScalarType::Int: return DType::int32;
    case ScalarType::Long: return DType::int64;
    case ScalarType::Byte: return DType::uint8;
    case ScalarType::Bool: return DType::boolean;
    case ScalarType::ComplexFloat: return DType::complex64;
    case ScalarType::ComplexDouble: return DType::complex128;
    default: return DType::other;
  }
}

int number_code(ScalarType type) {
  return type == ScalarType::Float ? fq::kFloat32 : type == ScalarType::BFloat16 ? fq::kBFloat16 : fq::kFloat16;
}

TensorArg describe(const Tensor& t) {
  TensorArg arg;
  arg.defined = true;
  arg.dtype = to_dtype(t.scalar_type());
  arg.rank = static_cast<int>(t.dim());
  const auto sizes = t.sizes(), strides = t.strides();
  for (int i = 0; i < arg.rank && i < static_cast<int>(arg.sizes.size()); ++i) {
    arg.sizes[i] = sizes[i];
    arg.strides[i] = strides[i];
  }
  arg.device_type = t.is_cuda() ? DeviceType::cuda : t.is_cpu() ? DeviceType::cpu : DeviceType::other;
  arg.device_index = t.get_device_index();
  return arg;
}

TensorArg describe(const std::optional<Tensor>& t) { return t ? describe(*t) : TensorArg{}; }

struct DeviceFacts {
  int major = 0, minor = 0, multiprocessors = 0;
};

DeviceFacts device_facts(int device) {
  DeviceFacts facts;
  check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&facts.major, cudaDevAttrComputeCapabilityMajor, device));
  check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&facts.minor, cudaDevAttrComputeCapabilityMinor, device));
  check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  if (facts.major != 9)
    throw std::runtime_error("q: expected a tensor on a GPU of compute capability 9.0 (Hopper), got one of " +
                             std::to_string(facts.major) + "." + std::to_string(facts.minor));
  return facts;
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("flash_qla: this torch cannot tell the current CUDA stream; it was built without CUDA");
  return static_cast<cudaStream_t>(stream);
}

Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, dtype);
}

// A tile load needs a 16-byte aligned base and strides that are multiples of 16 bytes and not 0. Projections and packed views
// have them; a tensor that does not is copied first.
Tensor loadable(const Tensor& t) {
  bool fits = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int i = 0; i < 3; ++i) fits = fits && (t.size(i) <= 1 || (t.stride(i) > 0 && t.stride(i) * 2 % 16 == 0));
  fits = fits && (t.size(3) <= 1 || t.stride(3) == 1);
  return fits ? t : torch::stable::contiguous(torch::stable::clone(t));
}

// The stride of a dimension of size 1 is never used, but the tensor map wants a legal one.
int64_t map_stride(const Tensor& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) : (t.size(3) + 7) / 8 * 8; }

struct ForwardCall {
  const Tensor &q, &k, &v, &g, &beta;
  std::optional<double> scale;
  const std::optional<Tensor>& initial_state;
  bool output_final_state, use_qk_l2norm_in_kernel;
  const std::optional<Tensor>& cu_seqlens;
  bool head_first, state_v_first, auto_cp;
  const std::string& gate_domain;
  bool train, output_h;
};

struct ForwardResult {
  Tensor g_out, A, o, h, final_state;
};

// The state after no tokens at all: what came in, or zero.
void copy_initial_state(Tensor& final_state, const std::optional<Tensor>& initial_state) {
  if (initial_state)
    torch::stable::copy_(final_state, *initial_state);
  else
    torch::stable::zero_(final_state);
}

ForwardResult forward(const ForwardCall& call) {
  ForwardArgs args;
  args.q = describe(call.q);
  args.k = describe(call.k);
  args.v = describe(call.v);
  args.g = describe(call.g);
  args.beta = describe(call.beta);
  args.initial_state = describe(call.initial_state);
  args.cu_seqlens = describe(call.cu_seqlens);
  args.has_scale = call.scale.has_value();
  args.scale = call.scale.value_or(0.0);
  args.head_first = call.head_first;
  args.state_v_first = call.state_v_first;
  args.gate_domain = call.gate_domain;
  if (std::string message = check_forward(args, built_head_configs()); !message.empty()) throw std::runtime_error(message);

  const int device = call.q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const DeviceFacts facts = device_facts(device);

  const int64_t B = call.q.size(0), T = call.q.size(1), H_k = call.q.size(2), K = call.q.size(3);
  const int64_t H_v = call.v.size(2), V = call.v.size(3);
  const bool varlen = call.cu_seqlens.has_value();
  const int64_t N = varlen ? call.cu_seqlens->size(0) - 1 : B;
  const int64_t h_rows = state_rows_per_batch(T, N, varlen);
  const ScalarType dtype = call.q.scalar_type();

  ForwardResult out;
  out.o = empty(call.q, {B, T, H_v, V}, dtype);
  out.final_state = !call.output_final_state ? empty(call.q, {0}, ScalarType::Float)
                    : call.state_v_first     ? empty(call.q, {N, H_v, V, K}, ScalarType::Float)
                                             : empty(call.q, {N, H_v, K, V}, ScalarType::Float);
  if (call.train) {
    out.g_out = empty(call.q, {B, T, H_v}, ScalarType::Float);
    out.A = empty(call.q, {B, T, H_v, kChunkTokens}, dtype);
    out.h = call.output_h ? empty(call.q, {B, h_rows, H_v, K, V}, dtype) : empty(call.q, {0}, dtype);
  }

  if (B == 0 || T == 0 || H_v == 0 || N == 0) {
    torch::stable::zero_(out.o);
    if (call.train) {
      torch::stable::zero_(out.g_out);
      torch::stable::zero_(out.A);
      torch::stable::zero_(out.h);
    }
    if (call.output_final_state) copy_initial_state(out.final_state, call.initial_state);
    return out;
  }

  ForwardProblem problem{B, T, N, H_v, K, V, to_dtype(dtype), varlen, call.train, facts.multiprocessors, call.auto_cp};
  const ForwardPlan plan = plan_forward(problem, built_kernels());

  const Tensor q = loadable(call.q), k = loadable(call.k), v = loadable(call.v);
  ChunkForwardParams p;
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.o = out.o.data_ptr();
  p.g = call.g.data_ptr();
  p.beta = call.beta.data_ptr();
  p.batch = B;
  p.tokens = T;
  p.heads_k = H_k;
  p.heads_v = H_v;
  p.group = H_v / H_k;
  p.sequences = N;
  p.states = N;
  p.scale = static_cast<float>(call.scale ? *call.scale : 1.0 / std::sqrt(static_cast<double>(K)));
  p.g_code = number_code(call.g.scalar_type());
  p.beta_code = number_code(call.beta.scalar_type());
  p.linear_gate = call.gate_domain == "linear";
  p.l2norm = call.use_qk_l2norm_in_kernel;
  p.q_sb = map_stride(q, 0), p.q_st = map_stride(q, 1), p.q_sh = map_stride(q, 2);
  p.k_sb = map_stride(k, 0), p.k_st = map_stride(k, 1), p.k_sh = map_stride(k, 2);
  p.v_sb = map_stride(v, 0), p.v_st = map_stride(v, 1), p.v_sh = map_stride(v, 2);
  p.g_sb = call.g.stride(0), p.g_st = call.g.stride(1), p.g_sh = call.g.stride(2);
  p.beta_sb = call.beta.stride(0), p.beta_st = call.beta.stride(1), p.beta_sh = call.beta.stride(2);
  if (varlen) {
    p.cu_seqlens = call.cu_seqlens->data_ptr();
    p.cu_code = call.cu_seqlens->scalar_type() == ScalarType::Int ? fq::kOffsets32 : fq::kOffsets64;
  }
  const int key_dim = call.state_v_first ? 3 : 2, value_dim = call.state_v_first ? 2 : 3;
  if (call.initial_state) {
    const Tensor& h0 = *call.initial_state;
    p.initial_state = h0.data_ptr();
    p.initial_code = number_code(h0.scalar_type());
    p.h0_sn = h0.stride(0), p.h0_sh = h0.stride(1), p.h0_sk = h0.stride(key_dim), p.h0_sv = h0.stride(value_dim);
  }
  if (call.output_final_state) {
    const Tensor& ht = out.final_state;
    p.final_state = ht.data_ptr();
    p.write_final = 1;
    p.s_sn = ht.stride(0), p.s_sh = ht.stride(1), p.s_sk = ht.stride(key_dim), p.s_sv = ht.stride(value_dim);
  }
  if (call.train) {
    p.g_out = out.g_out.data_ptr();
    p.a_out = out.A.data_ptr();
    p.h_out = out.h.data_ptr();
    p.h_rows = B * h_rows;
    p.write_h = call.output_h;
  }
  const cudaStream_t stream = current_stream(device);
  p.part_count = plan.part_count;
  Tensor table, ends;
  if (plan.ends_kernel >= 0) {
    table = empty(call.q, {4 * plan.part_count + 3 * plan.slots}, ScalarType::Int);
    ends = empty(call.q, {plan.slots, 2, H_v, K, V}, ScalarType::Float);
    p.split = 1;
    p.slots = plan.slots;
    p.parts = table.data_ptr();
    p.ends = ends.data_ptr();
    PartitionParams split;
    split.cu_seqlens = p.cu_seqlens;
    split.cu_code = p.cu_code;
    split.sequences = static_cast<int>(N);
    split.tokens = static_cast<int>(T);
    split.heads = static_cast<int>(H_v);
    split.multiprocessors = facts.multiprocessors;
    split.part_count = static_cast<int>(plan.part_count);
    split.slots = static_cast<int>(plan.slots);
    split.table = static_cast<int*>(table.data_ptr());
    split.ends = static_cast<float*>(ends.data_ptr());
    launch_partition(split, stream);
    forward_launcher(plan.ends_kernel)(p, stream);
    launch_scan(split, static_cast<int>(K), stream);
  }
  forward_launcher(plan.kernel)(p, stream);
  return out;
}

std::tuple<Tensor, Tensor> chunk_gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                  const Tensor& beta, std::optional<double> scale,
                                                  std::optional<Tensor> initial_state, bool output_final_state,
                                                  bool use_qk_l2norm_in_kernel, std::optional<Tensor> cu_seqlens,
                                                  bool head_first, bool state_v_first, bool auto_cp,
                                                  std::string gate_domain) {
  ForwardResult out = forward({q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                               head_first, state_v_first, auto_cp, gate_domain, /*train=*/false, /*output_h=*/false});
  return {out.o, out.final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> chunk_gated_delta_rule_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, std::optional<double> scale,
    std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens, bool output_final_state, bool output_h,
    bool use_qk_l2norm_in_kernel, bool state_v_first, bool auto_cp, std::string gate_domain) {
  ForwardResult out = forward({q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                               /*head_first=*/false, state_v_first, auto_cp, gate_domain, /*train=*/true, output_h});
  return {out.g_out, out.A, out.o, out.h, out.final_state};
}

}  // namespace
}  // namespace flash_qla

STABLE_TORCH_LIBRARY(flash_qla, m) {
#define FLASH_QLA_OP(...) m.def(#__VA_ARGS__);
#include "ops.def"
#undef FLASH_QLA_OP
}

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  m.impl("chunk_gated_delta_rule", TORCH_BOX(&flash_qla::chunk_gated_delta_rule));
  m.impl("chunk_gated_delta_rule_fwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_fwd));
}
