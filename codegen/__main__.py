"""python -m codegen: writes csrc/generated/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .configs import configurations, select


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m codegen", description="Lower the TileLang kernels to CUDA source. Needs no GPU."
    )
    parser.add_argument("--list", action="store_true", help="print the configurations and stop")
    parser.add_argument("--only", metavar="PATTERN", help="only configurations that match; shell patterns, separated by commas")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: csrc/generated)")
    parser.add_argument("--jobs", metavar="N", type=int, help="processes (default: MAX_JOBS, else all cores)")
    args = parser.parse_args(argv)
    try:
        configs = select(args.only)
    except ValueError as error:
        parser.error(str(error))

    console = Console(highlight=False)
    if args.list:
        table = Table()
        table.add_column("configuration", no_wrap=True)
        for header in ("kernel", "K", "V", "dtype", "V per block"):
            table.add_column(header)
        for c in configs:
            table.add_row(c.name, c.kernel, str(c.k), str(c.v), c.dtype, str(c.block_v))
        console.print(table)
        console.print(f"{len(configs)} of {len(configurations())} configurations")
        return 0

    # Imported late: TVM takes seconds to load and --list does not need it.
    from .build import DEFAULT_OUT, generate

    out = args.out or DEFAULT_OUT
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("lowering", total=len(configs))

        def progress(name: str, fresh: bool, seconds: float) -> None:
            bar.console.print(f"{name}: {'up to date' if fresh else f'{seconds:.1f} s'}")
            bar.advance(task)

        lowered = generate(configs, out, args.jobs, progress)
    console.print(f"{lowered} lowered, {len(configs) - lowered} up to date, in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
