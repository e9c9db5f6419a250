"""Softmaxes that divide behind the matrix product, ``(exp(s) @ v) / sum(exp(s))``, and masks on the exponentials."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, sites_of
from test_forms import FORMS, B, Case, D, H, L, qkv, rand
from torch import Tensor

DEFERRED: dict[str, Case] = {}


def deferred(*inputs):
    def register(function):
        DEFERRED[function.__name__] = FORMS[function.__name__] = function, lambda: [*qkv(), *(make() for make in inputs)]
        return function

    return register


def exponentials(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.mT * 0.3
    return torch.exp(s - s.amax(-1, keepdim=True))


def lower(x: Tensor) -> Tensor:
    return torch.ones(L, L, dtype=torch.bool, device=x.device).tril()


@deferred()
def divided_after_the_product(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def divided_by_a_sum_that_is_spread_out(q, k, v):
    e = exponentials(q, k)
    return (e @ v) / e.sum(-1).unsqueeze(-1).expand(B, H, L, D)


@deferred()
def multiplied_by_the_reciprocal(q, k, v):
    e = exponentials(q, k)
    return e @ v * (1 / e.sum(-1, keepdim=True))


@deferred()
def sum_with_a_floor(q, k, v):
    e = exponentials(q, k)
    return (e @ v) / e.sum(-1, keepdim=True).clamp(min=1e-6)


@deferred()
def sum_by_a_product_with_ones(q, k, v):
    e = exponentials(q, k)
    return (e @ v) / (e @ torch.ones(L, 1, device=v.device, dtype=v.dtype) + 1e-9)


@deferred()
def output_moved_before_the_division(q, k, v):
    e = exponentials(q, k)
    out = torch.einsum("bhqk,bhkd->bqhd", e, v)
    return (out / e.sum(-1).transpose(1, 2)[..., None]).reshape(B, L, H * D)


@deferred()
def divided_in_float32(q, k, v):
    e = exponentials(q, k)
    return ((e @ v).float() / e.sum(-1, keepdim=True).float()).to(v.dtype)


@deferred()
def powers_of_two_divided_later(q, k, v):
    e = torch.exp2(q @ k.mT * 0.3)
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred(lambda: rand(L, L))
def bias_and_causal_mask(q, k, v, b):
    s = (q @ k.mT * 0.3 + b).masked_fill(~lower(q), float("-inf"))
    e = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def masked_by_a_product(q, k, v):
    e = torch.exp(q @ k.mT * 0.2) * lower(q).to(q.dtype)
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def masked_by_a_choice(q, k, v):
    e = exponentials(q, k).masked_fill(~lower(q), 0)
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def masked_and_divided_at_once(q, k, v):
    e = torch.where(lower(q), exponentials(q, k), 0)
    return (e / e.sum(-1, keepdim=True)) @ v


@deferred()
def masked_twice(q, k, v):
    e = exponentials(q, k) * lower(q) * (torch.arange(L, device=q.device) != 2)[None]
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def masked_after_the_sum(q, k, v):
    """The sum is of all exponentials: the mask is a factor on the probabilities."""
    e = exponentials(q, k)
    return ((e * lower(q)) @ v) / e.sum(-1, keepdim=True)


@deferred(lambda: rand(H, 1, 1))
def sink_and_a_division_later(q, k, v, t):
    s = torch.cat([q @ k.mT, t.expand(B, H, L, 1)], -1)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e[..., :-1] @ v) / e.sum(-1, keepdim=True)


@deferred()
def row_hidden_by_a_product(q, k, v):
    """Row 3 sees no key: 0 / 0, and NaN in the gradients of q and k."""
    e = exponentials(q, k) * (lower(q) & (torch.arange(L, device=q.device) != 3)[:, None])
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def row_hidden_by_a_choice(q, k, v):
    e = exponentials(q, k).masked_fill(~(lower(q) & (torch.arange(L, device=q.device) != 3)[:, None]), 0.0)
    return (e @ v) / e.sum(-1, keepdim=True)


@deferred()
def finite_fill_in_a_whole_row(q, k, v):
    s = (q @ k.mT).masked_fill(~lower(q) | (torch.arange(L, device=q.device) == 3)[:, None], torch.finfo(q.dtype).min)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DEFERRED)
def test_deferred(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    function, inputs = DEFERRED[name]
    check(function, inputs(), dynamic=dynamic)


@pytest.mark.parametrize("name", DEFERRED)
def test_deferred_in_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = DEFERRED[name]
    check(function, [x.detach().bfloat16().requires_grad_() for x in inputs()])


def test_dropout_before_the_product() -> None:
    """The mean over many masks is the output without dropout: the sum is of all exponentials."""
    torch.manual_seed(0)
    q, k, v = rand(1, 1, 64, D, grad=False), rand(1, 1, 64, D, grad=False), torch.eye(64)[None, None].clone()

    def function(p: float) -> Tensor:
        e = exponentials(q, k)
        return F.dropout(e, p) @ v / e.sum(-1, keepdim=True)

    with torch.no_grad():
        dropped, (site,) = sites_of(function, 0.5)
        exact = function(0.0)
    assert site.fused
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * exact[kept], rtol=1e-5, atol=1e-7)
    assert abs(kept.double().mean().item() - 0.5) < 5 * (0.25 / kept.numel()) ** 0.5


def test_the_sums_and_the_undivided_product_escape() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        e = exponentials(q, k)
        total, out = e.sum(-1, keepdim=True), e @ v
        return out / total, total, out, e

    torch.manual_seed(0)
    check(function, qkv())  # type: ignore[arg-type]


# -- near misses ---------------------------------------------------------------------------------------------------------
def test_near_misses() -> None:
    def sums_of_other_rows(q, k, v):
        e = exponentials(q, k)
        return (e @ v) / e.sum(-1)[..., :1, None]

    def sums_of_the_next_head(q, k, v):
        e = exponentials(q, k)
        return (e[:, 1:] @ v[:, 1:]) / e.sum(-1, keepdim=True)[:, :-1]

    def sum_along_the_queries(q, k, v):
        e = exponentials(q, k)
        return (e @ v) / e.sum(-2)[..., None]

    def sum_of_some_keys(q, k, v):
        e = exponentials(q, k)
        return (e @ v) / e[..., 1:].sum(-1, keepdim=True)

    def detached_sum(q, k, v):
        e = exponentials(q, k)
        return (e @ v) / e.sum(-1, keepdim=True).detach()

    def sum_without_gradient(q, k, v):
        e = exponentials(q, k)
        with torch.no_grad():
            total = e.sum(-1, keepdim=True)
        return (e @ v) / total

    def tiny_number_without_the_maximum(q, k, v):
        e = torch.exp(q @ k.mT)
        return (e @ v) / (e.sum(-1, keepdim=True) + 1e-9)

    def tiny_number_and_a_mask(q, k, v):
        e = exponentials(q, k) * lower(q)
        return (e @ v) / (e.sum(-1, keepdim=True) + 1e-9)

    def weights_for_ones(q, k, v, w):
        e = exponentials(q, k)
        return (e @ v) / (e @ w)

    def twos_for_ones(q, k, v):
        e = exponentials(q, k)
        return (e @ v) / (e @ torch.full((L, 1), 2.0))

    def any_factor(q, k, v, m):
        e = exponentials(q, k) * m
        return (e @ v) / e.sum(-1, keepdim=True)

    def any_factor_at_once(q, k, v, m):
        e = exponentials(q, k) * m
        return e / e.sum(-1, keepdim=True) @ v

    def mask_of_the_scores(q, k, v):
        e = exponentials(q, k)
        e = e * (e > 0.1)
        return (e @ v) / e.sum(-1, keepdim=True)

    def dropout_before_both(q, k, v):
        e = F.dropout(exponentials(q, k), 0.5)
        return (e @ v) / e.sum(-1, keepdim=True)

    def mask_and_a_sink(q, k, v, t):
        s = torch.cat([q @ k.mT, t.expand(B, H, L, 1)], -1)
        e = torch.exp(s) * torch.cat([lower(q), lower(q)[:, :1]], -1)
        return (e[..., :-1] @ v) / e.sum(-1, keepdim=True)

    def product_with_a_factor(q, k, v):
        e = exponentials(q, k)
        return (e @ v) * 2 / e.sum(-1, keepdim=True)

    cases = (
        (sums_of_other_rows, ()),
        (sums_of_the_next_head, ()),
        (sum_along_the_queries, ()),
        (sum_of_some_keys, ()),
        (detached_sum, ()),
        (sum_without_gradient, ()),
        (tiny_number_without_the_maximum, ()),
        (tiny_number_and_a_mask, ()),
        (weights_for_ones, (rand(L, 1),)),
        (twos_for_ones, ()),
        (any_factor, (rand(L, L),)),
        (any_factor_at_once, (torch.rand(L, L),)),
        (mask_of_the_scores, ()),
        (dropout_before_both, ()),
        (mask_and_a_sink, (rand(H, 1, 1),)),
        (product_with_a_factor, ()),
    )
    found = {}
    for f, more in cases:
        _, reports = sites_of(f, *qkv(), *more)
        found[f.__name__] = "; ".join(str(r.refusal and f"{r.refusal.code}: {r.refusal.text}") for r in reports)
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in found.items()),
        """\
sums_of_other_rows: deferred_division: the matrix product with exp(x) is divided by the sums of other rows, or over another axis
sums_of_the_next_head: deferred_division: the matrix product with exp(x) is divided by the sums of other rows, or over another axis
sum_along_the_queries: softmax_axis: the softmax runs over dimension 2 of (2, 3, 17, 17), the matmul sums over another
sum_of_some_keys: deferred_division: the matrix product with exp(x) is divided by the sum of exp(x) afterwards
detached_sum: deferred_division: the matrix product with exp(x) is divided by the sum of exp(x) afterwards
sum_without_gradient: grad_mode: part of the scores and their softmax is computed under no_grad and part is not
tiny_number_without_the_maximum: altered_softmax: 1e-09 is added to the sum, which may be as small: no maximum is subtracted
tiny_number_and_a_mask: altered_softmax: 1e-09 is added to the sum, which a mask may have made as small
weights_for_ones: deferred_division: the matrix product with exp(x) is divided by the sums of other rows, or over another axis
twos_for_ones: deferred_division: the matrix product with exp(x) is divided by the sums of other rows, or over another axis
any_factor: altered_softmax: the exponentials are multiplied by what is not known to be 0 or 1
any_factor_at_once: altered_softmax: the exponentials are multiplied by what is not known to be 0 or 1
mask_of_the_scores: altered_softmax: what hides exponentials from the sum depends on the scores
dropout_before_both: deferred_division: the matrix product with exp(x) is divided by the sum of exp(x) afterwards
mask_and_a_sink: altered_softmax: exponentials are masked, and some of them are summed without values of their own
product_with_a_factor: deferred_division: the matrix product with exp(x) is divided by the sum of exp(x) afterwards""",
    )
