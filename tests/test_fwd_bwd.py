"""The low-level functions: the five results of the training forward, and the backward pass from them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_qla
from flash_qla._library import has_backward
from flash_qla.reference import gated_delta_rule
from flash_qla.testing import Case, Inputs, make_inputs, poison_outputs, relative_error

C = 64

CASES = (
    Case("dense", (150, 150), heads_k=1, heads_v=2),
    Case("one token", (1,), heads_k=1, heads_v=2, initial_state=None),
    Case("whole chunk", (128,), heads_k=2, heads_v=2, state_v_first=True),
    Case("packed", (70, 0, 1, 64, 130), packed=True, tail=9, heads_k=1, heads_v=3),
    Case("packed, strong, [V, K]", (100, 29), packed=True, gates="strong", state_v_first=True),
    Case(
        "packed, linear, l2norm",
        (65, 66),
        packed=True,
        gate_domain="linear",
        keys="raw",
        l2norm=True,
        offsets=torch.int32,
    ),
    Case("keys alike, odd strides", (100,), keys="alike", betas="one", gates="zero", layout="odd"),
)


def options_of(inputs: Inputs) -> dict[str, Any]:
    options = inputs.options()
    del options["output_final_state"]
    return options


def sequences(case: Case) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of each sequence."""
    if not case.packed:
        return [(b, 0, n) for b, n in enumerate(case.lengths)]
    ends = torch.tensor(case.lengths).cumsum(0).tolist()
    return [(0, end - n, end) for n, end in zip(case.lengths, ends, strict=True)]


def expected_inverse(inputs: Inputs) -> Tensor:
    """A in float64: torch's general inverse of I + strict_lower(diag(beta) K K^T), chunk by chunk."""
    case = inputs.case
    k = inputs.k.double()
    if case.l2norm:
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k.repeat_interleave(case.heads_v // case.heads_k, 2)
    out = k.new_zeros(case.batch, case.tokens, case.heads_v, C)
    for b, start, end in sequences(case):
        for t in range(start, end, C):
            rows = slice(t, min(t + C, end))
            tile = k[b, rows].transpose(0, 1)
            lower = (inputs.beta[b, rows].double().T[..., None] * (tile @ tile.mT)).tril(-1)
            inverse = torch.linalg.inv(torch.eye(tile.size(1), dtype=k.dtype, device=k.device) + lower)
            out[b, rows, :, : tile.size(1)] = inverse.transpose(0, 1)
    return out


def expected_starts(inputs: Inputs) -> list[list[Tensor]]:
    """Per sequence, the state [H_v, K, V] at the start of each of its chunks."""
    case, starts = inputs.case, []
    for n, (b, start, end) in enumerate(sequences(case)):
        shape = (1, case.heads_v, case.k, case.v)
        state = inputs.q.new_zeros(shape, dtype=torch.float64)
        if inputs.initial_state is not None:
            state = inputs.initial_state[n : n + 1].double()
            state = state.mT if case.state_v_first else state
        starts.append([])
        for t in range(start, end, C):
            starts[-1].append(state[0])
            piece = (x[b : b + 1, t : min(t + C, end)] for x in inputs.tensors())
            _, state = gated_delta_rule(
                *piece, initial_state=state, use_qk_l2norm_in_kernel=case.l2norm, gate_domain=case.gate_domain
            )
    return starts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_five_results(case: Case, dtype: torch.dtype, device: str) -> None:
    case = case if device == "cuda" else case.named(case.name, k=32, v=24)
    inputs = make_inputs(case, dtype=dtype, device=device)
    poison_outputs(case, device)
    g_out, inverse, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(*inputs.tensors(), **options_of(inputs))
    assert h is not None and final_state is not None
    covered = sum(case.lengths) if case.packed else case.tokens

    log_gate = inputs.g.double().log() if case.gate_domain == "linear" else inputs.g.double()
    assert g_out.dtype == torch.float32 and g_out.shape == inputs.g.shape
    torch.testing.assert_close(g_out[:, :covered].double(), log_gate[:, :covered], rtol=1e-5, atol=1e-6)

    expected = expected_inverse(inputs)
    assert inverse.dtype == dtype
    assert relative_error(inverse, expected) <= 0.005
    for b, start, end in sequences(case):
        for t in range(start, end, C):
            rows = inverse[b, t : min(t + C, end)]
            above = torch.ones(rows.size(0), C, dtype=torch.bool, device=device).triu(1)
            assert bool((rows.transpose(0, 1)[:, above] == 0).all()), "A is not lower triangular to the end of its row"

    starts = expected_starts(inputs)
    assert h.dtype == dtype and h.shape[2:] == (case.heads_v, case.k, case.v)
    rows = case.tokens // C + len(case.lengths) if case.packed else -(-case.tokens // C)
    assert h.shape[:2] == (case.batch, rows)
    flat = [state for chunks in starts for state in chunks]
    assert relative_error(h.flatten(0, 1)[: len(flat)], torch.stack(flat)) <= 0.005
    assert bool((h.flatten(0, 1)[len(flat) :] == 0).all())

    ref_o, ref_state = inputs.reference()
    assert relative_error(o, ref_o) <= 0.005
    assert relative_error(final_state, ref_state) <= 0.005
    for x in (g_out, inverse, o):
        assert bool((x[:, covered:] == 0).all()), "rows outside the sequences are not 0"


def test_results_not_asked_for(device: str) -> None:
    inputs = make_inputs(Case("dense", (70,), heads_k=1, heads_v=1), device=device)
    options = options_of(inputs)
    full = flash_qla.chunk_gated_delta_rule_fwd(*inputs.tensors(), **options)
    bare = flash_qla.chunk_gated_delta_rule_fwd(*inputs.tensors(), **options, output_final_state=False, output_h=False)
    assert bare[3] is None and bare[4] is None
    for a, b in zip(full[:3], bare[:3], strict=True):
        assert torch.equal(a, b)
    raw = torch.ops.flash_qla.chunk_gated_delta_rule_fwd(*inputs.tensors(), output_final_state=False, output_h=False)
    assert raw[3].shape == (0,) and raw[3].dtype == torch.bfloat16
    assert raw[4].shape == (0,) and raw[4].dtype == torch.float32


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("gate", ["g", "g_out"])
def test_backward_from_the_results(case: Case, gate: str, device: str) -> None:
    """bwd gives what autograd gives, whether it is given the gate or g_out, and with or without A."""
    if not has_backward(device):
        pytest.skip("no backward kernel is built yet")
    case = case if device == "cuda" else case.named(case.name, k=32, v=24)
    if gate == "g_out":
        case = case.named(case.name, gate_domain="log")
    inputs = make_inputs(case, device=device)
    options = options_of(inputs)
    g_out, inverse, o, _, final_state = flash_qla.chunk_gated_delta_rule_fwd(*inputs.tensors(), **options)
    assert final_state is not None
    do, dht = torch.randn_like(o), torch.randn_like(final_state)
    q, k, v, g, beta = inputs.tensors()
    got = flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g if gate == "g" else g_out, beta, inverse, do, dht, **options)
    call = inputs.with_grad()
    leaves = [*call.tensors(), *([] if call.initial_state is None else [call.initial_state])]
    results = flash_qla.chunk_gated_delta_rule(*call.tensors(), **call.options())
    dq, dk, dv, dg, dbeta, *dinitial = torch.autograd.grad(results, leaves, [do, dht])  # type: ignore[arg-type]
    assert (got[5] is None) == (inputs.initial_state is None)
    for a, b in zip(got, (dq, dk, dv, dbeta, dg, *dinitial), strict=False):
        assert a is not None and relative_error(a, b) <= 0.004 and a.dtype == b.dtype


def test_backward_without_incoming_gradients() -> None:
    inputs = make_inputs(Case("dense", (70, 70), k=16, v=24), device="cpu")
    o, state = (
        torch.randn_like(x) for x in flash_qla.chunk_gated_delta_rule(*inputs.tensors(), **inputs.options()) if x is not None
    )
    options = {"initial_state": inputs.initial_state}

    def run(do: Tensor | None, dht: Tensor | None) -> list[Tensor]:
        grads = flash_qla.chunk_gated_delta_rule_bwd(*inputs.tensors(), None, do, dht, **options)
        return [x.double() for x in grads if x is not None]

    whole, from_o, from_state, nothing = run(o, state), run(o, None), run(None, state), run(None, None)
    for w, a, b, zero in zip(whole, from_o, from_state, nothing, strict=True):
        assert bool((zero == 0).all())
        assert relative_error(a + b, w) <= 0.004


@pytest.mark.gpu
def test_cuda_backward_says_that_it_is_missing() -> None:
    if has_backward("cuda"):
        pytest.skip("this build has a backward kernel")
    inputs = make_inputs(Case("dense", (70,)), device="cuda").with_grad()
    o, _ = flash_qla.chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    with pytest.raises(NotImplementedError, match="the backward pass on CUDA is not part of this build"):
        o.float().sum().backward()
