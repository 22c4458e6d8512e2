"""The reference against things it does not contain: explicit matrix products, closed forms, numerical derivatives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_qla.reference import gated_delta_rule

B, T, H, K, V = 2, 7, 2, 4, 3


def draw(heads_k: int = H, heads_v: int = H, tokens: int = T, batch: int = B) -> dict[str, Tensor]:
    torch.manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return {
        "q": normal(batch, tokens, heads_k, K),
        "k": torch.nn.functional.normalize(normal(batch, tokens, heads_k, K), dim=-1),
        "v": normal(batch, tokens, heads_v, V),
        "g": -normal(batch, tokens, heads_v).abs(),
        "beta": normal(batch, tokens, heads_v).sigmoid(),
    }


def by_matrix_products(x: dict[str, Tensor], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Head by head with the transition written out: S_t = e^g (I - beta k k^T) S + beta k v^T."""
    o, final = torch.empty_like(x["v"]), torch.empty_like(state)
    group = x["v"].size(2) // x["k"].size(2)
    for b in range(x["v"].size(0)):
        for h in range(x["v"].size(2)):
            s = state[b, h]
            for t in range(x["v"].size(1)):
                q, k = x["q"][b, t, h // group], x["k"][b, t, h // group]
                beta = x["beta"][b, t, h]
                transition = x["g"][b, t, h].exp() * (torch.eye(K, dtype=torch.float64) - beta * torch.outer(k, k))
                s = transition @ s + beta * torch.outer(k, x["v"][b, t, h])
                o[b, t, h] = scale * (s.T @ q)
            final[b, h] = s
    return o, final


@pytest.mark.parametrize(("heads_k", "heads_v"), [(2, 2), (1, 3), (2, 8)])
def test_against_matrix_products(heads_k: int, heads_v: int) -> None:
    x = draw(heads_k, heads_v)
    state = torch.randn(B, heads_v, K, V, dtype=torch.float64)
    o, final = gated_delta_rule(**x, scale=0.3, initial_state=state)
    expected_o, expected_final = by_matrix_products(x, state, 0.3)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(final, expected_final)


def test_orthonormal_keys_recall_their_values() -> None:
    """Without decay and with beta = 1 the state is a dictionary: the query k_s gives v_s from token s on."""
    x = draw(tokens=K)
    x["k"] = torch.eye(K, dtype=torch.float64)[None, :, None, :].expand(B, K, H, K)
    x["q"] = x["k"][:, :1].expand(B, K, H, K)
    x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.ones_like(x["beta"])
    o, final = gated_delta_rule(**x, scale=1.0)
    torch.testing.assert_close(o, x["v"][:, :1].expand_as(o))
    torch.testing.assert_close(final, x["v"].transpose(1, 2))


def test_writing_a_key_again_replaces_its_value() -> None:
    x = draw(tokens=2)
    x["k"] = x["k"][:, :1].expand(B, 2, H, K)
    x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.ones_like(x["beta"])
    _, final = gated_delta_rule(**x)
    torch.testing.assert_close(final, x["k"][:, 1, :, :, None] * x["v"][:, 1, :, None, :])


def test_default_scale_and_scale_zero() -> None:
    x = draw()
    torch.testing.assert_close(gated_delta_rule(**x)[0], gated_delta_rule(**x, scale=0.5)[0])  # K = 4
    assert bool((gated_delta_rule(**x, scale=0.0)[0] == 0).all())


def test_linear_gates_are_exponentials_of_log_gates() -> None:
    x = draw()
    expected = gated_delta_rule(**x)
    got = gated_delta_rule(**{**x, "g": x["g"].exp()}, gate_domain="linear")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_linear_gate_of_zero_forgets() -> None:
    x = draw()
    decay = x["g"].exp()
    decay[:, 3] = 0
    o, final = gated_delta_rule(**{**x, "g": decay}, gate_domain="linear")
    fresh_o, fresh_final = gated_delta_rule(**{n: t[:, 3:] for n, t in {**x, "g": decay}.items()}, gate_domain="linear")
    torch.testing.assert_close(o[:, 3:], fresh_o)
    torch.testing.assert_close(final, fresh_final)


def test_l2norm_normalises() -> None:
    x = draw()
    expected, _ = gated_delta_rule(**{**x, "q": torch.nn.functional.normalize(x["q"], dim=-1)})
    got, _ = gated_delta_rule(**{**x, "k": 5 * x["k"]}, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # eps in the root


def test_states_v_first() -> None:
    x, state = draw(), torch.randn(B, H, K, V, dtype=torch.float64)
    o, final = gated_delta_rule(**x, initial_state=state)
    o_t, final_t = gated_delta_rule(**x, initial_state=state.mT, state_v_first=True)
    torch.testing.assert_close(o, o_t)
    torch.testing.assert_close(final, final_t.mT)


def test_packed_sequences_are_separate_sequences() -> None:
    x, offsets = draw(batch=1, tokens=12), [1, 4, 4, 5, 10]
    state = torch.randn(4, H, K, V, dtype=torch.float64)
    o, final = gated_delta_rule(**x, initial_state=state, cu_seqlens=torch.tensor(offsets))
    assert bool((o[:, :1] == 0).all()) and bool((o[:, 10:] == 0).all())
    for n in range(4):
        piece = {name: t[:, offsets[n] : offsets[n + 1]] for name, t in x.items()}
        one_o, one_final = gated_delta_rule(**piece, initial_state=state[n : n + 1])
        torch.testing.assert_close(o[:, offsets[n] : offsets[n + 1]], one_o)
        torch.testing.assert_close(final[n : n + 1], one_final)


def test_two_halves_make_a_whole() -> None:
    x = draw()
    o, final = gated_delta_rule(**x)
    first_o, middle = gated_delta_rule(**{n: t[:, :3] for n, t in x.items()})
    second_o, last = gated_delta_rule(**{n: t[:, 3:] for n, t in x.items()}, initial_state=middle)
    torch.testing.assert_close(o, torch.cat([first_o, second_o], 1))
    torch.testing.assert_close(final, last)


def test_dtype_of_the_arithmetic() -> None:
    x = {name: t.bfloat16() for name, t in draw().items()}
    assert {y.dtype for y in gated_delta_rule(**x)} == {torch.float64}
    assert {y.dtype for y in gated_delta_rule(**x, dtype=torch.float32)} == {torch.float32}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_qk_l2norm_in_kernel": True, "state_v_first": True},
        {"gate_domain": "linear"},
        {"cu_seqlens": torch.tensor([0, 2, 2, 5])},
    ],
)
def test_gradients_numerically(options: dict[str, Any]) -> None:
    packed = "cu_seqlens" in options
    x = draw(1, 2, tokens=6, batch=1 if packed else B)
    if options.get("gate_domain") == "linear":
        x["g"] = x["g"].exp()
    n = 3 if packed else B
    state = torch.randn(n, 2, *((V, K) if options.get("state_v_first") else (K, V)), dtype=torch.float64)
    leaves = [t.detach().requires_grad_() for t in (*x.values(), state)]
    assert torch.autograd.gradcheck(lambda *a: gated_delta_rule(*a[:5], initial_state=a[5], **options), leaves)


def test_unknown_gate_domain() -> None:
    with pytest.raises(ValueError, match='gate_domain: expected "log" or "linear", got "exp"'):
        gated_delta_rule(**draw(), gate_domain="exp")
