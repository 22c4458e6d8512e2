"""Times the forward pass against the libraries that are installed, each in a process of its own.

    python benchmarks/bench_gated_delta_rule.py [--impl flash_qla flashinfer fla] [--heads 16/64 2/8] [--rows 4x8192 mix]
                                                [--limit SECONDS] [--out DIR]

Per row and implementation: milliseconds in a replayed CUDA graph and in eager calls (median), microseconds of host time a call,
seconds of the first call with the shape, and how many times the floor the graph takes. The floor is max(FLOP / peak, bytes /
bandwidth) with both ceilings measured in the same run. Writes results.jsonl, versions included, and a plot to DIR if matplotlib is
installed.

A library that is not found is left out with a line that says so. To find one that is not installed, put its folder on
FLASH_QLA_BENCH_<IMPL>_PATH (a PYTHONPATH for its process alone). A library that takes longer than --limit is stopped, and the rows
that it did not reach stay empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MIX = (12000, 37, 512, 1, 2048, 777, 4096, 64, 129, 3000)
ROWS: dict[str, tuple[int, ...]] = {
    "1x32768": (32768,),
    "1x8192": (8192,),
    "1x2048": (2048,),
    "2x16384": (16384,) * 2,
    "4x8192": (8192,) * 4,
    "8x4096": (4096,) * 8,
    "8x1024": (1024,) * 8,
    "mix": MIX,
}
HEADS = ("2/8", "8/32", "16/64", "16/48")
DIM = 128


@dataclass(frozen=True)
class Row:
    """One measured shape: value heads, key heads and the lengths of the sequences."""

    name: str
    heads_k: int
    heads_v: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return ROWS[self.name]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flop(self) -> float:
        return 163_840.0 * self.tokens * self.heads_v

    @property
    def bytes(self) -> float:
        per_token = self.tokens * self.heads_v * (512 / (self.heads_v / self.heads_k) + 520)
        return per_token + 2 * 4 * len(self.lengths) * self.heads_v * DIM * DIM


def draw(row: Row) -> dict[str, Any]:
    """Unit q and k, mild gates with a quarter of the heads at 0, a state in and a state out. Equal lengths are a dense batch."""
    torch.manual_seed(0)
    packed = len(set(row.lengths)) > 1
    batch, tokens = (1, row.tokens) if packed else (len(row.lengths), row.lengths[0])

    def unit(heads: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(batch, tokens, heads, DIM, device="cuda"), dim=-1).bfloat16()

    g = torch.nn.functional.logsigmoid(torch.randn(batch, tokens, row.heads_v, device="cuda")) / 16
    g[..., ::4] = 0
    offsets = torch.tensor([0, *row.lengths], device="cuda").cumsum(0) if packed else None
    return {
        "q": unit(row.heads_k),
        "k": unit(row.heads_k),
        "v": torch.randn(batch, tokens, row.heads_v, DIM, device="cuda").bfloat16(),
        "g": g,
        "beta": torch.rand(batch, tokens, row.heads_v, device="cuda"),
        "initial_state": torch.randn(len(row.lengths), row.heads_v, DIM, DIM, device="cuda"),
        "cu_seqlens": offsets,
    }


def call_flash_qla(x: dict[str, Any]) -> Callable[[], Any]:
    import flash_qla

    return lambda: flash_qla.chunk_gated_delta_rule(**x, output_final_state=True)


def call_fla(x: dict[str, Any]) -> Callable[[], Any]:
    os.environ["FLA_FLASH_QLA"] = "0"  # else fla finds this package and calls it
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(**x, output_final_state=True)


def call_flashinfer(x: dict[str, Any]) -> Callable[[], Any]:
    """Packed sequences only, gates as factors, states as [V, K]."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, g, beta = (x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    offsets = x["cu_seqlens"]
    if offsets is None:
        batch, tokens = x["q"].shape[:2]
        offsets = torch.arange(batch + 1, device="cuda") * tokens
    state = x["initial_state"].transpose(-1, -2).contiguous()
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g.exp(),
        "beta": beta,
        "initial_state": state,
        "cu_seqlens": offsets,
        "output_state": torch.empty_like(state),
    }
    return lambda: chunk_gated_delta_rule(**arguments, output_final_state=True)


IMPLS: dict[str, tuple[str, Callable[[dict[str, Any]], Callable[[], Any]]]] = {
    "flash_qla": ("flash_qla", call_flash_qla),
    "flashinfer": ("flashinfer", call_flashinfer),
    "fla": ("fla", call_fla),
}


def measure_ceilings() -> tuple[float, float]:
    """FLOP/s of a dense bf16 product and bytes/s of a copy, on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = time_events(lambda: a @ b, 20)
    x = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    copy = time_events(lambda: y.copy_(x), 20)
    return 2 * 8192**3 / product * 1e3, 2 * 4 * (1 << 30) / copy * 1e3


def time_events(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call between two events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def time_graph(call: Callable[[], Any], calls: int = 5, repeats: int = 9) -> float:
    """Median milliseconds of a call inside a replayed graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return time_events(graph.replay, repeats) / calls


def time_host(call: Callable[[], Any], calls: int = 50) -> float:
    """Microseconds of host time of a call, the device far behind."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def worker(impl: str, rows: list[Row]) -> None:
    """Measures one implementation and prints a JSON line a row."""
    import importlib
    import importlib.metadata

    package, make = IMPLS[impl]
    start = time.perf_counter()
    module = importlib.import_module(package)
    imported = time.perf_counter() - start
    version = getattr(module, "__version__", "unknown")
    first = True
    for row in rows:
        result: dict[str, Any] = {
            "impl": impl,
            "version": version,
            "row": row.name,
            "heads_k": row.heads_k,
            "heads_v": row.heads_v,
        }
        try:
            call = make(draw(row))
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            result["first_call_s"] = time.perf_counter() - start
            if first:
                result["import_s"] = imported
                first = False
            result |= {"graph_ms": time_graph(call), "eager_ms": time_events(call, 15), "host_us": time_host(call)}
        except Exception as error:  # a peer that refuses a shape is a result, not the end of the run
            result["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(json.dumps(result), flush=True)


def run_worker(impl: str, rows: list[Row], limit: float) -> Iterator[dict[str, Any]]:
    environment = dict(os.environ)
    if path := environment.get(f"FLASH_QLA_BENCH_{impl.upper()}_PATH"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, environment.get("PYTHONPATH"))))
    command = [sys.executable, __file__, "--worker", impl, json.dumps([asdict(r) for r in rows])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    alarm = threading.Timer(limit, process.kill)
    alarm.start()
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    code = process.wait()
    stopped = not alarm.is_alive()
    alarm.cancel()
    if code != 0:
        reason = f"stopped after {limit:.0f} s" if stopped else f"its process ended with exit code {code}"
        print(f"{impl}: {reason}; the rows it did not reach stay empty", file=sys.stderr)


def found(impl: str) -> bool:
    environment = dict(os.environ)
    if path := environment.get(f"FLASH_QLA_BENCH_{impl.upper()}_PATH"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, environment.get("PYTHONPATH"))))
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({IMPLS[impl][0]!r}) is None)"
    return subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def show(console: Console, rows: list[Row], results: list[dict[str, Any]], floors: dict[Row, float]) -> None:
    impls = list(dict.fromkeys(r["impl"] for r in results))
    table = Table(title="forward, bf16, K = V = 128: graph ms (eager ms, host us)")
    table.add_column("H_k/H_v : sequences", no_wrap=True)
    for impl in impls:
        table.add_column(impl, justify="right")
    table.add_column("floor ms", justify="right")
    table.add_column("flash_qla / floor", justify="right")
    peers = [impl for impl in impls if impl != "flash_qla"]
    if peers:
        table.add_column("best peer / flash_qla", justify="right")
    gains = []
    by_key = {(r["impl"], r["row"], r["heads_k"], r["heads_v"]): r for r in results}
    for row in rows:
        cells = []
        for impl in impls:
            r = by_key.get((impl, row.name, row.heads_k, row.heads_v), {"error": "not run"})
            cells.append("-" if "error" in r else f"{r['graph_ms']:.3f} ({r['eager_ms']:.3f}, {r['host_us']:.0f})")
        ours = by_key.get(("flash_qla", row.name, row.heads_k, row.heads_v), {})
        ratio = f"{ours['graph_ms'] / floors[row]:.1f}" if "graph_ms" in ours else "-"
        cells += [f"{floors[row]:.3f}", ratio]
        if peers:
            times = [by_key.get((p, row.name, row.heads_k, row.heads_v), {}).get("graph_ms") for p in peers]
            best = min((t for t in times if t is not None), default=None)
            if best is not None and "graph_ms" in ours:
                gains.append(best / ours["graph_ms"])
            cells.append(f"{gains[-1]:.2f}" if best is not None and "graph_ms" in ours else "-")
        table.add_row(f"{row.heads_k}/{row.heads_v} : {row.name}", *cells)
    console.print(table)
    if gains:
        console.print(f"best peer / flash_qla, geometric mean of {len(gains)} rows: {statistics.geometric_mean(gains):.2f}")


def plot(path: Path, rows: list[Row], results: list[dict[str, Any]], floors: dict[Row, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    impls = list(dict.fromkeys(r["impl"] for r in results))
    heads = list(dict.fromkeys((r.heads_k, r.heads_v) for r in rows))
    figure, axes = plt.subplots(len(heads), 1, figsize=(10, 2.6 * len(heads)), squeeze=False)
    by_key = {(r["impl"], r["row"], r["heads_k"], r["heads_v"]): r.get("graph_ms") for r in results}
    for ax, (hk, hv) in zip(axes[:, 0], heads, strict=True):
        names = [r for r in rows if (r.heads_k, r.heads_v) == (hk, hv)]
        width = 0.8 / len(impls)
        for i, impl in enumerate(impls):
            values = [by_key.get((impl, r.name, hk, hv)) for r in names]
            ax.bar([x + i * width for x in range(len(names))], [v or 0 for v in values], width, label=impl)
        middle = [x + 0.4 - width / 2 for x in range(len(names))]
        ax.plot(middle, [floors[r] for r in names], "k_", markersize=24, label="floor")
        ax.set_xticks(middle, [r.name for r in names])
        ax.set_yscale("log")
        ax.set_ylabel(f"{hk}/{hv} heads, ms")
    axes[0, 0].legend(ncols=len(impls) + 1)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", nargs="+", choices=list(IMPLS), default=list(IMPLS))
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HK/HV")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for each library, compilation included")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], [Row(**r) for r in json.loads(args.worker[1])])
        return 0

    console = Console()
    if not torch.cuda.is_available():
        console.print("no CUDA device: there is nothing to measure")
        return 1
    rows = [Row(name, *(int(x) for x in heads.split("/"))) for heads in args.heads for name in args.rows]
    impls = []
    for impl in args.impl:
        if found(impl):
            impls.append(impl)
        else:
            console.print(f"{impl}: not found, left out")
    peak, bandwidth = measure_ceilings()
    torch.cuda.empty_cache()
    floors = {row: max(row.flop / peak, row.bytes / bandwidth) * 1e3 for row in rows}

    results: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        for impl in impls:
            task = bar.add_task(impl, total=len(rows))
            for result in run_worker(impl, rows, args.limit):
                results.append(result)
                bar.advance(task)

    args.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peak_tflops": peak / 1e12,
        "copy_tb_s": bandwidth / 1e12,
    }
    with (args.out / "results.jsonl").open("w") as file:
        file.write(json.dumps(facts) + "\n")
        for result in results:
            row = Row(result["row"], result["heads_k"], result["heads_v"])
            file.write(json.dumps({**result, "floor_ms": floors[row]}) + "\n")
    show(console, rows, results, floors)
    console.print(f"{facts}\nwritten to {args.out / 'results.jsonl'}")
    try:
        plot(args.out / "forward.png", rows, results, floors)
    except ImportError:
        console.print("matplotlib is not installed: no plot")
    return 0


if __name__ == "__main__":
    sys.exit(main())
