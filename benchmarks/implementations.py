"""The libraries that the benchmark knows: what each is called, and how it is called. Each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]
Call = Callable[[], Any]


def _flash_qla(x: Inputs) -> Call:
    import flash_qla

    return lambda: flash_qla.chunk_gated_delta_rule(**x, output_final_state=True)


def _flashqla_jit(x: Inputs) -> Call:
    """FlashQLA, which compiles with TileLang at run time. It has this package's import name."""
    import flash_qla

    return lambda: flash_qla.chunk_gated_delta_rule(**x, output_final_state=True)


def _fla(x: Inputs) -> Call:
    os.environ["FLA_FLASH_QLA"] = "0"  # else fla finds this package and calls it
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(**x, output_final_state=True)


def _flashinfer(x: Inputs) -> Call:
    """Packed sequences only, gates as factors, states as [V, K]."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, g, beta = (x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    offsets = x["cu_seqlens"]
    if offsets is None:
        batch, tokens = x["q"].shape[:2]
        offsets = torch.arange(batch + 1, device=q.device) * tokens
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


@dataclass(frozen=True)
class Implementation:
    """package: what it imports. prepare: from inputs to a call. backward: whether it has gradients. own_folder: its import name is
    taken, so it is looked for on FLASH_QLA_BENCH_<NAME>_PATH only."""

    package: str
    prepare: Callable[[Inputs], Call]
    backward: bool = True
    own_folder: bool = False


IMPLEMENTATIONS: dict[str, Implementation] = {
    "flash_qla": Implementation("flash_qla", _flash_qla),
    "flashinfer": Implementation("flashinfer", _flashinfer, backward=False),
    "fla": Implementation("fla", _fla),
    "flashqla_jit": Implementation("flash_qla", _flashqla_jit, own_folder=True),
}


def environment(name: str) -> dict[str, str]:
    """The environment of an implementation's process: its own folders come first on the path."""
    result = dict(os.environ)
    if path := result.get(f"FLASH_QLA_BENCH_{name.upper()}_PATH"):
        result["PYTHONPATH"] = os.pathsep.join(filter(None, (path, result.get("PYTHONPATH"))))
    return result


def found(name: str) -> bool:
    """Whether a process of the implementation would find its package."""
    implementation = IMPLEMENTATIONS[name]
    if implementation.own_folder and f"FLASH_QLA_BENCH_{name.upper()}_PATH" not in os.environ:
        return False
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({implementation.package!r}) is None)"
    return subprocess.run([sys.executable, "-c", code], env=environment(name), check=False).returncode == 0
