// pybind11 binding of the argument checks for pytest. Not part of the shipped library.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "../checks.h"

namespace py = pybind11;
using namespace flash_qla;

namespace {

TensorArg make_tensor(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                      DeviceType device_type, int device_index) {
  if (sizes.size() != strides.size()) throw std::invalid_argument("sizes and strides differ in length");
  TensorArg x;
  x.defined = true;
  x.dtype = dtype;
  x.rank = static_cast<int>(sizes.size());
  const size_t kept = std::min<size_t>(sizes.size(), kMaxRank);
  std::copy_n(sizes.begin(), kept, x.sizes.begin());
  std::copy_n(strides.begin(), kept, x.strides.begin());
  x.device_type = device_type;
  x.device_index = device_index;
  return x;
}

ForwardArgs make_forward(const TensorArg& q, const TensorArg& k, const TensorArg& v, const TensorArg& g,
                         const TensorArg& beta, const TensorArg& initial_state, const TensorArg& cu_seqlens,
                         std::optional<double> scale, bool head_first, bool state_v_first) {
  ForwardArgs a;
  a.q = q, a.k = k, a.v = v, a.g = g, a.beta = beta;
  a.initial_state = initial_state, a.cu_seqlens = cu_seqlens;
  a.has_scale = scale.has_value(), a.scale = scale.value_or(0.0);
  a.head_first = head_first, a.state_v_first = state_v_first;
  return a;
}

}  // namespace

PYBIND11_MODULE(flash_qla_checks, m) {
  m.doc() = "The argument checks of csrc/checks.cpp.";
  py::enum_<DType>(m, "DType")
      .value("fp32", DType::fp32)
      .value("bf16", DType::bf16)
      .value("fp16", DType::fp16)
      .value("fp64", DType::fp64)
      .value("int8", DType::int8)
      .value("int16", DType::int16)
      .value("int32", DType::int32)
      .value("int64", DType::int64)
      .value("uint8", DType::uint8)
      .value("boolean", DType::boolean)
      .value("complex64", DType::complex64)
      .value("complex128", DType::complex128)
      .value("other", DType::other);
  py::enum_<DeviceType>(m, "DeviceType")
      .value("cpu", DeviceType::cpu)
      .value("cuda", DeviceType::cuda)
      .value("meta", DeviceType::meta)
      .value("other", DeviceType::other);
  py::class_<TensorArg>(m, "TensorArg")
      .def(py::init<>(), "An argument that was not given.")
      .def(py::init(&make_tensor), py::arg("dtype"), py::arg("sizes"), py::arg("strides"), py::arg("device_type"),
           py::arg("device_index"));
  py::class_<HeadConfig>(m, "HeadConfig")
      .def(py::init<int64_t, int64_t, DType>(), py::arg("K"), py::arg("V"), py::arg("dtype"));
  py::class_<ForwardArgs>(m, "ForwardArgs")
      .def(py::init(&make_forward), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("g"), py::arg("beta"),
           py::arg("initial_state"), py::arg("cu_seqlens"), py::arg("scale"), py::arg("head_first"),
           py::arg("state_v_first"));

  // ForwardArgs only views gate_domain, so it is set where the Python string is alive.
  m.def(
      "check_forward",
      [](ForwardArgs a, const std::string& gate_domain, const std::vector<HeadConfig>& built) {
        a.gate_domain = gate_domain;
        return check_forward(a, built);
      },
      py::arg("args"), py::arg("gate_domain"), py::arg("built"));
  m.def(
      "check_backward",
      [](ForwardArgs a, const std::string& gate_domain, const TensorArg& A, const TensorArg& dout, const TensorArg& dht,
         const std::vector<HeadConfig>& built) {
        a.gate_domain = gate_domain;
        return check_backward({a, A, dout, dht}, built);
      },
      py::arg("args"), py::arg("gate_domain"), py::arg("A"), py::arg("dout"), py::arg("dht"), py::arg("built"));
}
