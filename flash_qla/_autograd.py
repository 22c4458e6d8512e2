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


class _Rule(torch.autograd.Function):
    """The op and its gradient in one node, for calls from Python: the general machinery of torch.library takes 70 us of host time
    more to do the same."""

    # With a setup_context of its own, a Function takes as long as torch.library's: torch looks up the signature on every call.
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, gate_domain = arguments
        output: tuple[Tensor, Tensor] = torch.ops.flash_qla.chunk_gated_delta_rule.default(*inputs, gate_domain=gate_domain)
        _setup(ctx, tuple(inputs), {"gate_domain": gate_domain}, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *gradients)


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd will want gradients of one of these. Compilers take the op as it is."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    )


def recorded_rule(*inputs: Any, gate_domain: str) -> tuple[Tensor, Tensor]:
    """As the op `chunk_gated_delta_rule`, with every argument in its place, for calls that are recorded."""
    output: tuple[Tensor, Tensor] = _Rule.apply(*inputs, gate_domain)
    return output


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
