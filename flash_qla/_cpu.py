"""The CPU implementation of the ops: the whole contract, on the chunked mathematics of `_chunked`."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from . import _chunked
from ._checks import (
    CHUNK,
    BackwardArgs,
    ForwardArgs,
    check_backward,
    check_forward,
    check_offsets,
    enforce,
    state_shape,
)
from ._chunked import Chunking, Tiles
from ._library import implement

L2NORM_EPS = 1e-6


@dataclass(frozen=True)
class _Prepared:
    """A call cut into chunks, with what the gradients need of the inputs."""

    chunking: Chunking
    tiles: Tiles
    initial_state: Tensor  # [N, H_v, K, V] fp32
    gate: Tensor  # [NC, H_v, 64] fp32, as given
    log_gate: Tensor  # the same as log decay, before clamping
    norms: tuple[Tensor, Tensor] | None  # reciprocal norms of q and k, [NC, H_k, 64, 1]


def _chunking(args: ForwardArgs) -> Chunking:
    batch, tokens = args.q.shape[:2]
    if args.cu_seqlens is None:
        return Chunking.of([n * tokens for n in range(batch)], [tokens] * batch)
    offsets = enforce(check_offsets, args.cu_seqlens, tokens)
    return Chunking.of(offsets[:-1], [end - start for start, end in pairwise(offsets)])


def _to_log(gate: Tensor, gate_domain: str) -> Tensor:
    return gate.log() if gate_domain == "linear" else gate


def _prepare(args: ForwardArgs, l2norm: bool) -> _Prepared:
    chunking = _chunking(args)
    q, k, v, beta, gate = (chunking.gather(x) for x in (args.q, args.k, args.v, args.beta, args.g))
    norms = None
    if l2norm:
        rq, rk = ((x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for x in (q, k))
        q, k, norms = q * rq, k * rk, (rq, rk)
    # A row without a token decays nothing, in either domain.
    log_gate = torch.where(chunking.valid[:, None, :], _to_log(gate, args.gate_domain), 0.0)
    scale = args.q.size(3) ** -0.5 if args.scale is None else float(args.scale)
    if args.initial_state is None:
        shape = [int(n) for n in state_shape(args)]
        state = torch.zeros(shape, dtype=torch.float32)
    else:
        state = args.initial_state.float()
    if args.state_v_first:
        state = state.mT
    return _Prepared(chunking, Tiles.of(q, k, v, log_gate, beta, scale), state, gate, log_gate, norms)


def _final_state(state: Tensor, v_first: bool) -> Tensor:
    return (state.mT if v_first else state).contiguous()


def _nothing(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What an output that was not asked for looks like."""
    return like.new_empty((0,), dtype=dtype or like.dtype)


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
    """CPU kernel of the op of this name. `auto_cp` has no meaning here: the CPU always runs a sequence in one piece."""
    args = ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, head_first, state_v_first, gate_domain)
    enforce(check_forward, args)
    p = _prepare(args, use_qk_l2norm_in_kernel)
    f = _chunked.forward(p.tiles, p.chunking, p.initial_state)
    o = p.chunking.scatter(f.o, q.new_zeros(v.shape))
    return o, _final_state(f.final_state, state_v_first) if output_final_state else _nothing(q, torch.float32)


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
    """CPU kernel of the op of this name."""
    args = ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, False, state_v_first, gate_domain)
    enforce(check_forward, args)
    p = _prepare(args, use_qk_l2norm_in_kernel)
    f = _chunked.forward(p.tiles, p.chunking, p.initial_state)
    batch, tokens, heads = v.shape[:3]
    g_out = p.chunking.scatter(p.log_gate, g.new_zeros(g.shape, dtype=torch.float32))
    inverse = p.chunking.scatter(p.tiles.inverse, q.new_zeros(batch, tokens, heads, CHUNK))
    o = p.chunking.scatter(f.o, q.new_zeros(v.shape))
    h = _nothing(q)
    if output_h:
        packed = cu_seqlens is not None
        rows = tokens // CHUNK + p.initial_state.size(0) if packed else (tokens + CHUNK - 1) // CHUNK
        h = q.new_zeros(batch, rows, *p.initial_state.shape[1:])
        h.flatten(0, 1)[: f.starts.size(0)] = f.starts.to(q.dtype)
    final_state = _final_state(f.final_state, state_v_first) if output_final_state else _nothing(q, torch.float32)
    return g_out, inverse, o, h, final_state


def _norm_gradient(dy: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """The gradient through y = x r with r = (sum x^2 + eps)^-1/2."""
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))


def _gate_gradient(dlog: Tensor, p: _Prepared, gate_domain: str) -> Tensor:
    """The gradient of the gate as given. Where the decay is clamped to nothing it is 0, also for a linear gate of 0."""
    dlog = torch.where(p.log_gate < _chunked.LOG_DECAY_FLOOR, 0.0, dlog)
    if gate_domain == "log":
        return dlog
    return torch.where(p.gate == 0, 0.0, dlog / torch.where(p.gate == 0, 1.0, p.gate))


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
    """CPU kernel of the op of this name. A is checked but computed again in fp32, more exact than the saved 16 bits."""
    args = ForwardArgs(q, k, v, g, beta, scale, initial_state, cu_seqlens, False, state_v_first, gate_domain)
    enforce(check_backward, BackwardArgs(args, A, do, dht))
    p = _prepare(args, use_qk_l2norm_in_kernel)
    f = _chunked.forward(p.tiles, p.chunking, p.initial_state)
    do_tiles = torch.zeros_like(f.o) if do is None else p.chunking.gather(do)
    dfinal = torch.zeros_like(f.final_state) if dht is None else (dht.mT if state_v_first else dht)
    d = _chunked.backward(p.tiles, f, p.chunking, do_tiles, dfinal)

    heads_k, tiles = q.size(2), p.tiles
    group = v.size(2) // heads_k
    dq, dk = (x.unflatten(1, (heads_k, group)).sum(2) for x in (d.q, d.k))
    if p.norms is not None:
        dq = _norm_gradient(dq, tiles.q[:, ::group], p.norms[0])
        dk = _norm_gradient(dk, tiles.k[:, ::group], p.norms[1])

    scatter = p.chunking.scatter
    dinitial = _nothing(q, torch.float32)
    if initial_state is not None:
        dinitial = _final_state(d.initial_state, state_v_first).to(initial_state.dtype)
    return (
        scatter(dq, q.new_zeros(q.shape)),
        scatter(dk, k.new_zeros(k.shape)),
        scatter(d.v, v.new_zeros(v.shape)),
        scatter(d.beta, beta.new_zeros(beta.shape)),
        scatter(_gate_gradient(d.log_decay, p, gate_domain), g.new_zeros(g.shape)),
        dinitial,
    )


for _function in (chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd):
    implement(_function.__name__, "CPU", _function)
