"""Compiles the generated sources and csrc/ into libflash_qla.so with nvcc, the host compiler and ninja."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .build import default_jobs
from .configs import Config

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
GENERATED = CSRC / "generated"
LIBRARY = "libflash_qla.so"

# The library talks to torch through the stable C interface of this release and runs on every later one.
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10

DEVICE_SOURCES = ("partition.cu",)
HOST_SOURCES = ("checks.cpp", "launch.cpp", "ops.cpp", "planner.cpp", "registry.cpp")


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit, by its compiler."""

    nvcc: Path
    version: str


def find_toolkit() -> tuple[Toolkit | None, str]:
    """The CUDA toolkit to build with, or None and where it was looked for.

    CUDA_HOME (or CUDA_PATH) wins, then nvcc on PATH, then /usr/local/cuda.
    """
    looked: list[str] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            looked.append(f"${variable}={home}")
            if (nvcc := Path(home) / "bin" / "nvcc").is_file():
                return _toolkit(nvcc), ""
            return None, ", ".join(looked)
    looked.append("nvcc on PATH")
    if found := shutil.which("nvcc"):
        return _toolkit(Path(found)), ""
    looked.append("/usr/local/cuda")
    if (nvcc := Path("/usr/local/cuda/bin/nvcc")).is_file():
        return _toolkit(nvcc), ""
    return None, ", ".join(looked)


def _toolkit(nvcc: Path) -> Toolkit:
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return Toolkit(nvcc, match.group(1) if match else "unknown")


def compile_library(configs: Iterable[Config], toolkit: Toolkit, build_dir: Path, jobs: int | None = None) -> Path:
    """Builds the library of `configs` (whose sources must have been generated) and returns its path.

    Incremental: ninja recompiles what changed. Its progress lines go to standard output.
    """
    build_dir.mkdir(parents=True, exist_ok=True)
    # Isolated builds get a new folder for torch and tilelang every time; through links the commands stay the same, and so do the
    # objects. Their headers are system headers (-MMD does not track them): the versions in the commands stand for them.
    for name in ("torch", "tilelang"):
        link = build_dir / name
        link.unlink(missing_ok=True)
        link.symlink_to(_package_dir(name))
    script = build_dir / "build.ninja"
    text = _ninja(list(configs), toolkit)
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
    command = ["ninja", "-C", str(build_dir), "-j", str(jobs or default_jobs())]
    if subprocess.run(command, check=False).returncode != 0:
        raise RuntimeError(f"compiling the kernels failed; the compiler's words are above ({' '.join(command)})")
    return build_dir / LIBRARY


def _package_dir(name: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"building the kernels needs the package {name}; install it, or build without --no-build-isolation")
    return Path(spec.origin).parent


def _ninja(configs: list[Config], toolkit: Toolkit) -> str:
    torch, tilelang = "torch", "tilelang"  # links in the build folder
    # nvcc drives every step, the plain C++ files and the link too: it knows where its own headers and libraries lie.
    compiler = f" -ccbin {os.environ['CXX']}" if os.environ.get("CXX") else ""
    nvcc = (
        f"{toolkit.nvcc}{compiler} -std=c++17 -O3 -I{CSRC} -Xcompiler -fPIC,-fvisibility=hidden,-ffile-prefix-map={ROOT}/=,-Wall"
    )
    device_flags = (
        f"-gencode=arch=compute_90a,code=sm_90a -DENABLE_BF16 --expt-relaxed-constexpr -Xptxas -v -DFLASH_QLA_TILELANG={importlib.metadata.version('tilelang')} "
        f"-isystem {tilelang}/src -isystem {tilelang}/3rdparty/cutlass/include "
        # TileLang's and CUTLASS's headers name types that CUDA 13 deprecates; their warnings are not ours to mend.
        f"-diag-suppress 1444 -Xcompiler -Wno-deprecated-declarations,-Wno-unused-variable"
    )
    host_flags = (
        f"-Xcompiler -Wextra -DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} -DUSE_CUDA -DFLASH_QLA_TORCH={importlib.metadata.version('torch')} "
        f"-isystem {torch}/include -isystem {torch}/include/torch/csrc/api/include"
    )
    # --no-as-needed: nothing here names a symbol of libtorch.so itself, which pulls in the libraries that define them.
    link_flags = (
        f"-shared -cudart static -Xlinker --no-as-needed -Xlinker {torch}/lib/libtorch.so -Xlinker --as-needed "
        f"-Xlinker -s -Xlinker --exclude-libs,ALL -Xlinker --build-id=none"
    )
    lines = [
        "ninja_required_version = 1.5",
        # The compiler's report (registers, spills) is kept beside each object and shown only when it fails.
        "rule device",
        f"  command = {nvcc} {device_flags} -MMD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; false)",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
        "rule host",
        f"  command = {nvcc} {host_flags} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $in",
        "rule link",
        f"  command = {nvcc} $in -o $out {link_flags}",
        "  description = link $out",
    ]
    objects = []
    for cfg in configs:
        objects.append(f"{cfg.name}.o")
        lines.append(f"build {cfg.name}.o: device {GENERATED / (cfg.name + '.cu')}")
    for source in DEVICE_SOURCES:
        objects.append(f"{source}.o")
        lines.append(f"build {source}.o: device {CSRC / source}")
    for source in HOST_SOURCES:
        objects.append(f"{source}.o")
        lines.append(f"build {source}.o: host {CSRC / source}")
    lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
    lines.append(f"default {LIBRARY}")
    return "\n".join(lines) + "\n"


def build_facts(configs: Iterable[Config], toolkit: Toolkit) -> dict[str, object]:
    """What `python -m flash_qla info` shows about the compiled library."""
    return {
        "library": LIBRARY,
        "arch": "sm_90a",
        "nvcc": toolkit.version,
        "torch": importlib.metadata.version("torch"),
        "tilelang": importlib.metadata.version("tilelang"),
        "configs": [
            {"name": c.name, "kernel": c.kernel, "K": c.k, "V": c.v, "dtype": c.dtype, "profile": f"bv{c.block_v}"}
            for c in configs
        ],
    }
