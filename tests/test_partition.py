"""Splitting sequences over the card: exact, decided on the device, and off with auto_cp=False."""

import pytest
import torch
from torch import Tensor

from flash_qla import chunk_gated_delta_rule, reference
from flash_qla.testing import Case, Inputs, make_inputs, poison, relative_error, rows_outside

pytestmark = pytest.mark.gpu

# Few heads and long sequences: the planner splits all of these (tests/test_planner.py).
CASES = (
    Case("one long sequence", (4000,), heads_k=1, heads_v=2),
    Case("ends inside a chunk", (3333,), heads_k=1, heads_v=3, l2norm=True),
    Case("a long prompt among short ones", (37, 1, 6000, 0, 200, 64), packed=True, heads_k=2, heads_v=4, tail=30),
    Case("several long sequences", (3000, 2500, 5, 2800), packed=True, heads_k=1, heads_v=2, offsets=torch.int32),
    Case("dense batch", (2048, 2048), heads_k=1, heads_v=4),
    Case("linear gates, states [V, K]", (2500, 100), packed=True, heads_v=2, gate_domain="linear", state_v_first=True),
    Case("no state in", (3000,), heads_k=1, heads_v=2, initial_state=None),
    Case("fp16", (3000, 10), packed=True, heads_k=1, heads_v=2),
    Case("strided", (2600,), heads_k=1, heads_v=2, layout="projection"),
)


def call(inputs: Inputs, auto_cp: bool = True) -> tuple[Tensor, Tensor]:
    poison([inputs.v.shape, inputs.case.state_shape(), (64, 2, inputs.v.size(2), 128, 128)], inputs.v.device)
    o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **{**inputs.options(), "auto_cp": auto_cp})
    assert final_state is not None
    return o, final_state


def expected(inputs: Inputs) -> tuple[Tensor, Tensor]:
    options = {name: x for name, x in inputs.options().items() if name not in ("output_final_state", "auto_cp")}
    return reference.gated_delta_rule(*inputs.tensors(), **options)


def splits(inputs: Inputs) -> bool:
    """A split shows in the last bits of a long sequence."""
    return not torch.equal(call(inputs, auto_cp=True)[0], call(inputs, auto_cp=False)[0])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_split_matches_the_reference(case: Case) -> None:
    inputs = make_inputs(case, device="cuda", dtype=torch.float16 if case.name == "fp16" else torch.bfloat16)
    # Gates of exactly 0 cut a sequence themselves: its parts do not notice each other.
    assert splits(inputs) or case.gate_domain == "linear"
    o, final_state = call(inputs)
    ref_o, ref_state = expected(inputs)
    assert relative_error(o, ref_o) <= 5e-3
    assert relative_error(final_state, ref_state) <= 5e-3
    assert bool((rows_outside(case, o) == 0).all())


@pytest.mark.parametrize("gates", ["zero", "strong", "mild"])
def test_split_is_exact_at_any_decay(gates: str) -> None:
    """Without decay all of the state crosses every boundary; with strong decay almost none does."""
    inputs = make_inputs(Case("decay", (4096,), heads_k=1, heads_v=2), device="cuda")
    draw = torch.rand_like(inputs.g)
    inputs.g.copy_({"zero": 0 * draw, "strong": -16 * draw, "mild": -0.01 * draw}[gates])
    o, final_state = call(inputs)
    ref_o, ref_state = expected(inputs)
    assert relative_error(o, ref_o) <= 5e-3
    assert relative_error(final_state, ref_state) <= 5e-3


@pytest.mark.parametrize("case", CASES[:4], ids=lambda c: c.name)
def test_two_runs_give_the_same_bits(case: Case) -> None:
    inputs = make_inputs(case, device="cuda")
    first = call(inputs)
    for _ in range(5):
        for a, b in zip(first, call(inputs), strict=True):
            assert torch.equal(a, b)


def test_without_auto_cp_a_sequence_does_not_see_its_batch() -> None:
    case = Case("batch", (2000, 70, 900), packed=True, heads_k=1, heads_v=2)
    inputs = make_inputs(case, device="cuda")
    o, final_state = call(inputs, auto_cp=False)
    assert inputs.initial_state is not None
    begin = 0
    for n, length in enumerate(case.lengths):
        alone, state = chunk_gated_delta_rule(
            *(x[:, begin : begin + length] for x in inputs.tensors()),
            **{**inputs.options(), "cu_seqlens": None, "initial_state": inputs.initial_state[n : n + 1], "auto_cp": False},
        )
        assert state is not None
        assert torch.equal(alone, o[:, begin : begin + length]) and torch.equal(state[0], final_state[n])
        begin += length


def test_graph_replays_with_other_lengths() -> None:
    """The table is made on the device: one captured call serves one long sequence, several, and none."""
    case = Case("graph", (5000, 20, 30), packed=True, heads_k=1, heads_v=2)
    static = make_inputs(case, device="cuda")
    call(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final_state = chunk_gated_delta_rule(*static.tensors(), **static.options())
    assert final_state is not None and static.cu_seqlens is not None and static.initial_state is not None
    for seed, lengths in enumerate(((0, 5050, 0), (2500, 50, 2500), (1700, 1650, 1700), (5000, 20, 30))):
        fresh = make_inputs(case.named("replay", lengths=lengths), device="cuda", seed=seed)
        for a, b in zip(static.tensors(), fresh.tensors(), strict=True):
            a.copy_(b)
        assert fresh.cu_seqlens is not None and fresh.initial_state is not None
        static.cu_seqlens.copy_(fresh.cu_seqlens)
        static.initial_state.copy_(fresh.initial_state)
        o.fill_(float("nan"))
        final_state.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        ref_o, ref_state = expected(fresh)
        assert relative_error(o, ref_o) <= 5e-3
        assert relative_error(final_state, ref_state) <= 5e-3


@pytest.mark.parametrize("short", [1000, 5000])
def test_many_sequences_and_a_long_one(short: int) -> None:
    """The long one is split among a thousand others, and left whole among more (the table would take too long)."""
    lengths = (*(n % 3 for n in range(short)), 4000)
    inputs = make_inputs(Case("many", lengths, packed=True, heads_k=1, heads_v=1, initial_state=None), device="cuda")
    o, final_state = call(inputs)
    whole, state = call(inputs, auto_cp=False)
    assert relative_error(o, whole) <= 5e-3
    assert relative_error(final_state, state) <= 5e-3
