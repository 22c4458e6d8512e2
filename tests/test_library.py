"""The compiled library as a binary: what it exports, what it needs, and what the compiler said about its kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flash_qla
from flash_qla import _library

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(flash_qla.__file__).parent
LIBRARY = PACKAGE / "libflash_qla.so"
INFO = _library.build_info()

pytestmark = pytest.mark.skipif(not INFO.kernels, reason=f"the package has no kernels: {INFO.reason}")


def output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_needs_only_torch_and_system_libraries():
    needed = set(re.findall(r"NEEDED\).*\[(.+?)\]", output("readelf", "-d", str(LIBRARY))))
    assert "libtorch.so" in needed
    system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
    system.add("ld-linux-x86-64.so.2")
    assert needed - system == {"libtorch.so"}


def test_talks_to_torch_through_the_stable_interface_only():
    symbols = [line.split() for line in output("nm", "-D", str(LIBRARY)).splitlines()]
    undefined = {s[-1].split("@")[0] for s in symbols if s[-2] in "Uw"}
    assert any(s.startswith("aoti_torch_") for s in undefined)
    demangled = output("nm", "-D", "-C", str(LIBRARY))
    for forbidden in (r"\bc10::", r"\bat::", r"\btorch::(?!headeronly|stable)", r"\bPy[A-Z_]", r"\bcu[A-Z]\w+\b"):
        assert not re.search(forbidden, demangled), forbidden
    weak = {s[-1] for s in symbols if s[-2] == "w"}
    assert "aoti_torch_get_current_cuda_stream" in weak  # absent from a torch without CUDA


def test_exports_nothing_of_its_own():
    exported = [line.split()[-1] for line in output("nm", "-D", "--defined-only", str(LIBRARY)).splitlines()]
    ours = [s for s in exported if not s.startswith(("_ZN5torch", "_ZTI", "_ZTS"))]
    assert not [s for s in ours if "flash_qla" in s or s.startswith(("cuda", "chunk_"))], ours


def test_holds_machine_code_for_hopper_and_no_ptx():
    binary = LIBRARY.read_bytes()
    assert b".target sm_" not in binary
    assert len(binary) < 60e6


LOGS = sorted((ROOT / "build" / "library").glob("*.o.log"))


@pytest.mark.skipif(not LOGS, reason="the compiler's reports are not here: the library was built elsewhere")
@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name.split(".")[0])
def test_kernels_do_not_spill(log):
    text = log.read_text()
    assert "C7512" not in text and "C7518" not in text, "the compiler serialises the warpgroup products"
    frame = int(re.search(r"(\d+) bytes stack frame", text).group(1))
    assert frame == 0 and "0 bytes spill stores, 0 bytes spill loads" in text


def test_schemas_are_those_of_ops_def():
    schemas = _library.read_schemas((PACKAGE / "ops.def").read_text())
    assert len(schemas) == len(_library.OPS)
    for schema in schemas:
        name = schema.split("(")[0]
        op = getattr(torch.ops.flash_qla, name).default
        assert str(op._schema) == str(torch._C.parse_schema(f"flash_qla::{schema}"))


def test_build_info_lists_what_was_compiled():
    assert INFO.arch == "sm_90a"
    assert INFO.configs
    for config in INFO.configs:
        assert {"name", "kernel", "K", "V", "dtype", "profile"} <= set(config)
