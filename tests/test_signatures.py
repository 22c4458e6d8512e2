"""One contract, written four times: the schema, its fake, the Python function and its documentation agree."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_qla
from flash_qla import _cpu, _fakes, _library


def schema(name: str) -> torch._C.FunctionSchema:
    return getattr(torch.ops.flash_qla, name).default._schema


def described(name: str) -> list[tuple[str, Any, bool]]:
    """Name, default and whether keyword-only, of each argument of a schema."""
    return [
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty, a.kwarg_only)
        for a in schema(name).arguments
    ]


def of_function(function: Callable[..., Any]) -> list[tuple[str, Any, bool]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default, p.kind is inspect.Parameter.KEYWORD_ONLY) for p in parameters]


@pytest.mark.parametrize("name", _library.OPS)
def test_python_function_has_the_arguments_of_its_schema(name: str) -> None:
    assert of_function(getattr(flash_qla, name)) == described(name)


@pytest.mark.parametrize("name", _library.OPS)
def test_every_argument_is_documented(name: str) -> None:
    text = inspect.getdoc(getattr(flash_qla, name)) or ""
    if "arguments as `chunk_gated_delta_rule`" in text:
        text += inspect.getdoc(flash_qla.chunk_gated_delta_rule) or ""
    for argument, _, _ in described(name):
        assert re.search(rf"^\s+{argument}: ", text, re.MULTILINE), f"{name}: the documentation does not list {argument}"


@pytest.mark.parametrize("name", _library.OPS)
def test_fake_takes_the_arguments_of_its_schema(name: str) -> None:
    assert [(n, k) for n, _, k in of_function(getattr(_fakes, name))] == [(n, k) for n, _, k in described(name)]


@pytest.mark.parametrize("name", _library.OPS)
def test_cpu_implementation_takes_the_arguments_of_its_schema(name: str) -> None:
    assert [n for n, _, _ in of_function(getattr(_cpu, name))] == [n for n, _, _ in described(name)]
