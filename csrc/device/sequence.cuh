// Where a sequence lies, read from cu_seqlens on the device.
//
// The offsets are values, so the host never sees them. Whatever they hold, the results stay inside [0, tokens]: offsets that
// break the contract (descending, too large) give undefined numbers, never an access outside the tensors.
#pragma once

#include <cstdint>

#include "codes.h"

namespace fq {

__device__ __forceinline__ int offset_at(const void* offsets, int code, int i, int tokens) {
  const int64_t x = code == kOffsets32 ? static_cast<int64_t>(static_cast<const int32_t*>(offsets)[i])
                                       : static_cast<const int64_t*>(offsets)[i];
  return static_cast<int>(x < 0 ? 0 : (x > tokens ? tokens : x));
}

__device__ __forceinline__ int sequence_begin(const void* offsets, int code, int n, int tokens) {
  return code == kDense ? 0 : offset_at(offsets, code, n, tokens);
}

__device__ __forceinline__ int sequence_length(const void* offsets, int code, int n, int tokens) {
  if (code == kDense) return tokens;
  const int length = offset_at(offsets, code, n + 1, tokens) - offset_at(offsets, code, n, tokens);
  return length > 0 ? length : 0;
}

// A call may split sequences into parts (csrc/partition.h has the table, four numbers a part). Without a table, part i is all of
// sequence i. Parts beyond the last one have sequence -1 and no tokens.
__device__ __forceinline__ int part_sequence(const int* parts, int split, int i) {
  return !split ? i : i < 0 || parts[4 * i] < 0 ? 0 : parts[4 * i];
}
// The part whose end goes to `slot`, or -1: no such part, or a first one, which needs no transfer matrix. Slot numbers follow the
// parts in the table.
__device__ __forceinline__ int part_of_slot(const int* parts, int part_count, int slot, int transfer) {
  const int part = parts[4 * part_count + slot];
  return part >= 0 && transfer && parts[4 * part + 3] >> 1 < 0 ? -1 : part;
}
__device__ __forceinline__ int part_begin(const int* parts, int split, int i) { return split && i >= 0 ? parts[4 * i + 1] : 0; }
__device__ __forceinline__ int part_length(const int* parts, int split, int i, int whole) {
  return !split ? whole : i < 0 ? 0 : parts[4 * i + 2];
}
// The slot of the part before, whose end is where this one starts; -1 for the first.
__device__ __forceinline__ int part_previous(const int* parts, int split, int i) {
  return split && i >= 0 ? parts[4 * i + 3] >> 1 : -1;
}
// Whether a sequence ends with this part.
__device__ __forceinline__ int part_is_last(const int* parts, int split, int i) { return split ? parts[4 * i + 3] & 1 : 1; }

// Chunks of all sequences before sequence n, in order. Every warp computes it for itself; call it with whole warps.
__device__ __forceinline__ int chunks_before(const void* offsets, int code, int n, int tokens) {
  constexpr int kChunk = 64;
  if (code == kDense) return n * ((tokens + kChunk - 1) / kChunk);
  int chunks = 0;
  for (int i = threadIdx.x % 32; i < n; i += 32)
    chunks += (sequence_length(offsets, code, i, tokens) + kChunk - 1) / kChunk;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) chunks += __shfl_xor_sync(0xffffffffu, chunks, d);
  return chunks;
}

// Zeroes the rows of a [tokens, ...] output that no sequence covers: before the first offset and from the last one on. `sharers`
// blocks share the rows out, of which this is number `share`; `bytes` (a multiple of 4) are written per row.
__device__ __forceinline__ void zero_outside(const void* offsets, int code, int share, int sharers, int sequences, int tokens,
                                             void* base, int bytes, int64_t row_bytes, int tid, int threads) {
  if (code == kDense) return;
  const int head = offset_at(offsets, code, 0, tokens);
  const int tail = offset_at(offsets, code, sequences, tokens);
  const int64_t outside = static_cast<int64_t>(head) + (tokens - tail);
  const int words = bytes / 4;
  for (int64_t r = share; r < outside; r += sharers) {
    const int64_t row = r < head ? r : tail + (r - head);
    auto* out = reinterpret_cast<uint32_t*>(static_cast<char*>(base) + row * row_bytes);
    for (int w = tid; w < words; w += threads) out[w] = 0;
  }
}

}  // namespace fq
