"""Several products with the same probabilities: each becomes a call, where then nothing needs the probabilities any more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import check, sites_of
from torch import Tensor

import fa_inductor

B, H, L, D = 2, 4, 17, 8


def rand(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def inputs() -> list[Tensor]:
    return [rand(B, H, L, D), rand(B, H, L, D), rand(B, H, L, D), rand(L, L)]


def probabilities(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    return (q @ k.mT * D**-0.5 + b).masked_fill(hidden, -math.inf).softmax(-1)


def scalars_and_vectors(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As networks for molecules: channels and vectors, the second read from the first too."""
    p = probabilities(q, k, b)
    first = p @ v
    points = v[..., :6].unflatten(-1, (2, 3)) + first.mean()
    return first, torch.einsum("bhqk,bhkcx->bhqcx", p, points)


def groups_of_heads(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    left, right = probabilities(q, k, b).chunk(2, 1)
    return left @ v[:, :2], right @ v[:, 2:].tanh()


def half_masked_afterwards(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    p = probabilities(q, k, b)
    return p @ v, (p * b.detach().sigmoid()) @ v


def with_a_sink(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.cat([q @ k.mT + b, b[0].expand(B, H, L, L)[..., :1]], -1).softmax(-1)[..., :-1]
    return p @ v, p @ v.cos()


FUSED = [scalars_and_vectors, groups_of_heads, half_masked_afterwards, with_a_sink]


@pytest.mark.parametrize("function", FUSED)
def test_each_becomes_a_call(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    fa_inductor.reset()
    (site,) = check(function, inputs())
    assert "several products" in site.labels


def test_both_calls_are_counted() -> None:
    fa_inductor.reset()
    torch._dynamo.reset()
    sum(x.sum() for x in torch.compile(scalars_and_vectors, backend="flashattn")(*inputs())).backward()
    counts = fa_inductor.counters()
    assert (counts["sites"], counts["rewritten"], counts["forward"], counts["backward"]) == (1, 1, 2, 2)


def test_symbolic_sizes() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        p = (q @ k.mT * D**-0.5 + b).softmax(-1)
        return p @ v, torch.einsum("bhqk,bhkcx->bhqcx", p, v.unflatten(-1, (2, 4)))

    (site,) = check(function, inputs(), dynamic=True)
    assert "several products" in site.labels


# -- where the probabilities stay --------------------------------------------------------------------------------------------
def returned_too(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    p = probabilities(q, k, b)
    return p @ v, p @ v.cos(), p


def summed_by_hand(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The sum over keys of the second is no matrix product."""
    p = probabilities(q, k, b)
    return p @ v, (p[..., None] * v[:, :, None]).cumsum(3)


def over_the_queries(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The second product sums over queries: no attention."""
    p = probabilities(q, k, b)
    return p @ v, p.mT @ v


@pytest.mark.parametrize("function", [returned_too, summed_by_hand, over_the_queries])
def test_one_call_where_they_stay(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    (site,) = check(function, inputs())
    assert "several products" not in site.labels


def test_a_dropout_of_both_is_refused() -> None:
    """Eager drops the same probabilities for both; two calls would draw twice."""

    def function(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        p = F.dropout(probabilities(q, k, b), 0.5)
        return p @ v, p @ v.cos()

    arguments = inputs()
    torch.manual_seed(3)
    result, (site,) = sites_of(function, *arguments)
    assert site.refusal is not None and site.refusal.code == "escape_after_dropout", str(site)
    torch.manual_seed(3)
    for ours, eager in zip(result, function(*arguments)):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
