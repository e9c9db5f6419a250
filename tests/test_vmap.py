"""torch.vmap in a model, as for masks made from a function of positions: it is seen through, and so is what is trained under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from fusing import check, sites_of
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import fa_inductor

B, H, L, D = 2, 3, 9, 8


def rand(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def qkv() -> list[Any]:
    return [rand(B, H, L, D) for _ in range(3)]


def over_positions(mask: Callable[..., Tensor], q: Tensor) -> Tensor:
    """A (B, 1, Lq, Lk) tensor, as in the mask functions of transformers and FlexAttention."""
    dims = [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)]
    for each in dims:
        mask = torch.vmap(mask, in_dims=each)
    with TransformGetItemToIndex():
        return mask(torch.arange(q.shape[0]), torch.arange(1), torch.arange(q.shape[2]), torch.arange(q.shape[2]))


def causal_and_padding(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    visible = over_positions(lambda b, h, i, j: (j <= i) & keep[b, j], q)
    return (q @ k.mT).masked_fill(~visible, -1e9).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = over_positions(lambda b, h, i, j: (j <= i) & (j > i - 4), q)
    return torch.where(visible, q @ k.mT, float("-inf")).softmax(-1) @ v


def one_level(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.vmap(lambda i: torch.arange(q.shape[2]) <= i)(torch.arange(q.shape[2]))
    return (q @ k.mT).masked_fill(~rows, float("-inf")).softmax(-1) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return window(one_level(q, k, v), k, v)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [causal_and_padding, window, one_level, twice])
def test_masks(function: Callable[..., Tensor], dynamic: bool) -> None:
    more = [torch.rand(B, L) > 0.2] if function is causal_and_padding else []
    check(function, [*qkv(), *more], sites=2 if function is twice else 1, dynamic=dynamic)


def test_programs() -> None:
    found = [
        *sites_of(causal_and_padding, *qkv(), torch.rand(B, L) > 0.2)[1],
        *sites_of(window, *qkv())[1],
        *sites_of(one_level, *qkv())[1],
    ]
    assert_expected_inline(
        "\n".join(f"{', '.join(s.labels)}: {s.program}" for s in found),
        """\
causal, key padding: where(k <= q and c0[b, k], s, -1e+09)
causal, window: where(k <= q and k > q - 4, s, -inf)
causal: where(k <= q, s, -inf)""",
    )


def test_through_inductor() -> None:
    inputs = [*qkv(), torch.rand(B, L) > 0.2]
    result = torch.compile(causal_and_padding, backend="flashattn")(*inputs)
    assert fa_inductor.counters()["rewritten"] == 1
    expected = causal_and_padding(*inputs)
    torch.testing.assert_close(result, expected)
    for a, b in zip(torch.autograd.grad(result.sum(), inputs[:3]), torch.autograd.grad(expected.sum(), inputs[:3])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_inside() -> None:
    """The mapped attention is an attention of one batch dimension more."""
    check(lambda q, k, v: torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v), qkv())


def biased_by(make: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, t: (q @ k.mT + torch.vmap(make)(t)).softmax(-1) @ v


def relative_shift(a: Tensor, b: Tensor) -> Tensor:
    n = a.shape[0]
    return torch.einsum("id,jd->ij", a, b).flatten().as_strided((n, n), ((n - 1) * 2, 1), n - 1)


def shifted_by_strides(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Borzoi's relative positions."""
    return (q @ k.mT + torch.vmap(torch.vmap(relative_shift), in_dims=(0, None))(q, t)).softmax(-1) @ v


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "make",
    [lambda x: x.tanh() * 2 + x, lambda x: x.detach().tanh() * x, lambda x: torch.nn.functional.layer_norm(x, (L,)), lambda x: x[torch.arange(L) // 2]],
    ids=["pointwise", "detached", "norm", "index"],
)
def test_trained(make: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    check(biased_by(make), [*qkv(), rand(H, L, L)], dynamic=dynamic)


def test_trained_through_strides() -> None:
    check(shifted_by_strides, [*qkv(), rand(H, 2 * L - 1, D)])


def test_trained_through_inductor() -> None:
    inputs = [*qkv(), rand(H, 2 * L - 1, D)]
    result = torch.compile(shifted_by_strides, backend="flashattn")(*inputs)
    assert fa_inductor.counters()["rewritten"] == 1
    expected = shifted_by_strides(*inputs)
    torch.testing.assert_close(result, expected)
    for a, b in zip(torch.autograd.grad(result.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.tanh()
    return x * y


def in_low_precision(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (q @ k.mT + torch.vmap(lambda x: x @ x.mT)(t)).softmax(-1) @ v


@pytest.mark.parametrize(
    "function",
    [
        biased_by(without_gradient),
        in_low_precision,
        lambda q, k, v, t: (q @ k.mT + t).softmax(-1) @ torch.func.grad(lambda x: x.square().sum())(v),
    ],
    ids=["no_grad", "autocast", "grad"],
)
def test_refused(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    inputs = [*qkv(), rand(H, L, L)]
    result = torch.compile(function, backend="flashattn")(*inputs)
    assert fa_inductor.counters()["refusals"] == {"normalize_functorch": 1}
    expected = function(*inputs)
    torch.testing.assert_close(result, expected, rtol=2e-2 if function is in_low_precision else None, atol=2e-2 if function is in_low_precision else None)
    for a, b in zip(torch.autograd.grad(result.float().sum(), inputs), torch.autograd.grad(expected.float().sum(), inputs)):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def test_random_numbers_are_refused() -> None:
    function = torch.vmap(lambda x: torch.nn.functional.dropout(x, 0.5), randomness="different")
    sites_of(lambda q, k, v: (q @ k.mT + function(q @ k.mT)).softmax(-1) @ v, *qkv())
    assert fa_inductor.counters()["refusals"] == {"normalize_functorch": 1}
