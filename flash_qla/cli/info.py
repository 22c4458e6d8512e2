"""`python -m flash_qla info`: what is installed, what is compiled, what it runs on."""

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .._library import BuildInfo, build_info, has_backward
from .._version import __version__


def add_command(commands: Any) -> None:
    """Adds `info` to the command line."""
    parser = commands.add_parser("info", help="versions, compiled kernels and devices")
    parser.set_defaults(run=run)


def device_lines() -> list[str]:
    """One line per CUDA device, or one that says there is none."""
    if not torch.cuda.is_available():
        return ["no CUDA device: the CPU implementation runs"]
    lines = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        lines.append(f"cuda:{i} {p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors")
    return lines


def _facts(info: BuildInfo) -> list[tuple[str, str]]:
    facts = [("flash_qla", __version__), ("torch", torch.__version__)]
    if info.kernels:
        facts += [
            ("library", str(info.library)),
            ("built for", info.arch),
            ("built with", f"nvcc {info.nvcc}, tilelang {info.tilelang}, torch {info.torch}"),
            ("CUDA backward", "yes" if has_backward("cuda") else "not part of this build"),
        ]
    else:
        facts.append(("CUDA kernels", f"none ({info.reason})"))
    return facts + [("device", line) for line in device_lines()]


def _kernel_table(configs: tuple[dict[str, Any], ...]) -> Table:
    table = Table(title="Compiled kernels", title_justify="left")
    columns = list(dict.fromkeys(key for config in configs for key in config))
    for column in columns:
        table.add_column(column, no_wrap=column == "name")
    for config in configs:
        table.add_row(*(_cell(config.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(x) for x in value)
    return "" if value is None else str(value)


def run(args: argparse.Namespace) -> int:
    """Prints the facts."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    info = build_info()
    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(info):
        grid.add_row(name, value)
    console.print(grid)
    if info.configs:
        console.print(_kernel_table(info.configs))
    return 0
