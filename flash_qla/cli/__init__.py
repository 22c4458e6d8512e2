"""The command line: `python -m flash_qla`."""

import argparse
from collections.abc import Sequence

from . import check, info


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the return value is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flash_qla", description="The Gated Delta Rule for NVIDIA Hopper.")
    commands = parser.add_subparsers(required=True, metavar="command")
    info.add_command(commands)
    check.add_command(commands)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code
