"""Calls of the device functions in csrc/device/, which TileLang reaches as externs."""

from typing import Any

import tilelang.language as T


def extern(name: str, *args: Any) -> Any:
    """A call of fq::name that gives nothing back."""
    return T.call_extern("void", f"fq::{name}", *args)


def extern_int(name: str, *args: Any) -> Any:
    return T.call_extern("int32", f"fq::{name}", *args)


def extern_float(name: str, *args: Any) -> Any:
    return T.call_extern("float32", f"fq::{name}", *args)


def fresh(x: Any) -> Any:
    """x, from which the compiler may not work anything out ahead of time (device/tiles.cuh says why)."""
    return extern_int("fresh", x)


def offset(row: Any, token: Any, head: Any, stride_b: Any, stride_t: Any, stride_h: Any) -> Any:
    """Of an element of a [batch, tokens, heads] tensor, in elements."""
    return T.int64(row) * stride_b + T.int64(token) * stride_t + T.int64(head) * stride_h


def read_gates(
    raw: Any, g: Any, g_code: Any, g_sb: Any, g_st: Any, g_sh: Any, beta: Any, beta_code: Any, beta_sb: Any, beta_st: Any,
    beta_sh: Any, row: Any, token: Any, head: Any, valid: Any,
) -> Any:  # fmt: skip
    """Starts the loads of a chunk's gates and betas from its first token on."""
    return extern(
        "read_gates",
        raw.data,
        T.access_ptr(g[0], "r"),
        g_code,
        offset(fresh(row), fresh(token), fresh(head), g_sb, g_st, g_sh),
        g_st,
        T.access_ptr(beta[0], "r"),
        beta_code,
        offset(fresh(row), fresh(token), fresh(head), beta_sb, beta_st, beta_sh),
        beta_st,
        valid,
    )
