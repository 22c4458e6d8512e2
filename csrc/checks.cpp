#include "checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <set>
#include <tuple>

namespace flash_qla {

namespace {

constexpr int64_t kChunk = 64;

struct Shape {
  int rank;
  std::array<int64_t, kMaxRank> sizes;
};

std::string number(int64_t x) { return std::to_string(x); }

std::string dtype_name(DType dtype) {
  switch (dtype) {
    case DType::fp32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::fp16: return "float16";
    case DType::fp64: return "float64";
    case DType::int8: return "int8";
    case DType::int16: return "int16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::uint8: return "uint8";
    case DType::boolean: return "bool";
    case DType::complex64: return "complex64";
    case DType::complex128: return "complex128";
    case DType::other: break;
  }
  return "another dtype";
}

std::string device_name(const TensorArg& x) {
  switch (x.device_type) {
    case DeviceType::cpu: return "cpu";
    case DeviceType::cuda: return "cuda:" + number(x.device_index);
    case DeviceType::meta: return "meta";
    case DeviceType::other: break;
  }
  return "another device";
}

std::string config_name(const HeadConfig& c) {
  return "K=" + number(c.K) + " V=" + number(c.V) + " " + dtype_name(c.dtype);
}

std::string shape_name(const std::array<int64_t, kMaxRank>& sizes, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text += (i ? ", " : "") + number(sizes[i]);
  return text + "]";
}

bool same_device(const TensorArg& a, const TensorArg& b) {
  return a.device_type == b.device_type && (a.device_type != DeviceType::cuda || a.device_index == b.device_index);
}

// Every helper returns "" when all is well; FLASH_QLA_TRY hands the first message up.
#define FLASH_QLA_TRY(expression)                       \
  do {                                                  \
    std::string message_ = (expression);                \
    if (!message_.empty()) return message_;             \
  } while (false)

std::string check_rank(const char* name, const TensorArg& x, int rank, const char* layout) {
  if (!x.defined) return std::string(name) + ": expected a torch.Tensor, got NoneType";
  if (x.rank == rank) return {};
  return std::string(name) + ": expected " + number(rank) + (rank > 1 ? " dimensions " : " dimension ") + layout +
         ", got " + number(x.rank);
}

std::string check_dtype_is_q(const char* name, const TensorArg& x, const TensorArg& q) {
  if (x.dtype == q.dtype) return {};
  return std::string(name) + ": expected q's dtype " + dtype_name(q.dtype) + ", got " + dtype_name(x.dtype);
}

std::string check_device(const char* name, const TensorArg& x, const TensorArg& q) {
  if (same_device(x, q)) return {};
  return std::string(name) + ": expected q's device " + device_name(q) + ", got " + device_name(x);
}

std::string check_shape(const char* name, const TensorArg& x, const Shape& expected, const char* layout) {
  if (std::equal(expected.sizes.begin(), expected.sizes.begin() + expected.rank, x.sizes.begin())) return {};
  return std::string(name) + ": expected shape " + shape_name(expected.sizes, expected.rank) + " (" + layout +
         "), got " + shape_name(x.sizes, x.rank);
}

// The stride of a dimension of one element, or of a tensor without elements, means nothing.
std::string check_last_stride(const char* name, const TensorArg& x) {
  const int last = x.rank - 1;
  if (x.strides[last] == 1 || x.sizes[last] <= 1) return {};
  for (int i = 0; i < x.rank; ++i)
    if (x.sizes[i] == 0) return {};
  return std::string(name) + ": expected a contiguous last dimension, got stride " + number(x.strides[last]);
}

std::string check_options(const ForwardArgs& a) {
  if (a.head_first) return "head_first: expected False (tensors are laid out [B, T, H, D]), got True";
  if (a.gate_domain != "log" && a.gate_domain != "linear")
    return "gate_domain: expected \"log\" or \"linear\", got \"" + std::string(a.gate_domain) + "\"";
  if (a.has_scale && !(std::fabs(a.scale) <= std::numeric_limits<float>::max())) {
    char text[40] = "nan";  // printf may write a NaN with its sign, Python never does
    if (!std::isnan(a.scale)) std::snprintf(text, sizeof text, "%g", a.scale);
    return std::string("scale: expected a number that float32 can hold, got ") + text;
  }
  return {};
}

std::string check_cu_seqlens(const TensorArg& x, const TensorArg& q) {
  FLASH_QLA_TRY(check_rank("cu_seqlens", x, 1, "[N + 1]"));
  if (x.dtype != DType::int32 && x.dtype != DType::int64)
    return "cu_seqlens: expected int32 or int64, got " + dtype_name(x.dtype);
  FLASH_QLA_TRY(check_device("cu_seqlens", x, q));
  if (x.sizes[0] < 1) return "cu_seqlens: expected 1 or more offsets, got 0";
  if (x.sizes[0] > 1 && x.strides[0] != 1)
    return "cu_seqlens: expected contiguous offsets, got stride " + number(x.strides[0]);
  if (q.sizes[0] != 1) return "q: expected batch size 1 with cu_seqlens, got " + number(q.sizes[0]);
  return {};
}

const char* state_layout(bool v_first) { return v_first ? "[N, H_v, V, K]" : "[N, H_v, K, V]"; }

Shape state_shape(const ForwardArgs& a) {
  const int64_t n = a.cu_seqlens.defined ? a.cu_seqlens.sizes[0] - 1 : a.q.sizes[0];
  const int64_t k = a.q.sizes[3], v = a.v.sizes[3];
  return {4, {n, a.v.sizes[2], a.state_v_first ? v : k, a.state_v_first ? k : v}};
}

std::string check_state(const char* name, const TensorArg& x, const ForwardArgs& a, bool bf16_allowed) {
  FLASH_QLA_TRY(check_rank(name, x, 4, state_layout(a.state_v_first)));
  if (x.dtype != DType::fp32 && !(bf16_allowed && x.dtype == DType::bf16))
    return std::string(name) + (bf16_allowed ? ": expected float32 or bfloat16, got " : ": expected float32, got ") +
           dtype_name(x.dtype);
  FLASH_QLA_TRY(check_device(name, x, a.q));
  return check_shape(name, x, state_shape(a), state_layout(a.state_v_first));
}

std::string check_config(const ForwardArgs& a, const std::vector<HeadConfig>& built) {
  const HeadConfig wanted{a.q.sizes[3], a.v.sizes[3], a.q.dtype};
  for (const HeadConfig& c : built)
    if (c.K == wanted.K && c.V == wanted.V && c.dtype == wanted.dtype) return {};
  std::set<std::tuple<int64_t, int64_t, std::string>> order;
  for (const HeadConfig& c : built) order.emplace(c.K, c.V, dtype_name(c.dtype));
  std::string names;
  for (const auto& [k, v, dtype] : order)
    names += (names.empty() ? "K=" : ", K=") + number(k) + " V=" + number(v) + " " + dtype;
  return "q, k, v: expected one of the built configurations (" + (names.empty() ? "none" : names) + "), got " +
         config_name(wanted) + "; FLASH_QLA_CONFIGS chooses what `pip install .` builds";
}

std::string check_heads(const char* name, const TensorArg& x) {
  if (x.sizes[2] < 1) return std::string(name) + ": expected 1 or more heads, got 0";
  if (x.sizes[3] < 1) return std::string(name) + ": expected a head dimension of 1 or more, got 0";
  return {};
}

std::string check_gate_type(const char* name, const TensorArg& x, const TensorArg& q) {
  FLASH_QLA_TRY(check_rank(name, x, 3, "[B, T, H_v]"));
  if (x.dtype != DType::fp32 && x.dtype != DType::bf16 && x.dtype != DType::fp16)
    return std::string(name) + ": expected float32, bfloat16 or float16, got " + dtype_name(x.dtype);
  return check_device(name, x, q);
}

std::string check_like_q(const char* name, const TensorArg& x, const TensorArg& q, const char* layout) {
  FLASH_QLA_TRY(check_rank(name, x, 4, layout));
  FLASH_QLA_TRY(check_dtype_is_q(name, x, q));
  return check_device(name, x, q);
}

}  // namespace

std::string check_forward(const ForwardArgs& a, const std::vector<HeadConfig>& built) {
  FLASH_QLA_TRY(check_options(a));
  FLASH_QLA_TRY(check_rank("q", a.q, 4, "[B, T, H_k, K]"));
  if (a.q.dtype != DType::bf16 && a.q.dtype != DType::fp16)
    return "q: expected bfloat16 or float16, got " + dtype_name(a.q.dtype);
  FLASH_QLA_TRY(check_like_q("k", a.k, a.q, "[B, T, H_k, K]"));
  FLASH_QLA_TRY(check_like_q("v", a.v, a.q, "[B, T, H_v, V]"));
  FLASH_QLA_TRY(check_gate_type("g", a.g, a.q));
  FLASH_QLA_TRY(check_gate_type("beta", a.beta, a.q));

  FLASH_QLA_TRY(check_heads("q", a.q));
  FLASH_QLA_TRY(check_heads("v", a.v));
  FLASH_QLA_TRY(check_shape("k", a.k, {4, a.q.sizes}, "q's shape"));
  if (a.v.sizes[0] != a.q.sizes[0] || a.v.sizes[1] != a.q.sizes[1])
    return "v: expected shape [" + number(a.q.sizes[0]) + ", " + number(a.q.sizes[1]) + ", H_v, V] (B and T of q)" +
           ", got " + shape_name(a.v.sizes, a.v.rank);
  if (a.v.sizes[2] % a.k.sizes[2] != 0)
    return "k: expected a number of heads that divides v's " + number(a.v.sizes[2]) + ", got " + number(a.k.sizes[2]);
  const Shape gate{3, a.v.sizes};
  FLASH_QLA_TRY(check_shape("g", a.g, gate, "[B, T, H_v]"));
  FLASH_QLA_TRY(check_shape("beta", a.beta, gate, "[B, T, H_v]"));

  if (a.cu_seqlens.defined) FLASH_QLA_TRY(check_cu_seqlens(a.cu_seqlens, a.q));
  if (a.initial_state.defined) FLASH_QLA_TRY(check_state("initial_state", a.initial_state, a, true));
  FLASH_QLA_TRY(check_last_stride("q", a.q));
  FLASH_QLA_TRY(check_last_stride("k", a.k));
  FLASH_QLA_TRY(check_last_stride("v", a.v));
  if (a.q.device_type == DeviceType::cuda) return check_config(a, built);
  return {};
}

std::string check_backward(const BackwardArgs& args, const std::vector<HeadConfig>& built) {
  const ForwardArgs& f = args.forward;
  FLASH_QLA_TRY(check_forward(f, built));
  if (args.A.defined) {
    FLASH_QLA_TRY(check_like_q("A", args.A, f.q, "[B, T, H_v, 64]"));
    const Shape expected{4, {f.v.sizes[0], f.v.sizes[1], f.v.sizes[2], kChunk}};
    FLASH_QLA_TRY(check_shape("A", args.A, expected, "[B, T, H_v, 64]"));
  }
  if (args.dout.defined) {
    FLASH_QLA_TRY(check_like_q("do", args.dout, f.q, "[B, T, H_v, V]"));
    FLASH_QLA_TRY(check_shape("do", args.dout, {4, f.v.sizes}, "[B, T, H_v, V]"));
  }
  if (args.dht.defined) FLASH_QLA_TRY(check_state("dht", args.dht, f, false));
  return {};
}

#undef FLASH_QLA_TRY

}  // namespace flash_qla
