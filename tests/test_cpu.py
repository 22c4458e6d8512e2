"""The CPU implementation against tighter limits than every device has: it computes in fp32, only rounding may show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_gdr import DEVELOP, VARLEN, forward_errors, gradient_errors

import flash_qla
from flash_qla.testing import Case, Inputs, make_inputs

# Half a unit in the last place of the output's dtype, in the 2-norm; fp32 results leave room for sums of 64 terms.
ROUNDING = {torch.bfloat16: 0.0025, torch.float16: 0.0004}
FP32 = 2e-5
SIXTEEN_BIT = {"o", "dq", "dk", "dv"}


def limit(name: str, inputs: Inputs) -> float:
    case = inputs.case
    dtypes = {"dg": case.gate_dtype, "dbeta": case.beta_dtype, "dinitial_state": case.initial_state}
    dtype = inputs.q.dtype if name in SIXTEEN_BIT else dtypes.get(name, torch.float32)
    return ROUNDING.get(dtype, FP32) if dtype is not None else FP32


@pytest.mark.parametrize("dtype", ROUNDING, ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [c for c in (*DEVELOP, *VARLEN) if "every length" not in c.name], ids=lambda c: c.name)
def test_only_rounding(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case.named(case.name, k=16, v=24), dtype=dtype)
    errors = forward_errors(inputs, "cpu") | gradient_errors(inputs)
    over = {name: error for name, error in errors.items() if not error <= limit(name, inputs)}
    assert not over, f"more than rounding: {over} of {errors}"


@pytest.mark.parametrize(("k", "v"), [(1, 1), (3, 5), (8, 8), (24, 48), (128, 64)])
def test_any_head_dimensions(k: int, v: int) -> None:
    inputs = make_inputs(Case("dimensions", (70,), k=k, v=v))
    errors = forward_errors(inputs, "cpu") | gradient_errors(inputs)
    assert all(error <= limit(name, inputs) for name, error in errors.items()), errors


def call(inputs: Inputs) -> torch.Tensor:
    o, final_state = flash_qla.chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    return o.float().sum() if final_state is None else o.float().sum() + final_state.sum()


def test_the_op_is_differentiable_by_itself() -> None:
    inputs = make_inputs(Case("op", (20,), k=8, v=8)).with_grad()
    o, final_state = torch.ops.flash_qla.chunk_gated_delta_rule(*inputs.tensors())
    assert o.requires_grad and final_state.numel() == 0
    o.float().sum().backward()
    assert inputs.q.grad is not None and bool(inputs.q.grad.isfinite().all())


@pytest.mark.parametrize("wanted", ["q", "k", "v", "g", "beta", "initial_state"])
def test_gradients_only_where_needed(wanted: str) -> None:
    inputs = make_inputs(Case("one gradient", (20,), k=8, v=8))
    getattr(inputs, wanted).requires_grad_()
    call(inputs).backward()
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert (getattr(inputs, name).grad is not None) == (name == wanted)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which: int) -> None:
    inputs = make_inputs(Case("one result", (70,), k=8, v=8)).with_grad()
    results = flash_qla.chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    out = results[which]
    assert out is not None
    got = torch.autograd.grad(out, inputs.v, torch.ones_like(out))[0]
    expected = torch.autograd.grad(inputs.reference()[which], inputs.v, torch.ones_like(out).double())[0]
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.01, atol=1e-4)


def test_second_derivatives_are_refused() -> None:
    inputs = make_inputs(Case("second", (5,), k=8, v=8)).with_grad()
    (dv,) = torch.autograd.grad(call(inputs), inputs.v, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of chunk_gated_delta_rule are not implemented"):
        dv.float().sum().backward()


def test_the_training_forward_does_not_differentiate() -> None:
    inputs = make_inputs(Case("fwd", (5,), k=8, v=8)).with_grad()
    _, _, o, _, _ = flash_qla.chunk_gated_delta_rule_fwd(*inputs.tensors())
    with pytest.raises(RuntimeError, match="chunk_gated_delta_rule_fwd does not differentiate"):
        o.float().sum().backward()


def test_linear_zero_gates_give_finite_gradients() -> None:
    inputs = make_inputs(Case("forget", (130,), k=16, v=16, gate_domain="linear")).with_grad()
    assert bool((inputs.g == 0).any())
    call(inputs).backward()
    for x in (*inputs.tensors(), inputs.initial_state):
        assert x is not None and x.grad is not None and bool(x.grad.isfinite().all())


def test_a_long_carried_state() -> None:
    """Many chunks with next to no decay: errors must not pile up."""
    inputs = make_inputs(Case("long", (3000,), heads_k=1, heads_v=1, k=16, v=16, gates="zero"))
    errors = forward_errors(inputs, "cpu")
    assert errors["o"] <= ROUNDING[torch.bfloat16] and errors["final_state"] <= FP32


def test_function_and_op_record_the_same_gradients() -> None:
    """The function records a node of its own, the op one of torch.library's."""
    inputs = make_inputs(Case("ways", (70, 5), packed=True, heads_k=1, heads_v=2, k=8, v=8)).with_grad()
    leaves = [*inputs.tensors(), inputs.initial_state]

    def gradients(rule: Callable[..., Any]) -> list[torch.Tensor]:
        outputs = rule(*inputs.tensors(), **inputs.options())
        return list(torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs]))

    for a, b in zip(
        gradients(flash_qla.chunk_gated_delta_rule), gradients(torch.ops.flash_qla.chunk_gated_delta_rule), strict=True
    ):
        assert torch.equal(a, b)


def test_no_gradients_are_recorded_without_need() -> None:
    inputs = make_inputs(Case("none", (9,), k=8, v=8)).with_grad()
    with torch.no_grad():
        assert not flash_qla.chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())[0].requires_grad
