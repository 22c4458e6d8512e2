// From a kernel's index in built_kernels() to its launcher.
#pragma once

#include <cuda_runtime.h>

#include "kernel_params.h"

namespace flash_qla {

using LaunchForward = void (*)(const ChunkForwardParams&, cudaStream_t);

LaunchForward forward_launcher(int kernel);

}  // namespace flash_qla
