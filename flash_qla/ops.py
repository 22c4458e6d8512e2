"""The public functions.

They hand their arguments straight to the ops, which check them. Only when an op refuses does Python look again, to
raise the ValueError or TypeError that an op cannot raise from C++.

Notation: B batch, T tokens, H_k key heads, H_v value heads (a multiple of H_k; value head h uses key head
h // (H_v // H_k)), K and V head dimensions, N sequences, C = 64 tokens a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._autograd import is_recorded, recorded_rule
from ._checks import BackwardArgs, ForwardArgs, check_backward, check_forward, check_offsets
from ._library import head_configs

# The overloads themselves: going through the packets costs host time on every call.
_RULE = torch.ops.flash_qla.chunk_gated_delta_rule.default
_FWD = torch.ops.flash_qla.chunk_gated_delta_rule_fwd.default
_BWD = torch.ops.flash_qla.chunk_gated_delta_rule_bwd.default


def _call(op: Callable[..., Any], check: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError):
        check()
        raise


def _check_call(args: ForwardArgs | BackwardArgs) -> None:
    """Raises what is wrong with the arguments of a call that an op refused, if it is that."""
    if isinstance(args, BackwardArgs):
        check_backward(args, head_configs())
    else:
        check_forward(args, head_configs())
    forward = args.forward if isinstance(args, BackwardArgs) else args
    if forward.cu_seqlens is not None and forward.cu_seqlens.device.type == "cpu":
        check_offsets(forward.cu_seqlens, forward.q.size(1))


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
) -> tuple[Tensor, Tensor | None]:
    """The Gated Delta Rule over whole sequences, differentiable.

    Per head, with state S [K, V] in fp32 (Yang et al., "Gated Delta Networks", arXiv 2412.06464, equation 10):

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

    Args:
        q: [B, T, H_k, K] bf16 or fp16; any strides, last dimension contiguous.
        k: [B, T, H_k, K], dtype of q; likewise.
        v: [B, T, H_v, V], dtype of q; likewise.
        g: [B, T, H_v] fp32, bf16 or fp16. Natural-log decay (<= 0), or the decay in [0, 1] with gate_domain="linear".
        beta: [B, T, H_v] fp32, bf16 or fp16. Step size, already a sigmoid.
        scale: factor of the output; K ** -0.5 if None. 0.0 is a scale.
        initial_state: [N, H_v, K, V] fp32 or bf16 ([N, H_v, V, K] with state_v_first); zeros if None.
        output_final_state: whether to return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: divide each q and k by sqrt(sum of squares + 1e-6) first.
        cu_seqlens: [N + 1] int32 or int64, on q's device: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] of a
            batch of one. Sequences may be empty; tokens that belong to none give an output (and gradients) of 0.
            Without it, each of the B rows is a sequence and N = B.
        head_first: must be False; kept for call sites that pass it.
        state_v_first: states are [N, H_v, V, K].
        auto_cp: whether a long sequence may be split over the device. With False, a sequence's result does not depend
            on what else is in the batch.
        gate_domain: "log" or "linear".

    Returns:
        o [B, T, H_v, V] in q's dtype, and the final state [N, H_v, K, V] (or [N, H_v, V, K]) in fp32, None unless asked
        for.

    Gradients come back in the dtype of their input. With gate_domain="linear" the gradient of a gate of exactly 0 is 0.

    Raises:
        ValueError: a size, stride, device or option breaks the contract, or K, V and dtype have no kernel in this
            package.
        TypeError: an argument has the wrong type or dtype.
        RuntimeError: CUDA tensors, and this package has no CUDA kernels.
        NotImplementedError: a backward pass on CUDA, and this package has no backward kernels.
    """
    o, final_state = _call(
        recorded_rule if is_recorded(q, k, v, g, beta, initial_state) else _RULE,
        lambda: _check_call(
            ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, head_first, state_v_first, gate_domain)
        ),
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
        head_first,
        state_v_first,
        auto_cp,
        gate_domain=gate_domain,
    )
    return o, final_state if output_final_state else None


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The forward pass with what a backward pass needs; arguments as `chunk_gated_delta_rule`. Not differentiable.

    Args:
        output_h: whether to return the state at the start of each chunk.

    Returns:
        g_out: [B, T, H_v] fp32, the gate as log decay.
        A: [B, T, H_v, C] in q's dtype, (I + strict_lower(diag(beta) K K^T))^-1 of each chunk: row t holds the row of
            token t in its chunk, 0 past the end of the chunk.
        o: [B, T, H_v, V] in q's dtype.
        h: [B, ceil(T / C), H_v, K, V] in q's dtype, the state at each chunk's start; None unless asked for. With
            cu_seqlens [1, T // C + N, H_v, K, V]: the chunks of all sequences one after another, the rows that are left
            are 0. Always [K, V], whatever state_v_first.
        final_state: as in `chunk_gated_delta_rule`.

    Raises:
        As `chunk_gated_delta_rule`.
    """
    g_out, inverse, o, h, final_state = _call(
        _FWD,
        lambda: _check_call(ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, False, state_v_first, gate_domain)),
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        cu_seqlens,
        output_final_state,
        output_h,
        use_qk_l2norm_in_kernel,
        state_v_first,
        auto_cp,
        gate_domain=gate_domain,
    )
    return g_out, inverse, o, h if output_h else None, final_state if output_final_state else None


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The backward pass; arguments as `chunk_gated_delta_rule`, with the same values as in the forward pass.

    Args:
        g: the gate, or g_out of the forward pass with gate_domain="log" (dg is then the gradient of the log decay).
        A: [B, T, H_v, C] in q's dtype, from the forward pass, or None to compute it again.
        do: [B, T, H_v, V] in q's dtype, the gradient of o; None for zeros.
        dht: fp32, shape and layout of the final state, its gradient; None for zeros.

    Returns:
        dq, dk, dv, dbeta, dg, dinitial_state, each with the shape and dtype of its input; dinitial_state is None
        without an initial state.

    Raises:
        As `chunk_gated_delta_rule`.
    """
    dq, dk, dv, dbeta, dg, dinitial_state = _call(
        _BWD,
        lambda: _check_call(
            BackwardArgs(
                ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, False, state_v_first, gate_domain),
                A,
                do,
                dht,
            )
        ),
        q,
        k,
        v,
        g,
        beta,
        A,
        do,
        dht,
        scale,
        initial_state,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        state_v_first,
        auto_cp,
        gate_domain=gate_domain,
    )
    return dq, dk, dv, dbeta, dg, dinitial_state if initial_state is not None else None
