"""The chunked Gated Delta Rule in PyTorch, fp32: the mathematics of the CPU implementation.

Equations: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv
2412.06464), in the form of docs/design-notes.md. Per head and chunk of C = 64 tokens, with c the inclusive cumulative
sum of the log decay, G_ij = e^(c_i - c_j) for i >= j (else 0) and S [K, V] the state at the chunk's start:

    A  = (I + strict_lower(diag(beta) K K^T))^-1          P = G o A diag(beta)
    W  = V - diag(e^c) K S                                Vd = P W
    O  = scale (diag(e^c) Q S + (G o Q K^T) Vd)           S' = e^(c_C) S + K^T diag(e^(c_C - c)) Vd

Exponents are differences <= 0 throughout, so no decay overflows. Sequences are cut into chunks that lie one after
another in the leading dimension NC, in the order of the sequences: everything that one chunk can do alone runs over all
of them at once, and a loop over chunk positions carries the states of all sequences together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import CHUNK

# Decay e^-128 is 0 in fp32. Clamping there keeps a gate of exactly 0 (log decay -inf) free of inf - inf and
# changes no result.
LOG_DECAY_FLOOR = -128.0


@dataclass(frozen=True)
class Chunking:
    """Where the chunks lie. Rows index the flattened [B * T] token dimension."""

    rows: Tensor  # [NC, 64] int64; 0 where there is no token
    valid: Tensor  # [NC, 64] bool
    first: Tensor  # [N] int64, a sequence's first chunk
    count: Tensor  # [N] int64, a sequence's number of chunks

    @staticmethod
    def of(starts: list[int], lengths: list[int]) -> "Chunking":
        """Cuts sequences, given by first row and length in tokens, into chunks."""
        start, length = torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
        count = (length + CHUNK - 1) // CHUNK
        first = count.cumsum(0) - count
        sequence = torch.repeat_interleave(torch.arange(len(starts)), count)
        position = torch.arange(sequence.numel()) - first[sequence]
        offset = position[:, None] * CHUNK + torch.arange(CHUNK)
        valid = offset < length[sequence, None]
        rows = torch.where(valid, start[sequence, None] + offset, 0)
        return Chunking(rows, valid, first, count)

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] to fp32 [NC, H, 64, ...], with zeros where there is no token whatever lies there in memory."""
        tiles = x.flatten(0, 1)[self.rows].float()
        tiles = torch.where(self.valid.view(*self.valid.shape, *[1] * (tiles.dim() - 2)), tiles, 0.0)
        return tiles.transpose(1, 2)

    def scatter(self, tiles: Tensor, out: Tensor) -> Tensor:
        """[NC, H, 64, ...] into the rows of the contiguous `out` [B, T, H, ...] that sequences cover, as its dtype."""
        out.flatten(0, 1)[self.rows[self.valid]] = tiles.transpose(1, 2)[self.valid].to(out.dtype)
        return out

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Per chunk position: the sequences that reach it and their chunks there."""
        for step in range(int(self.count.max()) if self.count.numel() else 0):
            active = torch.nonzero(self.count > step).flatten()
            yield active, self.first[active] + step


@dataclass(frozen=True)
class Tiles:
    """fp32 inputs of every chunk and what follows from them without the state. H is H_v throughout."""

    q: Tensor  # [NC, H, 64, K]
    k: Tensor  # [NC, H, 64, K]
    v: Tensor  # [NC, H, 64, V]
    beta: Tensor  # [NC, H, 64]
    scale: float
    grow: Tensor  # e^c                        [NC, H, 64, 1]
    fade: Tensor  # e^(c_C - c)                [NC, H, 64, 1]
    total: Tensor  # e^(c_C)                   [NC, H, 1, 1]
    gate: Tensor  # G                          [NC, H, 64, 64]
    kk: Tensor  # K K^T                        [NC, H, 64, 64]
    inverse: Tensor  # A                       [NC, H, 64, 64]
    mix: Tensor  # P = G o A diag(beta)        [NC, H, 64, 64]
    scores: Tensor  # G o Q K^T                [NC, H, 64, 64]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float) -> "Tiles":
        """q and k [NC, H_k, 64, K], v [NC, H_v, 64, V], log_decay and beta [NC, H_v, 64]."""
        group = v.size(1) // k.size(1)
        kk, qk = (x @ k.mT for x in (k, q))
        q, k, kk, qk = (x.repeat_interleave(group, 1) for x in (q, k, kk, qk))
        c = log_decay.clamp(min=LOG_DECAY_FLOOR).cumsum(-1)
        upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        gate = (c[..., :, None] - c[..., None, :]).masked_fill(upper, -torch.inf).exp()
        eye = torch.eye(CHUNK).expand_as(kk)
        lower = (beta[..., None] * kk).tril(-1)
        inverse = torch.linalg.solve_triangular(eye + lower, eye, upper=False, unitriangular=True)
        return Tiles(
            q=q,
            k=k,
            v=v,
            beta=beta,
            scale=scale,
            grow=c.exp()[..., None],
            fade=(c[..., -1:] - c).exp()[..., None],
            total=c[..., -1:].exp()[..., None],
            gate=gate,
            kk=kk,
            inverse=inverse,
            mix=gate * inverse * beta[..., None, :],
            scores=gate * qk,
        )


@dataclass(frozen=True)
class Forward:
    """Results of the forward pass and what the backward pass takes from it."""

    o: Tensor  # [NC, H, 64, V]
    starts: Tensor  # [NC, H, K, V], the state at each chunk's start
    final_state: Tensor  # [N, H, K, V]
    w: Tensor  # [NC, H, 64, V]
    vd: Tensor  # [NC, H, 64, V]


def forward(t: Tiles, chunking: Chunking, initial_state: Tensor) -> Forward:
    """Runs all sequences from initial_state [N, H, K, V] fp32, which is left as it is."""
    state = initial_state.clone()
    o, w, vd = (torch.empty_like(t.v) for _ in range(3))
    starts = t.v.new_empty(t.v.size(0), *state.shape[1:])
    for active, i in chunking.steps():
        s, k = state[active], t.k[i]
        starts[i] = s
        w[i] = t.v[i] - t.grow[i] * (k @ s)
        vd[i] = t.mix[i] @ w[i]
        o[i] = t.scale * (t.grow[i] * (t.q[i] @ s) + t.scores[i] @ vd[i])
        state[active] = t.total[i] * s + (k * t.fade[i]).mT @ vd[i]
    return Forward(o, starts, state, w, vd)


@dataclass(frozen=True)
class Gradients:
    """fp32 gradients; q and k still per value head."""

    q: Tensor  # [NC, H, 64, K]
    k: Tensor  # [NC, H, 64, K]
    v: Tensor  # [NC, H, 64, V]
    beta: Tensor  # [NC, H, 64]
    log_decay: Tensor  # [NC, H, 64]
    initial_state: Tensor  # [N, H, K, V]


def backward(t: Tiles, f: Forward, chunking: Chunking, do: Tensor, dht: Tensor) -> Gradients:
    """The gradients for do [NC, H, 64, V] and dht [N, H, K, V], both fp32; dht is left as it is.

    The reverse of `forward`, chunk by chunk from the last: with dS the gradient of the state after the chunk,

        dVd = scale (G o Q K^T)^T dO + diag(e^(c_C - c)) K dS        dW = P^T dVd = dV
        dS_start = e^(c_C) dS + scale Q^T diag(e^c) dO - K^T diag(e^c) dW

    and the rest is local to the chunk. L = strict_lower(diag(beta) K K^T) enters through dL = -A^T dA A^T.

    The gate enters through factors e^(c_i - c_j), e^(c_i), e^(c_C - c_i) and e^(c_C). dg_t sums the shares of the
    factors whose span holds t (j < t <= i, t <= i, i < t, all). Taking dc first and its reverse cumulative sum after is
    the same on paper, but under strong decay dg is then the small difference of large numbers: 8 % wrong in fp32 where
    g is -16.
    """
    dstate = dht.clone()
    dq, dk, dv = torch.empty_like(t.q), torch.empty_like(t.k), torch.empty_like(t.v)
    dbeta, dlog = torch.empty_like(t.beta), torch.empty_like(t.beta)
    for active, i in reversed(list(chunking.steps())):
        ds, s = dstate[active], f.starts[i]
        q, k, vd, dout = t.q[i], t.k[i], f.vd[i], t.scale * do[i]
        grow, fade, total, gate, inverse, beta = t.grow[i], t.fade[i], t.total[i], t.gate[i], t.inverse[i], t.beta[i]

        through_state = fade * (k @ ds)  # the part of dVd that comes from the state
        dvd = t.scores[i].mT @ dout + through_state
        dw = t.mix[i].mT @ dvd
        dscores = dout @ vd.mT
        dmix = dvd @ f.w[i].mT
        dqk = gate * dscores
        dinverse = gate * dmix * beta[..., None, :]
        dlower = -(inverse.mT @ dinverse @ inverse.mT).tril(-1)
        dkk = dlower * beta[..., None]

        dout_s, dw_s = dout @ s.mT, dw @ s.mT
        dq[i] = grow * dout_s + dqk @ k
        dk[i] = dqk.mT @ q + (dkk + dkk.mT) @ k + fade * (vd @ ds.mT) - grow * dw_s
        dv[i] = dw
        dbeta[i] = (gate * inverse * dmix).sum(-2) + (dlower * t.kk[i]).sum(-1)

        between = (t.mix[i] * dmix + t.scores[i] * dscores).flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
        to_end = (vd * through_state).sum(-1)
        from_start = (grow * (q * dout_s - k * dw_s)).sum(-1).flip(-1).cumsum(-1).flip(-1)
        dlog[i] = between + from_start + (total * s * ds).sum((-1, -2))[..., None]
        dlog[i, :, 1:] += to_end[..., :-1].cumsum(-1)

        dstate[active] = total * ds + (q * grow).mT @ dout - (k * grow).mT @ dw
    return Gradients(dq, dk, dv, dbeta, dlog, dstate)
