"""Loading: what importing does and does not do, and what it says when it cannot."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flash_qla
from flash_qla._library import OPS, read_schemas

PACKAGE = Path(flash_qla.__file__).parent
OPS_DEF = Path(__file__).resolve().parent.parent / "csrc" / "ops.def"


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def copy_package(tmp_path: Path, info: dict[str, Any] | str | None, *, schemas: bool = True) -> Path:
    """A copy of the package with other build information; the folder to put on the path."""
    copy = tmp_path / "flash_qla"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "build_info.json", "ops.def", "__pycache__"))
    if info is not None:
        (copy / "build_info.json").write_text(info if isinstance(info, str) else json.dumps(info))
    if schemas:
        shutil.copy(OPS_DEF, copy / "ops.def")
    return tmp_path


KERNELS = {"version": "0.1.0", "kernels": True, "reason": "", "library": "libflash_qla.so", "configs": []}
NO_KERNELS = {"version": "0.1.0", "kernels": False, "reason": "nvcc was not found"}


def test_import_does_not_initialise_cuda() -> None:
    done = python("import torch, flash_qla; assert not torch.cuda.is_initialized(); print('fine')", PACKAGE.parent)
    assert done.stdout.strip() == "fine", done.stderr


def test_import_loads_no_build_tool() -> None:
    """Neither compilers nor tracing nor the console library: they cost start-up time or are not installed."""
    code = (
        "import torch, sys; before = set(sys.modules); import flash_qla\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new & {'tilelang', 'tvm', 'triton', 'pybind11', 'ninja', 'setuptools', 'rich', 'pytest'}))"
    )
    done = python(code, PACKAGE.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_missing_library(tmp_path: Path) -> None:
    done = python("import flash_qla", copy_package(tmp_path, KERNELS))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flash_qla: the compiled library ")
    assert f"{tmp_path}/flash_qla/libflash_qla.so is missing" in last
    assert "torch is 2." in last and "update torch or reinstall flash_qla" in last


def test_broken_library(tmp_path: Path) -> None:
    copy_package(tmp_path, KERNELS)
    (tmp_path / "flash_qla" / "libflash_qla.so").write_bytes(b"not a library")
    done = python("import flash_qla", tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flash_qla: the compiled library ")
    assert f"{tmp_path}/flash_qla/libflash_qla.so does not load: " in last
    assert "torch is 2." in last and "update torch or reinstall flash_qla" in last


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"kernels": true, "version": "0.1.0"}'])
def test_unreadable_build_information(tmp_path: Path, text: str) -> None:
    done = python("import flash_qla", copy_package(tmp_path, text))
    assert done.returncode != 0
    assert "is not readable as build information" in done.stderr.strip().splitlines()[-1]


def test_no_schemas(tmp_path: Path) -> None:
    done = python("import flash_qla", copy_package(tmp_path, NO_KERNELS, schemas=False))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: flash_qla: no op schemas: neither ") and "ops.def exists" in last


def test_cpu_only_package_computes_and_says_why_it_has_no_kernels(tmp_path: Path) -> None:
    code = (
        "import torch, flash_qla\n"
        "x = torch.randn(1, 5, 2, 8).bfloat16(); g = torch.zeros(1, 5, 2)\n"
        "o, s = flash_qla.chunk_gated_delta_rule(x, x, x, g, g + 0.5, output_final_state=True)\n"
        "assert o.isfinite().all() and s.shape == (1, 2, 8, 8)\n"
        "print(flash_qla.build_info().kernels, flash_qla.build_info().reason, flash_qla.__file__)"
    )
    done = python(code, copy_package(tmp_path, NO_KERNELS))
    assert done.stdout.strip() == f"False nvcc was not found {tmp_path}/flash_qla/__init__.py", done.stderr


def test_source_tree_says_that_it_is_not_built(tmp_path: Path) -> None:
    copy_package(tmp_path, None, schemas=False)
    (tmp_path / "csrc").mkdir()
    shutil.copy(OPS_DEF, tmp_path / "csrc" / "ops.def")
    done = python("import flash_qla; print(flash_qla.build_info().reason)", tmp_path)
    assert done.stdout.strip() == "not built: run `pip install .` where nvcc is installed", done.stderr


def test_version_is_one() -> None:
    assert flash_qla.__version__ == "0.1.0"
    assert flash_qla.build_info().version in (None, flash_qla.__version__)


def test_schemas_of_the_file_are_those_of_the_ops() -> None:
    import torch

    schemas = read_schemas(OPS_DEF.read_text())
    assert tuple(schema.split("(")[0] for schema in schemas) == OPS
    for name, schema in zip(OPS, schemas, strict=True):
        registered = getattr(torch.ops.flash_qla, name).default._schema
        assert registered == torch._C.parse_schema(f"flash_qla::{schema}")


def test_reading_schemas() -> None:
    text = "// FLASH_QLA_OP(no)\nFLASH_QLA_OP(a(Tensor x, // why\n  str y='z') -> Tensor)\nFLASH_QLA_OP(b() -> ())\n"
    assert read_schemas(text) == ["a(Tensor x, str y='z') -> Tensor", "b() -> ()"]
    with pytest.raises(ValueError, match="unbalanced"):
        read_schemas("FLASH_QLA_OP(a(Tensor x)")
