"""Times the forward and the backward pass against the libraries that are found, each in a process of its own.

    python benchmarks/bench_gated_delta_rule.py [--impl flash_qla flashinfer fla flashqla_jit] [--pass forward backward]
                                                [--heads 16/64 2/8] [--rows 4x8192 mix] [--limit SECONDS] [--out DIR]

Forward: milliseconds in a replayed CUDA graph and in eager calls (median), microseconds of host time a call. Backward: milliseconds of
torch.autograd.grad with do and dht, of a forward and backward step, and the memory that a step takes beside its inputs. Both: seconds of
the first call with a shape, and how many times the floor the time is. The floor is max(FLOP / peak, bytes / bandwidth) with both
ceilings measured in the same run. Writes results.jsonl, versions included, and plots to DIR if matplotlib is installed.

A library that is not found is left out with a line that says so. To find one that is not installed, put its folder on
FLASH_QLA_BENCH_<IMPL>_PATH (a PYTHONPATH for its process alone). A library that takes longer than --limit is stopped, and the rows
that it did not reach stay empty.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from implementations import IMPLEMENTATIONS, environment, found
from measure import HEADS, ROWS, Row, ceilings, worker
from report import plot, show, show_cold_start
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PASSES = ("forward", "backward")


def run_worker(name: str, rows: list[Row], which: str, limit: float) -> Iterator[dict[str, Any]]:
    """The results of one implementation as its process prints them, until it ends or has had its time."""
    command = [sys.executable, __file__, "--worker", name, which, json.dumps([asdict(r) for r in rows])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(name), text=True)
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
        print(f"{name}: {reason}; the rows it did not reach stay empty", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=["forward"], dest="passes")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HK/HV")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--limit", type=float, default=300, metavar="SECONDS", help="for a library and pass, compilation included"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, which, rows_json = args.worker
        worker(name, [Row(**r) for r in json.loads(rows_json)], which == "backward")
        return 0

    console = Console()
    if not torch.cuda.is_available():
        console.print("no CUDA device: there is nothing to measure")
        return 1
    rows = [Row(name, *(int(x) for x in heads.split("/"))) for heads in args.heads for name in args.rows]
    names = [name for name in args.impl if found(name)]
    for name in args.impl:
        if name not in names:
            console.print(f"{name}: not found, left out")
    peak, bandwidth = ceilings()
    torch.cuda.empty_cache()
    facts = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peak_tflops": peak / 1e12,
        "copy_tb_s": bandwidth / 1e12,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(facts)]
    for which in args.passes:
        backward = which == "backward"
        floors = {row: row.floor_ms(peak, bandwidth, backward) for row in rows}
        results: list[dict[str, Any]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            for name in names:
                if backward and not IMPLEMENTATIONS[name].backward:
                    continue
                task = bar.add_task(f"{name} {which}", total=len(rows))
                for result in run_worker(name, rows, which, args.limit):
                    results.append(result)
                    floor = floors[Row(result["row"], result["heads_k"], result["heads_v"])]
                    lines.append(json.dumps({**result, "floor_ms": floor}))
                    bar.advance(task)
        show(console, rows, results, floors, backward)
        show_cold_start(console, results)
        try:
            plot(args.out / f"{which}.png", rows, results, floors, backward)
        except ImportError:
            console.print("matplotlib is not installed: no plot")
    (args.out / "results.jsonl").write_text("\n".join(lines) + "\n")
    console.print(f"{facts}\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
