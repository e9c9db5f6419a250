"""Sums of probabilities before the product with the values: differential attention and its like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import assert_close, check, rewritten, sites_of
from torch import Tensor

B, H, L, D = 2, 3, 17, 8


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def maps(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5 + torch.full((L, L), float("-inf"), dtype=q.dtype).triu(1)).softmax(-1)


def two(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return (maps(q, k) - weight * maps(q2, k2)) @ v


def two_inputs(dtype: torch.dtype = torch.float32, weight: tuple[int, ...] = ()) -> list[Any]:
    return [*(rand(B, H, L, D, dtype=dtype) for _ in range(5)), rand(*weight, dtype=dtype)]


def pairs(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """As published: both maps are heads of one tensor, and the scores lose their NaNs."""
    scores = torch.nan_to_num(q @ k.mT) + torch.full((L, L), float("-inf")).triu(1)
    p = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores).view(B, H, 2, L, L)
    return (p[:, :, 0] - weight * p[:, :, 1]) @ v


def halves(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    first, second = maps(q, k).chunk(2, dim=1)
    return torch.matmul(first - weight * second, v)


def shared_inputs() -> list[Any]:
    return [rand(B, 2 * H, L, D), rand(B, 2 * H, L, D), rand(B, H, L, 2 * D), rand(1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [(), (H, 1, 1), (B, H, L, 1)])
def test_two_maps(dtype: torch.dtype, weight: tuple[int, ...]) -> None:
    check(two, two_inputs(dtype, weight), sites=2)


@pytest.mark.parametrize("function", [pairs, halves])
def test_maps_of_one_tensor(function: Callable[..., Tensor]) -> None:
    check(function, shared_inputs(), sites=1)


def soft(q: Tensor, k: Tensor, *shape: int) -> Tensor:
    p = maps(q, k)
    return p.view(B, *shape, L, L) if shape else p


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "slices": lambda q, k, v, w: (soft(q, k)[:, :H] - w * soft(q, k)[:, H:]) @ v,
    "select_of_the_slow_one": lambda q, k, v, w: (soft(q, k, 2, H)[:, 0] - w * soft(q, k, 2, H)[:, -1]) @ v,
    "unbind": lambda q, k, v, w: torch.matmul((p := soft(q, k, H, 2).unbind(2))[0] - w * p[1], v),
    "alpha": lambda q, k, v, w: torch.sub(*soft(q, k).chunk(2, 1), alpha=0.3) @ v * w,
    "alpha_of_a_sum": lambda q, k, v, w: torch.add(*soft(q, k).chunk(2, 1), alpha=-0.3) @ v * w,
    "einsum": lambda q, k, v, w: torch.einsum("bhqk,bhkd->bhqd", (p := soft(q, k).chunk(2, 1))[0] - w * p[1], v),
    "einsum_heads_last": lambda q, k, v, w: torch.einsum("bkhd,bhqk->bqhd", v.transpose(1, 2), (p := soft(q, k).chunk(2, 1))[0] - w * p[1]),
    "einsum_values_of_all_heads": lambda q, k, v, w: torch.einsum("...qk,kd->...qd", (p := soft(q, k).chunk(2, 1))[0] - w * p[1], v[0, 0]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    check(SPELLINGS[name], shared_inputs(), sites=2 if "slices" in name or "select" in name else 1)


def test_a_weight_that_is_a_symbolic_number() -> None:
    """Made of a size that is a symbol: no tensor, and no reason to fail."""

    def function(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        p = soft(q, k).chunk(2, 1)
        return (p[0] - q.shape[-1] ** -0.5 * p[1]) @ v + ((p[0] + q.shape[-2] / 7.0) * 2.0) @ v * w

    inputs = shared_inputs()
    result, sites = sites_of(function, *inputs, dynamic=True)
    assert len(sites) >= 1
    torch.testing.assert_close(result, function(*inputs), rtol=1e-4, atol=1e-5)


def every_second(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    p = soft(q, k)
    return (p[:, ::2] - w * p[:, 1::2]) @ v


def uneven(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    p = soft(q, k)
    return (p[:, 1:4] - w * p[:, 2:5]) @ v


def summed_in_the_einsum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    p = soft(q, k).chunk(2, 1)
    return torch.einsum("bhqk,bhkd->bqd", p[0] - w * p[1], v)


def test_slices_that_overlap() -> None:
    """No shares of one tensor, but slices of the scores."""
    (site,) = check(uneven, shared_inputs())
    assert "several products" in site.labels


@pytest.mark.parametrize("function", [every_second, summed_in_the_einsum])
def test_what_is_no_equal_share(function: Callable[..., Tensor]) -> None:
    inputs = shared_inputs()
    result, (site,) = sites_of(function, *inputs)
    assert site.refusal is not None and site.refusal.code in ("operand_layout", "scores_reindexed", "not_query_times_key"), str(site)
    torch.testing.assert_close(result, function(*inputs), rtol=1e-5, atol=1e-6)


def test_values_that_all_heads_share() -> None:
    check(halves, [rand(B, 2 * H, L, D), rand(B, 2 * H, L, D), rand(B, 1, L, D), rand(1)], sites=1)


def test_three_maps_with_numbers() -> None:
    def three(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        mixed = (0.5 * maps(q, k) + -(maps(q2, k) / 4)) + maps(q, k2) * gate.sigmoid()[:, None, None]
        return mixed @ v

    check(three, [*two_inputs()[:5], rand(H)], sites=3)


def test_a_factor_on_one_map() -> None:
    def masked(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        return (maps(q, k) * factor + maps(q2, k2)) @ v

    check(masked, [*two_inputs()[:5], torch.rand(B, 1, 1, L)], sites=2)


def test_one_part_that_is_no_attention() -> None:
    """ConViT without its division: positions alone make the second map."""

    def gated(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, gate: Tensor) -> Tensor:
        share = torch.sigmoid(gate).view(1, -1, 1, 1)
        return ((1 - share) * maps(q, k) + share * positions.softmax(-1)) @ v

    inputs = [rand(B, H, L, D), rand(B, H, L, D), rand(B, H, L, D), rand(1, H, L, L).detach().expand(B, H, L, L).clone().requires_grad_(), rand(H)]
    result, sites = sites_of(gated, *inputs)
    assert [s.fused for s in sites] == [True, False]
    torch.testing.assert_close(result, gated(*inputs), rtol=1e-5, atol=1e-6)


def dropped(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(maps(q, k) - weight * maps(q2, k2), 0.5) @ v


def cut(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        mixed = maps(q, k) - weight * maps(q2, k2)
    return mixed @ v


def along_keys(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return ((maps(q, k) - maps(q2, k2)) * torch.arange(L)) @ v


def test_a_dropout_on_each_map() -> None:
    """Each map has random numbers of its own, and so it stays: all dropped but by chance, nothing dropped on average."""

    def each(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return (F.dropout(maps(q, k), 0.25) - weight * F.dropout(maps(q2, k2), 0.25)) @ v

    inputs = two_inputs()
    expected = two(*inputs)
    total = torch.zeros_like(expected)
    _, sites = sites_of(each, *inputs)
    assert [s.fused for s in sites] == [True, True]
    compiled = rewritten(each)
    with torch.no_grad():
        for _ in range(400):
            total += compiled(*inputs)
    assert float((total / 400 - expected).abs().mean()) < 0.1 * float(expected.abs().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    """The maps are float32 there, and the product has another precision."""
    inputs = two_inputs()
    with torch.autocast("cpu", dtype):
        result, sites = sites_of(two, *inputs)
        eager = two(*inputs)
    exact = two(*(x.detach().double() for x in inputs))
    assert [s.fused for s in sites] == [True, True] and result.dtype == eager.dtype
    assert_close(result, eager, exact)


def test_two_products_of_one_sum() -> None:
    """Neither is fused, since the dropped probabilities are used twice; both are put back, though they shared the sum."""

    def twice(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first, second = F.dropout(maps(q, k), 0.5).chunk(2, 1)
        return (first - weight * second) @ v, (first - weight * second) @ v.flip(0)

    inputs = shared_inputs()
    torch.manual_seed(3)
    results, (site,) = sites_of(twice, *inputs)
    assert site.refusal is not None and site.refusal.code == "escape_after_dropout", str(site)
    torch.manual_seed(3)
    for ours, eager in zip(results, twice(*inputs)):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [dropped, cut, along_keys])
def test_near_misses(function: Callable[..., Tensor]) -> None:
    """One dropout for both maps, a sum without a gradient, and a factor along the keys on the sum: the product stays as it was."""
    inputs = two_inputs()
    torch.manual_seed(3)
    result, sites = sites_of(function, *inputs)
    assert not any(s.fused for s in sites) and all(s.refusal is not None for s in sites)
    torch.manual_seed(3)
    torch.testing.assert_close(result, function(*inputs), rtol=1e-5, atol=1e-6)


def test_put_back_where_nothing_is_fused() -> None:
    def no_attention(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return (a.softmax(-1) - b.softmax(-1)) @ v

    inputs = [rand(B, H, L, L), rand(B, H, L, L), rand(B, H, L, D)]
    result, sites = sites_of(no_attention, *inputs)
    assert not any(s.fused for s in sites)
    assert torch.equal(result, no_attention(*inputs))


def test_maps_that_are_returned_too() -> None:
    def returned(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        mixed = maps(q, k) - weight * maps(q2, k2)
        return mixed @ v, mixed

    check(returned, two_inputs(), sites=2)  # type: ignore[arg-type]
