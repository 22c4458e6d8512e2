"""The reference: the recurrence itself, token by token, in float64. Slow, simple and differentiable, on any device.

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464),
equation 10. Everything else in this project is measured against this file.
"""

import torch
from torch import Tensor

L2NORM_EPS = 1e-6


def _recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All S_t^T q_t and the last state, from q, k [B, T, H, K], v [B, T, H, V], decay, beta [B, T, H] and S_0."""
    outputs = []
    for t in range(q.size(1)):
        q_t, k_t, v_t = q[:, t], k[:, t], v[:, t]
        decay_t, beta_t = decay[:, t, :, None, None], beta[:, t, :, None]
        state = decay_t * state
        # (I - beta k k^T) S + beta k v^T = S + k (beta (v - S^T k))^T
        delta = beta_t * (v_t - torch.einsum("bhkv,bhk->bhv", state, k_t))
        state = torch.addcmul(state, k_t[..., :, None], delta[..., None, :])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q_t))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    *,
    gate_domain: str = "log",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The Gated Delta Rule; arguments as `flash_qla.chunk_gated_delta_rule`, which may also be of `dtype` already.

    Reads cu_seqlens on the host. A linear gate is used as it is, without a logarithm, so its gradient is exact at 0
    too.

    Args:
        dtype: of all arithmetic and of the results.

    Returns:
        o [B, T, H_v, V] and the final state [N, H_v, K, V] (or [N, H_v, V, K]), both in `dtype`.
    """
    if gate_domain not in ("log", "linear"):
        raise ValueError(f'gate_domain: expected "log" or "linear", got "{gate_domain}"')
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    decay = g.exp() if gate_domain == "log" else g
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    group = v.size(2) // q.size(2)
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    q = q * (q.size(-1) ** -0.5 if scale is None else scale)

    sequences = q.size(0) if cu_seqlens is None else cu_seqlens.size(0) - 1
    if initial_state is None:
        state = q.new_zeros(sequences, v.size(2), q.size(3), v.size(3))
    else:
        state = initial_state.to(dtype)
        state = state.mT if state_v_first else state

    if cu_seqlens is None:
        o, final_state = _recurrence(q, k, v, decay, beta, state)
    else:
        offsets = cu_seqlens.tolist()
        pieces, states, end = [v.new_zeros(1, offsets[0], *v.shape[2:])], [state[:0]], offsets[0]
        for n in range(sequences):
            start, end = offsets[n], offsets[n + 1]
            rows = slice(start, end)
            piece, last = _recurrence(q[:, rows], k[:, rows], v[:, rows], decay[:, rows], beta[:, rows], state[n : n + 1])
            pieces.append(piece)
            states.append(last)
        pieces.append(v.new_zeros(1, v.size(1) - end, *v.shape[2:]))
        o, final_state = torch.cat(pieces, 1), torch.cat(states, 0)
    return o, final_state.mT if state_v_first else final_state
