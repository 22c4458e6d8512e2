"""Writes what lowering produced as C++: one source file per configuration with its launcher, and the list of all of them."""

from __future__ import annotations

from .configs import Config
from .lower import Lowered, Parameter, TensorMap

# TileLang's print support defines functions that are not inline, so only one file of a library could include it.
_DEBUG_INCLUDE = "#include <tl_templates/cuda/debug.h>\n"

_HEADER = "// Written by `python -m codegen`. Do not edit.\n"

# Which struct of csrc/kernel_params.h a kernel takes, by kernel name.
PARAMS_STRUCT = {
    "chunk_ends": "ChunkForwardParams",
    "chunk_fwd": "ChunkForwardParams",
    "chunk_fwd_train": "ChunkForwardParams",
}


def kernel_file(cfg: Config, lowered: Lowered) -> str:
    """The .cu file of one configuration: TileLang's device code and the launcher `launch_<name>`."""
    struct = PARAMS_STRUCT[cfg.kernel]
    maps = "\n".join(_encode(m) for m in lowered.tensor_maps)
    arguments = ",\n      ".join(_argument(p) for p in lowered.parameters)
    grid = ", ".join(f"static_cast<unsigned>({g})" for g in lowered.grid)
    return f"""{_HEADER}{lowered.source.replace(_DEBUG_INCLUDE, "").strip()}

#include "kernel_params.h"
#include "launch.h"

namespace flash_qla {{

void launch_{cfg.name}(const {struct}& p, cudaStream_t stream) {{
{maps}
  allow_shared_memory<{lowered.symbol}>({lowered.shared_bytes});
  {lowered.symbol}<<<dim3({grid}), dim3({lowered.threads}), {lowered.shared_bytes}, stream>>>(
      {arguments});
  check_launch("{cfg.name}");
}}

}}  // namespace flash_qla
"""


def kernels_def(lowered: list[tuple[Config, Lowered]]) -> str:
    """kernels.def: one FLASH_QLA_KERNEL line per configuration, for the registry and for the planner's tests."""
    lines = [
        f"FLASH_QLA_KERNEL({c.name}, {c.kernel}, {c.k}, {c.v}, {c.dtype}, {c.block_v}, {low.threads}, {low.shared_bytes})"
        for c, low in lowered
    ]
    comment = "// FLASH_QLA_KERNEL(name, kernel, K, V, dtype, block_v, threads, dynamic shared memory in bytes)\n"
    return _HEADER + comment + "\n".join(lines) + "\n"


def _encode(m: TensorMap) -> str:
    def braces(items: tuple[object, ...]) -> str:
        return "{" + ", ".join(str(x) for x in items) + "}"

    return (
        f"  const CUtensorMap {m.name} = encode_tensor_map<{len(m.sizes)}>(\n"
        f'      "{m.pointer}", p.{m.pointer}, {m.dtype}, {braces(m.sizes)}, {braces(m.strides)},\n'
        f"      {braces(m.box)}, {braces(m.element_strides)}, {m.interleave}, {m.swizzle}, {m.l2_promotion}, {m.oob_fill});"
    )


def _argument(p: Parameter) -> str:
    if p.kind == "tensor_map":
        return p.name
    if p.kind == "pointer":
        return f"static_cast<{p.ctype}*>(p.{p.name})"
    return f"static_cast<{p.ctype}>(p.{p.name})"
