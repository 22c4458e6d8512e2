"""Inputs, error measure and limits for `python -m flash_qla check`, the tests and the benchmarks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .reference import gated_delta_rule

# Largest relative 2-norm error against the float64 recurrence, 16-bit inputs and outputs.
TOLERANCES = {
    "o": 0.005,
    "final_state": 0.005,
    "dq": 0.008,
    "dk": 0.008,
    "dv": 0.008,
    "dinitial_state": 0.008,
    "dbeta": 0.02,
    "dg": 0.02,
}


@dataclass(frozen=True)
class Case:
    """What a call looks like, without its numbers."""

    name: str
    lengths: tuple[int, ...]  # tokens of each sequence; all the same unless packed
    packed: bool = False  # one batch row and cu_seqlens, or a batch row per sequence
    heads_k: int = 2
    heads_v: int = 4
    k: int = 128
    v: int = 128
    tail: int = 0  # packed: tokens after the last sequence
    offsets: torch.dtype = torch.int64  # packed: dtype of cu_seqlens
    gates: str = "random"  # "random": mild, a quarter of the heads exactly 0; "zero"; "strong": near -16; "mixed": 0 or -16
    gate_domain: str = "log"  # with "linear", every 16th token forgets everything
    gate_dtype: torch.dtype = torch.float32
    betas: str = "random"  # "random": sigmoid of a normal; "one": within 0.001 of 1
    beta_dtype: torch.dtype = torch.float32
    keys: str = "unit"  # "unit": directions at random; "alike": all close to one direction; "raw": not normalised
    l2norm: bool = False
    initial_state: torch.dtype | None = torch.float32
    final_state: bool = True
    state_v_first: bool = False
    # q, k, v in memory. "projection": slices of one [B, T, n] tensor; "odd": odd strides; "heads": [B, H, T, D]
    layout: str = "contiguous"
    scale: float | None = None
    auto_cp: bool = True

    @property
    def batch(self) -> int:
        """B."""
        return 1 if self.packed else len(self.lengths)

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths) + self.tail if self.packed else self.lengths[0]

    def state_shape(self) -> tuple[int, int, int, int]:
        """Sizes of the initial and the final state."""
        dims = (self.v, self.k) if self.state_v_first else (self.k, self.v)
        return (len(self.lengths), self.heads_v, *dims)

    def named(self, name: str, **changes: Any) -> "Case":
        """This case with another name and some fields changed."""
        return replace(self, name=name, **changes)


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments of `flash_qla.chunk_gated_delta_rule`."""
        return self.q, self.k, self.v, self.g, self.beta

    def options(self) -> dict[str, Any]:
        """Its keyword arguments."""
        return {
            **self._shared_options(),
            "output_final_state": self.case.final_state,
            "auto_cp": self.case.auto_cp,
        }

    def _shared_options(self) -> dict[str, Any]:
        return {
            "scale": self.case.scale,
            "initial_state": self.initial_state,
            "cu_seqlens": self.cu_seqlens,
            "use_qk_l2norm_in_kernel": self.case.l2norm,
            "state_v_first": self.case.state_v_first,
            "gate_domain": self.case.gate_domain,
        }

    def reference(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """o and the final state by the recurrence in `dtype`."""
        return gated_delta_rule(*self.tensors(), **self._shared_options(), dtype=dtype)

    def with_grad(self) -> "Inputs":
        """The same call on leaves that require gradients."""
        leaves = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta", "initial_state")}
        return replace(self, **{name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None})


def make_inputs(case: Case, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", seed: int = 0) -> Inputs:
    """Draws the tensors of a case on `device`. The same arguments give the same numbers on the same kind of device."""
    if not case.packed and len(set(case.lengths)) != 1:
        raise ValueError(f"{case.name}: sequences of different lengths need packed=True")
    generator = torch.Generator(device).manual_seed(seed)
    batch, tokens = case.batch, case.tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k = normal(batch, tokens, case.heads_k, case.k), normal(batch, tokens, case.heads_k, case.k)
    if case.keys == "alike":
        k = normal(batch, 1, case.heads_k, case.k) + 0.3 * k
    if case.keys != "raw":
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = normal(batch, tokens, case.heads_v, case.v)
    q, k, v = _lay_out(case.layout, [x.to(dtype) for x in (q, k, v)])
    state = None
    if case.initial_state is not None:
        state = normal(*case.state_shape()).to(case.initial_state)
    cu_seqlens = None
    if case.packed:
        cu_seqlens = torch.tensor([0, *accumulate(case.lengths)], dtype=case.offsets, device=device)
    gate_shape = (batch, tokens, case.heads_v)
    return Inputs(
        case=case,
        q=q,
        k=k,
        v=v,
        g=_gates(case, normal(*gate_shape)).to(case.gate_dtype),
        beta=_betas(case, normal(*gate_shape)).to(case.beta_dtype),
        initial_state=state,
        cu_seqlens=cu_seqlens,
    )


def _gates(case: Case, x: Tensor) -> Tensor:
    if case.gates == "random":
        g = torch.nn.functional.logsigmoid(x) / 16
        g[..., 3::4] = 0
    elif case.gates == "zero":
        g = torch.zeros_like(x)
    elif case.gates == "strong":
        g = -16 + 0.5 * x.clamp(-4, 4)
    elif case.gates == "mixed":
        g = torch.where(x > 0, 0.0, -16.0)
    else:
        raise ValueError(f"{case.name}: no gates called {case.gates!r}")
    if case.gate_domain == "linear":
        g = g.exp()
        g[:, 15::16] = 0
    return g


def _betas(case: Case, x: Tensor) -> Tensor:
    if case.betas == "random":
        return x.sigmoid()
    if case.betas == "one":
        return 1 - 0.001 * x.sigmoid()
    raise ValueError(f"{case.name}: no betas called {case.betas!r}")


def _lay_out(layout: str, tensors: list[Tensor]) -> list[Tensor]:
    """The same values in other strides, the last dimension still contiguous."""
    if layout == "contiguous":
        return tensors
    if layout == "heads":
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    if layout == "odd":
        padded = [torch.nn.functional.pad(x, (1, 2 - x.size(-1) % 2), value=float("nan")) for x in tensors]
        return [wide[..., 1 : 1 + x.size(-1)] for wide, x in zip(padded, tensors, strict=True)]
    if layout == "projection":
        row = torch.cat([x.flatten(2) for x in tensors], -1)
        parts = row.split([x.size(2) * x.size(3) for x in tensors], -1)
        return [part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, tensors, strict=True)]
    raise ValueError(f"no layout called {layout!r}")


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in the 2-norm and float64; 0 if both are zero or empty, NaN or infinity if `out` is not
    finite.

    A limit must therefore be tested as `error <= limit`, which NaN fails.
    """
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {list(out.shape)}, ref {list(ref.shape)}")
    out, ref = out.detach().double(), ref.detach().double()
    difference, norm = float((out - ref).norm()), float(ref.norm())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else difference * float("inf")
    return difference / norm


def rows_outside(case: Case, x: Tensor) -> Tensor:
    """The rows of a [B, T, ...] result that belong to no sequence; they must be 0."""
    return x[:, sum(case.lengths) :] if case.packed else x[:, case.tokens :]


def poison(shapes: Iterable[Iterable[int]], device: str | torch.device) -> None:
    """Leaves NaN in the memory that the next allocations of these sizes will get, so that an unwritten output shows.

    Works with CUDA's caching allocator, which hands a freed block out again; does nothing elsewhere.
    """
    if torch.device(device).type != "cuda":
        return
    blocks = []
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            blocks += [torch.full(tuple(shape), float("nan"), dtype=dtype, device=device) for _ in range(2)]
    del blocks


def poison_outputs(case: Case, device: str | torch.device) -> None:
    """`poison` for the outputs of a call: o, the inverse A, the gate and the final state."""
    rows = (case.batch, case.tokens, case.heads_v)
    poison([(*rows, case.v), (*rows, 64), rows, case.state_shape()], device)
