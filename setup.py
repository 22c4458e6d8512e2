"""Builds the package: with the compiled kernels where nvcc is found, as a CPU-only package where it is not.

Environment:
  FLASH_QLA_CONFIGS   build only the configurations that match (shell patterns, separated by commas; `python -m codegen --list`)
  FLASH_QLA_CPU_ONLY  1: do not look for nvcc
  MAX_JOBS            processes for lowering and compiling (default: all cores)
  CUDA_HOME           the CUDA toolkit to use
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "flash_qla"
sys.path.insert(0, str(ROOT))

from codegen.compile import LIBRARY, Toolkit, build_facts, compile_library, find_toolkit
from codegen.configs import select

TILELANG = "tilelang==0.1.15"
# Only a build with kernels needs these, so a CPU-only build does not download torch a second time.
KERNEL_BUILD_REQUIREMENTS = ["torch>=2.10", TILELANG, "ninja", "rich"]


def toolkit_or_reason() -> tuple[Toolkit | None, str]:
    if os.environ.get("FLASH_QLA_CPU_ONLY") == "1":
        return None, "FLASH_QLA_CPU_ONLY=1"
    toolkit, looked = find_toolkit()
    return toolkit, "" if toolkit else f"nvcc not found (looked at {looked})"


def generate_sources() -> None:
    command = [sys.executable, "-m", "codegen"]
    if patterns := os.environ.get("FLASH_QLA_CONFIGS"):
        command += ["--only", patterns]
    subprocess.run(command, cwd=ROOT, check=True)


class BuildPy(build_py):
    """Puts the library and its description next to the Python files before they are collected."""

    def run(self) -> None:
        toolkit, reason = toolkit_or_reason()
        facts: dict[str, object] = {"version": self.distribution.get_version(), "kernels": toolkit is not None, "reason": reason}
        shutil.copyfile(ROOT / "csrc" / "ops.def", PACKAGE / "ops.def")
        if toolkit is None:
            print(f"flash_qla: {reason}; building a CPU-only package without kernels", file=sys.stderr, flush=True)
            (PACKAGE / LIBRARY).unlink(missing_ok=True)
        else:
            generate_sources()
            configs = select(os.environ.get("FLASH_QLA_CONFIGS"))
            library = compile_library(configs, toolkit, ROOT / "build" / "library")
            shutil.copyfile(library, PACKAGE / LIBRARY)
            facts.update(build_facts(configs, toolkit))
        (PACKAGE / "build_info.json").write_text(json.dumps(facts, indent=1) + "\n")
        self.package_data = {"flash_qla": ["py.typed", "ops.def", "build_info.json", *([LIBRARY] if toolkit else [])]}
        self.__dict__.pop("data_files", None)  # collected lazily, from the line above
        super().run()


class SDist(sdist):
    """The source distribution carries the generated CUDA sources."""

    def run(self) -> None:
        generate_sources()
        super().run()


class BDistWheel(bdist_wheel):
    """One wheel for every Python: the library has no Python symbols."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return toolkit_or_reason()[0] is not None


setup(
    cmdclass={"build_py": BuildPy, "sdist": SDist, "bdist_wheel": BDistWheel},
    distclass=BinaryDistribution,
    setup_requires=KERNEL_BUILD_REQUIREMENTS if toolkit_or_reason()[0] else [],
)
