"""Every rejection of the contract: one table of bad inputs against Python functions, raw ops and C++ checks."""

from types import ModuleType
from typing import Any

import pytest
import torch
from bad_inputs import BAD_INPUTS, Arguments, BadInput, good_backward, good_forward
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla
from flash_qla._checks import BackwardArgs, ForwardArgs, check_backward, check_forward

BUILT = [(128, 128, torch.float16), (128, 128, torch.bfloat16), (64, 128, torch.bfloat16)]


def ids(rows: Any) -> list[str]:
    return [row.name for row in rows]


def function_of(row: BadInput) -> Any:
    return flash_qla.chunk_gated_delta_rule_bwd if row.backward else flash_qla.chunk_gated_delta_rule


def op_of(row: BadInput) -> Any:
    ops = torch.ops.flash_qla
    return ops.chunk_gated_delta_rule_bwd if row.backward else ops.chunk_gated_delta_rule


def test_names_are_unique() -> None:
    assert len({row.name for row in BAD_INPUTS}) == len(BAD_INPUTS)


@pytest.mark.parametrize("row", BAD_INPUTS, ids=ids(BAD_INPUTS))
def test_python_function(row: BadInput) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        function_of(row)(**row.arguments())
    assert str(caught.value) == row.message
    assert type(caught.value) is row.error


SCHEMA_ALLOWS = [row for row in BAD_INPUTS if not row.python_only]


@pytest.mark.parametrize("row", SCHEMA_ALLOWS, ids=ids(SCHEMA_ALLOWS))
def test_raw_op(row: BadInput) -> None:
    with pytest.raises(RuntimeError) as caught:
        op_of(row)(**row.arguments())
    assert str(caught.value) == row.message


@pytest.mark.parametrize("row", [r for r in SCHEMA_ALLOWS if not r.backward], ids=lambda row: row.name)
def test_fwd_op_has_the_same_checks(row: BadInput) -> None:
    arguments = row.arguments()
    if arguments.pop("head_first"):
        pytest.skip("this op has no head_first")
    with pytest.raises(RuntimeError) as caught:
        torch.ops.flash_qla.chunk_gated_delta_rule_fwd(**arguments)
    assert str(caught.value) == row.message
    with pytest.raises(row.error) as precise:
        flash_qla.chunk_gated_delta_rule_fwd(**arguments)
    assert str(precise.value) == row.message


@pytest.mark.parametrize("row", SCHEMA_ALLOWS, ids=ids(SCHEMA_ALLOWS))
def test_fake(row: BadInput) -> None:
    mode = FakeTensorMode()
    arguments = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in row.arguments().items()}
    with mode, pytest.raises(RuntimeError) as caught:
        op_of(row)(**arguments)
    assert row.message in str(caught.value)


class CxxChecks:
    """Calls the C++ checks with torch tensors."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        d = module.DType
        self.dtypes = {
            torch.float32: d.fp32,
            torch.bfloat16: d.bf16,
            torch.float16: d.fp16,
            torch.float64: d.fp64,
            torch.int8: d.int8,
            torch.int16: d.int16,
            torch.int32: d.int32,
            torch.int64: d.int64,
            torch.uint8: d.uint8,
            torch.bool: d.boolean,
            torch.complex64: d.complex64,
            torch.complex128: d.complex128,
        }

    def tensor(self, x: torch.Tensor | None) -> Any:
        if x is None:
            return self.module.TensorArg()
        return self.module.TensorArg(
            dtype=self.dtypes.get(x.dtype, self.module.DType.other),
            sizes=list(x.shape),
            strides=list(x.stride()),
            device_type=getattr(self.module.DeviceType, x.device.type),
            device_index=x.device.index or 0,
        )

    def __call__(self, arguments: Arguments, built: list[Any] = BUILT) -> str:
        names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
        forward = self.module.ForwardArgs(
            **{name: self.tensor(arguments[name]) for name in names},
            scale=arguments["scale"],
            head_first=arguments.get("head_first", False),
            state_v_first=arguments["state_v_first"],
        )
        configs = [self.module.HeadConfig(k, v, self.dtypes[dtype]) for k, v, dtype in built]
        common = {"args": forward, "gate_domain": arguments["gate_domain"], "built": configs}
        if "do" not in arguments:
            return str(self.module.check_forward(**common))
        gradients = {"A": arguments["A"], "dout": arguments["do"], "dht": arguments["dht"]}
        return str(self.module.check_backward(**common, **{name: self.tensor(x) for name, x in gradients.items()}))


@pytest.fixture(scope="module")
def cxx(checks: ModuleType) -> CxxChecks:
    return CxxChecks(checks)


@pytest.mark.parametrize("row", SCHEMA_ALLOWS, ids=ids(SCHEMA_ALLOWS))
def test_cxx_checks(cxx: CxxChecks, row: BadInput) -> None:
    assert cxx(row.arguments()) == row.message


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("good", [good_forward, good_backward])
def test_good_inputs_pass(cxx: CxxChecks, good: Any, packed: bool) -> None:
    arguments = good(packed=packed)
    assert cxx(arguments) == ""
    if good is good_forward:
        flash_qla.chunk_gated_delta_rule(**arguments)
    else:
        flash_qla.chunk_gated_delta_rule_bwd(**arguments)


def _with(arguments: Arguments, **changes: Any) -> Arguments:
    return {**arguments, **changes}


def legal_calls() -> dict[str, Arguments]:
    dense, packed = good_forward(), good_forward(packed=True)
    empty = {name: x[:, :0] if name in ("q", "k", "v", "g", "beta") else x for name, x in dense.items()}
    column = {name: x[..., :1].expand(*x.shape[:-1], 2)[..., :1] for name, x in dense.items() if name in ("q", "k", "v")}
    return {
        "scale 0.0": _with(dense, scale=0.0),
        "integer scale": _with(dense, scale=1),
        "no sequences": _with(packed, cu_seqlens=packed["cu_seqlens"][:1], initial_state=packed["initial_state"][:0]),
        "no tokens": empty,
        "no batch": {name: x[:0] if isinstance(x, torch.Tensor) else x for name, x in dense.items()},
        "int32 offsets": _with(packed, cu_seqlens=packed["cu_seqlens"].int()),
        "one column, stride 0": _with(dense, **column, initial_state=torch.zeros(2, 4, 1, 1)),
        "16-bit gates": _with(dense, g=dense["g"].half(), beta=dense["beta"].bfloat16()),
        "bf16 state": _with(dense, initial_state=dense["initial_state"].bfloat16()),
        "strided gates": _with(dense, g=torch.zeros(2, 4, 10).transpose(1, 2)),
        "head dimensions nobody built": _with(dense),
    }


@pytest.mark.parametrize("name", legal_calls())
def test_legal_calls_are_accepted(cxx: CxxChecks, name: str) -> None:
    arguments = legal_calls()[name]
    assert cxx(arguments) == ""
    o, final_state = flash_qla.chunk_gated_delta_rule(**arguments)
    assert o.shape == arguments["v"].shape and o.dtype == arguments["q"].dtype
    assert final_state is None


@pytest.mark.parametrize(
    ("built", "names"),
    [(BUILT, "K=64 V=128 bfloat16, K=128 V=128 bfloat16, K=128 V=128 float16"), ([], "none")],
)
def test_unbuilt_configuration_lists_the_built_ones(cxx: CxxChecks, built: list[Any], names: str) -> None:
    message = (
        f"q, k, v: expected one of the built configurations ({names}), got K=16 V=24 bfloat16; "
        "FLASH_QLA_CONFIGS chooses what `pip install .` builds"
    )
    with FakeTensorMode():
        arguments = good_forward("cuda:0")
    assert cxx(arguments, built) == message
    with pytest.raises(ValueError) as caught:
        check_forward(ForwardArgs(**arguments), built)
    assert str(caught.value) == message
    with FakeTensorMode():
        backward = good_backward("cuda:0")
    assert cxx(backward, built) == message
    gradients = {name: backward.pop(name) for name in ("A", "do", "dht")}
    with pytest.raises(ValueError) as caught:
        check_backward(BackwardArgs(ForwardArgs(**backward), **gradients), built)
    assert str(caught.value) == message


def test_devices_are_told_apart_by_index(cxx: CxxChecks) -> None:
    with FakeTensorMode():
        arguments = _with(good_forward("cuda:0"), g=good_forward("cuda:1")["g"])
    message = "g: expected q's device cuda:0, got cuda:1"
    assert cxx(arguments) == message
    with pytest.raises(ValueError) as caught:
        check_forward(ForwardArgs(**arguments), BUILT)
    assert str(caught.value) == message


def test_dtypes_outside_the_table_have_a_name_in_both(cxx: CxxChecks) -> None:
    arguments = _with(good_forward(), beta=good_forward()["beta"].to(torch.float8_e4m3fn))
    message = "beta: expected float32, bfloat16 or float16, got another dtype"
    assert cxx(arguments) == message
    with pytest.raises(TypeError) as caught:
        check_forward(ForwardArgs(**arguments))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5, 3], "cu_seqlens: expected offsets that never decrease, got 5 before 3"),
        ([0, 11], "cu_seqlens: expected offsets between 0 and T = 10, got 11 at index 1"),
        ([-1, 10], "cu_seqlens: expected offsets between 0 and T = 10, got -1 at index 0"),
    ],
)
def test_cpu_refuses_impossible_offsets(offsets: list[int], message: str) -> None:
    arguments = _with(good_forward(packed=True), cu_seqlens=torch.tensor(offsets), initial_state=None)
    with pytest.raises(RuntimeError) as raw:
        torch.ops.flash_qla.chunk_gated_delta_rule(**arguments)
    assert str(raw.value) == message
    with pytest.raises(ValueError) as precise:
        flash_qla.chunk_gated_delta_rule(**arguments)
    assert str(precise.value) == message


def test_cuda_tensors_without_kernels_are_refused_by_name() -> None:
    if flash_qla.build_info().kernels:
        pytest.skip("this package has kernels")
    from flash_qla._library import OPS, _refuse_cuda

    for name in OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_qla::{name}", "CUDA")
        with pytest.raises(RuntimeError) as caught:
            _refuse_cuda(name, flash_qla.build_info().reason)()
        assert f"flash_qla.{name}: got CUDA tensors, but this package has no CUDA kernels" in str(caught.value)
        assert flash_qla.build_info().reason in str(caught.value)


ON_GPU = [row for row in SCHEMA_ALLOWS if not row.cpu_only]


@pytest.mark.gpu
@pytest.mark.parametrize("row", ON_GPU, ids=ids(ON_GPU))
def test_gpu_op_and_function(row: BadInput) -> None:
    if row.backward and not flash_qla._library.has_backward("cuda"):
        pytest.skip("no backward kernel is built yet")
    with pytest.raises(RuntimeError) as raw:
        op_of(row)(**row.arguments("cuda"))
    assert row.message in str(raw.value)
    with pytest.raises(row.error) as precise:
        function_of(row)(**row.arguments("cuda"))
    assert str(precise.value) == row.message


@pytest.mark.gpu
def test_gpu_unbuilt_configuration() -> None:
    with pytest.raises(ValueError, match=r"got K=16 V=24 bfloat16; FLASH_QLA_CONFIGS chooses what `pip install \.` builds"):
        flash_qla.chunk_gated_delta_rule(**good_forward("cuda"))
    with pytest.raises(RuntimeError, match="expected one of the built configurations"):
        torch.ops.flash_qla.chunk_gated_delta_rule(**good_forward("cuda"))


@pytest.mark.gpu
def test_gpu_tensor_on_the_cpu() -> None:
    arguments = _with(good_forward("cuda"), beta=good_forward()["beta"])
    with pytest.raises(ValueError) as caught:
        flash_qla.chunk_gated_delta_rule(**arguments)
    assert str(caught.value) == "beta: expected q's device cuda:0, got cpu"
