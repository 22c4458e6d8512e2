"""What must not matter: whatever lies in the padded tail, in other sequences, between rows, or in freed memory."""

import pytest
import torch
from torch import Tensor

from flash_qla import chunk_gated_delta_rule
from flash_qla.testing import Case, Inputs, make_inputs, poison_outputs

LENGTHS = (70, 1, 0, 33, 64, 30)
CASES = (
    Case("plain", LENGTHS, packed=True, tail=40),
    Case("l2norm, 3 value heads a key head", LENGTHS, packed=True, tail=40, l2norm=True, heads_k=1, heads_v=3),
    Case("linear, [V, K]", LENGTHS, packed=True, tail=40, gate_domain="linear", state_v_first=True),
    Case("projection", LENGTHS, packed=True, tail=1, layout="projection", offsets=torch.int32),
    Case("odd strides", LENGTHS, packed=True, tail=3, layout="odd"),
)


def draw(case: Case, device: str) -> Inputs:
    return make_inputs(case if device == "cuda" else case.named(case.name, k=32, v=24), device=device)


def run(inputs: Inputs, device: str) -> tuple[Tensor, Tensor]:
    poison_outputs(inputs.case, device)
    o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
    assert final_state is not None
    return o, final_state


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_padded_tail_is_not_read(case: Case, poison: float, device: str) -> None:
    inputs = draw(case, device)
    o, final_state = run(inputs, device)
    for x in inputs.tensors():
        x[:, sum(LENGTHS) :] = poison
    spoilt_o, spoilt_state = run(inputs, device)
    assert torch.equal(o, spoilt_o) and torch.equal(final_state, spoilt_state)
    assert bool((spoilt_o[:, sum(LENGTHS) :] == 0).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("victim", [0, 1, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_broken_sequence_stays_alone(case: Case, victim: int, poison: float, device: str) -> None:
    inputs = draw(case, device)
    o, final_state = run(inputs, device)
    start = sum(LENGTHS[:victim])
    end = start + LENGTHS[victim]
    for x in inputs.tensors():
        x[:, start:end] = poison
    assert inputs.initial_state is not None
    inputs.initial_state[victim] = poison
    spoilt_o, spoilt_state = run(inputs, device)
    others = [n for n in range(len(LENGTHS)) if n != victim]
    assert torch.equal(o[:, :start], spoilt_o[:, :start])
    assert torch.equal(o[:, end:], spoilt_o[:, end:])
    assert torch.equal(final_state[others], spoilt_state[others])
    assert not bool(spoilt_o[:, start:end].isfinite().all())


def test_a_broken_batch_row_stays_alone(device: str) -> None:
    inputs = draw(Case("dense", (50, 50, 50)), device)
    o, final_state = run(inputs, device)
    for x in inputs.tensors():
        x[1] = float("nan")
    spoilt_o, spoilt_state = run(inputs, device)
    assert torch.equal(o[::2], spoilt_o[::2]) and torch.equal(final_state[::2], spoilt_state[::2])


def test_a_broken_head_stays_alone(device: str) -> None:
    inputs = draw(Case("dense", (90,), heads_k=2, heads_v=4), device)
    o, _ = run(inputs, device)
    inputs.k[:, :, 1] = float("nan")
    spoilt_o, _ = run(inputs, device)
    assert torch.equal(o[:, :, :2], spoilt_o[:, :, :2])
    assert bool(spoilt_o[:, :, 2:].isnan().any())


def test_inputs_are_left_alone(device: str) -> None:
    inputs = draw(CASES[0], device)
    assert inputs.initial_state is not None
    before = [x.clone() for x in (*inputs.tensors(), inputs.initial_state)]
    run(inputs, device)
    for a, b in zip(before, (*inputs.tensors(), inputs.initial_state), strict=True):
        assert torch.equal(a, b)


def test_strides_do_not_change_bits(device: str) -> None:
    case = Case("layouts", (100, 100))
    plain = run(draw(case, device), device)
    for layout in ("projection", "odd", "heads"):
        for a, b in zip(plain, run(draw(case.named(layout, layout=layout), device), device), strict=True):
            assert torch.equal(a, b), layout


def test_rows_before_the_first_offset_belong_to_nobody(device: str) -> None:
    inputs = draw(Case("packed", (40, 60), packed=True, initial_state=None), device)
    assert inputs.cu_seqlens is not None
    o, final_state = run(inputs, device)
    shifted = inputs.cu_seqlens.clone()
    shifted[0] = 40  # the first sequence becomes empty
    for x in inputs.tensors():
        x[:, :40] = float("nan")
    poison_outputs(inputs.case, device)
    late_o, late_state = chunk_gated_delta_rule(*inputs.tensors(), **{**inputs.options(), "cu_seqlens": shifted})
    assert late_state is not None
    assert bool((late_o[:, :40] == 0).all()) and torch.equal(late_o[:, 40:], o[:, 40:])
    assert bool((late_state[0] == 0).all()) and torch.equal(late_state[1], final_state[1])
