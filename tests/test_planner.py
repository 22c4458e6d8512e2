"""The planner, bound by pybind11: each dispatch decision without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

if not (ROOT / "csrc" / "generated" / "kernels.def").is_file():
    pytest.skip("csrc/generated/ is not here: run python -m codegen", allow_module_level=True)

H200 = 132  # multiprocessors


@pytest.fixture(scope="module")
def planner() -> ModuleType:
    from torch.utils.cpp_extension import load

    build = ROOT / "build" / "test-planner"
    build.mkdir(parents=True, exist_ok=True)
    return load(
        name="flash_qla_planner",
        sources=[str(ROOT / "csrc" / "bindings" / "planner_py.cpp"), str(ROOT / "csrc" / "planner.cpp")],
        extra_cflags=["-std=c++17", "-O1", "-Wall", "-Werror"],
        extra_include_paths=[str(ROOT / "csrc")],
        build_directory=str(build),
        with_cuda=False,
    )


def plan(planner, **changes):
    problem = dict(
        batch=1, tokens=4096, sequences=1, heads_v=32, k=128, v=128, dtype="bf16", varlen=False, train=False, multiprocessors=H200
    )
    return planner.plan_forward(**{**problem, **changes})


def test_the_library_has_the_listed_kernels(planner):
    configs = pytest.importorskip("codegen.configs", reason="codegen/ is not here")
    built = {row["name"] for row in planner.kernels()}
    assert built <= {c.name for c in configs.configurations()}
    by_name = {c.name: c for c in configs.configurations()}
    for row in planner.kernels():
        c = by_name[row["name"]]
        assert (row["k"], row["v"], row["dtype"], row["block_v"], row["kernel"]) == (c.k, c.v, c.dtype, c.block_v, c.kernel)
        assert row["shared_bytes"] <= 227 * 1024 - 1024


def test_inference_gives_a_whole_head_to_a_block(planner):
    for sequences, heads_v in ((1, 8), (4, 64), (100, 32)):
        chosen = plan(planner, sequences=sequences, heads_v=heads_v, varlen=True, may_split=False)
        assert chosen["block_v"] == 128
        assert chosen["grid"] == sequences * heads_v


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("heads_v,tokens", [(2, 2048), (3, 3333), (8, 2048), (8, 32768), (32, 8192), (32, 32768)])
def test_few_heads_and_long_sequences_are_split(planner, heads_v, tokens, varlen):
    chosen = plan(planner, heads_v=heads_v, tokens=tokens, varlen=varlen)
    assert chosen["slots"] > 0 and chosen["ends_kernel"].startswith("chunk_ends_k128_v128_bf16")
    assert chosen["part_count"] == 1 + chosen["slots"]
    assert chosen["grid"] == chosen["part_count"] * heads_v


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads_v=8, tokens=64),
        dict(heads_v=8, tokens=640),
        dict(heads_v=64, batch=4, sequences=4, tokens=8192),
        dict(heads_v=32, batch=8, sequences=8, tokens=4096),
        dict(heads_v=8, tokens=32768, may_split=False),
        dict(heads_v=8, tokens=32768, train=True),
        dict(heads_v=1, tokens=32768, varlen=True, sequences=1025),
    ],
)
def test_no_split_where_it_cannot_pay(planner, changes):
    chosen = plan(planner, **changes)
    assert chosen["slots"] == 0 and chosen["ends_kernel"] is None
    assert chosen["part_count"] == changes.get("sequences", 1)


def test_packed_sequences_that_are_probably_even_are_left_alone(planner):
    """Half the card is busy anyway: one long sequence would gain a tenth, many even ones would lose."""
    assert plan(planner, heads_v=64, tokens=22664, varlen=True, sequences=10)["slots"] == 0
    assert plan(planner, heads_v=64, tokens=32768, varlen=True, sequences=1)["slots"] > 0


def test_packed_sequences_are_judged_by_the_worst_lengths_they_could_have(planner):
    one, ten = (plan(planner, heads_v=8, tokens=32768, varlen=True, sequences=n) for n in (1, 10))
    assert ten["slots"] == 2 * one["slots"]
    assert ten["part_count"] == 10 + ten["slots"]


def test_training_takes_wide_slices_when_sequences_fill_the_card(planner):
    wide = plan(planner, batch=4, sequences=4, heads_v=64, train=True)
    assert wide["block_v"] == 128
    assert wide["grid"] == 4 * 64


def test_training_takes_narrow_slices_when_heads_leave_the_card_idle(planner):
    narrow = plan(planner, heads_v=8, train=True)
    assert narrow["block_v"] == 32
    assert narrow["grid"] == 8 * 4


@pytest.mark.parametrize("heads_v", [1, 2, 3, 7, 16, 32, 33, 48, 64, 100, 200])
@pytest.mark.parametrize("sequences", [1, 2, 5, 100])
def test_training_never_doubles_the_waves_of_the_widest_slice(planner, heads_v, sequences):
    chosen = plan(planner, heads_v=heads_v, sequences=sequences, varlen=True, train=True)
    assert chosen["grid"] == sequences * heads_v * (128 // chosen["block_v"])
    widest = sequences * heads_v
    # A narrower slice costs more than half of a wide one, so it is chosen only if it does not double the waves.
    assert -(-chosen["grid"] // H200) < 2 * -(-widest // H200)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("train", [False, True])
def test_kernel_matches_dtype_and_use(planner, dtype, train):
    chosen = plan(planner, dtype=dtype, train=train)
    assert f"_{dtype}_" in chosen["kernel"]
    assert chosen["kernel"].startswith("chunk_fwd_train_" if train else "chunk_fwd_k")


def test_the_choice_does_not_depend_on_lengths(planner):
    assert plan(planner, tokens=64)["kernel"] == plan(planner, tokens=32768)["kernel"]


def test_chunk_bounds(planner):
    rows = planner.state_rows_per_batch
    assert [rows(t, 1, False) for t in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]
    assert rows(300, 6, True) == 300 // 64 + 6
    # The bound holds for any lengths: with every sequence one token over a chunk, it is met exactly but for rounding.
    lengths = [65] * 10
    assert sum(-(-n // 64) for n in lengths) <= rows(sum(lengths), len(lengths), True)


def test_unbuilt_head_dimensions_are_refused(planner):
    with pytest.raises(ValueError, match="no forward kernel is built"):
        plan(planner, k=96)


def test_grids_stay_inside_int32(planner):
    assert plan(planner, batch=60_000, sequences=60_000, heads_v=64)["grid"] > 65_535
    with pytest.raises(ValueError, match="2\\^31"):
        plan(planner, batch=2**26, sequences=2**26, heads_v=64)
