"""THE list of built configurations. Everything that knows which kernels exist reads it from here or from what codegen wrote.

A configuration is one compiled kernel: kernel, head dimensions, dtype and tile profile. Batch, token count, head counts
and scale are run-time arguments. To add a head dimension, add a line to `HEAD_DIMS`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

# Tokens in a chunk. Also written in csrc/device/gates.cuh and csrc/planner.h, checked against each other by the tests.
CHUNK = 64


@dataclass(frozen=True)
class HeadDim:
    """A pair of head dimensions. `block_v`: the slices of V that chunk_fwd_train is built for, widest first."""

    k: int
    v: int
    block_v: tuple[int, ...]


HEAD_DIMS: tuple[HeadDim, ...] = (HeadDim(k=128, v=128, block_v=(128, 64, 32)),)

DTYPES: tuple[str, ...] = ("bf16", "fp16")

TILE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Config:
    """One compiled kernel.

    kernel: name of the module in codegen/kernels/.
    k, v: head dimensions of q/k and of v.
    dtype: "bf16" or "fp16", the dtype of q, k, v and o.
    block_v: how many of the V columns one thread block owns; the planner chooses among these.
    """

    kernel: str
    k: int
    v: int
    dtype: str
    block_v: int

    @property
    def tile_dtype(self) -> str:
        """TileLang's name of the dtype."""
        return TILE_DTYPES[self.dtype]

    @property
    def name(self) -> str:
        parts = [self.kernel, f"k{self.k}", f"v{self.v}", self.dtype, f"bv{self.block_v}", "sm90"]
        return "_".join(parts)


def configurations() -> tuple[Config, ...]:
    """Every configuration that a full build compiles, in a fixed order."""
    return tuple(
        config
        for dims in HEAD_DIMS
        for dtype in DTYPES
        for config in (
            Config("chunk_fwd", dims.k, dims.v, dtype, dims.v),
            Config("chunk_ends", dims.k, dims.v, dtype, dims.v),
            *(Config("chunk_fwd_train", dims.k, dims.v, dtype, block_v) for block_v in dims.block_v),
        )
    )


def select(patterns: str | None) -> tuple[Config, ...]:
    """The configurations whose names match one of the comma-separated shell patterns; all of them for None or "".

    Raises ValueError if a pattern matches nothing.
    """
    every = configurations()
    if not patterns:
        return every
    chosen: set[Config] = set()
    for pattern in (p.strip() for p in patterns.split(",")):
        matched = {c for c in every if fnmatch.fnmatchcase(c.name, pattern)}
        if not matched:
            names = "\n  ".join(c.name for c in every)
            raise ValueError(f"no configuration matches {pattern!r}; there are\n  {names}")
        chosen |= matched
    return tuple(c for c in every if c in chosen)
