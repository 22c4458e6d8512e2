"""What only a GPU can show: graphs, streams, synchronisation, memory that was never written."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flash_qla import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from flash_qla.testing import TOLERANCES, Case, Inputs, make_inputs, poison, relative_error, rows_outside

pytestmark = pytest.mark.gpu

PACKED = Case("packed", (70, 0, 1, 130), packed=True, tail=9, l2norm=True)
CASES = (
    PACKED,
    PACKED.named("packed, linear, [V, K]", gate_domain="linear", state_v_first=True, offsets=torch.int32),
    PACKED.named("packed, odd strides", layout="odd"),
    PACKED.named("packed, projection, bf16 state", layout="projection", initial_state=torch.bfloat16),
    Case("dense", (150, 150)),
    Case("dense, no states", (64, 64), initial_state=None, final_state=False),
)


def check(inputs: Inputs, o: Tensor, final_state: Tensor | None) -> None:
    expected_o, expected_state = inputs.reference()
    assert relative_error(o, expected_o) <= TOLERANCES["o"]
    assert bool((rows_outside(inputs.case, o) == 0).all())
    if final_state is not None:
        assert relative_error(final_state, expected_state) <= TOLERANCES["final_state"]


def copy_into(target: Inputs, source: Inputs) -> None:
    for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"):
        x = getattr(target, name)
        if x is not None:
            x.copy_(getattr(source, name))


@pytest.fixture
def restore_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_graph_replays_with_other_contents(case: Case) -> None:
    """Captured once, replayed with other numbers and other offsets of the same shapes."""
    static = make_inputs(case, device="cuda", seed=0)
    chunk_gated_delta_rule(*static.tensors(), **static.options())  # anything done once per process happens here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final_state = chunk_gated_delta_rule(*static.tensors(), **static.options())
    total = sum(case.lengths)
    others = [case.lengths]
    if case.packed:
        others += [(total, 0, 0, 0), (0, 0, 0, total), (1, 64, 65, total - 130), (total - 20, 0, 15, 5)]
    for seed, lengths in enumerate(others, start=1):
        fresh = make_inputs(case.named("replay", lengths=lengths), device="cuda", seed=seed)
        copy_into(static, fresh)
        o.fill_(float("nan"))
        if final_state is not None:
            final_state.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(fresh, o, final_state)


def test_graph_of_the_training_forward() -> None:
    static = make_inputs(PACKED, device="cuda")
    options = {name: x for name, x in static.options().items() if name != "output_final_state"}
    chunk_gated_delta_rule_fwd(*static.tensors(), **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chunk_gated_delta_rule_fwd(*static.tensors(), **options)
    fresh = make_inputs(PACKED.named("replay", lengths=(1, 128, 2, 70)), device="cuda", seed=5)
    copy_into(static, fresh)
    for x in captured:
        assert x is not None
        x.fill_(float("nan"))
    graph.replay()
    expected = chunk_gated_delta_rule_fwd(*static.tensors(), **options)
    for a, b in zip(captured, expected, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_call_never_waits_for_the_device(case: Case, restore_sync_mode: None) -> None:
    inputs = make_inputs(case, device="cuda")
    options = {name: x for name, x in inputs.options().items() if name != "output_final_state"}
    torch.cuda.set_sync_debug_mode("error")
    chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    chunk_gated_delta_rule_fwd(*inputs.tensors(), **options)


def test_work_goes_to_the_current_stream() -> None:
    """The side stream waits before its inputs are right; a call on another stream would read the wrong ones."""
    inputs = make_inputs(PACKED, device="cuda")
    right = [x.clone() for x in inputs.tensors()]
    for x in inputs.tensors():
        x.fill_(float("nan"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(inputs.tensors(), right, strict=True):
            x.copy_(y)
        o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    stream.synchronize()
    check(inputs, o, final_state)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_element_is_written(case: Case) -> None:
    """Outputs take memory that was full of NaN just before; the poisoning itself is checked first."""
    inputs = make_inputs(case, device="cuda")
    poison([inputs.v.shape], "cuda")
    assert bool(torch.empty_like(inputs.v, memory_format=torch.contiguous_format).isnan().any()), "the poison has no effect"
    for _ in range(3):
        poison([inputs.v.shape, case.state_shape(), (*inputs.v.shape[:3], 64), inputs.g.shape], "cuda")
        o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
        assert bool(o.isfinite().all())
        assert final_state is None or bool(final_state.isfinite().all())


def test_no_sequences_zero_the_output() -> None:
    """N = 0: no sequence to run, but every row of o is still an output."""
    inputs = make_inputs(Case("none", (), packed=True, tail=80, initial_state=None), device="cuda")
    poison([inputs.v.shape], "cuda")
    o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    assert bool((o == 0).all())
    assert final_state is not None and final_state.shape == (0, 4, 128, 128)


def test_memory_next_to_the_outputs_is_left_alone() -> None:
    """A ragged last chunk must not be written whole: neighbours in the same block of memory keep their bits."""
    inputs = make_inputs(Case("ragged", (33,), heads_k=1, heads_v=1), device="cuda")
    poison([inputs.v.shape] * 4, "cuda")
    guards = [torch.full_like(inputs.v, 7.0) for _ in range(8)]
    outputs = [chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())[0] for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((x == 7.0).all()) for x in guards)
    assert all(torch.equal(outputs[0], x) for x in outputs)


def test_many_sequences() -> None:
    """Thousands of short sequences, more than a grid dimension of y or z could number."""
    lengths = tuple((n * 7) % 5 for n in range(70_000))
    case = Case("many", lengths, packed=True, heads_k=1, heads_v=1, initial_state=None, final_state=False)
    inputs = make_inputs(case, device="cuda")
    o, _ = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    few = 2000
    assert inputs.cu_seqlens is not None
    for first in (0, len(lengths) - few):
        start = sum(lengths[:first])
        end = start + sum(lengths[first : first + few])
        alone, _ = chunk_gated_delta_rule(
            *(x[:, start:end] for x in inputs.tensors()), cu_seqlens=inputs.cu_seqlens[first : first + few + 1] - start
        )
        assert relative_error(o[:, start:end], alone) <= 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_second_device() -> None:
    inputs = make_inputs(PACKED, device="cuda:1")
    with torch.cuda.device(0):
        o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    assert o.device.index == 1
    check(inputs, o, final_state)
