"""Fixtures and the `gpu` marker.

The tests run against the installed package; in a source tree without one, against the tree itself.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("flash_qla") is None:
    sys.path.insert(0, str(ROOT))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU and a package with kernels; skipped, with the reason, elsewhere")


def no_gpu_reason() -> str:
    """Why GPU tests cannot run here; empty if they can."""
    from flash_qla import build_info

    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is false"
    if not build_info().kernels:
        return f"the package has no kernels: {build_info().reason}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = no_gpu_reason()
    if reason:
        skip = pytest.mark.skip(reason=reason)
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test on the CPU and, where there is one, on a GPU."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def checks() -> ModuleType:
    """The C++ argument checks, compiled with pybind11 and ninja."""
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: the C++ argument checks cannot be compiled here")
    from torch.utils.cpp_extension import load

    build = ROOT / "build" / "test-checks"
    build.mkdir(parents=True, exist_ok=True)
    return load(
        name="flash_qla_checks",
        sources=[str(ROOT / "csrc" / "bindings" / "checks_py.cpp"), str(ROOT / "csrc" / "checks.cpp")],
        extra_cflags=["-std=c++17", "-O1", "-Wall", "-Werror"],
        build_directory=str(build),
        with_cuda=False,
    )
