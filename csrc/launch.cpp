#include "launch.h"

namespace flash_qla {

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda("cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)",
               cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || pointer == nullptr)
      throw std::runtime_error("flash_qla: the CUDA driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or newer is needed");
    return reinterpret_cast<EncodeTiled>(pointer);
  }();
  return function;
}

void throw_cuda_error(const char* what, cudaError_t error) {
  throw std::runtime_error(std::string("flash_qla: ") + what + " failed: " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

void throw_tensor_map_error(const char* tensor, CUresult result) {
  throw std::runtime_error(std::string("flash_qla: cuTensorMapEncodeTiled refused tensor ") + tensor + ": CUresult " +
                           std::to_string(static_cast<int>(result)));
}

}  // namespace flash_qla
