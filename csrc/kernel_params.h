// What a launch passes to a kernel. Field names are the parameter names in codegen/kernels/: the generated launchers read
// these structs by name, so a missing field is a compile error.
#pragma once

#include <cstdint>

namespace flash_qla {

// Strides are in elements. *_code fields take the values of device/codes.h.
struct ChunkForwardParams {
  void* q = nullptr;              // [batch, tokens, heads_k, K], last dimension contiguous
  void* k = nullptr;              // [batch, tokens, heads_k, K]
  void* v = nullptr;              // [batch, tokens, heads_v, V]
  void* o = nullptr;              // [batch, tokens, heads_v, V], contiguous
  void* g = nullptr;              // [batch, tokens, heads_v], dtype g_code
  void* beta = nullptr;           // [batch, tokens, heads_v], dtype beta_code
  void* cu_seqlens = nullptr;     // [sequences + 1], or null when cu_code is kDense
  void* initial_state = nullptr;  // [sequences, heads_v, K, V] by strides h0_*, dtype initial_code
  void* final_state = nullptr;    // [states, heads_v, K, V] fp32 by strides s_*, written if write_final
  void* parts = nullptr;          // the table of csrc/partition.h if split, else null
  void* ends = nullptr;           // [slots, 2, heads_v, K, V] fp32 if split, else null
  void* g_out = nullptr;          // chunk_fwd_train: [batch, tokens, heads_v] fp32
  void* a_out = nullptr;          // chunk_fwd_train: [batch, tokens, heads_v, 64]
  void* h_out = nullptr;          // chunk_fwd_train: [h_rows, heads_v, K, V], written if write_h

  int64_t batch = 0, tokens = 0, heads_k = 0, heads_v = 0;
  int64_t sequences = 0, states = 0, h_rows = 0;
  int64_t part_count = 0;  // parts of sequences, rows of the table; sequences if not split
  int64_t slots = 0;       // parts whose end another part starts from
  int64_t group = 1;       // heads_v / heads_k
  float scale = 1.0f;

  int g_code = 0, beta_code = 0, cu_code = 0, initial_code = 0;
  int linear_gate = 0, l2norm = 0, write_final = 0, write_h = 0, split = 0;

  int64_t q_sb = 0, q_st = 0, q_sh = 0;
  int64_t k_sb = 0, k_st = 0, k_sh = 0;
  int64_t v_sb = 0, v_st = 0, v_sh = 0;
  int64_t g_sb = 0, g_st = 0, g_sh = 0;
  int64_t beta_sb = 0, beta_st = 0, beta_sh = 0;
  int64_t h0_sn = 0, h0_sh = 0, h0_sk = 0, h0_sv = 0;
  int64_t s_sn = 0, s_sh = 0, s_sk = 0, s_sv = 0;
};

}  // namespace flash_qla
