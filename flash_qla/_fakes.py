"""Fake implementations: the shapes, dtypes, strides and devices of the ops' outputs, for torch.compile and
torch.export.

They repeat the argument checks. Sizes may be symbolic. An output that was not asked for has zero elements.
"""

import torch
from torch import Tensor

from ._checks import CHUNK, BackwardArgs, ForwardArgs, check_backward, check_forward, enforce, state_shape
from ._library import head_configs


def _state(args: ForwardArgs, asked: bool) -> Tensor:
    q: Tensor = args.q
    return q.new_empty(state_shape(args) if asked else [0], dtype=torch.float32)


@torch.library.register_fake("flash_qla::chunk_gated_delta_rule")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    gate_domain: str = "log",
) -> tuple[Tensor, Tensor]:
    args = ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, head_first, state_v_first, gate_domain)
    enforce(check_forward, args, head_configs())
    return q.new_empty(v.shape), _state(args, output_final_state)


@torch.library.register_fake("flash_qla::chunk_gated_delta_rule_fwd")
def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    gate_domain: str = "log",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    args = ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, False, state_v_first, gate_domain)
    enforce(check_forward, args, head_configs())
    batch, tokens, heads_v, dim_v = v.shape
    if cu_seqlens is None:
        chunks = (tokens + CHUNK - 1) // CHUNK
    else:
        chunks = tokens // CHUNK + cu_seqlens.size(0) - 1
    h = q.new_empty((batch, chunks, heads_v, q.size(3), dim_v) if output_h else (0,))
    return (
        g.new_empty(g.shape, dtype=torch.float32),
        q.new_empty((batch, tokens, heads_v, CHUNK)),
        q.new_empty(v.shape),
        h,
        _state(args, output_final_state),
    )


@torch.library.register_fake("flash_qla::chunk_gated_delta_rule_bwd")
def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor | None,
    do: Tensor | None,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    gate_domain: str = "log",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    args = ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, False, state_v_first, gate_domain)
    enforce(check_backward, BackwardArgs(args, A, do, dht), head_configs())
    if initial_state is None:
        dinitial = q.new_empty((0,), dtype=torch.float32)
    else:
        dinitial = initial_state.new_empty(initial_state.shape)
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        beta.new_empty(beta.shape),
        g.new_empty(g.shape),
        dinitial,
    )
