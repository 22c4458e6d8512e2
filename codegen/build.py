"""Keeps a folder of generated sources in step with the configurations, lowering only what changed, on all cores."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import emit
from .configs import Config
from .lower import Lowered, Parameter, TensorMap, lower

ROOT = Path(__file__).resolve().parent
DEFAULT_OUT = ROOT.parent / "csrc" / "generated"
MANIFEST = "manifest.json"

Progress = Callable[[str, bool, float], None]
"""Called when a configuration is done: its name, whether it was up to date already, seconds spent."""


def generate(
    configs: Iterable[Config], out: Path = DEFAULT_OUT, jobs: int | None = None, progress: Progress | None = None
) -> int:
    """Makes `out` hold exactly the sources of `configs`; returns how many had to be lowered.

    A configuration is up to date when the code it comes from, TileLang's version and the file on disk are what the manifest
    says. The files do not depend on the order of the work, the number of jobs or the machine.
    """
    configs = list(configs)
    out.mkdir(parents=True, exist_ok=True)
    old = _read_manifest(out)
    entries: dict[str, dict[str, Any]] = {}
    stale: list[Config] = []
    for cfg in configs:
        entry = old.get(cfg.name)
        if entry is not None and entry["inputs"] == inputs_hash(cfg) and _file_hash(out / f"{cfg.name}.cu") == entry["output"]:
            entries[cfg.name] = entry
            if progress:
                progress(cfg.name, True, 0.0)
        else:
            stale.append(cfg)

    for cfg, lowered, seconds in _lower_all(stale, jobs or default_jobs()):
        path = out / f"{cfg.name}.cu"
        _write(path, emit.kernel_file(cfg, lowered))
        interface = asdict(lowered)
        del interface["source"]
        entries[cfg.name] = {
            "config": asdict(cfg),
            "inputs": inputs_hash(cfg),
            "output": _file_hash(path),
            "interface": interface,
        }
        # Written as we go: an interrupted run keeps what it finished.
        _write_manifest(out, {**{k: v for k, v in old.items() if k not in entries}, **entries})
        if progress:
            progress(cfg.name, False, seconds)

    wanted = {f"{cfg.name}.cu" for cfg in configs}
    for path in out.glob("*.cu"):
        if path.name not in wanted:
            path.unlink()
    _write_manifest(out, {cfg.name: entries[cfg.name] for cfg in configs})
    _write(out / "kernels.def", emit.kernels_def([(cfg, _lowered(entries[cfg.name])) for cfg in configs]))
    return len(stale)


def default_jobs() -> int:
    """MAX_JOBS if set, else the cores this process may use."""
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def _kernel_sources(kernel: str) -> list[Path]:
    """The module of a kernel and those beside it that it imports, each once."""
    found: list[Path] = []
    waiting = [kernel]
    while waiting:
        path = ROOT / "kernels" / f"{waiting.pop()}.py"
        if path in found:
            continue
        found.append(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                waiting.append(node.module)
    return sorted(found)


def inputs_hash(cfg: Config) -> str:
    """A digest of everything that the generated file of `cfg` depends on."""
    digest = hashlib.sha256()
    digest.update(importlib.metadata.version("tilelang").encode())
    digest.update(json.dumps(asdict(cfg), sort_keys=True).encode())
    for path in (*_kernel_sources(cfg.kernel), ROOT / "lower.py", ROOT / "emit.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _lower_all(configs: list[Config], jobs: int) -> Iterable[tuple[Config, Lowered, float]]:
    if not configs:
        return
    if jobs == 1 or len(configs) == 1:
        yield from map(_timed_lower, configs)
        return
    # Spawned workers: TVM keeps threads that a fork would lose.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(configs))) as pool:
        yield from pool.imap_unordered(_timed_lower, configs)


def _timed_lower(cfg: Config) -> tuple[Config, Lowered, float]:
    start = time.perf_counter()
    return cfg, lower(cfg), time.perf_counter() - start


def _lowered(entry: dict[str, Any]) -> Lowered:
    interface = dict(entry["interface"])
    interface["parameters"] = tuple(Parameter(**p) for p in interface["parameters"])
    interface["tensor_maps"] = tuple(TensorMap(**m) for m in interface["tensor_maps"])
    interface["grid"] = tuple(interface["grid"])
    return Lowered(source="", **interface)


def _read_manifest(out: Path) -> dict[str, dict[str, Any]]:
    path = out / MANIFEST
    if not path.exists():
        return {}
    try:
        kernels = json.loads(path.read_text())["kernels"]
    except (json.JSONDecodeError, KeyError):
        return {}  # an interrupted write: lower everything again
    return dict(kernels)


def _write_manifest(out: Path, entries: dict[str, dict[str, Any]]) -> None:
    manifest = {"tilelang": importlib.metadata.version("tilelang"), "kernels": entries}
    _write(out / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return  # an unchanged time stamp spares a rebuild
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
