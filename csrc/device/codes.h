// Run-time codes that the host passes to the kernels, shared by both sides.
#pragma once

namespace fq {

// How the numbers behind a pointer of unknown dtype are stored; kAbsent also says "there is no such tensor".
enum NumberCode : int { kAbsent = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

// How sequences are laid out: one per batch row, or packed with int32 or int64 offsets.
enum OffsetsCode : int { kDense = 0, kOffsets32 = 1, kOffsets64 = 2 };

}  // namespace fq
