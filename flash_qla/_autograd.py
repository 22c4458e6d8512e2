"""Gradients: `chunk_gated_delta_rule` is differentiable by itself; its backward pass is an op of its own."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _library  # noqa: F401 - defines the ops that gradients are registered for


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, cu_seqlens, _, v_first, auto_cp = inputs
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens)
    ctx.options = {
        "scale": scale,
        "use_qk_l2norm_in_kernel": l2norm,
        "state_v_first": v_first,
        "auto_cp": auto_cp,
        "gate_domain": keyword_only_inputs["gate_domain"],
    }
    ctx.has_final_state = output_final_state
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, initial_state, cu_seqlens = ctx.saved_tensors
    if not ctx.has_final_state:
        dht = None
    needed = ctx.needs_input_grad
    if do is None and dht is None:
        return (None,) * len(needed)
    dq, dk, dv, dbeta, dg, dinitial = torch.ops.flash_qla.chunk_gated_delta_rule_bwd(
        q, k, v, g, beta, None, do, dht, initial_state=initial_state, cu_seqlens=cu_seqlens, **ctx.options
    )
    # In the order of the op's arguments. The dispatcher drops trailing arguments that have their default, so `needed`
    # can be shorter than this, and as many gradients must be returned.
    gradients = (dq, dk, dv, dg, dbeta, None, dinitial)
    return tuple(gradients[i] if wanted else None for i, wanted in enumerate(needed))


def _no_second_derivative(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError("flash_qla: second derivatives of chunk_gated_delta_rule are not implemented")


def _not_differentiable(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "flash_qla: chunk_gated_delta_rule_fwd does not differentiate; use chunk_gated_delta_rule, or call "
        "chunk_gated_delta_rule_bwd with its results"
    )


torch.library.register_autograd("flash_qla::chunk_gated_delta_rule", _backward, setup_context=_setup)
torch.library.register_autograd("flash_qla::chunk_gated_delta_rule_fwd", _not_differentiable)
torch.library.register_autograd("flash_qla::chunk_gated_delta_rule_bwd", _no_second_derivative)
