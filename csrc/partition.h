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
// The table, int32:  parts  [part_count, 4]  sequence (-1: no part), first token in it, tokens,
//                                          2 x slot of the part before (-1: none) + whether it is the sequence's last
//                    slots  [slots]          the part whose end the slot holds, or -1; a sequence's slots are neighbours, in order
//                    chains [slots, 2]       first slot and number of slots of each split sequence; no slots: no sequence
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
  static constexpr float kForwardBlock = 9.0f, kForwardChunk = 3.2f;  // a block of chunk_fwd, and each of its chunks
  static constexpr float kEndsBlock = 6.0f, kEndsChunk = 2.05f;       // of chunk_ends
  static constexpr float kScan = 5.0f, kScanStep = 2.2f;              // the scan, and each M S + N
  static constexpr float kTable = 9.0f;                               // making the table, and the gaps between launches

  // A pass of `blocks` blocks on `multiprocessors`, one block on each, with `chunks` chunks together and `longest` in the longest.
  FLASH_QLA_HOST_DEVICE static float pass(float blocks, float longest, float chunks, float multiprocessors, float block, float chunk) {
    const float waves = static_cast<float>(static_cast<int64_t>((blocks + multiprocessors - 1) / multiprocessors));
    const float full = waves * (block + longest * chunk);
    const float packed = (blocks * block + chunks * chunk) / multiprocessors + 0.5f * (block + longest * chunk);
    const float least = block + longest * chunk, time = full < packed ? full : packed;
    return time > least ? time : least;
  }

  // chunks: of all sequences; longest: chunks of the longest part; parts: all; end_blocks and end_chunks: of chunk_ends, both per head;
  // chain: most slots of a sequence.
  FLASH_QLA_HOST_DEVICE static float total(float chunks, float longest, float parts, float end_blocks, float end_chunks, float chain,
                                           float heads, float multiprocessors) {
    float cost = pass(parts * heads, longest, chunks * heads, multiprocessors, kForwardBlock, kForwardChunk);
    if (chain > 0)
      cost += kTable + kScan + kScanStep * (chain - 1) +
              pass(end_blocks * heads, longest, end_chunks * heads, multiprocessors, kEndsBlock, kEndsChunk);
    return cost;
  }
};

// One candidate, for one sequence: parts of at most `limit` chunks.
FLASH_QLA_HOST_DEVICE inline int parts_of(int chunks, int limit) { return chunks > limit ? (chunks + limit - 1) / limit : 1; }

// The candidates are limits of ceil(longest / k) chunks, k = 1 (no split) to kMostParts.
constexpr int kMostParts = 64;

// The table is made by one block, in time proportional to the sequences: about 10 us for this many. More fill the card anyway.
constexpr int64_t kMostSplitSequences = 1024;

}  // namespace flash_qla
