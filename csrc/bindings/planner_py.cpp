// The planner for pytest: every dispatch decision without a GPU. Built by the tests, not part of the library.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "planner.h"

namespace py = pybind11;
using namespace flash_qla;

namespace {

const char* dtype_name(DType dtype) {
  if (dtype == DType::bf16) return "bf16";
  if (dtype == DType::fp16) return "fp16";
  throw std::invalid_argument("kernels exist for bf16 and fp16");
}

DType dtype_of(const std::string& name) {
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::fp16;
  throw std::invalid_argument("expected bf16 or fp16, got " + name);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("CHUNK") = kChunkTokens;
  m.def("kernels", [] {
    py::list rows;
    for (const KernelInfo& k : built_kernels()) {
      py::dict row;
      row["name"] = k.name;
      row["kernel"] = k.kernel;
      row["k"] = k.k;
      row["v"] = k.v;
      row["dtype"] = dtype_name(k.dtype);
      row["block_v"] = k.block_v;
      row["threads"] = k.threads;
      row["shared_bytes"] = k.shared_bytes;
      rows.append(row);
    }
    return rows;
  });
  m.def("state_rows_per_batch", &state_rows_per_batch, py::arg("tokens"), py::arg("sequences"), py::arg("varlen"));
  m.def(
      "plan_forward",
      [](int64_t batch, int64_t tokens, int64_t sequences, int64_t heads_v, int64_t k, int64_t v, const std::string& dtype,
         bool varlen, bool train, int multiprocessors, bool may_split) {
        const ForwardPlan plan = plan_forward(
            {batch, tokens, sequences, heads_v, k, v, dtype_of(dtype), varlen, train, multiprocessors, may_split}, built_kernels());
        py::dict out;
        out["kernel"] = built_kernels()[plan.kernel].name;
        out["block_v"] = built_kernels()[plan.kernel].block_v;
        out["grid"] = plan.grid;
        out["ends_kernel"] = plan.ends_kernel < 0 ? py::object(py::none()) : py::cast(built_kernels()[plan.ends_kernel].name);
        out["part_count"] = plan.part_count;
        out["slots"] = plan.slots;
        return out;
      },
      py::kw_only(), py::arg("batch"), py::arg("tokens"), py::arg("sequences"), py::arg("heads_v"), py::arg("k"), py::arg("v"),
      py::arg("dtype"), py::arg("varlen"), py::arg("train"), py::arg("multiprocessors"),
      py::arg("may_split") = true);
}
