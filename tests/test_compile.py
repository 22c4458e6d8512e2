"""torch.compile: one graph, forward and backward, and no needless recompiles."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flash_qla
from flash_qla._library import has_backward
from flash_qla.testing import Case, Inputs, make_inputs

CASES = (
    Case("dense", (70, 70)),
    Case("nothing optional", (70,), initial_state=None, final_state=False),
    Case("packed", (70, 0, 1, 65), packed=True, tail=3, state_v_first=True, l2norm=True),
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(case: Case, device: str, seed: int = 0) -> Inputs:
    return make_inputs(case if device == "cuda" else case.named(case.name, k=16, v=24), device=device, seed=seed)


def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, final_state = flash_qla.chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    return o * 2, final_state


def function(*tensors: Any, **options: Any) -> Any:
    o, final_state = flash_qla.chunk_gated_delta_rule(*tensors, **options)
    return o * 2, final_state


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_forward_is_one_graph(case: Case, device: str) -> None:
    inputs = draw(case, device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*inputs.tensors(), **inputs.options()), run(inputs), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients(case: Case, device: str) -> None:
    if not has_backward(device):
        pytest.skip("no backward kernel is built yet")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (compiled, function):
        inputs = draw(case, device).with_grad()
        results = call(*inputs.tensors(), **inputs.options())
        sum(x.float().square().sum() for x in results if x is not None).backward()
        gradients.append([x.grad for x in (*inputs.tensors(), inputs.initial_state) if x is not None])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and torch.equal(a, b)


def test_low_level_functions_are_one_graph(device: str) -> None:
    inputs = draw(CASES[2], device)
    options = inputs.options()

    def both(*tensors: Any) -> Any:
        results = flash_qla.chunk_gated_delta_rule_fwd(*tensors, **options)
        if not has_backward(device):
            return results
        options_bwd = {name: x for name, x in options.items() if name != "output_final_state"}
        return *results, *flash_qla.chunk_gated_delta_rule_bwd(*tensors, results[1], results[2], **options_bwd)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*inputs.tensors()), both(*inputs.tensors()), strict=True):
        assert torch.equal(a, b)


def test_new_lengths_and_contents_recompile_once(device: str) -> None:
    """The second length makes T and N symbolic; all further ones run that graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for lengths in ((70, 10), (33, 44, 20), (64, 64, 64, 1), (5, 6), (128, 300, 1), (9,) * 20):
        inputs = draw(Case("lengths", lengths, packed=True), device)
        for a, b in zip(compiled(*inputs.tensors(), **inputs.options()), run(inputs), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2


def test_scale_is_a_constant_of_the_graph(device: str) -> None:
    """torch turns the float arguments of any op into constants: a new scale is a new graph, never a stale number."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    graphs = []
    for seed, scale in enumerate((0.25, 0.25, 0.5, 0.0, None, 0.25, 0.5)):
        inputs = draw(CASES[0], device, seed)
        options = {**inputs.options(), "scale": scale}
        for a, b in zip(compiled(*inputs.tensors(), **options), function(*inputs.tensors(), **options), strict=True):
            assert torch.equal(a, b)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] and graphs[-3] == graphs[-1], "a known scale was compiled again"


def test_bad_input_fails_at_compile_time(device: str) -> None:
    inputs = draw(CASES[0], device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="beta: expected shape"):
        compiled(*inputs.tensors()[:4], inputs.beta[:, 1:])
