"""The table of bad inputs: how a good call is spoilt, and what every layer must say about it.

It drives the Python functions (exact text and exception type), the raw ops (same text, RuntimeError) and the C++ checks
(same text), so that the three cannot drift apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

B, T, H_K, H_V, K, V = 2, 10, 2, 4, 16, 24

Arguments = dict[str, Any]


def good_forward(device: str = "cpu", *, packed: bool = False) -> Arguments:
    """Arguments of `chunk_gated_delta_rule` that keep the contract; packed: three sequences in a batch of one."""
    batch = 1 if packed else B
    arguments: Arguments = {
        "q": torch.zeros(batch, T, H_K, K, dtype=torch.bfloat16, device=device),
        "k": torch.zeros(batch, T, H_K, K, dtype=torch.bfloat16, device=device),
        "v": torch.zeros(batch, T, H_V, V, dtype=torch.bfloat16, device=device),
        "g": torch.zeros(batch, T, H_V, device=device),
        "beta": torch.zeros(batch, T, H_V, device=device),
        "scale": None,
        "initial_state": torch.zeros(3 if packed else batch, H_V, K, V, device=device),
        "cu_seqlens": torch.tensor([0, 3, 3, 9], device=device) if packed else None,
        "head_first": False,
        "state_v_first": False,
        "gate_domain": "log",
    }
    return arguments


def good_backward(device: str = "cpu", *, packed: bool = False) -> Arguments:
    """The same for `chunk_gated_delta_rule_bwd`."""
    arguments = good_forward(device, packed=packed)
    del arguments["head_first"]
    batch, v = arguments["q"].size(0), arguments["v"]
    arguments["A"] = torch.zeros(batch, T, H_V, 64, dtype=torch.bfloat16, device=device)
    arguments["do"] = torch.zeros_like(v)
    arguments["dht"] = torch.zeros_like(arguments["initial_state"])
    return arguments


@dataclass(frozen=True)
class BadInput:
    """One way to break a call."""

    name: str
    spoil: Callable[[Arguments], None]
    error: type[Exception]
    message: str
    packed: bool = False
    backward: bool = False
    python_only: bool = False  # an op's schema already excludes it
    cpu_only: bool = False  # the message names the device

    def arguments(self, device: str = "cpu") -> Arguments:
        """The spoilt arguments."""
        good = good_backward if self.backward else good_forward
        arguments = good(device, packed=self.packed)
        self.spoil(arguments)
        return arguments


def put(name: str, value: Any) -> Callable[[Arguments], None]:
    """Replaces an argument."""

    def spoil(arguments: Arguments) -> None:
        arguments[name] = value

    return spoil


def change(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], None]:
    """Replaces a tensor by a function of it."""

    def spoil(arguments: Arguments) -> None:
        arguments[name] = function(arguments[name])

    return spoil


def resize(name: str, *shape: int) -> Callable[[Arguments], None]:
    """Gives a tensor another shape."""
    return change(name, lambda x: x.new_zeros(shape))


def cast(name: str, dtype: torch.dtype) -> Callable[[Arguments], None]:
    """Gives a tensor another dtype."""
    return change(name, lambda x: x.to(dtype))


def elsewhere(name: str) -> Callable[[Arguments], None]:
    """Moves a tensor to the meta device."""
    return change(name, lambda x: x.to("meta"))


def every_other(name: str) -> Callable[[Arguments], None]:
    """Strides of 2 in the last dimension."""
    return change(name, lambda x: torch.stack([x, x], -1)[..., 0])


def both(*spoils: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    """Several changes."""

    def spoil(arguments: Arguments) -> None:
        for one in spoils:
            one(arguments)

    return spoil


BAD_INPUTS = (
    # Options.
    BadInput(
        "head_first",
        put("head_first", True),
        ValueError,
        "head_first: expected False (tensors are laid out [B, T, H, D]), got True",
    ),
    BadInput("gate_domain", put("gate_domain", "exp"), ValueError, 'gate_domain: expected "log" or "linear", got "exp"'),
    BadInput(
        "gate_domain_type",
        put("gate_domain", 2),
        TypeError,
        'gate_domain: expected "log" or "linear", got int',
        python_only=True,
    ),
    BadInput(
        "scale_nan",
        put("scale", float("nan")),
        ValueError,
        "scale: expected a number that float32 can hold, got nan",
    ),
    BadInput("scale_inf", put("scale", float("inf")), ValueError, "scale: expected a number that float32 can hold, got inf"),
    BadInput(
        "scale_minus_inf",
        put("scale", float("-inf")),
        ValueError,
        "scale: expected a number that float32 can hold, got -inf",
    ),
    BadInput("scale_too_large", put("scale", 1e39), ValueError, "scale: expected a number that float32 can hold, got 1e+39"),
    BadInput("scale_type", put("scale", "1"), TypeError, "scale: expected a number or None, got str", python_only=True),
    # Types.
    BadInput("q_list", put("q", [1.0]), TypeError, "q: expected a torch.Tensor, got list", python_only=True),
    BadInput("v_none", put("v", None), TypeError, "v: expected a torch.Tensor, got NoneType", python_only=True),
    BadInput(
        "cu_seqlens_list",
        put("cu_seqlens", [0, 10]),
        TypeError,
        "cu_seqlens: expected a torch.Tensor, got list",
        python_only=True,
        packed=True,
    ),
    BadInput(
        "initial_state_float",
        put("initial_state", 0.0),
        TypeError,
        "initial_state: expected a torch.Tensor, got float",
        python_only=True,
    ),
    # Ranks.
    BadInput("q_rank", resize("q", B, T, H_K * K), ValueError, "q: expected 4 dimensions [B, T, H_k, K], got 3"),
    BadInput("q_rank_6", resize("q", 1, 1, B, T, H_K, K), ValueError, "q: expected 4 dimensions [B, T, H_k, K], got 6"),
    BadInput("k_rank", resize("k", T, H_K, K), ValueError, "k: expected 4 dimensions [B, T, H_k, K], got 3"),
    BadInput("v_rank", resize("v", B, T, 1, H_V, V), ValueError, "v: expected 4 dimensions [B, T, H_v, V], got 5"),
    BadInput("g_rank", resize("g", B, T, H_V, 1), ValueError, "g: expected 3 dimensions [B, T, H_v], got 4"),
    BadInput("beta_rank", resize("beta", B, T), ValueError, "beta: expected 3 dimensions [B, T, H_v], got 2"),
    BadInput(
        "initial_state_rank",
        resize("initial_state", H_V, K, V),
        ValueError,
        "initial_state: expected 4 dimensions [N, H_v, K, V], got 3",
    ),
    BadInput(
        "initial_state_rank_v_first",
        both(put("state_v_first", True), resize("initial_state", H_V, V, K)),
        ValueError,
        "initial_state: expected 4 dimensions [N, H_v, V, K], got 3",
    ),
    BadInput(
        "cu_seqlens_rank",
        resize("cu_seqlens", 1, 4),
        ValueError,
        "cu_seqlens: expected 1 dimension [N + 1], got 2",
        packed=True,
    ),
    BadInput(
        "cu_seqlens_scalar",
        resize("cu_seqlens"),
        ValueError,
        "cu_seqlens: expected 1 dimension [N + 1], got 0",
        packed=True,
    ),
    # Dtypes.
    BadInput("q_float64", cast("q", torch.float64), TypeError, "q: expected bfloat16 or float16, got float64"),
    BadInput("q_float32", cast("q", torch.float32), TypeError, "q: expected bfloat16 or float16, got float32"),
    BadInput(
        "all_float64",
        both(*(cast(name, torch.float64) for name in ("q", "k", "v", "g", "beta", "initial_state"))),
        TypeError,
        "q: expected bfloat16 or float16, got float64",
    ),
    BadInput("k_dtype", cast("k", torch.float16), TypeError, "k: expected q's dtype bfloat16, got float16"),
    BadInput("v_dtype", cast("v", torch.float32), TypeError, "v: expected q's dtype bfloat16, got float32"),
    BadInput("g_dtype", cast("g", torch.float64), TypeError, "g: expected float32, bfloat16 or float16, got float64"),
    BadInput("beta_dtype", cast("beta", torch.int64), TypeError, "beta: expected float32, bfloat16 or float16, got int64"),
    BadInput("beta_bool", cast("beta", torch.bool), TypeError, "beta: expected float32, bfloat16 or float16, got bool"),
    BadInput(
        "initial_state_dtype",
        cast("initial_state", torch.float16),
        TypeError,
        "initial_state: expected float32 or bfloat16, got float16",
    ),
    BadInput(
        "cu_seqlens_dtype",
        cast("cu_seqlens", torch.float32),
        TypeError,
        "cu_seqlens: expected int32 or int64, got float32",
        packed=True,
    ),
    BadInput(
        "cu_seqlens_int16",
        cast("cu_seqlens", torch.int16),
        TypeError,
        "cu_seqlens: expected int32 or int64, got int16",
        packed=True,
    ),
    # Devices.
    *(
        BadInput(
            f"{name}_device",
            elsewhere(name),
            ValueError,
            f"{name}: expected q's device cpu, got meta",
            packed=True,
            cpu_only=True,
        )
        for name in ("k", "v", "g", "beta", "initial_state", "cu_seqlens")
    ),
    # Sizes.
    BadInput("q_no_heads", resize("q", B, T, 0, K), ValueError, "q: expected 1 or more heads, got 0"),
    BadInput("q_no_dimension", resize("q", B, T, H_K, 0), ValueError, "q: expected a head dimension of 1 or more, got 0"),
    BadInput("v_no_heads", resize("v", B, T, 0, V), ValueError, "v: expected 1 or more heads, got 0"),
    BadInput("v_no_dimension", resize("v", B, T, H_V, 0), ValueError, "v: expected a head dimension of 1 or more, got 0"),
    BadInput(
        "k_heads",
        resize("k", B, T, 4, K),
        ValueError,
        "k: expected shape [2, 10, 2, 16] (q's shape), got [2, 10, 4, 16]",
    ),
    BadInput(
        "k_dimension",
        resize("k", B, T, H_K, 32),
        ValueError,
        "k: expected shape [2, 10, 2, 16] (q's shape), got [2, 10, 2, 32]",
    ),
    BadInput(
        "v_tokens",
        resize("v", B, 11, H_V, V),
        ValueError,
        "v: expected shape [2, 10, H_v, V] (B and T of q), got [2, 11, 4, 24]",
    ),
    BadInput(
        "v_batch",
        resize("v", 1, T, H_V, V),
        ValueError,
        "v: expected shape [2, 10, H_v, V] (B and T of q), got [1, 10, 4, 24]",
    ),
    BadInput(
        "heads_do_not_divide",
        both(resize("q", B, T, 3, K), resize("k", B, T, 3, K)),
        ValueError,
        "k: expected a number of heads that divides v's 4, got 3",
    ),
    BadInput(
        "more_key_heads",
        both(resize("q", B, T, 8, K), resize("k", B, T, 8, K)),
        ValueError,
        "k: expected a number of heads that divides v's 4, got 8",
    ),
    BadInput("g_heads", resize("g", B, T, H_K), ValueError, "g: expected shape [2, 10, 4] ([B, T, H_v]), got [2, 10, 2]"),
    BadInput(
        "beta_tokens",
        resize("beta", B, 9, H_V),
        ValueError,
        "beta: expected shape [2, 10, 4] ([B, T, H_v]), got [2, 9, 4]",
    ),
    BadInput(
        "states_dense",
        resize("initial_state", 1, H_V, K, V),
        ValueError,
        "initial_state: expected shape [2, 4, 16, 24] ([N, H_v, K, V]), got [1, 4, 16, 24]",
    ),
    BadInput(
        "states_packed",
        resize("initial_state", 4, H_V, K, V),
        ValueError,
        "initial_state: expected shape [3, 4, 16, 24] ([N, H_v, K, V]), got [4, 4, 16, 24]",
        packed=True,
    ),
    BadInput(
        "state_layout",
        put("state_v_first", True),
        ValueError,
        "initial_state: expected shape [2, 4, 24, 16] ([N, H_v, V, K]), got [2, 4, 16, 24]",
    ),
    # Offsets.
    BadInput(
        "cu_seqlens_empty",
        resize("cu_seqlens", 0),
        ValueError,
        "cu_seqlens: expected 1 or more offsets, got 0",
        packed=True,
    ),
    BadInput(
        "cu_seqlens_stride",
        every_other("cu_seqlens"),
        ValueError,
        "cu_seqlens: expected contiguous offsets, got stride 2",
        packed=True,
    ),
    BadInput(
        "cu_seqlens_batch",
        change("cu_seqlens", lambda _: torch.tensor([0, 5, 10])),
        ValueError,
        "q: expected batch size 1 with cu_seqlens, got 2",
        cpu_only=True,
    ),
    # Strides.
    *(
        BadInput(
            f"{name}_stride",
            every_other(name),
            ValueError,
            f"{name}: expected a contiguous last dimension, got stride 2",
        )
        for name in ("q", "k", "v")
    ),
    # The backward pass.
    BadInput("bwd_q", cast("q", torch.float64), TypeError, "q: expected bfloat16 or float16, got float64", backward=True),
    BadInput("A_rank", resize("A", B, T, 64), ValueError, "A: expected 4 dimensions [B, T, H_v, 64], got 3", backward=True),
    BadInput("A_dtype", cast("A", torch.float32), TypeError, "A: expected q's dtype bfloat16, got float32", backward=True),
    BadInput(
        "A_shape",
        resize("A", B, T, H_V, 32),
        ValueError,
        "A: expected shape [2, 10, 4, 64] ([B, T, H_v, 64]), got [2, 10, 4, 32]",
        backward=True,
    ),
    BadInput("A_device", elsewhere("A"), ValueError, "A: expected q's device cpu, got meta", backward=True, cpu_only=True),
    BadInput("do_list", put("do", [1.0]), TypeError, "do: expected a torch.Tensor, got list", backward=True, python_only=True),
    BadInput("do_dtype", cast("do", torch.float32), TypeError, "do: expected q's dtype bfloat16, got float32", backward=True),
    BadInput(
        "do_shape",
        resize("do", B, T, H_V, K),
        ValueError,
        "do: expected shape [2, 10, 4, 24] ([B, T, H_v, V]), got [2, 10, 4, 16]",
        backward=True,
    ),
    BadInput("dht_dtype", cast("dht", torch.bfloat16), TypeError, "dht: expected float32, got bfloat16", backward=True),
    BadInput(
        "dht_shape",
        resize("dht", 2, H_V, K, V),
        ValueError,
        "dht: expected shape [3, 4, 16, 24] ([N, H_v, K, V]), got [2, 4, 16, 24]",
        backward=True,
        packed=True,
    ),
    BadInput(
        "dht_layout",
        both(put("state_v_first", True), put("initial_state", None)),
        ValueError,
        "dht: expected shape [2, 4, 24, 16] ([N, H_v, V, K]), got [2, 4, 16, 24]",
        backward=True,
    ),
)
