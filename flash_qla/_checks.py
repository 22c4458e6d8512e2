"""Argument checks of the Gated Delta Rule ops: what the contract asks of shapes, dtypes, devices and strides.

`csrc/checks.cpp` holds the same checks for the CUDA path. Order and wording agree character for character (one table of
bad inputs drives the tests of both), so a message does not depend on who found the mistake. Here a wrong type or dtype
is a TypeError and everything else a ValueError; the raw ops turn both into RuntimeError, which is all that C++ can
raise.

No check reads a tensor's values, so none of them waits for a GPU. `check_offsets` is the exception and is for CPU
tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 64  # tokens a chunk, and the columns of A

HeadConfig = tuple[int, int, torch.dtype]  # (K, V, dtype) with compiled kernels

_FLOAT32_MAX = torch.finfo(torch.float32).max
_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


@dataclass(frozen=True)
class ForwardArgs:
    """The arguments of a forward call that a check looks at, as the caller gave them."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    scale: Any = None
    initial_state: Any = None
    cu_seqlens: Any = None
    head_first: Any = False
    state_v_first: bool = False
    gate_domain: Any = "log"


@dataclass(frozen=True)
class BackwardArgs:
    """The arguments of a backward call: those of the forward, the saved inverse A and the incoming gradients."""

    forward: ForwardArgs
    A: Any = None
    do: Any = None
    dht: Any = None


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as messages print it, without the `torch.` prefix."""
    return _DTYPE_NAMES.get(dtype, "another dtype")


def device_name(device: torch.device) -> str:
    """The device as messages print it: "cpu", "cuda:0", "meta"."""
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    return device.type if device.type in ("cpu", "meta") else "another device"


def config_name(config: HeadConfig) -> str:
    """A head configuration as messages print it."""
    return f"K={config[0]} V={config[1]} {dtype_name(config[2])}"


def _shape(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _check_tensor(name: str, x: Any, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    rank = layout.count(",") + 1
    if x.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimension{'s' if rank > 1 else ''} {layout}, got {x.dim()}")


def _check_dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...], text: str) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name}: expected {text}, got {dtype_name(x.dtype)}")


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if device_name(x.device) != device_name(q.device):
        raise ValueError(f"{name}: expected q's device {device_name(q.device)}, got {device_name(x.device)}")


def _check_shape(name: str, x: Tensor, sizes: Sequence[Any], layout: str) -> None:
    if any(a != b for a, b in zip(x.shape, sizes, strict=True)):
        raise ValueError(f"{name}: expected shape {_shape(sizes)} ({layout}), got {_shape(x.shape)}")


def _check_last_stride(name: str, x: Tensor) -> None:
    # The stride of a dimension of one element, or of a tensor without elements, means nothing.
    if x.stride(-1) != 1 and x.size(-1) > 1 and all(size > 0 for size in x.shape):
        raise ValueError(f"{name}: expected a contiguous last dimension, got stride {x.stride(-1)}")


def _check_options(args: ForwardArgs) -> None:
    if args.head_first:
        raise ValueError("head_first: expected False (tensors are laid out [B, T, H, D]), got True")
    if not isinstance(args.gate_domain, str):
        raise TypeError(f'gate_domain: expected "log" or "linear", got {type(args.gate_domain).__name__}')
    if args.gate_domain not in ("log", "linear"):
        raise ValueError(f'gate_domain: expected "log" or "linear", got "{args.gate_domain}"')
    scale = args.scale
    if scale is None or isinstance(scale, torch.SymFloat):  # a traced scale has no value yet; looking would specialise on it
        return
    if isinstance(scale, bool) or not hasattr(scale, "__float__") or isinstance(scale, Tensor):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")
    if not math.isfinite(scale) or abs(scale) > _FLOAT32_MAX:
        raise ValueError(f"scale: expected a number that float32 can hold, got {float(scale):g}")


def state_layout(state_v_first: bool) -> str:
    """The layout of a state as messages print it."""
    return "[N, H_v, V, K]" if state_v_first else "[N, H_v, K, V]"


def state_shape(args: ForwardArgs) -> list[Any]:
    """Sizes of initial_state, final_state and their gradients for arguments that passed the checks."""
    n = args.q.size(0) if args.cu_seqlens is None else args.cu_seqlens.size(0) - 1
    dims = (args.q.size(3), args.v.size(3))
    return [n, args.v.size(2), *(reversed(dims) if args.state_v_first else dims)]


def check_forward(args: ForwardArgs, built: Sequence[HeadConfig] | None = None) -> None:
    """Raises TypeError or ValueError unless the arguments keep the contract.

    Args:
        args: the arguments of the call.
        built: (K, V, dtype) with compiled kernels, or None to accept any. Only CUDA tensors are held to it: the CPU
            implementation takes every K and V.
    """
    _check_options(args)
    q, k, v, g, beta = args.q, args.k, args.v, args.g, args.beta
    _check_tensor("q", q, "[B, T, H_k, K]")
    _check_dtype("q", q, (torch.bfloat16, torch.float16), "bfloat16 or float16")
    for name, x, layout in (("k", k, "[B, T, H_k, K]"), ("v", v, "[B, T, H_v, V]")):
        _check_tensor(name, x, layout)
        _check_dtype(name, x, (q.dtype,), f"q's dtype {dtype_name(q.dtype)}")
        _check_device(name, x, q)
    for name, x in (("g", g), ("beta", beta)):
        _check_tensor(name, x, "[B, T, H_v]")
        _check_dtype(name, x, (torch.float32, torch.bfloat16, torch.float16), "float32, bfloat16 or float16")
        _check_device(name, x, q)

    for name, x in (("q", q), ("v", v)):
        if x.size(2) < 1:
            raise ValueError(f"{name}: expected 1 or more heads, got 0")
        if x.size(3) < 1:
            raise ValueError(f"{name}: expected a head dimension of 1 or more, got 0")
    _check_shape("k", k, q.shape, "q's shape")
    if v.size(0) != q.size(0) or v.size(1) != q.size(1):
        raise ValueError(f"v: expected shape [{q.size(0)}, {q.size(1)}, H_v, V] (B and T of q), got {_shape(v.shape)}")
    if v.size(2) % k.size(2) != 0:
        raise ValueError(f"k: expected a number of heads that divides v's {v.size(2)}, got {k.size(2)}")
    for name, x in (("g", g), ("beta", beta)):
        _check_shape(name, x, v.shape[:3], "[B, T, H_v]")

    if args.cu_seqlens is not None:
        _check_cu_seqlens(args.cu_seqlens, q)
    if args.initial_state is not None:
        _check_tensor("initial_state", args.initial_state, state_layout(args.state_v_first))
        _check_dtype("initial_state", args.initial_state, (torch.float32, torch.bfloat16), "float32 or bfloat16")
        _check_device("initial_state", args.initial_state, q)
        _check_shape("initial_state", args.initial_state, state_shape(args), state_layout(args.state_v_first))
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_last_stride(name, x)
    if built is not None and q.device.type == "cuda":
        _check_config(args, built)


def _check_cu_seqlens(cu_seqlens: Any, q: Tensor) -> None:
    _check_tensor("cu_seqlens", cu_seqlens, "[N + 1]")
    _check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64), "int32 or int64")
    _check_device("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.size(0) < 1:
        raise ValueError("cu_seqlens: expected 1 or more offsets, got 0")
    if cu_seqlens.size(0) > 1 and cu_seqlens.stride(0) != 1:
        raise ValueError(f"cu_seqlens: expected contiguous offsets, got stride {cu_seqlens.stride(0)}")
    if q.size(0) != 1:
        raise ValueError(f"q: expected batch size 1 with cu_seqlens, got {q.size(0)}")


def _check_config(args: ForwardArgs, built: Sequence[HeadConfig]) -> None:
    wanted = (args.q.size(3), args.v.size(3), args.q.dtype)
    if not any(wanted[0] == k and wanted[1] == v and wanted[2] == dtype for k, v, dtype in built):
        names = ", ".join(config_name(c) for c in sorted(set(built), key=lambda c: (c[0], c[1], dtype_name(c[2]))))
        raise ValueError(
            f"q, k, v: expected one of the built configurations ({names or 'none'}), got {config_name(wanted)}; "
            "FLASH_QLA_CONFIGS chooses what `pip install .` builds"
        )


def check_backward(args: BackwardArgs, built: Sequence[HeadConfig] | None = None) -> None:
    """The checks of `check_forward`, then those of A [B, T, H_v, 64], do (like v) and dht (like the final state)."""
    check_forward(args.forward, built)
    q, v = args.forward.q, args.forward.v
    for name, x, layout, sizes in (
        ("A", args.A, f"[B, T, H_v, {CHUNK}]", [*v.shape[:3], CHUNK]),
        ("do", args.do, "[B, T, H_v, V]", v.shape),
    ):
        if x is not None:
            _check_tensor(name, x, layout)
            _check_dtype(name, x, (q.dtype,), f"q's dtype {dtype_name(q.dtype)}")
            _check_device(name, x, q)
            _check_shape(name, x, sizes, layout)
    if args.dht is not None:
        layout = state_layout(args.forward.state_v_first)
        _check_tensor("dht", args.dht, layout)
        _check_dtype("dht", args.dht, (torch.float32,), "float32")
        _check_device("dht", args.dht, q)
        _check_shape("dht", args.dht, state_shape(args.forward), layout)


def check_offsets(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The offsets of a CPU tensor as a list; ValueError unless they never decrease and stay within [0, tokens]."""
    offsets: list[int] = cu_seqlens.tolist()
    for i, offset in enumerate(offsets):
        if not 0 <= offset <= tokens:
            raise ValueError(f"cu_seqlens: expected offsets between 0 and T = {tokens}, got {offset} at index {i}")
        if i > 0 and offset < offsets[i - 1]:
            raise ValueError(f"cu_seqlens: expected offsets that never decrease, got {offsets[i - 1]} before {offset}")
    return offsets


def enforce(check: Callable[..., Any], *args: Any) -> Any:
    """Runs a check for a raw op, whose errors are RuntimeError as they are in C++."""
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None
