"""Sliding windows in overlapping chunks, whose scores are stored by diagonals."""

from __future__ import annotations

import math

import pytest
import test_forms
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, rewritten, sites_of
from test_forms import FORMS, rand
from torch import Tensor

B, H, D, W, LENGTH = 2, 2, 8, 4, 24


def qkv(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in (rand(B, H, length, D) for _ in range(3))]


def pairs_by_joining(x: Tensor, w: int) -> Tensor:
    """Chunks of 2w that overlap by w."""
    blocks = x.unflatten(1, (-1, w))
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], 2)


def pairs_by_strides(x: Tensor, w: int) -> Tensor:
    n, length, d = x.shape
    x = x.contiguous()
    return x.as_strided((n, length // w - 1, 2 * w, d), (x.stride(0), w * x.stride(1), x.stride(1), x.stride(2)))


def threes_by_joining(x: Tensor, w: int) -> Tensor:
    """For each block of w the values of the blocks before it, of itself and behind it."""
    blocks = F.pad(x, (0, 0, w, w), value=-1.0).unflatten(1, (-1, w))
    return torch.cat([blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], 2)


def threes_by_strides(x: Tensor, w: int) -> Tensor:
    n, length, d = x.shape
    x = F.pad(x, (0, 0, w, w), value=-1.0)
    return x.as_strided((n, length // w, 3 * w, d), (x.stride(0), w * x.stride(1), x.stride(1), x.stride(2)))


def diagonals(q: Tensor, k: Tensor, w: int, pairs=pairs_by_joining) -> Tensor:
    """(n, length, 2w + 1): the score of query i and key i + t - w at [:, i, t]; what lies outside is anything."""
    n, length, _ = q.shape
    full = pairs(q, w) @ pairs(k, w).mT
    skewed = F.pad(full, (0, 0, 0, 1)).view(n, -1, 2 * w, 2 * w + 1)
    out = full.new_zeros(n, length // w, w, 2 * w + 1)
    out[:, :-1, :, w:] = skewed[:, :, :w, : w + 1]
    out[:, -1, :, w:] = skewed[:, -1, w:, : w + 1]
    out[:, 1:, :, :w] = skewed[:, :, w - 1 : -1, w + 1 :]
    out[:, 0, 1:, 1:w] = skewed[:, 0, : w - 1, 1 - w :]
    return out.view(n, length, 2 * w + 1)


def outside(x: Tensor, w: int, lower: int = 0) -> Tensor:
    key = torch.arange(x.shape[1], device=x.device)[:, None] + torch.arange(2 * w + 1, device=x.device) - w
    return (key < lower) | (key >= x.shape[1])


def spread(p: Tensor, w: int) -> Tensor:
    """Rows of 2w + 1 probabilities as rows of 3w, the x-th of each block begins at column x."""
    rows = F.pad(p.unflatten(1, (-1, w)), (0, w))
    return rows.flatten(-2)[..., :-w].unflatten(-1, (w, 3 * w))


def sliding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before=lambda s: s,
    hiding=lambda s: s.masked_fill(outside(s, W), -math.inf),
    between=lambda s: s,
    after=lambda p: p,
    spreading=spread,
    pairs=pairs_by_joining,
    threes=threes_by_joining,
) -> Tensor:
    """Each step of an attention by diagonals may be another one."""
    b, h, length, d = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q / math.sqrt(d), k, v))
    scores = hiding(before(diagonals(q, k, W, pairs)))
    p = after(between(scores.view(b, h, length, -1)).softmax(-1)).flatten(0, 1)
    return (spreading(p, W) @ threes(v, W)).view(b, h, length, d)


def plain(q, k, v):
    return sliding(q, k, v)


def by_strides(q, k, v):
    return sliding(q, k, v, pairs=pairs_by_strides, threes=threes_by_strides)


def padded_keys(q, k, v, mask):
    """The mask is brought to the diagonals as Longformer does it: as keys that are multiplied with ones."""
    bias = q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)[..., None]
    bias = diagonals(torch.ones_like(bias), bias, W)
    bias = bias.masked_fill(outside(bias, W), -math.inf)[:, None]
    return sliding(q, k, v, between=lambda s: s + bias, after=lambda p: p.masked_fill(~mask[:, None, :, None], 0.0))


def learned_by_distance(q, k, v, bias):
    return sliding(q, k, v, between=lambda s: s + bias[:, None, :])


def capped_and_halved(q, k, v):
    return sliding(q, k, v, before=lambda s: 3 * torch.tanh(s / 3), after=lambda p: p * 0.5)


def table() -> torch.nn.Parameter:
    """A bias for each distance; memory before and behind it holds NaN."""
    whole = torch.full((3, H, 2 * W + 1), math.nan, device=test_forms.DEVICE)
    whole[1] = rand(H, 2 * W + 1).detach()
    return torch.nn.Parameter(whole[1])


def padding() -> Tensor:
    return torch.arange(LENGTH, device=test_forms.DEVICE) < torch.tensor([[LENGTH], [LENGTH - 9]], device=test_forms.DEVICE)


FORMS |= {f"diagonals_{f.__name__}": (f, qkv) for f in (plain, by_strides, capped_and_halved)}
FORMS |= {
    "diagonals_padded_keys": (padded_keys, lambda: [*qkv(), padding()]),
    "diagonals_learned_by_distance": (learned_by_distance, lambda: [*qkv(), table()]),
}
NAMES = [name for name in FORMS if name.startswith("diagonals_")]


@pytest.mark.parametrize("name", NAMES)
def test_a_window_in_chunks_is_an_attention_over_all_keys(name: str) -> None:
    form, inputs = FORMS[name]
    (site,) = check(form, inputs())
    assert "window" in site.labels


@pytest.mark.parametrize("length", [8, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_lengths_and_dtypes(length: int, dtype: torch.dtype) -> None:
    check(by_strides, qkv(length, dtype))


def test_programs() -> None:
    _, (site,) = sites_of(padded_keys, *qkv(), padding())
    assert_expected_inline(site.program, """where(-1*q + 4 + k >= 0 and -1*q + 4 + k < 9, s + where(c0[b, k], 0, min(float32)), -inf)""")
    _, (site,) = sites_of(learned_by_distance, *qkv(), table())
    assert_expected_inline(site.program, """where(-1*q + 4 + k >= 0 and -1*q + 4 + k < 9, s + c0[h, max(min(-1*q + 4 + k, 8), 0)], -inf)""")


def edges_not_hidden(q, k, v):
    return sliding(q, k, v, hiding=lambda s: s.masked_fill(outside(s, W), 0.0))


def edges_hidden_by_a_number(q, k, v):
    return sliding(q, k, v, hiding=lambda s: s.masked_fill(outside(s, W), -1e9))


def given_bias(q, k, v, bias):
    """It may hold +inf where the scores are -inf, which would be NaN."""
    return sliding(q, k, v, between=lambda s: s + bias)


def values_shifted(q, k, v):
    def later(x: Tensor, w: int) -> Tensor:
        return threes_by_joining(F.pad(x, (0, 0, 1, 0))[:, :-1], w)

    return sliding(q, k, v, threes=later)


def one_diagonal_twice(q, k, v):
    return sliding(q, k, v, after=lambda p: torch.cat([p[..., :-1], p[..., :1]], -1))


def keys_of_the_first_block_twice(q, k, v):
    def wrong(x: Tensor, w: int) -> Tensor:
        blocks = x.unflatten(1, (-1, w))
        return torch.cat([blocks[:, :-1], blocks[:, :-1]], 2)

    return sliding(q, k, v, pairs=wrong)


def spread_with_ones(p: Tensor, w: int) -> Tensor:
    return F.pad(p.unflatten(1, (-1, w)), (0, w), value=1.0).flatten(-2)[..., :-w].unflatten(-1, (w, 3 * w))


def spread_by_ones(q, k, v):
    """What lies between the probabilities counts too."""
    return sliding(q, k, v, spreading=spread_with_ones)


def ones_where_no_key_is(q, k, v):
    return sliding(q, k, v, after=lambda p: p.masked_fill(outside(p.flatten(0, 1), W), 1.0))


def windows_without_gradient(q, k, v):
    def cut(x: Tensor, w: int) -> Tensor:
        with torch.no_grad():
            return threes_by_joining(x, w)

    return sliding(q, k, k + v * 0, threes=cut)


def a_third_of_the_windows_without_gradient(q, k, v):
    def cut(x: Tensor, w: int) -> Tensor:
        x = F.pad(x, (0, 0, w, w))
        blocks = x.unflatten(1, (-1, w))
        with torch.no_grad():
            first = F.pad(x, (0, 0, 0, w))
        return torch.cat([first.unflatten(1, (-1, w))[:, :-3], blocks[:, 1:-1], blocks[:, 2:]], 2)

    return sliding(q, k, v, threes=cut)


MISSES = [
    edges_not_hidden, edges_hidden_by_a_number, values_shifted, one_diagonal_twice, keys_of_the_first_block_twice,
    spread_by_ones, ones_where_no_key_is, windows_without_gradient, a_third_of_the_windows_without_gradient,
]  # fmt: skip


@pytest.mark.parametrize("form", MISSES)
def test_what_is_no_window_is_refused(form) -> None:
    inputs = qkv()
    result, (site,) = sites_of(form, *inputs)
    assert site.refusal is not None and site.refusal.code == "diagonals", site
    expected = form(*inputs)
    torch.testing.assert_close(result, expected)
    for ours, eager in zip(torch.autograd.grad(result.sum(), inputs, allow_unused=True), torch.autograd.grad(expected.sum(), inputs, allow_unused=True)):
        torch.testing.assert_close(ours, eager)


def test_corners_hidden_by_the_head_instead_of_the_query() -> None:
    """As many heads as queries: the mask has the right shape."""
    q, k, v = (torch.randn(2, 8, 8, 8) for _ in range(3))

    def function(q, k, v):
        def between(s):
            return s.masked_fill(outside(s.flatten(0, 1), W)[:, None, :], -math.inf)

        return sliding(q, k, v, between=between, hiding=lambda s: s)

    result, (site,) = sites_of(function, q, k, v)
    assert site.refusal is not None and site.refusal.code == "diagonals", site
    torch.testing.assert_close(result, function(q, k, v))


def test_an_equal_layer_of_other_constants() -> None:
    """What the keys of the first layer hold hides its corners, what those of the second hold hides nothing."""

    def layer(q, v, keys):
        s = diagonals(q, keys.expand(q.shape), W)
        s = s.masked_fill(outside(s, W) & (keys[:, :1] >= 0), -math.inf)
        return spread(s.softmax(-1), W) @ threes_by_joining(v, W)

    def function(q, v):
        r = torch.arange(LENGTH * D).view(LENGTH, D) * 0.001
        return layer(q, v, r.cos()) + layer(q, v, (r + 3).cos())

    q, v = rand(4, LENGTH, D), rand(4, LENGTH, D)
    result, sites = sites_of(function, q, v)
    assert not sites[1].fused, sites
    torch.testing.assert_close(result, function(q, v))


def test_an_equal_layer_whose_bias_is_not_finite() -> None:
    trained, frozen = table(), torch.nn.Parameter(rand(H, 2 * W + 1).detach(), requires_grad=False)
    frozen.data[:, 0] = math.inf
    q, k, v = (x.detach() for x in qkv())

    def function(q, k, v, trained, frozen):
        return learned_by_distance(q, k, v, trained) + learned_by_distance(q, k, v, frozen)

    with torch.no_grad():
        result, sites = sites_of(function, q, k, v, trained, frozen)
        assert [s.fused for s in sites] == [True, False], sites
        torch.testing.assert_close(result, function(q, k, v, trained, frozen), equal_nan=True)


def edges_and_padding_in_one_mask(q, k, v, mask):
    return sliding(q, k, v, hiding=lambda s: s.masked_fill(outside(s, W) | ~mask.repeat_interleave(H, 0)[:, :, None], -math.inf))


def hidden_again(q, k, v, mask):
    return sliding(q, k, v, between=lambda s: s.masked_fill(~mask[:, None, :, None], -math.inf))


def padding_added(q, k, v, mask):
    return sliding(q, k, v, between=lambda s: s + torch.where(mask, 0.0, -1e9)[:, None, :, None])


def test_padding_by_a_number() -> None:
    check(padding_added, [*qkv(), padding()])


@pytest.mark.parametrize("form", [edges_and_padding_in_one_mask, hidden_again])
def test_rows_that_are_hidden_as_a_whole(form) -> None:
    """Their NaN reaches the gradients of the window's keys alone, in a fused kernel those of all keys: fused without gradients only."""
    inputs = [*qkv(), padding()]
    with torch.no_grad():
        result, (site,) = sites_of(form, *inputs)
    assert site.fused, site
    torch.testing.assert_close(result, form(*inputs), equal_nan=True)
    result, (site,) = sites_of(form, *inputs)
    assert site.refusal is not None and site.refusal.code == "diagonals" and "NaN" in site.refusal.text, site
    torch.testing.assert_close(result, form(*inputs), equal_nan=True)


def test_too_many_places_are_named() -> None:
    """No list is made of more than 2**24."""
    q, k, v = (torch.randn(1, 1, 1 << 14, 2) for _ in range(3))
    from fa_inductor import band_proof

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(band_proof, "MOST_PLACES", 1 << 14)
        _, (site,) = sites_of(plain, q, k, v)
    assert site.refusal is not None and site.refusal.code == "diagonals" and "too many" in site.refusal.text, site


def test_a_bias_that_may_be_infinite_is_refused() -> None:
    _, (site,) = sites_of(given_bias, *qkv(), torch.randn(B, H, LENGTH, 2 * W + 1))
    assert site.refusal is not None and site.refusal.code == "diagonals" and "-inf" in site.refusal.text


def test_what_is_proved_of_one_layer_is_not_taken_for_granted_of_another() -> None:
    """The second layer is equal to the first, the third hides its edges by a number, the fourth has values of other tokens."""

    def layers(q, k, v):
        first = plain(q, k, v)
        return plain(first, k, v) + edges_hidden_by_a_number(q, first, v) + values_shifted(q, k, first)

    inputs = qkv()
    result, sites = sites_of(layers, *inputs)
    assert [s.fused for s in sites] == [True, True, False, False], sites
    torch.testing.assert_close(result, layers(*inputs))


def test_equal_layers_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa_inductor import band_region

    proofs = []
    prove = band_region.prove
    monkeypatch.setattr(band_region, "prove", lambda *args: proofs.append(args) or prove(*args))
    check(lambda q, k, v: plain(plain(plain(q, k, v), k, v), k, v), qkv(), sites=3)
    assert len(proofs) == 1


def test_dropout() -> None:
    """Averaged over draws it is the attention without."""
    inputs = qkv()

    def function(q, k, v):
        return sliding(q, k, v, after=lambda p: F.dropout(p, 0.25))

    _, (site,) = sites_of(function, *inputs)
    assert site.fused, site
    compiled = rewritten(function)
    draws = torch.stack([compiled(*inputs).detach() for _ in range(400)])
    sigma = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - plain(*inputs)).abs() < 5 * sigma + 1e-5).all()  # of 768 numbers, one is further away in 1 of 2,000 runs


def test_lengths_that_are_symbols_are_refused() -> None:
    _, (site,) = sites_of(plain, *qkv(), dynamic=True)
    assert site.refusal is not None and "sizes are symbols" in site.refusal.text, site
