"""The fakes: torch's own op checks, and fake outputs against real ones in shape, dtype, strides and device."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_qla._library import has_backward
from flash_qla.testing import Case, Inputs, make_inputs

OPS = torch.ops.flash_qla

CASES = (
    Case("dense", (70, 70)),
    Case("dense, nothing optional", (64,), initial_state=None, final_state=False),
    Case("packed", (70, 0, 1, 65), packed=True, tail=3, state_v_first=True, offsets=torch.int32),
    Case(
        "packed, linear, bf16 state",
        (70, 30),
        packed=True,
        gate_domain="linear",
        initial_state=torch.bfloat16,
        l2norm=True,
    ),
    Case("16-bit gates, strided", (33,), gate_dtype=torch.float16, beta_dtype=torch.bfloat16, layout="projection"),
    Case("no tokens", (0,)),
)


def draw(case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return make_inputs(case if device == "cuda" else case.named(case.name, k=16, v=24), dtype=dtype, device=device)


def calls(inputs: Inputs) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Every op with arguments for these inputs."""
    case, options = inputs.case, inputs.options()
    fwd = {**options, "output_h": case.final_state}
    bwd = {name: x for name, x in options.items() if name != "output_final_state"}
    inverse = torch.randn(*inputs.v.shape[:3], 64, device=inputs.q.device).to(inputs.q.dtype)
    dht = torch.randn(case.state_shape(), device=inputs.q.device) if case.final_state else None
    return {
        "chunk_gated_delta_rule": (OPS.chunk_gated_delta_rule, inputs.tensors(), options),
        "chunk_gated_delta_rule_fwd": (OPS.chunk_gated_delta_rule_fwd, inputs.tensors(), fwd),
        "chunk_gated_delta_rule_bwd": (
            OPS.chunk_gated_delta_rule_bwd,
            (*inputs.tensors(), inverse, torch.randn_like(inputs.v), dht),
            bwd,
        ),
    }


NAMES = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")


def skip_without_backward(name: str, device: str) -> None:
    if name.endswith("_bwd") and not has_backward(device):
        pytest.skip("no backward kernel is built yet")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_opcheck(case: Case, dtype: torch.dtype, name: str, device: str) -> None:
    skip_without_backward(name, device)
    op, args, kwargs = calls(draw(case, device, dtype))[name]
    torch.library.opcheck(op.default, args, kwargs)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_opcheck_with_gradients(case: Case, device: str) -> None:
    if not has_backward(device):
        pytest.skip("no backward kernel is built yet")
    inputs = draw(case, device).with_grad()
    torch.library.opcheck(OPS.chunk_gated_delta_rule.default, inputs.tensors(), inputs.options())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_fake_matches_real(case: Case, name: str, device: str) -> None:
    skip_without_backward(name, device)
    op, args, kwargs = calls(draw(case, device))[name]
    real = op(*args, **kwargs)
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

    with mode:
        faked = op(*map(fake, args), **{key: fake(x) for key, x in kwargs.items()})
    for a, b in zip(real, faked, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_meta_tensors_run_the_fake() -> None:
    inputs = draw(CASES[2], "cpu")
    o, final_state = OPS.chunk_gated_delta_rule(
        *(x.to("meta") for x in inputs.tensors()),
        cu_seqlens=None if inputs.cu_seqlens is None else inputs.cu_seqlens.to("meta"),
        output_final_state=True,
        state_v_first=True,
    )
    assert o.device.type == "meta" and o.shape == inputs.v.shape
    assert final_state.shape == inputs.case.state_shape()


def test_symbolic_lengths_stay_symbolic() -> None:
    """Tracing with dynamic T and N gives outputs in terms of them."""
    inputs = draw(CASES[2], "cpu")

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any) -> Any:
        return OPS.chunk_gated_delta_rule_fwd(q, k, v, g, beta, cu_seqlens=cu_seqlens)

    # torch specialises sizes of 0 and 1, here N, whatever the op.
    tokens, offsets = torch.export.Dim("tokens", min=2), torch.export.Dim("offsets", min=3)
    program = torch.export.export(
        _Module(run), (*inputs.tensors(), inputs.cu_seqlens), dynamic_shapes=(*[{1: tokens}] * 5, {0: offsets})
    )
    other = draw(Case("other", (5, 150, 64, 1, 0, 7), packed=True), "cpu")
    got = program.module()(*other.tensors(), other.cu_seqlens.int())  # type: ignore[union-attr]
    expected = run(*other.tensors(), other.cu_seqlens)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any) -> Any:
        return self.function(q, k, v, g, beta, cu_seqlens)
