"""Makes `torch.ops.flash_qla.*` exist, from the compiled library or, where the package has no kernels, from the
schemas.

`build_info.json`, written when the package is built, says which of the two this package is. A package that should have
kernels and cannot load them fails to import and says why. Nothing here initialises CUDA.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ._checks import HeadConfig

OPS = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")

_PACKAGE = Path(__file__).resolve().parent
_SOURCE_TREE_REASON = "not built: run `pip install .` where nvcc is installed"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Registrations last as long as their Library object.
_registrations: list[torch.library.Library] = []


@dataclass(frozen=True)
class BuildInfo:
    """How this package was built."""

    version: str | None  # None in a source tree that was not built
    kernels: bool
    reason: str  # why there are no kernels; empty if there are
    library: Path | None
    configs: tuple[dict[str, Any], ...]
    nvcc: str
    tilelang: str
    torch: str
    arch: str


def _read_build_info() -> BuildInfo:
    path = _PACKAGE / "build_info.json"
    if not path.exists():
        return BuildInfo(None, False, _SOURCE_TREE_REASON, None, (), "", "", "", "")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kernels = bool(raw["kernels"])
        library = _PACKAGE / raw["library"] if kernels else None
        return BuildInfo(
            version=raw["version"],
            kernels=kernels,
            reason="" if kernels else raw["reason"],
            library=library,
            configs=tuple(raw.get("configs", ())),
            nvcc=raw.get("nvcc") or "",
            tilelang=raw.get("tilelang") or "",
            torch=raw.get("torch") or "",
            arch=raw.get("arch") or "",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"flash_qla: {path} is not readable as build information ({type(error).__name__}: {error}); reinstall flash_qla"
        ) from error


def _load(library: Path) -> None:
    advice = f"torch is {torch.__version__}; flash_qla needs torch 2.10 or newer: update torch or reinstall flash_qla"
    if not library.exists():
        raise ImportError(f"flash_qla: the compiled library {library} is missing ({advice})")
    try:
        torch.ops.load_library(str(library))
    except Exception as error:
        raise ImportError(f"flash_qla: the compiled library {library} does not load: {error} ({advice})") from error
    missing = [name for name in OPS if not hasattr(torch.ops.flash_qla, name)]
    if missing:
        raise ImportError(f"flash_qla: the compiled library {library} has no op {', '.join(missing)}; reinstall flash_qla")


def read_schemas(text: str) -> list[str]:
    """The op schemas in the text of `ops.def`, one string each."""
    text = re.sub(r"//[^\n]*", "", text)
    schemas = []
    for start in (m.end() for m in re.finditer(r"FLASH_QLA_OP\(", text)):
        depth, end = 1, start
        while depth:
            if end == len(text):
                raise ValueError("unbalanced parentheses after FLASH_QLA_OP(")
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        schemas.append(" ".join(text[start : end - 1].split()))
    return schemas


def _define_from_schemas() -> None:
    candidates = (_PACKAGE / "ops.def", _PACKAGE.parent / "csrc" / "ops.def")
    path = next((p for p in candidates if p.exists()), None)
    if path is None:
        raise ImportError(f"flash_qla: no op schemas: neither {candidates[0]} nor {candidates[1]} exists; reinstall flash_qla")
    library = torch.library.Library("flash_qla", "DEF")
    _registrations.append(library)
    for schema in read_schemas(path.read_text(encoding="utf-8")):
        library.define(schema)


def implement(name: str, key: str, function: Callable[..., Any]) -> None:
    """Registers a Python kernel of an op under a dispatch key ("CPU", "CUDA")."""
    library = torch.library.Library("flash_qla", "IMPL")
    _registrations.append(library)
    library.impl(name, function, key)


def _refuse_cuda(name: str, reason: str) -> Callable[..., NoReturn]:
    def no_kernels(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"flash_qla.{name}: got CUDA tensors, but this package has no CUDA kernels ({reason}); move the "
            "tensors to the CPU or install a package with kernels"
        )

    return no_kernels


def _no_cuda_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_qla: the backward pass on CUDA is not part of this build; the forward pass is. Gradients are available on the CPU"
    )


def build_info() -> BuildInfo:
    """How this package was built, and which kernels it has."""
    return _info


def head_configs() -> tuple[HeadConfig, ...] | None:
    """The (K, V, dtype) with forward kernels, or None in a package without kernels."""
    if not _info.kernels:
        return None
    found = [(c["K"], c["V"], _DTYPES[c["dtype"]]) for c in _info.configs if c["kernel"] == "chunk_fwd"]
    return tuple(dict.fromkeys(found))


def has_backward(device: str | torch.device) -> bool:
    """Whether gradients can be computed on this kind of device ("cpu" or "cuda")."""
    if torch.device(device).type == "cpu":
        return True
    return _info.kernels and any(str(c["kernel"]).startswith("chunk_bwd") for c in _info.configs)


_info = _read_build_info()
if _info.library is not None:
    _load(_info.library)
    if not has_backward("cuda"):
        implement("chunk_gated_delta_rule_bwd", "CUDA", _no_cuda_backward)
else:
    _define_from_schemas()
    for _name in OPS:
        implement(_name, "CUDA", _refuse_cuda(_name, _info.reason))
