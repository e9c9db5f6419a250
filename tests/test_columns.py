"""Softmaxes whose rows sum over more than the keys: attention sinks, null columns, softmax-plus-one. ``P = exp(s) / (sum exp(s) + sum exp(t))``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from fusing import check, rewritten, sites_of
from test_forms import FORMS, B, Case, D, H, L, qkv, rand
from torch import Tensor

from fa_inductor.options import Options
from fa_inductor.report import SiteReport, collecting

COLUMNS: dict[str, Case] = {}


def column(*inputs):
    def register(function):
        COLUMNS[function.__name__] = FORMS[function.__name__] = function, lambda: [*qkv(), *(make() for make in inputs)]
        return function

    return register


def causal() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).triu(1)


@column(lambda: rand(H))
def sink_behind(q, k, v, s):
    scores = (q @ k.mT * 0.3).masked_fill(causal().to(q.device), float("-inf"))
    joined = torch.cat([scores, s.reshape(1, -1, 1, 1).expand(B, -1, L, -1)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


@column(lambda: rand(H))
def shifted_and_scaled_with_its_sink(q, k, v, s):
    joined = torch.cat([q @ k.mT, s.view(1, H, 1, 1).expand(B, H, L, 1)], -1) / 16
    return ((joined - joined.amax(-1, keepdim=True)) * 16).softmax(-1)[..., :-1] @ v


@column(lambda: rand(H))
def sink_in_front(q, k, v, s):
    return torch.cat([s.view(1, H, 1, 1).expand(B, H, L, 1), q @ k.mT * 0.3], -1).softmax(-1)[..., 1:] @ v


@column(lambda: rand(H, 2), lambda: rand(L))
def sinks_on_both_sides(q, k, v, s, t):
    joined = torch.cat([s[None, :, None].expand(B, H, L, 2), q @ k.mT * 0.3, t[:, None].expand(B, H, L, 1)], -1)
    return joined.softmax(-1)[..., 2 : L + 2] @ v


@column(lambda: rand(H, D))
def score_of_a_learned_key(q, k, v, w):
    """The sink depends on the query: a small matrix product of its own."""
    return torch.cat([q @ k.mT * 0.3, q @ w[..., None]], -1).softmax(-1)[..., :L] @ v


@column(lambda: rand(H))
def capped_after_joining(q, k, v, s):
    joined = torch.cat([q @ k.mT, s.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
    return (torch.tanh(joined / 5) * 5).softmax(-1)[..., :-1] @ v


@column()
def zeros_joined(q, k, v):
    scores = q @ k.mT * 0.3
    return torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v


@column()
def plus_one(q, k, v):
    e = torch.exp(q @ k.mT * 0.2)
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@column()
def plus_one_written_twice(q, k, v):
    s = q @ k.mT * 0.2
    return (s.exp() / (s.exp().sum(-1, keepdim=True) + 1)) @ v


@column()
def plus_one_less_the_maximum(q, k, v):
    s = q @ k.mT * 2
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-m)) @ v


@column()
def plus_one_less_a_clamped_maximum(q, k, v):
    s = q @ k.mT * 2
    m = s.max(-1, keepdim=True).values.clamp(min=0).detach()
    e = (s - m).exp()
    return e / ((0 - m).exp() + e.sum(-1, keepdim=True)) @ v


@column()
def plus_a_tiny_number_that_counts(q, k, v):
    """Without the maximum the sum may be as small as the number that is added."""
    e = torch.exp(q @ k.mT * 2 - 20)
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@column(lambda: rand(H, 1, 1))
def plus_a_learned_term(q, k, v, t):
    s = q @ k.mT
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return e / (e.sum(-1, keepdim=True) + (t - m).exp()) @ v


@column(lambda: rand(H, 1, 1))
def larger_logsumexp(q, k, v, t):
    s = q @ k.mT
    return torch.exp(s - torch.logaddexp(s.logsumexp(-1, keepdim=True), t)) @ v


@column(lambda: rand(H))
def row_of_minus_infinity_and_a_sink(q, k, v, s):
    """Row 3 sees no key: the sink takes all of it, and the output is 0, not NaN."""
    hidden = causal().to(q.device).clone()
    hidden[3] = True
    joined = torch.cat([(q @ k.mT).masked_fill(hidden, float("-inf")), s.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
    return joined.softmax(-1)[..., :-1] @ v


@column(lambda: rand(H))
def row_of_the_least_number_and_a_sink(q, k, v, s):
    hidden = causal().to(q.device).clone()
    hidden[3] = True
    joined = torch.cat([(q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min), s.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
    return joined.softmax(-1)[..., :-1] @ v


@column(lambda: rand(H))
def sink_and_factor(q, k, v, s):
    joined = torch.cat([q @ k.mT, s.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
    return (joined.softmax(-1)[..., :-1] * torch.arange(L, device=q.device)) @ v


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    function, inputs = COLUMNS[name]
    (site,) = check(function, inputs(), dynamic=dynamic)
    assert "sink" in site.labels


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_in_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = COLUMNS[name]
    check(function, [x.detach().bfloat16().requires_grad_() for x in inputs()])


def test_only_the_sink_trains() -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in qkv())
    check(sink_behind, [q, k, v, rand(H)])


def test_every_column_is_infinitely_low() -> None:
    """No key and no sink: NaN, as in eager."""

    def function(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        hidden = causal()
        hidden[3] = True
        joined = torch.cat([(q @ k.mT).masked_fill(hidden, float("-inf")), s.expand(B, H, L, 1)], -1)
        return joined.softmax(-1)[..., :-1] @ v

    check(function, [*(x.detach() for x in qkv()), torch.tensor(float("-inf"))])


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4])
def test_row_whose_keys_and_columns_are_all_hidden(fill: float, columns: int) -> None:
    """With a finite fill it is an average over the keys and the columns; with -inf NaN."""

    def function(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        joined = torch.cat([q @ k.mT, s.view(1, H, 1, 1).expand(B, H, L, columns)], -1)
        return joined.masked_fill((torch.arange(L, device=q.device) == 3)[:, None], fill).softmax(-1)[..., :-columns] @ v

    torch.manual_seed(0)
    check(function, [*qkv(), rand(H)])


def test_fill_that_is_an_input() -> None:
    """A number that changes from call to call becomes a symbol, which the keys and the columns read."""

    def function(q: Tensor, k: Tensor, v: Tensor, s: Tensor, fill: float) -> Tensor:
        joined = torch.cat([q @ k.mT, s.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
        return joined.masked_fill((torch.arange(L, device=q.device) == 3)[:, None], fill).softmax(-1)[..., :-1] @ v

    torch.manual_seed(0)
    inputs = [*qkv(), rand(H)]
    compiled = rewritten(function)
    with collecting() as reports:
        for fill in (-2.0, -30.0, -1e4):
            torch.testing.assert_close(compiled(*inputs, fill), function(*inputs, fill))
    assert [s.fused for r in reports for s in r.sites] == [True, True], "\n".join(map(str, reports))


def test_dropout_and_a_sink() -> None:
    """The mean over many masks is the output without dropout, and rows keep what the sink leaves them."""
    torch.manual_seed(0)
    q, k = rand(1, 1, 64, D, grad=False), rand(1, 1, 64, D, grad=False)
    v, s = torch.eye(64)[None, None].clone(), torch.tensor(1.0)

    def function(p: float) -> Tensor:
        joined = torch.cat([q @ k.mT, s.expand(1, 1, 64, 1)], -1)
        return F.dropout(joined.softmax(-1)[..., :-1], p) @ v

    with torch.no_grad():
        dropped, (site,) = sites_of(function, 0.5)
        exact = function(0.0)
    assert site.fused
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * exact[kept], rtol=1e-5, atol=1e-7)
    assert abs(kept.double().mean().item() - 0.5) < 5 * (0.25 / kept.numel()) ** 0.5


def test_probabilities_and_sink_escape() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.cat([q @ k.mT, s.view(1, H, 1, 1).expand(B, H, L, 1)], -1).softmax(-1)
        return p[..., :-1] @ v, p

    torch.manual_seed(0)
    check(function, [*qkv(), rand(H)])  # type: ignore[arg-type]


# -- near misses ---------------------------------------------------------------------------------------------------------
def refusal_of(function, *inputs) -> tuple[str, str]:
    _, (site,) = sites_of(function, *inputs)
    assert site.refusal is not None, str(site)
    return site.refusal.code, site.refusal.text


def test_near_misses() -> None:
    """Some keys' probabilities dropped; a term that is not known to be one of the sum; one that differs from key to key; other scores joined."""

    def some_keys(q, k, v):
        return (q @ k.mT).softmax(-1)[..., 1:] @ v[:, :, 1:]

    def one_next_to_exponentials_less_the_maximum(q, k, v):
        s = q @ k.mT
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) + 1) @ v

    def other_maximum(q, k, v):
        s = q @ k.mT
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return e / (e.sum(-1, keepdim=True) + torch.exp(-s.detach().amax(-1, keepdim=True))) @ v

    def term_of_any_sign(q, k, v, t):
        e = torch.exp(q @ k.mT)
        return e / (e.sum(-1, keepdim=True) + t) @ v

    def term_for_each_key(q, k, v, t):
        e = torch.exp(q @ k.mT)
        return e / (e.sum(-1, keepdim=True) + t.exp()) @ v

    def two_attentions_joined(q, k, v):
        p = torch.cat([q @ k.mT, k @ q.mT], -1).softmax(-1)
        return p[..., :L] @ v

    def sum_with_all_columns(q, k, v):
        p = torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)
        return p @ torch.cat([v, v[..., :1, :]], -2)

    found = {
        f.__name__: refusal_of(f, *qkv(), *more)
        for f, more in (
            (some_keys, ()),
            (one_next_to_exponentials_less_the_maximum, ()),
            (other_maximum, ()),
            (term_of_any_sign, (rand(H, 1, 1),)),
            (term_for_each_key, (rand(H, 1, L),)),
            (two_attentions_joined, ()),
            (sum_with_all_columns, ()),
        )
    }
    assert_expected_inline(
        "\n".join(f"{name}: {code}: {text}" for name, (code, text) in found.items()),
        """\
some_keys: softmax_axis: the softmax runs over dimension 3 of (2, 3, 17, 17), the matmul sums over 16 of its 17 places
one_next_to_exponentials_less_the_maximum: altered_softmax: 1 is added to the sum and counts: the sum may be 1, in which only up to 3e-08 is lost
other_maximum: altered_softmax: what aten.div.Tensor applies to exp(x) is not its own sum over one axis
term_of_any_sign: altered_softmax: what aten.div.Tensor applies to exp(x) is not its own sum over one axis
term_for_each_key: altered_softmax: what aten.div.Tensor applies to exp(x) is not its own sum over one axis
two_attentions_joined: joined_scores: the softmax runs over 17 scores besides those of the 17 keys
sum_with_all_columns: joined_scores: some of the joined scores that have values of their own are no matrix product""",
    )


def test_report_names_the_sink() -> None:
    site: SiteReport
    function, inputs = COLUMNS["sink_behind"]
    _, (site,) = sites_of(function, *inputs(), options=Options(kernel="tiled"))
    assert_expected_inline(
        f"{', '.join(site.labels)}\n{site.program}",
        """\
causal, sink
where(k - q < 1, 0.3*s, -inf); softmax also over c0[h]""",
    )
