"""`python -m flash_qla`: what it prints and how it exits."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_qla
from flash_qla import cli
from flash_qla.cli import check, info
from flash_qla.testing import Case, make_inputs, relative_error

SMALL = (
    Case("small, dense", (20,), k=16, v=16),
    Case("small, packed", (3, 0, 70), packed=True, k=16, v=16, tail=4),
)


def module(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(flash_qla.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "flash_qla", *arguments],
        check=False,
        env={**os.environ, "PYTHONPATH": root, "COLUMNS": "200"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_info_as_a_module() -> None:
    done = module("info")
    assert done.returncode == 0, done.stderr
    for text in (flash_qla.__version__, torch.__version__):
        assert text in done.stdout
    if not torch.cuda.is_available():
        assert "no CUDA device: the CPU implementation runs" in done.stdout
    if not flash_qla.build_info().kernels:
        assert flash_qla.build_info().reason in done.stdout


def test_info_lists_the_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configs = ({"kernel": "chunk_fwd", "K": 128, "V": 64, "dtype": "bf16", "profile": "bv64", "flags": ["train"]},)
    built = replace(
        flash_qla.build_info(), kernels=True, library=Path("/somewhere/libflash_qla.so"), configs=configs, arch="sm_90a"
    )
    monkeypatch.setattr(info, "build_info", lambda: built)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for text in ("libflash_qla.so", "sm_90a", "chunk_fwd", "bf16", "bv64", "train"):
        assert text in out


def test_check_as_a_module() -> None:
    done = module("check", "--device", "cpu", "--dtype", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(check.CASES)} of {len(check.CASES)} cases within limits of the float64 reference" in done.stdout
    for case in check.CASES:
        assert case.name in done.stdout


@pytest.mark.gpu
def test_check_on_the_gpu() -> None:
    done = module("check", "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: 1 value head a key head, 64 dimensions" in done.stdout or "K=64" in str(flash_qla.build_info().configs)


def test_check_counts_both_dtypes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)
    assert cli.main(["check", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 cases within limits" in out and "bf16" in out and "fp16" in out


def test_check_fails_on_wrong_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)
    right = flash_qla.chunk_gated_delta_rule

    def wrong(*args: object, **kwargs: object) -> object:
        o, final_state = right(*args, **kwargs)  # type: ignore[arg-type]
        return o * 1.01, final_state

    monkeypatch.setattr(check, "chunk_gated_delta_rule", wrong)
    assert cli.main(["check", "--device", "cpu", "--dtype", "bf16"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "0 of 2 cases within limits" in out


def test_check_fails_on_rubbish_in_the_tail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)
    right = flash_qla.chunk_gated_delta_rule

    def leaves_tail(*args: object, **kwargs: object) -> object:
        o, final_state = right(*args, **kwargs)  # type: ignore[arg-type]
        o[:, -1] += 1e-3 if kwargs["cu_seqlens"] is not None else 0
        return o, final_state

    monkeypatch.setattr(check, "chunk_gated_delta_rule", leaves_tail)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["check", "--device", "cpu", "--dtype", "fp16"]) == 1
    out = capsys.readouterr().out
    assert "rows outside sequences are not 0" in out and "1 of 2 cases within limits" in out


def test_check_on_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and flash_qla.build_info().kernels:
        pytest.skip("this machine has both")
    assert cli.main(["check", "--device", "cuda"]) == 1
    assert "cannot check on cuda" in capsys.readouterr().out


def test_check_says_what_it_skips(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)
    monkeypatch.setattr(check, "is_built", lambda case, dtype, device: case is SMALL[0])
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["check", "--device", "cpu", "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "skipped: small, packed: K=16 V=16 bfloat16 is not among the built configurations" in out
    assert "1 of 1 cases" in out


def test_check_with_nothing_to_run_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "is_built", lambda case, dtype, device: False)
    assert cli.main(["check", "--device", "cpu"]) == 1
    assert "nothing was checked" in capsys.readouterr().out


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "command" in capsys.readouterr().err


def test_relative_error() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0.0
    assert relative_error(1.1 * x, x) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(x, torch.zeros(2)) == float("inf")
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    for bad in (float("nan"), float("inf")):
        assert not relative_error(torch.tensor([bad, 4.0]), x) <= 1e9
        assert not relative_error(torch.tensor([bad, 0.0]), torch.zeros(2)) <= 1e9
    with pytest.raises(ValueError, match="out has shape"):
        relative_error(x, torch.zeros(3))


def test_inputs_are_reproducible_and_seeded() -> None:
    case = Case("seed", (10, 20), packed=True, tail=2, layout="odd")
    a, b, c = make_inputs(case, seed=1), make_inputs(case, seed=1), make_inputs(case, seed=2)
    for x, y, z in zip(a.tensors(), b.tensors(), c.tensors(), strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z)
    assert a.cu_seqlens is not None and a.cu_seqlens.tolist() == [0, 10, 30] and a.q.size(1) == 32
    assert a.q.stride(-1) == 1 and a.q.stride(-2) % 2 == 1 and a.q.storage_offset() == 1


def test_inputs_need_packing_for_different_lengths() -> None:
    with pytest.raises(ValueError, match="need packed=True"):
        make_inputs(Case("dense", (10, 20)))
