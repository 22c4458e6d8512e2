"""Lowers one configuration with TileLang and reads from the result what a launcher needs to know."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from .configs import Config

# What a thread block of a Hopper GPU can have, less the kilobyte that barriers and other static variables take.
MOST_SHARED_BYTES = 226 * 1024


@dataclass(frozen=True)
class Parameter:
    """A parameter of the device function: a tensor map, a pointer or a scalar."""

    name: str
    kind: str  # "tensor_map" | "pointer" | "scalar"
    ctype: str


@dataclass(frozen=True)
class TensorMap:
    """The arguments of one cuTensorMapEncodeTiled call; sizes and strides are C++ expressions, innermost first."""

    name: str
    dtype: int
    pointer: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]  # bytes; the innermost, contiguous dimension has none
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int


@dataclass(frozen=True)
class Lowered:
    """CUDA source of a configuration and the interface of its device function."""

    source: str
    symbol: str
    parameters: tuple[Parameter, ...]
    tensor_maps: tuple[TensorMap, ...]
    grid: tuple[str, ...]
    threads: int
    shared_bytes: int


def lower(cfg: Config) -> Lowered:
    """Lowers `cfg` for sm_90a. Needs no GPU and starts no device compiler."""
    import tilelang
    from tilelang import tvm

    module = importlib.import_module(f"codegen.kernels.{cfg.kernel}")
    function = module.build(cfg).with_attr("global_symbol", cfg.name)
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tvm.transform.PassContext(opt_level=3, config=module.PASS_CONFIG), target:
        artifact = tilelang.lower(function, target=target, enable_device_compile=False)
    return _interface(artifact)


def _interface(artifact: Any) -> Lowered:
    from tilelang import tvm

    (device,) = artifact.device_mod.functions.values()
    (host,) = artifact.host_mod.functions.values()
    symbol = str(device.attrs["global_symbol"])
    maps = {str(k.name): v for k, v in (host.attrs.get("tma_descriptor_args") or {}).items()}

    parameters = []
    for var in device.params:
        if var.name in maps:
            parameters.append(Parameter(var.name, "tensor_map", "CUtensorMap"))
        elif str(var.dtype) == "handle":
            parameters.append(Parameter(var.name, "pointer", _ctype(str(var.type_annotation.element_type.dtype))))
        else:
            parameters.append(Parameter(var.name, "scalar", _ctype(str(var.dtype))))

    call = _launch_call(host, symbol, tvm)
    launch = list(call.args)[1 + len(parameters) :]
    tags = [str(t) for t in device.attrs["tirx.kernel_launch_params"]]
    extents = dict(zip(tags, launch, strict=True))
    grid = tuple(cexpr(extents[f"blockIdx.{x}"]) for x in "xyz" if f"blockIdx.{x}" in extents)
    threads = 1
    for x in "xyz":
        threads *= int(extents.get(f"threadIdx.{x}", 1))
    shared = extents.get("tirx.use_dyn_shared_memory", extents.get("tir.use_dyn_shared_memory", 0))
    if int(shared) > MOST_SHARED_BYTES:
        raise RuntimeError(f"{symbol}: {int(shared)} bytes of shared memory, a block can have {MOST_SHARED_BYTES}")
    return Lowered(
        source=_clamp_fences(artifact.kernel_source),
        symbol=symbol,
        parameters=tuple(parameters),
        tensor_maps=tuple(_tensor_map(name, list(args)) for name, args in sorted(maps.items())),
        grid=grid,
        threads=threads,
        shared_bytes=int(shared),
    )


def _clamp_fences(source: str) -> str:
    """Keeps `warpgroup_fence_operand` inside its array.

    When several warpgroups share the rows of a product, TileLang 0.1.15 counts the accumulators of all of them for each thread.
    Fencing past the end of a local array is undefined, and makes the compiler keep the array in memory.
    """
    registers = {
        name: int(count) * size // 4
        for ctype, name, count in re.findall(r"^ *(float|bfloat16_t|half_t) (\w+)\[(\d+)\];", source, re.MULTILINE)
        for size in (4 if ctype == "float" else 2,)
    }

    def clamp(match: re.Match[str]) -> str:
        return f"{match[1]}{min(int(match[3]), registers[match[2]])})"

    return re.sub(r"(warpgroup_fence_operand\(reinterpret_cast<\w+\*>\((\w+) \+ 0\), )(\d+)\)", clamp, source)


def _launch_call(host: Any, symbol: str, tvm: Any) -> Any:
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, tvm.tirx.Call) and node.args and isinstance(node.args[0], tvm.tirx.StringImm):
            if str(node.args[0].value) == symbol:
                found.append(node)

    tvm.tirx.stmt_functor.post_order_visit(host.body, visit)
    if len(found) != 1:
        raise RuntimeError(f"expected one launch of {symbol} in the host function, found {len(found)}")
    return found[0]


def _tensor_map(name: str, args: list[Any]) -> TensorMap:
    # ("__tvm_tensormap_create_tiled", desc, dtype, rank, pointer, sizes[rank], strides[rank], box[rank], element_strides[rank],
    #  interleave, swizzle, l2_promotion, oob_fill)
    dtype, rank, pointer = int(args[2]), int(args[3]), args[4]
    rest = args[5:]
    if len(rest) != 4 * rank + 4:
        raise RuntimeError(f"{name}: a tiled tensor map of rank {rank} has {4 * rank + 4} trailing arguments, got {len(rest)}")
    part = [rest[i * rank : (i + 1) * rank] for i in range(4)]
    interleave, swizzle, l2_promotion, oob_fill = (int(x) for x in rest[4 * rank :])
    return TensorMap(
        name=name,
        dtype=dtype,
        pointer=str(pointer.name),
        sizes=tuple(cexpr(x) for x in part[0]),
        strides=tuple(cexpr(x) for x in part[1][1:]),
        box=tuple(int(x) for x in part[2]),
        element_strides=tuple(int(x) for x in part[3]),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        oob_fill=oob_fill,
    )


def cexpr(node: Any) -> str:
    """An integer expression over kernel parameters as C++ over the fields of `p`, computed in int64_t."""
    from tilelang import tvm

    t = tvm.tirx
    if isinstance(node, int):
        return str(node)
    if isinstance(node, t.IntImm):
        return str(int(node))
    if isinstance(node, t.Var):
        return f"int64_t(p.{node.name})"
    if isinstance(node, t.Cast):
        return cexpr(node.value)
    for kind, sign in ((t.Add, "+"), (t.Sub, "-"), (t.Mul, "*"), (t.Div, "/"), (t.FloorDiv, "/")):
        # Shapes are not negative, so C++'s truncating division is floor division.
        if isinstance(node, kind):
            return f"({cexpr(node.a)} {sign} {cexpr(node.b)})"
    raise NotImplementedError(f"no C++ for {type(node).__name__}: {node}")


def _ctype(dtype: str) -> str:
    names = {
        "bfloat16": "bfloat16_t",
        "float16": "half_t",
        "float32": "float",
        "uint8": "uchar",
        "int32": "int",
        "int64": "int64_t",
    }
    return names[dtype]
