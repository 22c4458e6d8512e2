#include "registry.h"

namespace flash_qla {

#define FLASH_QLA_KERNEL(name, ...) void launch_##name(const ChunkForwardParams&, cudaStream_t);
#include "generated/kernels.def"
#undef FLASH_QLA_KERNEL

LaunchForward forward_launcher(int kernel) {
  static constexpr LaunchForward launchers[] = {
#define FLASH_QLA_KERNEL(name, ...) launch_##name,
#include "generated/kernels.def"
#undef FLASH_QLA_KERNEL
  };
  return launchers[kernel];
}

}  // namespace flash_qla
