"""The inference forward: one thread block carries the transposed state of one value head through the chunks of a sequence or a part.

For a chunk of C = 64 tokens with inclusive cumulative log decay c, key tile K, query tile Q, value tile V and state S [K, V]:

    A   = (I + strict_lower(diag(beta) K K^T))^-1
    T   = G o A diag(beta)                               G_ij = e^(c_i - c_j) for i >= j, else 0
    P   = scale (G o Q K^T)
    W   = V - diag(e^c) K S
    N   = T W                                            the new values
    O   = scale diag(e^c) Q S + P N
    S'  = e^(c_C) S + K^T diag(e^(c_C - c)) N

Roles, by warpgroup of 128 threads:

    0, 1   the state, as S^T in registers, 64 rows of V each: S^T K^T, then W over V's tile in shared memory, N^T = W^T T^T,
           O^T = S^T Q^T + N^T P^T, S'^T = S^T + N^T K. S and N are register operands.
    2, 3   what does not depend on the state: K K^T and its gated inverse, T and P. One takes the even chunks, the other the odd
           ones, so that the waits of one are the work of the other. Of each, one warp loads tiles and one prepares the gates.

The l2 normalisation of q and k never touches the tiles: with r the reciprocal norms of the rows, the products above take r as
fp32 factors of their rows or columns.
"""

from typing import Any

import tilelang.language as T

from ..configs import CHUNK, Config
from .externs import extern, extern_float, extern_int, fresh, offset, read_gates

PASS_CONFIG = {
    "tl.disable_buffer_init_check": True,  # it cannot see what the device functions write
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
}

PRELUDE = """
#include "device/chunk_matrices.cuh"
#include "device/gates.cuh"
#include "device/sequence.cuh"
#include "device/tiles.cuh"
#include "device/wgmma.cuh"
"""

# Indices into the vectors of fq::Factor in device/gates.cuh, and how many there are.
OUTPUT_DECAY, STATE_DECAY, FACTORS = 7, 8, 9
INVERSE_FLOATS = 3200  # kBlocks * kBlockFloats in device/triangular_mma.cuh

CUDA_DTYPES = {"bf16": "__nv_bfloat16", "fp16": "__half"}

# Of the 512 that a thread of each warpgroup has together. The state needs most; ptxas decides whether it fits (docs/design-notes.md).
STATE_REGISTERS = 168
AUXILIARY_REGISTERS = 88
# Chunks in flight. The keys of a chunk are read long before the state needs them, and its gates with them; everything else has the
# stage of its warpgroup.
KEY_STAGES = 4
STAGES = 2


def build(cfg: Config) -> Any:
    """The TileLang function of one configuration."""
    return build_pass(cfg, output=True)


def build_pass(cfg: Config, output: bool) -> Any:
    """The pass over a part of a sequence: with `output` it makes O, from the state that the part starts with.

    Without, it makes where the part ends: N, what the part adds (from zero, or from the initial state in the first part), or the
    transfer matrix M (from the identity, without values), such that the state after it is M S + N for any state S before it.
    Neither needs Q.
    """
    K, V = cfg.k, cfg.v
    C = CHUNK
    dtype = cfg.tile_dtype
    acc = "float32"
    rows = T.GemmWarpPolicy.FullRow
    cuda_dtype = CUDA_DTYPES[cfg.dtype]

    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_k, heads_v = T.dynamic("heads_k"), T.dynamic("heads_v")
    states, slots = T.dynamic("states"), T.dynamic("slots")
    q_sb, q_st, q_sh = (T.dynamic(f"q_s{x}", "int64") for x in "bth")
    k_sb, k_st, k_sh = (T.dynamic(f"k_s{x}", "int64") for x in "bth")
    v_sb, v_st, v_sh = (T.dynamic(f"v_s{x}", "int64") for x in "bth")
    s_sn, s_sh, s_sk, s_sv = (T.dynamic(f"s_s{x}", "int64") for x in "nhkv")

    def factors(factor_s, i, mode="r"):
        return T.access_ptr(factor_s[i % KEY_STAGES, 0, 0], mode, 1, FACTORS, C)

    def tile(tile_s, i):
        return T.access_ptr(tile_s[i % KEY_STAGES, 0, 0], "r", 1, C, K)

    def blocks(inverse_s, w):
        return T.access_ptr(inverse_s[w, 0], "rw", 1, INVERSE_FLOATS)

    def store_panel_transposed(fragment, panel):
        return extern(f"store_panel_transposed<{cuda_dtype}>", fragment.data, T.access_ptr(panel, "w", 1, C, 64))

    def zero_tail(tile, columns, valid):
        return extern(f"zero_tail<{columns // 64}>", T.access_ptr(tile, "w", 1, C, columns), valid)

    @T.macro
    def load_keys(q, k, q_s, k_s, keys_full, i, row, first, hk):
        stage = i % KEY_STAGES
        T.tma_copy(
            k[row, first + i * C : first + (i + 1) * C, hk, 0:K],
            k_s[stage, :, :],
            barrier=keys_full[stage],
            leader_scope_threads=32,
        )
        if output:
            T.tma_copy(
                q[row, first + i * C : first + (i + 1) * C, hk, 0:K],
                q_s[stage, :, :],
                barrier=keys_full[stage],
                leader_scope_threads=32,
            )
        T.barrier_arrive(keys_full[stage])

    @T.macro
    def load_values(v, v_s, values_full, i, row, first, ih):
        stage = i % STAGES
        T.tma_copy(
            v[row, first + i * C : first + (i + 1) * C, ih, 0:V],
            v_s[stage, :, :],
            barrier=values_full[stage],
            leader_scope_threads=32,
        )
        T.barrier_arrive(values_full[stage])

    # Where parts end, [slots, (N, M), heads_v, K, V]; a part that starts where another ended reads it by hand.
    Ends: Any = T.Tensor((1,), "uint8") if output else T.Tensor((slots, 2, heads_v, K, V), acc)

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
        parts: T.Tensor((1,), "int32"),
        ends: Ends,
        final_state: T.StridedTensor((states, heads_v, K, V), (s_sn, s_sh, s_sk, s_sv), acc),
        scale: T.float32,
        group: T.int32,
        sequences: T.int32,
        split: T.int32,
        part_count: T.int32,
        g_code: T.int32,
        beta_code: T.int32,
        cu_code: T.int32,
        initial_code: T.int32,
        linear_gate: T.int32,
        l2norm: T.int32,
        write_final: T.int32,
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
        with T.Kernel(part_count * heads_v if output else slots * 2 * heads_v, threads=512, prelude=PRELUDE) as block:
            if output:
                q_s = T.alloc_shared((KEY_STAGES, C, K), dtype)
                p_s = T.alloc_shared((STAGES, C, C), dtype)
            k_s = T.alloc_shared((KEY_STAGES, C, K), dtype)
            v_s = T.alloc_shared((STAGES, C, V), dtype)
            t_s = T.alloc_shared((STAGES, C, C), dtype)
            inverse_s = T.alloc_shared((2, INVERSE_FLOATS), acc)
            # Vectors of per-token factors (device/gates.cuh has their list).
            factor_s = T.alloc_shared((KEY_STAGES, FACTORS, C), acc)

            keys_full = T.alloc_barrier([32] * KEY_STAGES)  # have arrived
            values_full = T.alloc_barrier([32] * STAGES)
            ready = T.alloc_barrier([128] * STAGES)  # all that the state needs of a chunk, but for its values
            done = T.alloc_barrier([256] * KEY_STAGES)  # the state has done with the chunk, but for its output
            # The output has left its buffer; without output, the products have read the values.
            values_free = T.alloc_barrier([64 if output else 256] * STAGES)

            tx = T.get_thread_binding()
            ih = T.alloc_var("int32")
            hk = T.alloc_var("int32")
            n = T.alloc_var("int32")
            row = T.alloc_var("int32")
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            chunks = T.alloc_var("int32")
            part = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            transfer = T.alloc_var("int32")
            ih = T.truncmod(block, heads_v)
            hk = T.truncdiv(ih, group)
            slot = T.truncdiv(block, heads_v)
            if output:
                part = slot
                transfer = 0
            else:
                transfer = T.truncmod(slot, 2)
                slot = T.truncdiv(slot, 2)
                part = extern_int("part_of_slot", T.access_ptr(parts[0], "r"), part_count, slot, transfer)
            n = extern_int("part_sequence", T.access_ptr(parts[0], "r"), split, part)

            # The part is rows [first, first + length) of batch row `row`.
            row = T.if_then_else(cu_code == 0, n, 0)
            first = extern_int("sequence_begin", T.access_ptr(cu_seqlens[0], "r"), cu_code, n, tokens)
            first = first + extern_int("part_begin", T.access_ptr(parts[0], "r"), split, part)
            length = extern_int("sequence_length", T.access_ptr(cu_seqlens[0], "r"), cu_code, n, tokens)
            length = extern_int("part_length", T.access_ptr(parts[0], "r"), split, part, length)
            chunks = T.truncdiv(length + (C - 1), C)

            if tx < 256:
                T.set_max_nreg(STATE_REGISTERS, 1)
                state = T.alloc_fragment((V, K), acc)
                state_h = T.alloc_fragment((V, K), dtype)
                values = T.alloc_fragment((V, C), acc)
                values_h = T.alloc_fragment((V, C), dtype)
                decayed_h = T.alloc_fragment((V, C), dtype)
                out = T.alloc_fragment((V, C), acc)
                start = T.alloc_var("int32")
                start = extern_int("part_previous", T.access_ptr(parts[0], "r"), split, part)
                if output and start >= 0:
                    for a, b in T.Parallel(V, K):
                        state[a, b] = extern_float(
                            "load_number",
                            T.access_ptr(ends[0], "r"),
                            1,
                            (T.int64(start) * (2 * heads_v) + ih) * (K * V) + T.int64(b) * V + a,
                        )
                elif start < 0 and initial_code != 0:
                    for a, b in T.Parallel(V, K):
                        state[a, b] = extern_float(
                            "load_number",
                            T.access_ptr(initial_state[0], "r"),
                            initial_code,
                            offset(n, ih, b, h0_sn, h0_sh, h0_sk) + T.int64(a) * h0_sv,
                        )
                elif transfer != 0:
                    for a, b in T.Parallel(V, K):
                        state[a, b] = T.if_then_else(a == b, T.float32(1), T.float32(0))
                else:
                    T.clear(state)

                for i in T.serial(chunks):
                    for a, b in T.Parallel(V, K):
                        state_h[a, b] = state[a, b]
                    if transfer == 0:
                        T.barrier_wait(values_full[i % STAGES], (i // STAGES) % 2)
                    T.barrier_wait(ready[i % STAGES], (i // STAGES) % 2)
                    T.wgmma_gemm(state_h, k_s[i % KEY_STAGES, :, :], values, transpose_B=True, clear_accum=True, policy=rows)
                    if output:
                        if i > 0:
                            if tx % 128 < 32:
                                T.tma_store_wait(0)
                                T.barrier_arrive(values_free[(i - 1) % STAGES])
                    T.wait_wgmma(0)
                    extern(
                        f"subtract_from_values<{cuda_dtype}>",
                        T.access_ptr(v_s[i % STAGES, 0, tx // 128 * 64], "rw", 1, C, 64),
                        values.data,
                        factors(factor_s, i),
                        1 if output else 1 - transfer,
                    )
                    T.fence_proxy_async()
                    extern("warpgroup_sync")
                    T.wgmma_gemm(
                        v_s[i % STAGES, :, :],
                        t_s[i % STAGES, :, :],
                        values,
                        transpose_A=True,
                        transpose_B=True,
                        clear_accum=True,
                        policy=rows,
                    )
                    if not output:
                        for a, b in T.Parallel(V, K):
                            state[a, b] *= extern_float("chunk_total", i % KEY_STAGES)
                    T.wait_wgmma(0)
                    for a, b in T.Parallel(V, C):
                        values_h[a, b] = values[a, b]
                    if output:
                        T.wgmma_gemm(state_h, q_s[i % KEY_STAGES, :, :], out, transpose_B=True, clear_accum=True, policy=rows)
                        for a, b in T.Parallel(V, K):
                            state[a, b] *= extern_float("chunk_total", i % KEY_STAGES)
                        T.wait_wgmma(0)
                        extern("scale_columns", out.data, factors(factor_s, i), OUTPUT_DECAY)
                        T.wgmma_gemm(values_h, p_s[i % STAGES, :, :], out, transpose_B=True, policy=rows)
                    else:
                        T.barrier_arrive(values_free[i % STAGES])
                    # No registers are left to keep the new values in fp32 as well, so their decayed copy starts from the rounded ones.
                    for a, b in T.Parallel(V, C):
                        decayed_h[a, b] = T.cast(values_h[a, b], acc) * factor_s[i % KEY_STAGES, STATE_DECAY, b]
                    T.wgmma_gemm(decayed_h, k_s[i % KEY_STAGES, :, :], state, policy=rows)
                    if output:
                        T.wait_wgmma(1)
                        # V has been consumed; its buffer stages the output, a panel of 64 columns for each of the two warpgroups.
                        store_panel_transposed(out, v_s[i % STAGES, 0, tx // 128 * 64])
                        T.fence_proxy_async()
                    T.wait_wgmma(0)
                    T.barrier_arrive(done[i % KEY_STAGES])
                    if output:
                        extern("warpgroup_sync")
                        if tx % 128 < 32:
                            if length - i * C >= C:
                                if tx < 128:
                                    T.tma_copy(
                                        v_s[i % STAGES, :, 0:64],
                                        o[row, first + i * C : first + (i + 1) * C, ih, 0:64],
                                        leader_scope_threads=32,
                                    )
                                else:
                                    T.tma_copy(
                                        v_s[i % STAGES, :, 64:128],
                                        o[row, first + i * C : first + (i + 1) * C, ih, 64:128],
                                        leader_scope_threads=32,
                                    )
                            else:
                                extern(
                                    "store_valid_rows<1>",
                                    T.access_ptr(v_s[i % STAGES, 0, tx // 128 * 64], "r", 1, C, 64),
                                    T.access_ptr(o[row, first + i * C, ih, tx // 128 * 64], "w"),
                                    T.int64(heads_v) * (V * 2),
                                    length - i * C,
                                )

                if output:
                    # Shared memory must outlive the copy engine's reads of it.
                    if tx % 128 < 32:
                        T.tma_store_wait(0)
                    last = T.alloc_var("int32")
                    last = extern_int(
                        "part_is_last",
                        T.access_ptr(parts[0], "r"),
                        split,
                        T.truncdiv(extern_int("fresh_block"), heads_v),
                    )
                    if write_final != 0 and last != 0:
                        for a, b in T.Parallel(V, K):
                            final_state[n, ih, b, a] = state[a, b]
                elif part >= 0:
                    for a, b in T.Parallel(V, K):
                        ends[slot, transfer, ih, b, a] = state[a, b]
            else:
                T.set_max_nreg(AUXILIARY_REGISTERS, 0)
                w = T.alloc_var("int32")  # which of the two, and the stage of its chunks
                j = T.alloc_var("int32")
                w = T.truncdiv(tx, 128) - 2
                product = T.alloc_local((32,), acc)
                if output:
                    attention = T.alloc_local((16,), "uint32")  # P, until there is room for it
                raw = T.alloc_local((4,), acc)  # gates and betas of two tokens a lane, read an iteration ahead
                T.clear(raw)
                if tx % 128 >= 96:
                    if chunks > w:
                        load_keys(q, k, q_s if output else k_s, k_s, keys_full, w, row, first, hk)
                        if transfer == 0:
                            load_values(v, v_s, values_full, w, row, first, ih)
                    if chunks > w + 2:
                        load_keys(q, k, q_s if output else k_s, k_s, keys_full, w + 2, row, first, hk)
                elif tx % 128 < 32:
                    read_gates(
                        raw, g, g_code, g_sb, g_st, g_sh, beta, beta_code, beta_sb, beta_st, beta_sh,
                        row, first + w * C, ih, length - w * C,
                    )  # fmt: skip
                for i in T.serial(T.truncdiv(fresh(chunks) + 1 - w, 2)):
                    w = fresh(w)
                    j = 2 * i + w
                    if tx % 128 < 32:
                        extern("sum_gates", raw.data, linear_gate, fresh(length) - j * C)
                        extern("put_factors", raw.data, scale, factors(factor_s, j, "w"), j % KEY_STAGES)
                    T.barrier_wait(keys_full[j % KEY_STAGES], (j // KEY_STAGES) % 2)
                    # Rows past the end belong to the next sequence or to nobody: whatever they hold, NaN too, may not enter a sum.
                    if fresh(length) - j * C < C:
                        if output:
                            zero_tail(q_s[j % KEY_STAGES, 0, 0], K, length - j * C)
                        zero_tail(k_s[j % KEY_STAGES, 0, 0], K, length - j * C)
                        T.fence_proxy_async()
                    # Also: the factors are there, and the blocks of the last inverse have been read.
                    extern("warpgroup_sync")
                    if l2norm != 0:
                        extern(f"apply_key_norms<{cuda_dtype}, {K // 64}>", tile(k_s, j), factors(factor_s, j, "rw"))
                        if output:
                            extern(f"apply_query_norms<{cuda_dtype}, {K // 64}>", tile(q_s, j), factors(factor_s, j, "rw"))
                        extern("warpgroup_sync")
                    extern(f"multiply_tiles<{cuda_dtype}, {K}>", product.data, tile(k_s, j), tile(k_s, j))
                    if tx % 128 < 32:
                        read_gates(
                            raw, g, g_code, g_sb, g_st, g_sh, beta, beta_code, beta_sb, beta_st, beta_sh,
                            row, first + (j + 2) * C, ih, fresh(length) - (j + 2) * C,
                        )  # fmt: skip
                    extern("products_wait<0, 32>", product.data)
                    extern("gate_keys", product.data, factors(factor_s, j), blocks(inverse_s, w))
                    extern("warpgroup_sync")
                    if output:
                        extern(f"multiply_tiles<{cuda_dtype}, {K}>", product.data, tile(q_s, j), tile(k_s, j))
                    if tx % 128 < 64:
                        extern("invert_halves", blocks(inverse_s, w))
                    if output:
                        extern("products_wait<0, 32>", product.data)
                        extern(f"gate_queries<{cuda_dtype}>", product.data, factors(factor_s, j), attention.data)
                    # The state has done with the chunk before the last: there is room for T and P, and for tiles to come.
                    if T.truncdiv(fresh(tx), 32) % 4 == 2:
                        if j >= STAGES:
                            T.barrier_wait(done[(j - STAGES) % KEY_STAGES], ((j - STAGES) // KEY_STAGES) % 2)
                            if j + STAGES < chunks:
                                load_keys(q, k, q_s if output else k_s, k_s, keys_full, j + STAGES, row, first, hk)
                            if transfer == 0:
                                T.barrier_wait(values_free[w], (i - 1) % 2)
                                load_values(v, v_s, values_full, j, row, first, ih)
                    extern("warpgroup_sync")
                    if output:
                        extern("store_packed", attention.data, T.access_ptr(p_s[w, 0, 0], "w", 1, C, C))
                    extern(
                        f"store_inverse<{cuda_dtype}>",
                        blocks(inverse_s, w),
                        factors(factor_s, j),
                        T.access_ptr(t_s[w, 0, 0], "w", 1, C, C),
                    )
                    if fresh(length) - j * C < C:
                        T.barrier_wait(values_full[w], i % 2)
                        zero_tail(v_s[w, 0, 0], V, length - j * C)
                    T.fence_proxy_async()
                    T.barrier_arrive(ready[w])

                if output:
                    # Rows outside every sequence are zero: the parts share them out.
                    extern(
                        "zero_outside",
                        T.access_ptr(cu_seqlens[0], "r"),
                        cu_code,
                        T.truncdiv(extern_int("fresh_block"), heads_v),
                        part_count,
                        sequences,
                        tokens,
                        T.access_ptr(o[0, 0, ih, 0], "w"),
                        V * 2,
                        T.int64(heads_v) * (V * 2),
                        tx - 256,
                        256,
                    )

    return kernel
