"""Rows of NaN that are turned into 0 after the softmax, as code does about rows that a mask hides altogether: the same function, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fusing import assert_close, check, sites_of
from test_forms import B, D, H, L, padded, qkv, rand
from torch import Tensor


def put(p: Tensor) -> Tensor:
    p = p.clone()
    p[torch.isnan(p)] = 0
    return p


CLEANED: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_to_num": lambda p: p.nan_to_num(0.0),
    "nan_to_num_by_default": torch.nan_to_num,
    "where": lambda p: torch.where(torch.isnan(p), 0.0, p),
    "where_zeros_like": lambda p: torch.where(p.isnan(), torch.zeros_like(p), p),
    "where_not": lambda p: torch.where(~torch.isnan(p), p, torch.zeros((), device=p.device)),
    "where_finite": lambda p: torch.where(torch.isfinite(p), p, 0.0),
    "masked_fill": lambda p: p.masked_fill(torch.isnan(p), 0.0),
    "compared_with_itself": lambda p: p.masked_fill(p != p, 0.0),
    "index_put": put,
}


def hidden_by_a_fill(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~padded()[:, None, None], -math.inf)


def attention(clean: Callable[[Tensor], Tensor], scores: Callable[..., Tensor] = hidden_by_a_fill) -> Callable[..., Tensor]:
    return lambda q, k, v, *more: clean(scores(q, k, *more).softmax(-1)) @ v


@pytest.mark.parametrize("name", CLEANED)
def test_a_row_without_a_key_is_zero(name: str) -> None:
    """The second sequence has no key at all; the gradients are 0 there, not NaN."""
    torch.manual_seed(0)
    inputs = qkv()
    function = attention(CLEANED[name])
    assert function(*inputs)[1].eq(0).all()
    check(function, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(attention(torch.nan_to_num), [x.detach().to(dtype).requires_grad_() for x in qkv()])


@pytest.mark.parametrize(("dtype", "code"), [(torch.float16, "nan_rows"), (torch.bfloat16, None)])
def test_masks_added_in_half(dtype: torch.dtype, code: str | None) -> None:
    """The least number less 100 is -inf in float16, and itself in bfloat16."""
    mask = torch.where(padded()[:, None, None], 0.0, torch.finfo(dtype).min).to(dtype)
    inputs = [x.detach().to(dtype) for x in qkv()]
    function = attention(torch.nan_to_num, lambda q, k: q @ k.mT - 100 + mask)
    result, (site,) = sites_of(function, *inputs)
    assert (site.refusal and site.refusal.code) == code, str(site)
    assert_close(result, function(*inputs), function(*(x.double() for x in inputs)) if code is None else function(*inputs).double())
    assert (result[1] == 0).all() == (dtype == torch.float16)


def causal_and_a_bias(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    s = (q @ k.mT + bias.tanh()).masked_fill(~padded()[:, None, None], -math.inf)
    return torch.where(torch.ones(L, L, dtype=torch.bool, device=q.device).tril(-1), s, -math.inf) / 2


@pytest.mark.parametrize("name", ["nan_to_num", "where", "index_put"])
def test_two_masks_and_a_learned_bias(name: str) -> None:
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(H, L, L))
    function = attention(CLEANED[name], causal_and_a_bias)
    check(function, [*qkv(), table])


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = hidden_by_a_fill(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.nan_to_num(hidden_by_a_fill(q, k).softmax(-1))
    return p @ v, p


def of_few_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].repeat_interleave(H, 1) for x in (k, v))
    return torch.nan_to_num(hidden_by_a_fill(q, k).softmax(-1)) @ v


def head_mask_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.arange(H, device=q.device)[:, None, None] != 1
    return torch.nan_to_num(hidden_by_a_fill(q, k).softmax(-1)).masked_fill(~keep, 0.0) @ v


@pytest.mark.parametrize("function", [by_hand, returned, of_few_heads, head_mask_after])
def test_around_it(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    check(function, qkv())


def test_where_no_row_can_be_nan() -> None:
    torch.manual_seed(0)
    check(attention(torch.nan_to_num, lambda q, k: q @ k.mT * 0.3), qkv())


BEFORE: dict[str, Callable[..., Tensor]] = {
    "fill": lambda q, k: hidden_by_a_fill(q, k).nan_to_num(),
    "numbers": lambda q, k: torch.nan_to_num(hidden_by_a_fill(q, k), nan=-1e4, neginf=-1e4),
    "captured": lambda q, k: torch.nan_to_num(added(q, k), nan=-5.0, posinf=4.0, neginf=-30.0),
}


@pytest.mark.parametrize("name", BEFORE)
def test_on_both_sides(name: str) -> None:
    """The scores have lost their infinities already, so that no row can be NaN and its gradient is that of any other."""
    torch.manual_seed(0)
    check(attention(torch.nan_to_num, BEFORE[name]), qkv())


@pytest.mark.parametrize("order", ["before", "after"])
def test_with_dropout(order: str) -> None:
    """Rows without a key stay 0 under a dropout on either side."""
    clean = CLEANED["where_zeros_like"]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = hidden_by_a_fill(q, k).softmax(-1)
        return (clean(F.dropout(p, 0.3)) if order == "before" else F.dropout(clean(p), 0.3)) @ v

    inputs = qkv()
    result, (site,) = sites_of(function, *inputs)
    assert site.fused, str(site)
    assert result[1].eq(0).all() and result[0].isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(result.sum(), inputs))


ADDED = torch.zeros(L, L)
ADDED[2], ADDED[3, 4], ADDED[5, 1], ADDED[6] = -math.inf, math.nan, math.inf, torch.where(torch.arange(L) < 3, -math.inf, 0.0)


def added(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3 + ADDED


@pytest.mark.parametrize("name", CLEANED)
def test_any_mask_without_gradients(name: str) -> None:
    """Rows of -inf, and with NaN or inf in them, are all 0."""
    torch.manual_seed(0)
    inputs = [x.detach() for x in qkv()]
    (site,) = check(attention(CLEANED[name], added), inputs)
    assert attention(CLEANED[name], added)(*inputs)[:, :, [2, 3, 5]].eq(0).all() and site.fused


def test_a_query_that_is_nan() -> None:
    """Forward its row is 0 as in eager; backward it is NaN that the query and the keys get."""
    torch.manual_seed(0)
    function, inputs = attention(torch.nan_to_num, lambda q, k: torch.tanh(q @ k.mT)), [x.detach() for x in qkv()]
    inputs[0][0, 1, 3] = math.nan
    result, (site,) = sites_of(function, *inputs)
    assert site.fused, str(site)
    assert result.isfinite().all() and result[0, 1, 3].eq(0).all()
    assert_close(result, function(*inputs), function(*(x.double() for x in inputs)))


@pytest.mark.parametrize(
    ("code", "scores"),
    [
        ("nan_gradient", added),
        ("nan_gradient", lambda q, k: q @ k.mT + torch.where(padded()[:, None, None], 0.0, -math.inf)),
        ("nan_gradient", lambda q, k: (q @ k.mT).masked_fill(~padded()[:, None, None], -math.inf) + ADDED.exp()),
        ("nan_gradient", lambda q, k: (q @ k.mT + ADDED).masked_fill(~padded()[:, None, None], -math.inf)),
        ("nan_gradient", lambda q, k: (q @ k.mT).masked_fill(~padded()[:, None, None], -math.inf).nan_to_num(0.0, neginf=-math.inf)),
    ],
    ids=["captured", "literal", "bias_outside", "captured_inside", "nan_alone_before_the_softmax"],
)
def test_a_gradient_of_nan_is_refused(code: str, scores: Callable[..., Tensor]) -> None:
    """In eager it reaches the queries, where -inf was added to the scores rather than put in their place."""
    inputs = qkv()
    function = attention(torch.nan_to_num, scores)
    result, (site,) = sites_of(function, *inputs)
    assert site.refusal is not None and site.refusal.code == code, str(site)
    torch.testing.assert_close(result, function(*inputs))


def small_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp makes 0 of -1e9, and 0 / 0 is NaN: a row of such scores is 0 here, not the mean of all values."""
    e = torch.exp((q @ k.mT).masked_fill(~padded()[:, None, None], -1e9))
    return torch.nan_to_num(e / e.sum(-1, keepdim=True)) @ v


def times_a_captured_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.nan_to_num(hidden_by_a_fill(q, k).softmax(-1)) * ADDED.exp()) @ v


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("nan_rows", small_by_hand),
        ("post_mask_nan", times_a_captured_factor),
        ("post_softmax_op", attention(lambda p: p.nan_to_num(0.5))),
        ("post_softmax_op", attention(lambda p: (p * 2 + 1).nan_to_num(0.0))),
        ("post_softmax_op", attention(lambda p: torch.where(p.isnan(), 1.0, p))),
        ("post_softmax_op", attention(lambda p: torch.where(p.isnan(), p, 0.0))),
        ("post_softmax_op", attention(lambda p: torch.index_put(p, [p.isnan()], torch.ones(())))),
    ],
    ids=["by_hand", "factor", "other_number", "other_value", "one", "turned_round", "index_put_one"],
)
def test_near_misses(code: str, function: Callable[..., Tensor]) -> None:
    inputs = qkv()
    result, (site,) = sites_of(function, *inputs)
    assert site.refusal is not None and site.refusal.code == code, str(site)
    torch.testing.assert_close(result, function(*inputs), equal_nan=True)


@pytest.mark.parametrize("trained", [False, True])
def test_with_a_sink(trained: bool) -> None:
    """Its row is NaN only where the sink's score is -inf too."""
    sink = torch.tensor([0.3, -math.inf, 1.0]).requires_grad_(trained)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        joined = torch.cat([hidden_by_a_fill(q, k), sink.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
        return torch.nan_to_num(joined.softmax(-1)[..., :-1]) @ v

    inputs = [x.detach().requires_grad_(trained) for x in qkv()]
    result, (site,) = sites_of(function, *inputs)
    torch.testing.assert_close(result, function(*inputs))
    assert site.fused is not trained and (site.fused or site.refusal.code == "nan_gradient"), str(site)


def test_sizes_that_are_symbols() -> None:
    check(attention(torch.nan_to_num, lambda q, k, m: (q @ k.mT).masked_fill(m, -math.inf)), [*qkv(), ~padded()[:, None, None]], dynamic=True)


def test_one_value_per_row() -> None:
    q, k, v = rand(B, H, 1, D), rand(B, H, L, D), rand(B, H, L, 1)
    check(attention(torch.nan_to_num), [q, k, v])
