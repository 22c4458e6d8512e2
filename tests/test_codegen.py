"""codegen: the list of configurations, selection, determinism, and what the launchers are made from."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if not (ROOT / "codegen").is_dir():
    pytest.skip("codegen/ is not here: these tests need the source tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from codegen import build, configs

needs_tilelang = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None, reason="tilelang, a build requirement, is not installed"
)

# The cheapest configuration to lower.
SMALL = "chunk_fwd_train_k128_v128_bf16_bv32_sm90"


def codegen(*args: str, hash_seed: str = "0", **env: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, **env}
    return subprocess.run(
        [sys.executable, "-m", "codegen", *args], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_names_are_unique_and_carry_the_configuration():
    every = configs.configurations()
    names = [c.name for c in every]
    assert len(set(names)) == len(names) == len(configs.DTYPES) * sum(2 + len(dims.block_v) for dims in configs.HEAD_DIMS)
    for c in every:
        assert re.fullmatch(rf"{c.kernel}_k{c.k}_v{c.v}_{c.dtype}_bv{c.block_v}_sm90", c.name)


def test_every_configuration_has_a_kernel_module_and_legal_tiles():
    for c in configs.configurations():
        assert (ROOT / "codegen" / "kernels" / f"{c.kernel}.py").is_file()
        assert c.v % c.block_v == 0


def test_select():
    assert configs.select(None) == configs.configurations() == configs.select("")
    only = configs.select("*train*_bf16_*")
    assert only and all(c.dtype == "bf16" and c.kernel == "chunk_fwd_train" for c in only)
    both = configs.select(f"{SMALL}, *fp16_bv64*")
    assert [c.name for c in both] == [SMALL, "chunk_fwd_train_k128_v128_fp16_bv64_sm90"]
    with pytest.raises(ValueError, match="no configuration matches 'nonsense'"):
        configs.select("nonsense")


def test_list_needs_no_tilelang():
    done = codegen("--list", "--only", "*bf16*", COLUMNS="160")
    assert done.returncode == 0, done.stderr
    for c in configs.select("*bf16*"):
        assert c.name in done.stdout
    assert f"of {len(configs.configurations())} configurations" in done.stdout


def test_unknown_pattern_is_a_usage_error():
    done = codegen("--only", "nothing_like_it")
    assert done.returncode == 2
    assert "no configuration matches 'nothing_like_it'" in done.stderr


def test_chunk_is_the_same_everywhere():
    gates = (ROOT / "csrc" / "device" / "gates.cuh").read_text()
    planner = (ROOT / "csrc" / "planner.h").read_text()
    assert re.search(r"kChunk = (\d+)", gates).group(1) == str(configs.CHUNK)
    assert re.search(r"kChunkTokens = (\d+)", planner).group(1) == str(configs.CHUNK)


@needs_tilelang
def test_lowering_is_deterministic_and_skips_what_is_up_to_date(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for out, seed in ((first, "1"), (second, "2")):
        done = codegen("--only", SMALL, "--out", str(out), hash_seed=seed)
        assert done.returncode == 0, done.stderr
        assert "1 lowered, 0 up to date" in done.stdout
    files = sorted(p.name for p in first.iterdir())
    assert files == sorted([f"{SMALL}.cu", "kernels.def", "manifest.json"])
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), f"{name} differs between two runs"

    before = (first / f"{SMALL}.cu").stat().st_mtime_ns
    assert "0 lowered, 1 up to date" in codegen("--only", SMALL, "--out", str(first)).stdout
    assert (first / f"{SMALL}.cu").stat().st_mtime_ns == before

    # A file that is not what the manifest says, and one that nobody asked for, are put right.
    (first / f"{SMALL}.cu").write_text("// spoiled\n")
    (first / "stranger.cu").write_text("")
    assert "1 lowered, 0 up to date" in codegen("--only", SMALL, "--out", str(first)).stdout
    assert (first / f"{SMALL}.cu").read_bytes() == (second / f"{SMALL}.cu").read_bytes()
    assert not (first / "stranger.cu").exists()

    interface = json.loads((first / "manifest.json").read_text())["kernels"][SMALL]["interface"]
    check_interface(interface)


def check_interface(interface):
    maps = {m["pointer"]: m for m in interface["tensor_maps"]}
    assert sorted(maps) == ["k", "q", "v"]
    for name, heads in (("q", "heads_k"), ("k", "heads_k"), ("v", "heads_v")):
        assert maps[name]["sizes"] == ["128", "int64_t(p.tokens)", f"int64_t(p.{heads})", "int64_t(p.batch)"]
        assert maps[name]["strides"] == [f"(int64_t(p.{name}_s{x}) * 2)" for x in "thb"]
        assert maps[name]["box"][1] == configs.CHUNK
        assert maps[name]["dtype"] == 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    kinds = {p["name"]: p["kind"] for p in interface["parameters"]}
    assert kinds["o"] == "pointer" and kinds["scale"] == "scalar" and kinds["q_desc"] == "tensor_map"
    assert interface["threads"] == 256
    assert interface["shared_bytes"] <= 227 * 1024 - 1024  # what a block may have, less the static barriers


@needs_tilelang
def test_expressions_become_cpp():
    from tilelang import tvm

    from codegen.lower import cexpr

    n = tvm.tirx.Var("n", "int32")
    assert cexpr(tvm.tirx.IntImm("int32", 7)) == "7"
    assert cexpr((n + 63) // 64) == "((int64_t(p.n) + 63) / 64)"
    with pytest.raises(NotImplementedError, match="no C\\+\\+ for"):
        cexpr(tvm.tirx.Max(n, n + 1))


def test_fences_stay_inside_their_arrays():
    from codegen.lower import _clamp_fences

    source = (
        "  float wide[64];\n"
        "  bfloat16_t narrow[32];\n"
        "  tl::warpgroup_fence_operand(reinterpret_cast<float*>(wide + 0), 128);\n"
        "  tl::warpgroup_fence_operand(reinterpret_cast<uint32_t*>(narrow + 0), 32);\n"
        "  tl::warpgroup_fence_operand(reinterpret_cast<float*>(wide + 0), 32);\n"
    )
    counts = [int(n) for n in re.findall(r"\+ 0\), (\d+)\)", _clamp_fences(source))]
    assert counts == [64, 16, 32]


@pytest.mark.skipif(not (ROOT / "csrc" / "generated" / "kernels.def").is_file(), reason="csrc/generated/ is not here")
def test_generated_sources_fence_inside_their_arrays_and_define_nothing_twice():
    for path in sorted((ROOT / "csrc" / "generated").glob("*.cu")):
        source = path.read_text()
        assert "tl_templates/cuda/debug.h" not in source
        sizes = {
            name: int(count) * (4 if ctype == "float" else 2) // 4
            for ctype, name, count in re.findall(r"^ *(float|bfloat16_t|half_t) (\w+)\[(\d+)\];", source, re.MULTILINE)
        }
        fences = re.findall(r"warpgroup_fence_operand\(reinterpret_cast<\w+\*>\((\w+) \+ 0\), (\d+)\)", source)
        assert fences
        for name, count in fences:
            assert int(count) <= sizes[name], f"{path.name}: {name}"


def test_a_generated_file_depends_on_every_module_that_its_kernel_imports():
    sources = {path.stem for path in build._kernel_sources("chunk_ends")}
    assert sources == {"chunk_ends", "chunk_fwd", "externs"}
