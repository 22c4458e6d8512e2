// Argument checks of the ops, on plain structs: no torch, no CUDA, so that pytest drives them anywhere
// (csrc/bindings/checks_py.cpp). Order and wording are those of flash_qla/_checks.py, character for character.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flash_qla {

constexpr int kMaxRank = 5;

// The short names are those of generated/kernels.def.
enum class DType { fp32, bf16, fp16, fp64, int8, int16, int32, int64, uint8, boolean, complex64, complex128, other };

enum class DeviceType { cpu, cuda, meta, other };

// What a check sees of a tensor. `rank` is the true rank; sizes and strides (in elements) hold the first kMaxRank
// entries.
struct TensorArg {
  bool defined = false;
  DType dtype = DType::other;
  int rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};
  DeviceType device_type = DeviceType::cpu;
  int device_index = 0;
};

struct ForwardArgs {
  TensorArg q;     // [B, T, H_k, K]
  TensorArg k;     // [B, T, H_k, K]
  TensorArg v;     // [B, T, H_v, V]
  TensorArg g;     // [B, T, H_v]
  TensorArg beta;  // [B, T, H_v]
  TensorArg initial_state;  // [N, H_v, K, V], or [N, H_v, V, K] with state_v_first; may be undefined
  TensorArg cu_seqlens;     // [N + 1]; may be undefined
  bool has_scale = false;
  double scale = 0.0;  // read if has_scale
  bool head_first = false;
  bool state_v_first = false;
  std::string_view gate_domain = "log";
};

struct BackwardArgs {
  ForwardArgs forward;
  TensorArg A;    // [B, T, H_v, 64]; may be undefined
  TensorArg dout; // the argument called "do", like v; may be undefined
  TensorArg dht;  // like the final state; may be undefined
};

// Head dimensions and dtype that have compiled kernels.
struct HeadConfig {
  int64_t K, V;
  DType dtype;
};

// An empty string if the arguments keep the contract, else the message of the first violation. Only CUDA tensors are
// held to `built`. Nothing is allocated when all is well: this runs on every call.
std::string check_forward(const ForwardArgs& args, const std::vector<HeadConfig>& built);
std::string check_backward(const BackwardArgs& args, const std::vector<HeadConfig>& built);

}  // namespace flash_qla
