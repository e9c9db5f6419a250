"""Softmaxes over the joined scores of several products: each piece of the keys is an attention of its own, with a share of each row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, sites_of
from test_forms import FORMS, B, Case, D, H, L, qkv, rand
from torch import Tensor

from fa_inductor.options import Options

N = 21
"""Keys of the prefix: more than could be columns."""
JOINED: dict[str, Case] = {}


def joined(*inputs):
    """A case of q, k, v, the prefix's keys and values, and what else it takes."""

    def register(function):
        make = (lambda: rand(B, H, N, D), lambda: rand(B, H, N, D), *inputs)
        JOINED[function.__name__] = FORMS[function.__name__] = function, lambda: [*qkv(), *(m() for m in make)]
        return function

    return register


def both(q: Tensor, k: Tensor, pk: Tensor) -> Tensor:
    return torch.cat([q @ pk.mT, q @ k.mT], -1) * 0.3


def later(x: Tensor, first: int = 1) -> Tensor:
    """Hides the keys behind each query (``first`` 0: its own too, so that row 0 sees none)."""
    return torch.ones(L, L, dtype=torch.bool, device=x.device).triu(first)


def row(x: Tensor) -> Tensor:
    return (torch.arange(L, device=x.device) == 3)[:, None]


@joined()
def prefix(q, k, v, pk, pv):
    p = both(q, k, pk).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def prefix_behind_and_causal(q, k, v, pk, pv):
    p = torch.cat([(q @ k.mT).masked_fill(later(q), float("-inf")), q @ pk.mT], -1).softmax(-1)
    out = p[..., L:] @ pv
    out += p[..., :L] @ v
    return out.transpose(1, 2).reshape(B, L, H * D)


@joined()
def values_joined_at_another_place(q, k, v, pk, pv):
    return both(q, k, pk).softmax(-1) @ torch.cat([v, pv], -2)


@joined()
def split_probabilities(q, k, v, pk, pv):
    p, rest = both(q, k, pk).softmax(-1).split([N, L], -1)
    return rest @ v + p @ pv


@joined()
def one_product_with_joined_values(q, k, v, pk, pv):
    return both(q, k, pk).softmax(-1) @ torch.cat([pv, v], -2)


@joined(lambda: rand(B, H, L, D), lambda: rand(B, H, L, D))
def three_pieces_in_two_products(q, k, v, pk, pv, k2, v2):
    p = torch.cat([both(q, k, pk), (q @ k2.mT).masked_fill(later(q), -1e9)], -1).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", p[..., : N + L], torch.cat([pv, v], 2)) + (p[..., N + L :] @ v2).transpose(1, 2)


@joined(lambda: rand(H, 1, N), lambda: rand(L, L))
def biases_of_their_own(q, k, v, pk, pv, b, c):
    p = torch.cat([q @ pk.mT * 0.2 + b, torch.tanh(q @ k.mT / 4) * 4 + c], -1).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined(lambda: rand(H, L, N + L))
def learned_bias_over_both(q, k, v, pk, pv, b):
    p = (both(q, k, pk) + b).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined(lambda: rand(H, 1, 1))
def learned_temperature_after_joining(q, k, v, pk, pv, t):
    p = (torch.cat([q @ pk.mT, q @ k.mT], -1) * t.exp()).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined(lambda: rand(B, 1, 1, N + L, grad=False) < 0.3)
def mask_over_both(q, k, v, pk, pv, keep):
    s = both(q, k, pk).masked_fill(~keep, torch.finfo(q.dtype).min)
    p = torch.softmax(s - s.amax(-1, keepdim=True).detach(), -1, dtype=torch.float32).to(q.dtype)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def piece_without_a_visible_key(q, k, v, pk, pv):
    """Row 0 sees the prefix alone."""
    p = torch.cat([q @ pk.mT, (q @ k.mT).masked_fill(later(q, 0), float("-inf"))], -1).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def piece_under_a_finite_fill(q, k, v, pk, pv):
    p = torch.cat([q @ pk.mT, (q @ k.mT).masked_fill(later(q, 0), torch.finfo(q.dtype).min)], -1).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def row_under_a_finite_fill(q, k, v, pk, pv):
    """Row 3 is an average over all keys of both pieces."""
    p = both(q, k, pk).masked_fill(row(q), torch.finfo(q.dtype).min).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def row_under_an_added_fill(q, k, v, pk, pv):
    """A captured mask: nothing is known of its size."""
    p = (both(q, k, pk) + (torch.zeros(L, 1, device=q.device, dtype=q.dtype).masked_fill(row(q), -1e9))).softmax(-1)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined(lambda: rand(H))
def prefix_and_a_sink_between(q, k, v, pk, pv, s):
    p = torch.cat([q @ pk.mT, s.view(1, H, 1, 1).expand(B, H, L, 1), q @ k.mT], -1).softmax(-1)
    return p[..., :N] @ pv + p[..., N + 1 :] @ v


@joined(lambda: rand(H, 2))
def two_sinks_in_a_row_under_a_finite_fill(q, k, v, pk, pv, s):
    p = torch.cat([both(q, k, pk), s[None, :, None].expand(B, H, L, 2)], -1).masked_fill(row(q), -1e9).softmax(-1)
    return p[..., :N] @ pv + p[..., N:-2] @ v


@joined()
def joined_plus_one(q, k, v, pk, pv):
    e = both(q, k, pk).exp()
    p = e / (1 + e.sum(-1, keepdim=True))
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def joined_and_divided_later(q, k, v, pk, pv):
    s = both(q, k, pk)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e @ torch.cat([pv, v], -2)) / e.sum(-1, keepdim=True)


@joined(lambda: rand(L, N + L, grad=False))
def factors_on_the_probabilities(q, k, v, pk, pv, f):
    p = both(q, k, pk).softmax(-1) * f
    return p[..., :N] @ pv * 2 + (p[..., N:] * 0.5) @ v


@joined()
def values_made_late(q, k, v, pk, pv):
    """The second piece's values are computed behind the first piece's output, which is written to."""
    p = both(q, k, pk).softmax(-1)
    out = p[..., :N] @ pv
    out.mul_(1.5)
    return out + p[..., N:] @ (v * 2)[:, :, :L].contiguous()


@joined()
def values_changed_in_between(q, k, v, pk, pv):
    p = both(q, k, pk).softmax(-1)
    w = v * 2
    u = w.view(B, H, L, D)
    out = p[..., :N] @ pv
    w.add_(1.0)
    return out + p[..., N:] @ u


@joined()
def probabilities_joined_in_another_order(q, k, v, pk, pv):
    p = both(q, k, pk).softmax(-1)
    return torch.cat([p[..., N:], p[..., :N]], -1) @ torch.cat([v, pv], -2)


@joined(lambda: rand(B, H, 5, D), lambda: rand(B, H, 5, D))
def few_keys_in_another_order(q, k, v, pk, pv, k1, v1):
    """So few keys could be columns."""
    p = torch.cat([q @ k1.mT, q @ k[:, :, :7].mT], -1).softmax(-1)
    return torch.cat([p[..., 5:], p[..., :5]], -1) @ torch.cat([v[:, :, :7], v1], -2) + 0 * (pk.sum() + pv.sum())


@joined()
def mask_on_the_exponentials(q, k, v, pk, pv):
    s = both(q, k, pk)
    keep = torch.cat([torch.ones(L, N, dtype=torch.bool, device=q.device), ~later(q)], -1)
    e = torch.exp(s - s.amax(-1, keepdim=True)) * keep
    p = e / e.sum(-1, keepdim=True)
    return p[..., :N] @ pv + p[..., N:] @ v


@joined()
def an_empty_part(q, k, v, pk, pv):
    p = torch.cat([q @ pk.mT, q @ k[:, :, :0].mT, q @ k.mT], -1).softmax(-1)
    return p @ torch.cat([pv, v], -2)


@joined()
def transposed_scores(q, k, v, pk, pv):
    """Keys times queries, joined and normalised along the first of the two axes."""
    p = torch.cat([pk @ q.mT, k @ q.mT], -2).softmax(-2)
    return (pv.mT @ p[..., :N, :] + v.mT @ p[..., N:, :]).mT


@joined()
def windows_around_each_query(q, k, v, pk, pv):
    """Each query has window keys of its own (DALL-E's convolutional attention): a batch of single queries."""
    windows = (F.pad(x, (0, 0, 4, 0)).unfold(2, 5, 1).transpose(-1, -2) for x in (k, v))
    wk, wv = windows
    local = torch.einsum("bhid,bhijd->bhij", q, wk)
    outside = torch.arange(L, device=q.device)[:, None] + torch.arange(5, device=q.device) < 4
    p = torch.cat([q @ pk.mT, local.masked_fill(outside, -torch.finfo(q.dtype).max)], -1).softmax(-1)
    return p[..., :N] @ pv + torch.einsum("bhij,bhijd->bhid", p[..., N:], wv)


@joined(lambda: rand(B, H, 6, 4, D), lambda: rand(B, H, 6, 4, D), lambda: rand(B, H, 6, 4, D))
def blocks_and_global_keys(q, k, v, pk, pv, bq, bk, bv):
    """Blocks of queries see their neighbours' keys, and all see the global ones (BigBird)."""
    near, values = (torch.cat([x[:, :, :-2], x[:, :, 1:-1], x[:, :, 2:]], 3) for x in (bk, bv))
    mid = bq[:, :, 1:-1]
    scores = [torch.einsum("bhlqd,bhkd->bhlqk", mid, pk), mid @ near.mT, torch.einsum("bhlqd,bhkd->bhlqk", mid, k)]
    p = torch.cat(scores, -1).softmax(-1)
    out = p[..., N : N + 12] @ values
    out += torch.einsum("bhlqk,bhkd->bhlqd", p[..., :N], pv)
    out += torch.einsum("bhlqk,bhkd->bhlqd", p[..., N + 12 :], v)
    return out + 0 * q.sum()


@joined(lambda: rand(B, 1, N, D), lambda: rand(B, 1, N, D))
def prefix_shared_by_the_heads(q, k, v, pk, pv, k1, v1):
    p = torch.cat([q @ k1.mT, q @ k.mT], -1).softmax(-1)
    return p[..., :N] @ v1 + p[..., N:] @ v + 0 * (pk.sum() + pv.sum())


@joined()
def outputs_apart(q, k, v, pk, pv):
    p = both(q, k, pk).softmax(-1)
    return p[..., :N] @ pv, (p[..., N:] @ v).transpose(1, 2).contiguous(), p


ONLY_STATIC = ("probabilities_joined_in_another_order", "few_keys_in_another_order")
"""The sizes of their slices are not known to be those of the parts where they are symbols: refused there."""


@pytest.mark.parametrize(("name", "dynamic"), [(n, d) for n in JOINED for d in (False, True) if not d or n not in ONLY_STATIC])
def test_joined(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    function, inputs = JOINED[name]
    (site,) = check(function, inputs(), dynamic=dynamic)
    assert "joined" in site.labels


@pytest.mark.parametrize("name", JOINED)
def test_joined_in_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = JOINED[name]
    check(function, [x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x for x in inputs()])


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("how", ["chosen", "added"])
def test_row_whose_pieces_are_all_hidden(fill: float, how: str) -> None:
    """An average over all keys for a finite fill, NaN for -inf, and NaN in the same gradients."""

    def function(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        s = both(q, k, pk)
        s = s.masked_fill(row(q), fill) if how == "chosen" else s + torch.zeros(L, 1, dtype=q.dtype).masked_fill(row(q), fill)
        p = s.softmax(-1)
        return p[..., :N] @ pv + p[..., N:] @ v

    torch.manual_seed(0)
    check(function, JOINED["prefix"][1]())


def test_hidden_rows_are_zero_on_request() -> None:
    """The option masked_rows: neither the row nor the gradients hold NaN."""

    def function(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        p = both(q, k, pk).masked_fill(row(q), float("-inf")).softmax(-1)
        return p[..., :N] @ pv + p[..., N:] @ v

    torch.manual_seed(0)
    inputs = JOINED["prefix"][1]()
    out, (site,) = sites_of(function, *inputs, options=Options(masked_rows="zero"))
    assert site.fused
    seen = (torch.arange(L) != 3)[:, None]
    grads = [torch.autograd.grad((o * seen).sum() if o is not out else o.sum(), inputs) for o in (out, prefix(*inputs))]
    assert out[:, :, 3].eq(0).all()
    for ours, eager in zip(*grads):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("trained", range(5))
def test_one_input_trains(trained: int) -> None:
    torch.manual_seed(0)
    inputs = [x.detach().requires_grad_(i == trained) for i, x in enumerate(JOINED["prefix"][1]())]
    check(prefix, inputs)


def test_dropout_over_both_pieces() -> None:
    """The mean over many masks is the output without dropout, and the pieces' masks are independent of each other."""
    torch.manual_seed(0)
    q, k, pk = (rand(1, 1, 64, D, grad=False) for _ in range(3))
    left, right = torch.eye(64, 128)[None, None], torch.eye(64, 128).roll(64, 1)[None, None]

    def function(p: float) -> Tensor:
        probabilities = F.dropout(torch.cat([q @ pk.mT, q @ k.mT], -1).softmax(-1), p)
        return probabilities[..., :64] @ left + probabilities[..., 64:] @ right

    with torch.no_grad():
        dropped, (site,) = sites_of(function, 0.5)
        exact = function(0.0)
    assert site.fused
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * exact[kept], rtol=1e-5, atol=1e-7)
    for part in (kept, kept[..., :64] == kept[..., 64:]):
        assert abs(part.double().mean().item() - 0.5) < 5 * (0.25 / part.numel()) ** 0.5


def test_write_between_the_products_with_values() -> None:
    """All pieces are computed where the first output is: an input that is written to behind it must not be read before."""

    def function(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        p = both(q, k, pk).softmax(-1)
        out = p[..., :N] @ pv
        v.add_(1.0)
        return out + p[..., N:] @ v

    q, k, v, pk, pv = (x.detach() for x in JOINED["prefix"][1]())
    expected = function(q, k, v.clone(), pk, pv)
    result, (site,) = sites_of(function, q, k, v, pk, pv)
    assert site.refusal is not None and site.refusal.code == "mutation", str(site)
    torch.testing.assert_close(result, expected)


def test_write_to_a_sink_before_the_products_with_values() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, s: Tensor) -> Tensor:
        p = torch.cat([both(q, k, pk), s.expand(B, H, L, 1)], -1).softmax(-1)
        s.add_(1.0)
        return p[..., :N] @ pv + p[..., N:-1] @ v

    inputs = [x.detach() for x in JOINED["prefix"][1]()]
    s = torch.randn(H, 1, 1)
    expected = function(*inputs, s.clone())
    result, (site,) = sites_of(function, *inputs, s)
    assert site.refusal is not None and site.refusal.code == "mutation", str(site)
    torch.testing.assert_close(result, expected)


def test_softmaxes_that_read_each_others_outputs() -> None:
    """The second one's values are the first one's outputs, one of which comes late."""

    def function(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        p, r = both(q, k, pk).softmax(-1), both(k, q, pk).softmax(-1)
        one = p[..., :N] @ pv
        two = r[..., N:] @ (one + v)
        return one * two + (p[..., N:] @ v) + r[..., :N] @ pv

    torch.manual_seed(0)
    inputs = JOINED["prefix"][1]()
    result, sites = sites_of(function, *inputs)
    assert any(s.fused for s in sites) and all(s.fused or s.refusal for s in sites), "\n".join(map(str, sites))
    assert not any(s.refusal and s.refusal.code == "internal_error" for s in sites), "\n".join(map(str, sites))
    torch.testing.assert_close(result, function(*inputs))


def test_a_key_of_both_products() -> None:
    """Its probability meets two values: the second product is read as one over the other keys, with this one beside them."""

    def function(q, k, v, pk, pv):
        p = both(q, k, pk).softmax(-1)
        return p[..., : N + 1] @ torch.cat([pv, v[:, :, :1]], 2) + p[..., N:] @ v

    check(function, JOINED["prefix"][1]())


# -- near misses ---------------------------------------------------------------------------------------------------------
def test_near_misses() -> None:
    def without_values(q, k, v, pk, pv):
        return both(q, k, pk).softmax(-1)[..., N:] @ v

    def joined_along_the_queries(q, k, v, pk, pv):
        return torch.cat([q @ k.mT, pk @ k.mT], -2).softmax(-1) @ v

    def one_piece_detached(q, k, v, pk, pv):
        p = torch.cat([q @ pk.mT, (q @ k.mT).detach()], -1).softmax(-1)
        return p[..., :N] @ pv + p[..., N:] @ v

    def one_piece_without_gradient(q, k, v, pk, pv):
        with torch.no_grad():
            s = q @ k.mT
        p = torch.cat([q @ pk.mT, s], -1).softmax(-1)
        return p[..., :N] @ pv + p[..., N:] @ v

    def values_from_the_first_output(q, k, v, pk, pv):
        p = both(q, k, pk).softmax(-1)
        out = p[..., :N] @ pv
        return p[..., N:] @ (v + out)

    def values_by_a_late_product(q, k, v, pk, pv):
        p = both(q, k, pk).softmax(-1)
        out = p[..., :N] @ pv
        return out + p[..., N:] @ (v @ pv.mT @ pk)

    def dropped_and_used(q, k, v, pk, pv):
        p = F.dropout(both(q, k, pk).softmax(-1), 0.5)
        return p[..., :N] @ pv + p[..., N:] @ v, p

    def summed_over_heads(q, k, v, pk, pv):
        p = both(q, k, pk).softmax(-1)
        return p[..., :N] @ pv + p.flip(1)[..., N:] @ v

    def masked_again(q, k, v, pk, pv):
        hidden = torch.cat([later(q)[:, :1].expand(L, N), later(q)], -1)
        p = both(q, k, pk).masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
        return p[..., :N] @ pv + p[..., N:] @ v

    functions = (
        without_values,
        joined_along_the_queries,
        one_piece_detached,
        one_piece_without_gradient,
        values_from_the_first_output,
        values_by_a_late_product,
        dropped_and_used,
        summed_over_heads,
        masked_again,
    )
    found = {}
    for f in functions:
        _, reports = sites_of(f, *JOINED["prefix"][1]())
        found[f.__name__] = "; ".join(str(r.refusal and f"{r.refusal.code}: {r.refusal.text}") for r in reports)
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in found.items()),
        """\
without_values: joined_scores: the softmax runs over 21 scores besides those of the 17 keys
joined_along_the_queries: not_query_times_key: Q is read at an index that depends on the part of a concatenation
one_piece_detached: joined_scores: some of the joined scores that have values of their own are no matrix product
one_piece_without_gradient: grad_mode: part of the scores and their softmax is computed under no_grad and part is not
values_from_the_first_output: joined_order: matmul_2 is computed after the first of the outputs and read for another
values_by_a_late_product: joined_order: matmul_4 is computed after the first of the outputs and read for another
dropped_and_used: escape_after_dropout: output uses the probabilities after dropout too
summed_over_heads: joined_scores: the softmax runs over 17 scores besides those of the 21 keys
masked_again: post_mask_nan: probabilities are masked again after a softmax that may have rows of -inf alone, or NaN""",
    )
