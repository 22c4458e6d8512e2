"""`python -m flash_qla check`: is what this machine computes right?

Runs the forward pass over shapes that tell, on this machine's device, and compares output and final state with the
token recurrence in float64.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .._checks import config_name
from .._library import build_info, head_configs
from ..ops import chunk_gated_delta_rule
from ..testing import TOLERANCES, Case, make_inputs, poison_outputs, relative_error, rows_outside
from .info import device_lines

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

CASES = (
    Case("dense, batch of 2", (100, 100), heads_k=2, heads_v=4),
    Case("dense, one token", (1,), heads_k=1, heads_v=2),
    Case("packed, empty and short sequences", (0, 1, 63, 0, 64, 65, 1, 0), packed=True, tail=7, offsets=torch.int32),
    Case(
        "packed prompts, 16/32 heads, carried state",
        (70, 1, 33, 0, 25),
        packed=True,
        heads_k=16,
        heads_v=32,
        l2norm=True,
    ),
    Case("3 value heads a key head", (130,), heads_k=2, heads_v=6),
    Case("4 value heads a key head", (96, 96), heads_k=1, heads_v=4, initial_state=None),
    Case("1 value head a key head, 64 dimensions", (129,), heads_k=4, heads_v=4, k=64, v=64),
    Case("strong decay", (200,), gates="strong"),
    Case("no decay, beta near 1", (200,), gates="zero", betas="one"),
    Case("l2 normalisation of raw q and k", (80, 17), packed=True, keys="raw", l2norm=True),
    Case("states stored [V, K], bf16 in", (90, 40), packed=True, state_v_first=True, initial_state=torch.bfloat16),
    Case("linear gates with zeros", (150,), gate_domain="linear", gate_dtype=torch.bfloat16, beta_dtype=torch.bfloat16),
    Case("q, k, v sliced from one projection", (77, 77), layout="projection"),
    Case("odd strides, scale 0.5", (65, 66), packed=True, layout="odd", scale=0.5),
    # Long and of few heads: a GPU splits it over its multiprocessors.
    Case("a long sequence among short ones", (30, 2500, 64), packed=True, heads_k=1, heads_v=2),
)


@dataclass(frozen=True)
class Outcome:
    """What one case gave."""

    case: Case
    dtype: str
    errors: dict[str, float]
    outside_is_zero: bool

    @property
    def good(self) -> bool:
        """Whether every number is within its limit."""
        return self.outside_is_zero and all(error <= TOLERANCES[name] for name, error in self.errors.items())


def add_command(commands: Any) -> None:
    """Adds `check` to the command line."""
    parser = commands.add_parser("check", help="compare the forward pass on this machine with the float64 reference")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a device and there are kernels")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "both"), default="both")
    parser.set_defaults(run=run)


def is_built(case: Case, dtype: torch.dtype, device: str) -> bool:
    """Whether this package can run the case on the device."""
    built = head_configs()
    return device == "cpu" or (built is not None and (case.k, case.v, dtype) in built)


def run_case(case: Case, dtype: str, device: str) -> Outcome:
    """Runs one case and measures it."""
    inputs = make_inputs(case, dtype=DTYPES[dtype], device=device)
    poison_outputs(case, device)
    with torch.inference_mode():
        o, final_state = chunk_gated_delta_rule(*inputs.tensors(), **inputs.options())
        expected_o, expected_state = inputs.reference()
        if final_state is None:
            raise AssertionError(f"{case.name}: no final state came back")
        errors = {"o": relative_error(o, expected_o), "final_state": relative_error(final_state, expected_state)}
        return Outcome(case, dtype, errors, bool((rows_outside(case, o) == 0).all()))


def _outcomes(device: str, dtypes: list[str], console: Console) -> Iterator[Outcome]:
    work = [(case, dtype) for dtype in dtypes for case in CASES]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"checking on {device}", total=len(work))
        for case, dtype in work:
            progress.update(task, description=f"{case.name} ({dtype})")
            if is_built(case, DTYPES[dtype], device):
                yield run_case(case, dtype, device)
            else:
                name = config_name((case.k, case.v, DTYPES[dtype]))
                console.print(f"skipped: {case.name}: {name} is not among the built configurations")
            progress.advance(task)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table()
    for heading in ("case", "dtype"):
        table.add_column(heading)
    for name, heading in (("o", "o"), ("final_state", "state")):
        table.add_column(f"{heading}\n<= {TOLERANCES[name]:g}", justify="right")
    table.add_column("")
    for outcome in outcomes:
        verdict = "[green]ok[/]" if outcome.good else "[red]WRONG[/]"
        if not outcome.outside_is_zero:
            verdict += " (rows outside sequences are not 0)"
        table.add_row(outcome.case.name, outcome.dtype, *(f"{outcome.errors[n]:.1e}" for n in ("o", "final_state")), verdict)
    return table


def run(args: argparse.Namespace) -> int:
    """Checks and prints; 0 if every case is within its limits, 1 if not or if nothing could run."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    info = build_info()
    device = args.device or ("cuda" if torch.cuda.is_available() and info.kernels else "cpu")
    if device == "cuda" and not (torch.cuda.is_available() and info.kernels):
        console.print(f"cannot check on cuda: {info.reason or 'no CUDA device'}", style="red")
        return 1
    for line in device_lines() if device == "cuda" else ["the CPU implementation"]:
        console.print(f"device: {line}")
    if device == "cpu" and torch.cuda.is_available() and not info.kernels:
        console.print(f"this machine has a GPU, but the package has no CUDA kernels ({info.reason})", style="yellow")
    dtypes = ["bf16", "fp16"] if args.dtype == "both" else [args.dtype]
    started = time.perf_counter()
    outcomes = list(_outcomes(device, dtypes, console))
    console.print(_table(outcomes))
    bad = [outcome for outcome in outcomes if not outcome.good]
    seconds = time.perf_counter() - started
    if not outcomes:
        console.print("nothing was checked: no case has a built configuration", style="red")
        return 1
    console.print(
        f"{len(outcomes) - len(bad)} of {len(outcomes)} cases within limits of the float64 reference, {seconds:.1f} s",
        style="red" if bad else "green",
    )
    return 1 if bad else 0
