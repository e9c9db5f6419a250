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
    between=lambda s: s,
    after=lambda p: p,
    fill=-math.inf,
    pairs=pairs_by_joining,
    threes=threes_by_joining,
):
    b, h, length, d = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q / math.sqrt(d), k, v))
    scores = before(diagonals(q, k, W, pairs))
    scores = scores.masked_fill(outside(scores, W), fill)
    p = after(between(scores.view(b, h, length, -1)).softmax(-1)).flatten(0, 1)
    return (spread(p, W) @ threes(v, W)).view(b, h, length, d)


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
    return sliding(q, k, v, fill=0.0)


def edges_hidden_by_a_number(q, k, v):
    return sliding(q, k, v, fill=-1e9)


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


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (edges_not_hidden, "softmax_axis"),
        (edges_hidden_by_a_number, "softmax_axis"),
        (values_shifted, "softmax_axis"),
        (one_diagonal_twice, "scores_reindexed"),
        (keys_of_the_first_block_twice, "softmax_axis"),
    ],
)
def test_what_is_no_window_is_refused(form, code: str) -> None:
    inputs = qkv()
    result, (site,) = sites_of(form, *inputs)
    assert site.refusal is not None and site.refusal.code == code, site
    torch.testing.assert_close(result, form(*inputs))


def test_a_bias_that_may_be_infinite_is_refused() -> None:
    _, (site,) = sites_of(given_bias, *qkv(), torch.randn(B, H, LENGTH, 2 * W + 1))
    assert site.refusal is not None and site.refusal.code == "softmax_axis" and "-inf" in site.refusal.text


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
