"""Named cases against the float64 recurrence, on the CPU and on a GPU: output, final state and gradients.

Also a script: `python tests/test_gdr.py --set product --num-heads 32` prints a table of errors and exits with 1 if one
is over its limit.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    import importlib.util

    if importlib.util.find_spec("flash_qla") is None:  # a source tree without an installed package
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flash_qla import chunk_gated_delta_rule
from flash_qla._library import has_backward
from flash_qla.testing import (
    TOLERANCES,
    Case,
    Inputs,
    make_inputs,
    poison_outputs,
    relative_error,
    rows_outside,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_BACKWARD = "no backward kernel is built yet"

BASE = Case("base", (100, 100))

DEVELOP = (
    *(BASE.named(f"length {n}", lengths=(n,)) for n in (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 192, 200)),
    *(BASE.named(f"{r} value heads a key head", heads_k=2, heads_v=2 * r) for r in (1, 2, 3, 4, 8)),
    BASE.named("one head", heads_k=1, heads_v=1),
    BASE.named("no tokens", lengths=(0, 0)),
    BASE.named("no batch", lengths=(), packed=True, tail=5),
    BASE.named("no initial state", initial_state=None),
    BASE.named("no states at all", initial_state=None, final_state=False),
    BASE.named("bf16 initial state", initial_state=torch.bfloat16),
    BASE.named("states [V, K]", state_v_first=True),
    BASE.named("states [V, K], bf16", state_v_first=True, initial_state=torch.bfloat16),
    BASE.named("zero gates", gates="zero"),
    BASE.named("strong decay", gates="strong", lengths=(200,)),
    BASE.named("mixed decay", gates="mixed", lengths=(200,)),
    BASE.named("beta near 1", betas="one"),
    BASE.named("beta near 1, zero gates", betas="one", gates="zero", lengths=(200,)),
    BASE.named("keys alike", keys="alike", lengths=(200,)),
    BASE.named("keys alike, beta near 1, zero gates", keys="alike", betas="one", gates="zero", lengths=(200,)),
    BASE.named("16-bit gates", gate_dtype=torch.float16, beta_dtype=torch.bfloat16),
    BASE.named("16-bit gates the other way round", gate_dtype=torch.bfloat16, beta_dtype=torch.float16),
    BASE.named("linear gates", gate_domain="linear", lengths=(130,)),
    BASE.named("linear bf16 gates, strong", gate_domain="linear", gates="strong", gate_dtype=torch.bfloat16),
    BASE.named("l2 normalisation", keys="raw", l2norm=True),
    BASE.named("l2 normalisation of alike keys", keys="alike", l2norm=True, betas="one"),
    BASE.named("scale 0", scale=0.0),
    BASE.named("scale -2.5", scale=-2.5),
    *(BASE.named(f"layout: {name}", layout=name) for name in ("projection", "odd", "heads")),
    BASE.named("odd strides, l2 normalisation", layout="odd", keys="raw", l2norm=True),
    BASE.named("auto_cp off", auto_cp=False),
)

_PACKED = Case("packed", (70, 1, 130), packed=True)
VARLEN = (
    _PACKED,
    _PACKED.named("every length 1 to 200", lengths=tuple(range(1, 201)), heads_k=1, heads_v=1),
    _PACKED.named("empty sequences anywhere", lengths=(0, 0, 65, 0, 1, 0, 64, 0, 0), offsets=torch.int32),
    _PACKED.named("only empty sequences", lengths=(0, 0, 0), tail=9),
    _PACKED.named("no tokens", lengths=(0, 0)),
    _PACKED.named("tail after the last sequence", lengths=(33, 90), tail=70),
    _PACKED.named("tail of one row", lengths=(64,), tail=1, offsets=torch.int32),
    _PACKED.named("many short sequences", lengths=(3, 1, 2, 0, 1) * 40, heads_k=1, heads_v=2),
    _PACKED.named("whole chunks", lengths=(64, 128, 64)),
    _PACKED.named("one sequence", lengths=(150,)),
    _PACKED.named("states [V, K], no initial state", state_v_first=True, initial_state=None),
    _PACKED.named("states [V, K], bf16", state_v_first=True, initial_state=torch.bfloat16),
    _PACKED.named("strong decay", gates="strong"),
    _PACKED.named("linear gates, tail", gate_domain="linear", tail=5),
    _PACKED.named("projection, l2 normalisation, tail", layout="projection", keys="raw", l2norm=True, tail=3),
    _PACKED.named("odd strides", layout="odd"),
    _PACKED.named("heads first in memory", layout="heads"),
    _PACKED.named("3 value heads a key head, scale 0", heads_k=1, heads_v=3, scale=0.0),
    _PACKED.named("16-bit gates", gate_dtype=torch.bfloat16, beta_dtype=torch.bfloat16, offsets=torch.int32),
    _PACKED.named("auto_cp off", auto_cp=False),
)


def _product() -> tuple[Case, ...]:
    """Lengths times head ratios times packing; the options take turns."""
    options = itertools.cycle(
        {"gates": gates, "state_v_first": v_first, "initial_state": state, "layout": layout, "l2norm": l2norm}
        for gates, v_first, state, layout, l2norm in zip(
            ("random", "strong", "zero", "mixed", "random", "strong", "random"),
            (False, True, True, False, True, False, False),
            (torch.float32, None, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, None),
            ("contiguous", "projection", "odd", "heads", "contiguous", "projection", "odd"),
            (False, False, True, False, True, True, False),
            strict=True,
        )
    )
    cases = []
    for n, ratio, packed in itertools.product((1, 17, 64, 65, 130, 200), (1, 2, 3, 4, 8), (False, True)):
        case = Case(
            f"{n} tokens, ratio {ratio}, {'packed' if packed else 'dense'}",
            (n, 0, n // 2, 1) if packed else (n, n),
            packed=packed,
            heads_k=2,
            heads_v=2 * ratio,
            tail=n % 3 if packed else 0,
        )
        cases.append(case.named(case.name, **next(options)))
    return tuple(cases)


def _model(name: str, heads_k: int, heads_v: int, lengths: Sequence[int]) -> Case:
    return Case(
        f"{name}: {heads_k}/{heads_v}",
        tuple(lengths),
        packed=True,
        heads_k=heads_k,
        heads_v=heads_v,
        keys="raw",
        l2norm=True,
    )


_MIX = (1200, 37, 512, 1, 204, 777, 409, 64, 129, 300)
PROFILE = tuple(
    _model(name, heads_k, heads_v, lengths)
    for heads_k, heads_v in ((2, 8), (8, 32), (16, 32), (16, 48), (16, 64))
    for name, lengths in (("1 x 4096", (4096,)), ("4 x 1024", (1024,) * 4), ("mix", _MIX))
)

SETS = {"develop": DEVELOP, "varlen": VARLEN, "product": _product(), "profile": PROFILE}

# The reference keeps every token's state for its gradients; beyond this many numbers that is not worth the memory.
GRADIENT_LIMIT = 2**26


def on_device(case: Case, device: str) -> Case:
    """The case with head dimensions for the device: those built on a GPU, small ones on the CPU to save time."""
    return case.named(case.name, k=128, v=128) if device == "cuda" else case.named(case.name, k=32, v=24)


def run_forward(inputs: Inputs, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    poison_outputs(inputs.case, device)
    with torch.inference_mode():
        return chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())


def forward_errors(inputs: Inputs, device: str, ref_dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Relative errors of o and the final state; infinite for a row outside the sequences that is not 0."""
    o, final_state = run_forward(inputs, device)
    ref_o, ref_state = inputs.reference(ref_dtype)
    outside_is_zero = bool((rows_outside(inputs.case, o) == 0).all())
    errors = {"o": relative_error(o, ref_o) if outside_is_zero else float("inf")}
    if final_state is not None:
        errors["final_state"] = relative_error(final_state, ref_state)
    return errors


def gradient_errors(inputs: Inputs, seed: int = 1) -> dict[str, float]:
    """Relative errors of every gradient, for random gradients of o and the final state."""
    call = inputs.with_grad()
    leaves = {f"d{name}": x for name, x in zip(("q", "k", "v", "g", "beta"), call.tensors(), strict=True)}
    if call.initial_state is not None:
        leaves["dinitial_state"] = call.initial_state
    results = [x for x in chunk_gated_delta_rule(*call.tensors(), **call.options()) if x is not None]
    expected = list(call.reference()[: len(results)])
    generator = torch.Generator(inputs.q.device).manual_seed(seed)
    outgoing = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in results]
    got = torch.autograd.grad(results, list(leaves.values()), outgoing)
    # Without tokens, leaves of the reference or even a whole result depend on nothing: the gradient is 0.
    pairs = [(y, dy.double()) for y, dy in zip(expected, outgoing, strict=True) if y.requires_grad]
    want = [torch.zeros_like(x) for x in leaves.values()]
    if pairs:
        want = list(
            torch.autograd.grad(
                [y for y, _ in pairs],
                list(leaves.values()),
                [dy for _, dy in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        )
    errors = {}
    for name, a, b in zip(leaves, got, want, strict=True):
        leaf = leaves[name]
        assert a.dtype == leaf.dtype and a.shape == leaf.shape
        want_here = b
        if name == "dg" and inputs.case.gate_domain == "linear":
            forgotten = leaf == 0  # defined as 0 there; the reference has the true slope
            assert bool((a[forgotten] == 0).all())
            want_here = b.masked_fill(forgotten, 0)
        if name not in ("dinitial_state",):
            assert bool((rows_outside(inputs.case, a) == 0).all()), f"{name} outside the sequences"
        errors[name] = relative_error(a, want_here)
    return errors


def assert_within_limits(errors: dict[str, float]) -> None:
    over = {name: error for name, error in errors.items() if not error <= TOLERANCES[name]}
    assert not over, f"over the limit: {over} of {errors}"


def _parametrise(*sets: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=f"{s}-{c.name}") for s in sets for c in SETS[s]])


@pytest.mark.parametrize("dtype", DTYPES)
@_parametrise("develop", "varlen", "product")
def test_forward(case: Case, dtype: str, device: str) -> None:
    inputs = make_inputs(on_device(case, device), dtype=DTYPES[dtype], device=device)
    assert_within_limits(forward_errors(inputs, device))


@pytest.mark.gpu
@_parametrise("profile")
def test_forward_of_models(case: Case) -> None:
    inputs = make_inputs(on_device(case, "cuda"), device="cuda")
    assert_within_limits(forward_errors(inputs, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@_parametrise("develop", "varlen")
def test_gradients(case: Case, dtype: str, device: str) -> None:
    if not has_backward(device):
        pytest.skip(NO_BACKWARD)
    if "every length" in case.name:
        case = case.named(case.name, lengths=tuple(range(1, 201, 7)))
    assert_within_limits(gradient_errors(make_inputs(on_device(case, device), dtype=DTYPES[dtype], device=device)))


@_parametrise("develop", "varlen")
def test_two_runs_give_the_same_bits(case: Case, device: str) -> None:
    inputs = make_inputs(on_device(case, device), device=device)
    for a, b in zip(run_forward(inputs, device), run_forward(inputs, device), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("others", [3, 60])
def test_result_does_not_depend_on_the_batch(others: int) -> None:
    """With auto_cp=False a sequence gives the same bits alone and among others."""
    case = Case("batch", (150, *[97] * others), packed=True, heads_k=2, heads_v=4, auto_cp=False)
    inputs = make_inputs(case, device="cuda")
    o, final_state = run_forward(inputs, "cuda")
    assert inputs.initial_state is not None and final_state is not None
    alone_o, alone_state = chunk_gated_delta_rule(
        *(x[:, :150] for x in inputs.tensors()),
        **{
            **inputs.options(),
            "initial_state": inputs.initial_state[:1],
            "cu_seqlens": torch.tensor([0, 150], device="cuda"),
        },
    )
    assert alone_state is not None
    assert torch.equal(o[:, :150], alone_o)
    assert torch.equal(final_state[:1], alone_state)


def _with_heads(case: Case, heads_v: int) -> Case:
    ratio = case.heads_v // case.heads_k
    if heads_v % ratio:
        raise SystemExit(f"{case.name}: --num-heads {heads_v} is not a multiple of the case's {ratio} value heads a key head")
    return case.named(case.name, heads_k=heads_v // ratio, heads_v=heads_v)


def main(argv: Sequence[str] | None = None) -> int:
    """The script: runs one set and prints every error. 0 if all are within their limits."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description="Compare flash_qla with the token recurrence.")
    parser.add_argument("--set", choices=SETS, default="develop")
    parser.add_argument("--num-heads", type=int, metavar="N", help="value heads; the ratio to key heads stays")
    parser.add_argument("--ref-dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--skip-bwd", action="store_true", help="forward only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args(argv)

    console = Console(width=None if sys.stdout.isatty() else 160)
    backward = not args.skip_bwd and has_backward(args.device)
    if not args.skip_bwd and not backward:
        console.print(f"gradients are skipped: {NO_BACKWARD}")
    table = Table("case", *TOLERANCES, "")
    table.add_row("[dim]limit[/]", *(f"[dim]{limit:g}[/]" for limit in TOLERANCES.values()), "")
    wrong, started = 0, time.perf_counter()
    for listed in track(SETS[args.set], description=f"{args.set} on {args.device}", console=console, transient=True):
        case = on_device(listed, args.device)
        if args.num_heads:
            case = _with_heads(case, args.num_heads)
        inputs = make_inputs(case, dtype=DTYPES[args.dtype], device=args.device)
        errors = forward_errors(inputs, args.device, getattr(torch, args.ref_dtype))
        if backward and case.batch * case.tokens * case.heads_v * case.k * case.v <= GRADIENT_LIMIT:
            errors |= gradient_errors(inputs)
        good = all(error <= TOLERANCES[name] for name, error in errors.items())
        wrong += not good
        cells = (f"{errors[name]:.1e}" if name in errors else "-" for name in TOLERANCES)
        table.add_row(case.name, *cells, "[green]ok[/]" if good else "[red]WRONG[/]")
    console.print(table)
    total = len(SETS[args.set])
    console.print(f"{total - wrong} of {total} cases within limits, {time.perf_counter() - started:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
