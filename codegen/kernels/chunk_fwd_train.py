"""The training forward: like chunk_fwd, and stores what the backward pass reads: the gate in fp32, the inverse A, and the state at
each chunk start. One thread block carries the state of one (sequence, value head, slice of V) through its chunks.

For a chunk of C = 64 tokens with inclusive cumulative log decay c, key tile K, query tile Q, value tile V and state S:

    A  = (I + strict_lower(diag(beta) K K^T))^-1
    W  = V - diag(e^c) K S
    Vd = (G o A diag(beta)) W                            G_ij = e^(c_i - c_j) for i >= j, else 0
    O  = scale (diag(e^c) Q S + (G o Q K^T) Vd)
    S' = e^(c_C) S + K^T diag(e^(c_C - c)) Vd

The l2 normalisation of q and k never touches the tiles. With r the reciprocal norms of the rows, K K^T, Q K^T, K S, Q S and
K^T X take r as fp32 factors of their rows or columns, which is also more exact than rounding normalised tiles to 16 bits.
"""

from typing import Any

import tilelang.language as T

from ..configs import CHUNK, Config

# Roles, barriers and synchronisation are placed by hand: the automatic passes cannot see into the device functions.
PASS_CONFIG = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}

PRELUDE = """
#include "device/gates.cuh"
#include "device/sequence.cuh"
#include "device/triangular.cuh"
"""


def build(cfg: Config) -> Any:
    """The TileLang function of one configuration."""
    K, V, BV = cfg.k, cfg.v, cfg.block_v
    C = CHUNK
    dtype = cfg.tile_dtype
    acc = "float32"
    threads = 128 * (K // 64)
    slices = V // BV
    LD = C + 4  # keeps rows of the fp32 tile 16-byte aligned and on different banks
    by_row = T.GemmWarpPolicy.FullRow
    by_col = T.GemmWarpPolicy.FullCol

    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_k, heads_v = T.dynamic("heads_k"), T.dynamic("heads_v")
    h_rows, states = T.dynamic("h_rows"), T.dynamic("states")
    q_sb, q_st, q_sh = (T.dynamic(f"q_s{x}", "int64") for x in "bth")
    k_sb, k_st, k_sh = (T.dynamic(f"k_s{x}", "int64") for x in "bth")
    v_sb, v_st, v_sh = (T.dynamic(f"v_s{x}", "int64") for x in "bth")
    s_sn, s_sh, s_sk, s_sv = (T.dynamic(f"s_s{x}", "int64") for x in "nhkv")

    def exp2(x):
        return T.call_extern("float32", "fq::exp2_fast", x)

    def load_gate(g, g_code, g_offset, g_st, linear_gate, beta, beta_code, beta_offset, beta_st, remaining, c_row, beta_row):
        return T.call_extern(
            "void",
            "fq::gate_chunk",
            T.access_ptr(g[0], "r"),
            g_code,
            g_offset,
            g_st,
            linear_gate,
            T.access_ptr(beta[0], "r"),
            beta_code,
            beta_offset,
            beta_st,
            remaining,
            T.access_ptr(c_row, "w", 1, C),
            T.access_ptr(beta_row, "w", 1, C),
        )

    def zero_outside(cu_seqlens, cu_code, n, sequences, pointer, row_bytes, head_bytes, tx):
        return T.call_extern(
            "void",
            "fq::zero_outside",
            T.access_ptr(cu_seqlens[0], "r"),
            cu_code,
            n,
            sequences,
            sequences,
            tokens,
            pointer,
            row_bytes,
            T.int64(heads_v) * head_bytes,
            tx,
            threads,
        )

    def token_offset(row, token, head, stride_b, stride_t, stride_h):
        return T.int64(row) * stride_b + T.int64(token) * stride_t + T.int64(head) * stride_h

    @T.macro
    def load_tiles(q, k, v, q_s, k_s, v_s, full, stage, row, token, hk, ih, iv):
        """One warp asks the copy engine for a chunk; `full[stage]` completes when all of it has arrived."""
        T.tma_copy(q[row, token : token + C, hk, 0:K], q_s[stage, :, :], barrier=full[stage])
        T.tma_copy(k[row, token : token + C, hk, 0:K], k_s[stage, :, :], barrier=full[stage])
        T.tma_copy(v[row, token : token + C, ih, iv * BV : (iv + 1) * BV], v_s[stage, :, :], barrier=full[stage])
        T.barrier_arrive(full[stage])

    @T.prim_func
    def kernel(
        q: T.StridedTensor((batch, tokens, heads_k, K), (q_sb, q_st, q_sh, 1), dtype),
        k: T.StridedTensor((batch, tokens, heads_k, K), (k_sb, k_st, k_sh, 1), dtype),
        v: T.StridedTensor((batch, tokens, heads_v, V), (v_sb, v_st, v_sh, 1), dtype),
        o: T.Tensor((batch, tokens, heads_v, V), dtype),
        # Gates, offsets and the incoming state come in several dtypes: device/*.cuh reads them through a dtype code.
        g: T.Tensor((1,), "uint8"),
        beta: T.Tensor((1,), "uint8"),
        cu_seqlens: T.Tensor((1,), "uint8"),
        initial_state: T.Tensor((1,), "uint8"),
        final_state: T.StridedTensor((states, heads_v, K, V), (s_sn, s_sh, s_sk, s_sv), acc),
        g_out: T.Tensor((batch, tokens, heads_v), acc),
        a_out: T.Tensor((batch, tokens, heads_v, C), dtype),
        h_out: T.Tensor((h_rows, heads_v, K, V), dtype),
        scale: T.float32,
        group: T.int32,
        sequences: T.int32,
        g_code: T.int32,
        beta_code: T.int32,
        cu_code: T.int32,
        initial_code: T.int32,
        linear_gate: T.int32,
        l2norm: T.int32,
        write_final: T.int32,
        write_h: T.int32,
        g_sb: T.int64,
        g_st: T.int64,
        g_sh: T.int64,
        beta_sb: T.int64,
        beta_st: T.int64,
        beta_sh: T.int64,
        h0_sn: T.int64,
        h0_sh: T.int64,
        h0_sk: T.int64,
        h0_sv: T.int64,
    ):
        with T.Kernel(sequences * heads_v * slices, threads=threads, prelude=PRELUDE) as block:
            q_s = T.alloc_shared((2, C, K), dtype)
            k_s = T.alloc_shared((2, C, K), dtype)
            v_s = T.alloc_shared((2, C, BV), dtype)
            state_s = T.alloc_shared((K, BV), dtype)
            inverse_s = T.alloc_shared((C, LD), acc)
            p_s = T.alloc_shared((C, C), dtype)
            m_s = T.alloc_shared((C, C), dtype)
            w_s = T.alloc_shared((C, BV), dtype)
            vd_s = T.alloc_shared((C, BV), dtype)
            vn_s = T.alloc_shared((C, BV), dtype)
            c_s = T.alloc_shared((2, C), acc)
            beta_s = T.alloc_shared((2, C), acc)
            rq_s = T.alloc_shared((C,), acc)
            rk_s = T.alloc_shared((C,), acc)
            state = T.alloc_fragment((K, BV), acc)
            kk = T.alloc_fragment((C, C), acc)
            qk = T.alloc_fragment((C, C), acc)
            out = T.alloc_fragment((C, BV), acc)
            values = T.alloc_fragment((C, BV), acc)
            full = T.alloc_barrier([32, 32])

            tx = T.get_thread_binding()
            iv = T.alloc_var("int32")
            ih = T.alloc_var("int32")
            hk = T.alloc_var("int32")
            n = T.alloc_var("int32")
            row = T.alloc_var("int32")
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            h_first = T.alloc_var("int32")
            h_total = T.alloc_var("int32")
            valid = T.alloc_var("int32")
            iv = block % slices
            ih = T.truncmod(block // slices, heads_v)
            hk = T.truncdiv(ih, group)
            n = T.truncdiv(block // slices, heads_v)

            # The sequence is rows [first, first + length) of batch row `row`.
            row = T.if_then_else(cu_code == 0, n, 0)
            first = T.call_extern("int32", "fq::sequence_begin", T.access_ptr(cu_seqlens[0], "r"), cu_code, n, tokens)
            length = T.call_extern("int32", "fq::sequence_length", T.access_ptr(cu_seqlens[0], "r"), cu_code, n, tokens)
            h_first = T.call_extern("int32", "fq::chunks_before", T.access_ptr(cu_seqlens[0], "r"), cu_code, n, tokens)

            if length > 0:
                if tx < 32:
                    load_tiles(q, k, v, q_s, k_s, v_s, full, 0, row, first, hk, ih, iv)
                    load_gate(
                        g,
                        g_code,
                        token_offset(row, first, ih, g_sb, g_st, g_sh),
                        g_st,
                        linear_gate,
                        beta,
                        beta_code,
                        token_offset(row, first, ih, beta_sb, beta_st, beta_sh),
                        beta_st,
                        length,
                        c_s[0, 0],
                        beta_s[0, 0],
                    )

            if initial_code != 0:
                for a, b in T.Parallel(K, BV):
                    state[a, b] = T.call_extern(
                        "float32",
                        "fq::load_number",
                        T.access_ptr(initial_state[0], "r"),
                        initial_code,
                        token_offset(n, ih, a, h0_sn, h0_sh, h0_sk) + T.int64(iv * BV + b) * h0_sv,
                    )
            else:
                T.clear(state)

            for i in T.serial(T.truncdiv(length + (C - 1), C)):
                valid = T.min(length - i * C, C)
                stage = i % 2
                T.barrier_wait(full[stage], (i // 2) % 2)
                # Every thread has left chunk i - 1, whose stage the next chunk takes.
                T.sync_threads()
                if (i + 1) * C < length:
                    if tx < 32:
                        load_tiles(q, k, v, q_s, k_s, v_s, full, (i + 1) % 2, row, first + (i + 1) * C, hk, ih, iv)
                        load_gate(
                            g,
                            g_code,
                            token_offset(row, first + (i + 1) * C, ih, g_sb, g_st, g_sh),
                            g_st,
                            linear_gate,
                            beta,
                            beta_code,
                            token_offset(row, first + (i + 1) * C, ih, beta_sb, beta_st, beta_sh),
                            beta_st,
                            length - (i + 1) * C,
                            c_s[(i + 1) % 2, 0],
                            beta_s[(i + 1) % 2, 0],
                        )

                # Rows past the end belong to the next sequence or to nobody: whatever they hold, NaN too, may not enter a sum.
                if valid < C:
                    for a, b in T.Parallel(C, K):
                        if a >= valid:
                            q_s[stage, a, b] = 0
                            k_s[stage, a, b] = 0
                    for a, b in T.Parallel(C, BV):
                        if a >= valid:
                            v_s[stage, a, b] = 0
                    T.fence_proxy_async()
                    T.sync_threads()
                if l2norm != 0:
                    squares = T.alloc_fragment((C, K), acc)
                    norm = T.alloc_fragment((C,), acc)
                    for a, b in T.Parallel(C, K):
                        squares[a, b] = T.cast(q_s[stage, a, b], acc) * T.cast(q_s[stage, a, b], acc)
                    T.reduce_sum(squares, norm, dim=1)
                    for a in T.Parallel(C):
                        rq_s[a] = T.rsqrt(norm[a] + 1e-6)
                    for a, b in T.Parallel(C, K):
                        squares[a, b] = T.cast(k_s[stage, a, b], acc) * T.cast(k_s[stage, a, b], acc)
                    T.reduce_sum(squares, norm, dim=1)
                    for a in T.Parallel(C):
                        rk_s[a] = T.rsqrt(norm[a] + 1e-6)
                else:
                    for a in T.Parallel(C):
                        rq_s[a] = 1.0
                        rk_s[a] = 1.0
                T.sync_threads()

                T.gemm(k_s[stage, :, :], k_s[stage, :, :], kk, transpose_B=True, clear_accum=True, policy=by_col)
                T.gemm(q_s[stage, :, :], k_s[stage, :, :], qk, transpose_B=True, clear_accum=True, policy=by_col)
                for a, b in T.Parallel(C, C):
                    inverse_s[a, b] = T.if_then_else(a > b, kk[a, b] * (beta_s[stage, a] * rk_s[a]) * rk_s[b], 0.0)
                for a, b in T.Parallel(C, C):
                    p_s[a, b] = T.if_then_else(
                        a >= b, qk[a, b] * exp2(c_s[stage, a] - c_s[stage, b]) * (scale * rq_s[a]) * rk_s[b], 0.0
                    )
                T.copy(state, state_s)
                T.fence_proxy_async()
                T.sync_threads()
                T.call_extern(
                    "void", f"fq::invert_unit_lower<{C}, {threads}>", T.access_ptr(inverse_s[0, 0], "rw", C, LD), LD, tx
                )

                if iv == 0:
                    for a, b in T.Parallel(C, C):
                        if a < valid:
                            a_out[row, first + i * C + a, ih, b] = inverse_s[a, b]
                    if tx < 32:
                        T.call_extern(
                            "void",
                            "fq::store_gate",
                            T.access_ptr(g[0], "r"),
                            g_code,
                            token_offset(row, first + i * C, ih, g_sb, g_st, g_sh),
                            g_st,
                            linear_gate,
                            T.access_ptr(g_out[0, 0, 0], "w"),
                            token_offset(row, first + i * C, ih, T.int64(tokens) * heads_v, heads_v, 1),
                            heads_v,
                            valid,
                        )
                if write_h != 0:
                    T.copy(state_s, h_out[h_first + i, ih, 0:K, iv * BV : (iv + 1) * BV], disable_tma=True)

                T.gemm(k_s[stage, :, :], state_s, values, clear_accum=True, policy=by_col)
                T.gemm(q_s[stage, :, :], state_s, out, clear_accum=True, policy=by_col)
                for a, b in T.Parallel(C, BV):
                    w_s[a, b] = v_s[stage, a, b] - values[a, b] * (exp2(c_s[stage, a]) * rk_s[a])
                for a, b in T.Parallel(C, C):
                    m_s[a, b] = T.if_then_else(
                        a >= b, inverse_s[a, b] * exp2(c_s[stage, a] - c_s[stage, b]) * beta_s[stage, b], 0.0
                    )
                T.fence_proxy_async()
                T.sync_threads()
                T.gemm(m_s, w_s, values, clear_accum=True, policy=by_col)
                for a, b in T.Parallel(C, BV):
                    vd_s[a, b] = values[a, b]
                for a, b in T.Parallel(C, BV):
                    vn_s[a, b] = values[a, b] * (exp2(c_s[stage, C - 1] - c_s[stage, a]) * rk_s[a])
                T.fence_proxy_async()
                T.sync_threads()
                for a, b in T.Parallel(C, BV):
                    out[a, b] *= exp2(c_s[stage, a]) * (scale * rq_s[a])
                for a, b in T.Parallel(K, BV):
                    state[a, b] *= exp2(c_s[stage, C - 1])
                T.gemm(p_s, vd_s, out, policy=by_col)
                T.gemm(k_s[stage, :, :], vn_s, state, transpose_A=True, policy=by_row)
                # W has been consumed; its buffer stages the output so that rows leave in 16-byte pieces.
                T.copy(out, w_s)
                T.sync_threads()
                for a, b in T.Parallel(C, BV):
                    if a < valid:
                        o[row, first + i * C + a, ih, iv * BV + b] = w_s[a, b]

            if write_final != 0:
                for a, b in T.Parallel(K, BV):
                    final_state[n, ih, a, iv * BV + b] = state[a, b]

            zero_outside(cu_seqlens, cu_code, n, sequences, T.access_ptr(o[0, 0, ih, iv * BV], "w"), BV * 2, V * 2, tx)
            if iv == 0:
                zero_outside(cu_seqlens, cu_code, n, sequences, T.access_ptr(a_out[0, 0, ih, 0], "w"), C * 2, C * 2, tx)
                zero_outside(cu_seqlens, cu_code, n, sequences, T.access_ptr(g_out[0, 0, ih], "w"), 4, 4, tx)
            if write_h != 0 and cu_code != 0:
                # Rows of h past the last chunk.
                h_total = T.call_extern(
                    "int32", "fq::chunks_before", T.access_ptr(cu_seqlens[0], "r"), cu_code, sequences, tokens
                )
                for j in T.serial(T.truncdiv(T.max(h_rows - h_total - n, 0) + sequences - 1, sequences)):
                    for a, b in T.Parallel(K, BV):
                        h_out[h_total + n + j * sequences, ih, a, iv * BV + b] = 0

    return kernel
