// Splitting sequences over the card, exactly. A sequence of few heads would run on as many multiprocessors as it has heads; cut into
// parts, it runs on more, at the price of a pass that finds the state each part starts with:
//
//   1. chunk_ends  for every part but a sequence's last one, by itself: N, what the part adds to no state at all, and the transfer
//                  matrix M with which the state after the part is M S + N. A first part starts from its true state and needs no M.
//   2. the scan    S of part i + 1 = M S + N of part i, in order, in fp32.
//   3. chunk_fwd   every part from its state.
//
// Which sequences are split, and where, is decided on the device, from cu_seqlens; the host bounds the number of parts from shapes.
//
// The table, int32:  parts  [part_count, 4]  sequence (-1: no part), first token in it, tokens, slot of the part before or -1
//                    slots  [slots]          the part whose end the slot holds, or -1; a sequence's slots are neighbours, in order
//                    chains [slots]          how many slots the sequence has whose first slot this is, else 0
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASH_QLA_HOST_DEVICE __host__ __device__
#else
#define FLASH_QLA_HOST_DEVICE
#endif

namespace flash_qla {

// What a split would cost, in microseconds, from sums over all sequences. Constants measured on an H200 (docs/design-notes.md).
struct SplitCost {
  static constexpr float kForwardChunk = 3.4f;  // a chunk of chunk_fwd in one block
  static constexpr float kEndsChunk = 2.3f;     // of chunk_ends
  static constexpr float kScanStep = 2.0f;      // one M S + N
  static constexpr float kPasses = 22.0f;       // three more launches, and a pass more to fill and drain

  // A pass over `blocks` equal pieces of work on `multiprocessors`, one block on each, of which the longest has `longest` chunks.
  FLASH_QLA_HOST_DEVICE static float pass(float blocks, float longest, float chunks, float multiprocessors) {
    const float waves = static_cast<float>(static_cast<int64_t>((blocks + multiprocessors - 1) / multiprocessors));
    const float full = waves * longest, packed = chunks / multiprocessors + 0.5f * longest;
    const float time = full < packed ? full : packed;
    return time > longest ? time : longest;
  }

  // chunks: of all sequences; longest: chunks of the longest part; parts: all; end_blocks and end_chunks: of chunk_ends, both per head;
  // chain: most slots of a sequence.
  FLASH_QLA_HOST_DEVICE static float total(float chunks, float longest, float parts, float end_blocks, float end_chunks, float chain,
                                           float heads, float multiprocessors) {
    float cost = kForwardChunk * pass(parts * heads, longest, chunks * heads, multiprocessors);
    if (chain > 0)
      cost += kPasses + kScanStep * (chain - 1) + kEndsChunk * pass(end_blocks * heads, longest, end_chunks * heads, multiprocessors);
    return cost;
  }
};

// One candidate, for one sequence: parts of at most `limit` chunks.
FLASH_QLA_HOST_DEVICE inline int parts_of(int chunks, int limit) { return chunks > limit ? (chunks + limit - 1) / limit : 1; }

// The candidates are limits of ceil(longest / k) chunks, k = 1 (no split) to kMostParts.
constexpr int kMostParts = 64;

}  // namespace flash_qla
