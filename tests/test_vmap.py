"""torch.vmap in a model: masks made from a function of positions are seen through; what is trained under it is not."""

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
    """Nothing is trained, so the mapped attention is an attention of one batch dimension more."""
    q, k, v = (x.detach() for x in qkv())
    function = torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    result, _ = sites_of(lambda q, k, v: function(q, k, v), q, k, v)
    torch.testing.assert_close(result, function(q, k, v))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v),
        lambda q, k, v: (q @ k.mT).softmax(-1) @ torch.func.grad(lambda x: x.square().sum())(v),
    ],
    ids=["trained", "grad"],
)
def test_refused(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    inputs = qkv()
    result = torch.compile(function, backend="flashattn")(*inputs)
    assert fa_inductor.counters()["refusals"] == {"normalize_functorch": 1}
    torch.testing.assert_close(result, function(*inputs))
