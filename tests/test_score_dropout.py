"""A dropout on the scores, before the softmax: the same distribution as in eager, one mask in forward and backward, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusing import check, rewritten, sites_of
from golden import B, Golden, H, L, ones, qkv, text_of, verdicts_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fa_inductor
from fa_inductor.report import collecting

N, P = 33, 0.4
"""Length, and chance to be dropped, where the numbers matter."""
FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)
HIDDEN = torch.rand(N, N, generator=torch.Generator().manual_seed(3)) < 0.3
Drop = Callable[[Tensor], Tensor]
Attention = Callable[[Drop, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of the dropout, queries, keys, values and a bias."""


def plain(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return drop(q @ k.mT * 0.5).softmax(-1) @ v


def mask_after(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return drop(q @ k.mT * 0.5).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v


def finite_mask_after(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    hidden = torch.arange(N) >= torch.arange(N)[:, None] - 5  # the first rows see no key
    return drop(q @ k.mT * 0.5).masked_fill(hidden, -1e9).softmax(-1) @ v


def mask_before(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """A hidden score that is dropped is 0: visible."""
    return drop((q @ k.mT * 0.5).masked_fill(FUTURE, -1e9)).softmax(-1) @ v


def infinite_mask_before(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """-inf times 0: rows in which a hidden score is dropped are NaN in eager too."""
    return drop((q @ k.mT * 0.5).masked_fill(FUTURE, -torch.inf)).softmax(-1) @ v


def bias_before(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return drop(q @ k.mT * 0.5 + b).softmax(-1) @ v


def bias_after(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (drop(q @ k.mT * 0.5) + b).masked_fill(HIDDEN, -torch.inf).softmax(-1) @ v


def capped(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(drop(q @ k.mT) / 3).mul(3).softmax(-1) @ v


def by_hand(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    s = drop(q @ k.mT * 0.5)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def divided_behind(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    e = drop(q @ k.mT * 0.5).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def with_a_sink(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    s = torch.cat([drop(q @ k.mT * 0.5), b[..., :1].expand(1, 2, N, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def merged(drop: Drop, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (drop(torch.bmm(q[0], k[0].mT) * 0.5).softmax(-1) @ v[0])[None]


CASES = (plain, mask_after, finite_mask_after, mask_before, infinite_mask_before, bias_before, bias_after, capped, by_hand, divided_behind, with_a_sink, merged)
ATTENTIONS: dict[str, Attention] = {f.__name__: f for f in CASES}


def numbers() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in ((1, 2, N, 8), (1, 2, N, 8), (1, 2, N, N), (2, N, N))]


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, P)


def keep_mask(seed: int) -> Tensor:
    """The scores that a call after ``torch.manual_seed(seed)`` keeps, read off scores of 2 and an identity V."""
    q, k = torch.ones(1, 2, N, 4), torch.full((1, 2, N, 4), 0.5)
    compiled = rewritten(lambda q, k, v: F.dropout(q @ k.mT, P).softmax(-1) @ v)
    torch.manual_seed(seed)
    probabilities = compiled(q, k, torch.eye(N).expand(1, 2, N, N))
    return probabilities > probabilities.mean(-1, keepdim=True)


def explicit(keep: Tensor) -> Drop:
    """Eager's dropout with a given mask."""
    return lambda x: x * keep.view(x.shape) / (1 - P)


def run(function: Callable[..., Tensor], seed: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(seed)
    out = function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    found = torch.autograd.grad(out, inputs, weights, allow_unused=True)
    return [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs))]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_forward_and_backward_are_eagers_with_the_mask_that_is_drawn(name: str) -> None:
    attention, inputs = ATTENTIONS[name], numbers()
    compiled = rewritten(lambda *tensors: attention(drop, *tensors))
    with collecting() as reports:
        ours = run(compiled, 5, inputs)
    (site,) = [s for r in reports for s in r.sites]
    assert site.fused and site.kernel == "tiled" and "score dropout" in site.labels, str(site)
    keep = keep_mask(5)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for got, want in zip(ours, run(lambda *tensors: attention(explicit(keep), *tensors), 5, exact)):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert bool(ours[0].isnan().any()) == (name == "infinite_mask_before")


@pytest.mark.parametrize("name", ["plain", "mask_after", "mask_before", "bias_before"])
def test_distribution_is_eagers(name: str) -> None:
    """Mean and spread of many calls."""
    inputs = [x.detach() for x in numbers()]
    attention = ATTENTIONS[name]
    compiled = rewritten(lambda *tensors: attention(drop, *tensors))
    ours = torch.stack([compiled(*inputs) for _ in range(400)])
    eager = torch.stack([attention(drop, *inputs) for _ in range(400)])
    assert fa_inductor.counters()["rewritten"] >= 1
    error = (ours.mean(0) - eager.mean(0)).abs()
    assert (error <= 5.5 * (ours.var(0) + eager.var(0)).sqrt() / 20 + 1e-6).all()
    assert abs(ours.std(0).mean() / eager.std(0).mean() - 1) < 0.05


def test_every_call_draws_anew_at_the_right_rate() -> None:
    masks = torch.stack([keep_mask(seed) for seed in range(4)]).double()
    assert abs(float(masks.mean()) - (1 - P)) < 5 * (P * (1 - P) / masks.numel()) ** 0.5
    agree = float((masks[1:] == masks[:-1]).double().mean())
    assert abs(agree - (P**2 + (1 - P) ** 2)) < 0.03
    compiled, inputs = rewritten(lambda *tensors: plain(drop, *tensors)), numbers()
    assert not torch.equal(compiled(*inputs), compiled(*inputs))


def test_a_dropout_after_the_softmax_has_a_mask_of_its_own() -> None:
    """A dropped score of 5 leaves a probability near 0: both kinds of zeros are told apart, and come in all combinations."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(F.dropout(q @ k.mT, 0.5).softmax(-1), 0.25) @ v

    q, k, eye = torch.ones(2, 3, 64, 4), torch.full((2, 3, 64, 4), 0.5), torch.eye(64).expand(2, 3, 64, 64)
    p, sites = sites_of(both, q, k, eye)
    assert [s.fused for s in sites] == [True]
    kept, high = p > 0, p > p.mean(-1, keepdim=True)
    assert abs(float(kept.double().mean()) - 0.75) < 0.015
    assert abs(float(high[kept].double().mean()) - 0.5) < 0.02
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, N, 8) for _ in range(3)]
    compiled = rewritten(both)
    ours, eager = (torch.stack([f(*inputs) for _ in range(400)]) for f in (compiled, both))
    assert ((ours.mean(0) - eager.mean(0)).abs() <= 5.5 * (ours.var(0) + eager.var(0)).sqrt() / 20).all()
    assert abs(ours.std(0).mean() / eager.std(0).mean() - 1) < 0.05


def test_a_checkpoint_draws_the_same_mask_again() -> None:
    inputs = numbers()
    body = lambda *tensors: bias_before(drop, *tensors)  # noqa: E731
    compiled = torch.compile(lambda *tensors: checkpoint(body, *tensors, use_reentrant=False), backend="flashattn")
    torch._dynamo.reset()
    with collecting() as reports:
        ours = run(compiled, 5, inputs)
    assert [s.fused for r in reports for s in r.sites] == [True]
    # V is a square matrix: the gradient of the values is P^T times the weights, and P that of the forward pass
    torch.manual_seed(5)
    probabilities = compiled(*inputs[:2], torch.eye(N).expand(1, 2, N, N), inputs[3])
    torch.testing.assert_close(ours[0], probabilities @ inputs[2], rtol=1e-4, atol=1e-5)
    weights = torch.randn(ours[0].shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours[3], probabilities.mT @ weights, rtol=1e-4, atol=1e-5)


def test_joined_scores_are_dropped_apart() -> None:
    def joined(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        s = F.dropout(torch.cat([q @ k.mT, q @ k.flip(-2).mT], -1), 0.5)
        return s.softmax(-1) @ torch.cat([v, v.flip(-2)], -2)

    inputs = [x.detach() for x in numbers()]
    ours, sites = sites_of(joined, *inputs)
    assert [s.fused for s in sites] == [True] and set(sites[0].labels) == {"score dropout", "joined"}, str(sites[0])
    compiled = rewritten(joined)
    ours, eager = (torch.stack([f(*inputs) for _ in range(200)]) for f in (compiled, joined))
    assert ((ours.mean(0) - eager.mean(0)).abs() <= 5.5 * (ours.var(0) + eager.var(0)).sqrt() / 200**0.5).all()
    assert abs(ours.std(0).mean() / eager.std(0).mean() - 1) < 0.1


@pytest.mark.parametrize("training", [False, True])
def test_in_evaluation_or_of_nothing_it_is_not_there(training: bool) -> None:
    (site,) = check(lambda q, k, v: F.dropout(q @ k.mT, 0.0 if training else 0.3, training).softmax(-1) @ v, numbers()[:3])
    assert site.labels == ("plain",)


def test_a_shared_mask_that_values_repeat_is_one() -> None:
    """One head of scores for four heads of values: eager draws once, and so does the kernel."""
    q, k, eye = torch.ones(2, 1, N, 4), torch.ones(2, 1, N, 4), torch.eye(N).expand(2, 4, N, N)
    p, sites = sites_of(lambda q, k, v: F.dropout(q @ k.mT, P).softmax(-1) @ v, q, k, eye)
    assert [s.fused for s in sites] == [True]
    assert (p == p[:, :1]).all() and (p[0] != p[1]).any()


def test_fallback_random_is_refused() -> None:
    with torch._inductor.config.patch(fallback_random=True):
        _, sites = sites_of(lambda *tensors: plain(drop, *tensors), *numbers())
    assert sites[0].refusal is not None and sites[0].refusal.code == "fallback_random"


# -- golden --------------------------------------------------------------------------------------------------------------
def twice(q, k, v, b):
    return F.dropout(F.dropout(q @ k.mT, 0.1) + b, 0.1).softmax(-1) @ v


def all_dropped(q, k, v, b):
    return F.dropout(q @ k.mT, 1.0).softmax(-1) @ v


def scores_returned(q, k, v, b):
    s = F.dropout(q @ k.mT, 0.1)
    return s.softmax(-1) @ v, s


def probabilities_returned(q, k, v, b):
    p = F.dropout(q @ k.mT, 0.1).softmax(-1)
    return p @ v, p


def maximum_returned(q, k, v, b):
    s = F.dropout(q @ k.mT, 0.1)
    m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return (e / e.sum(-1, keepdim=True)) @ v, m


def several_products(q, k, v, b):
    p = F.dropout(q @ k.mT, 0.1).softmax(-1)
    return p @ v + p @ k


def two_softmaxes(q, k, v, b):
    s = F.dropout(q @ k.mT, 0.1)
    return s.softmax(-1) @ v + (s * 2).softmax(-1) @ v


def one_draw_for_all_heads(q, k, v, b):
    return (F.dropout(q[:, :1] @ k[:, :1].mT, 0.1) + b[0, 0] * torch.arange(H).view(H, 1, 1)).softmax(-1) @ v


def two_draws_for_a_score(q, k, v, b):
    s = F.dropout((q[:, :1] @ k[:, :1].mT).expand(B, 2, L, L), 0.1)
    return (s[:, :1] + s[:, 1:]).softmax(-1) @ v


def shifted_before(q, k, v, b):
    s = q @ k.mT
    return F.dropout(s - s.amax(-1, keepdim=True), 0.1).softmax(-1) @ v


def sink_dropped(q, k, v, b):
    return F.dropout(torch.cat([q @ k.mT, b[:, :1].expand(B, H, L, 1)], -1), 0.1).softmax(-1)[..., :-1] @ v


def other_dropout(q, k, v, b):
    return F.alpha_dropout(q @ k.mT, 0.1, training=True).softmax(-1) @ v


MISSES: tuple[Callable[..., Any], ...] = (
    twice, all_dropped, scores_returned, probabilities_returned, maximum_returned, several_products, two_softmaxes, one_draw_for_all_heads,
    two_draws_for_a_score, shifted_before, sink_dropped, other_dropout,
)  # fmt: skip


class Scores(Golden):
    def test_near_misses(self):
        found = [f"{f.__name__}: {text_of(verdict)}" for f in MISSES for verdict in verdicts_of(f, *qkv(), ones(L, L))]
        self.assertExpectedInline(
            "\n".join(found),
            """\
twice: refused: dropout_twice: two dropouts stand before the softmax
all_dropped: refused: dropout_of_everything: this dropout sets every score to zero
scores_returned: refused: escape_after_dropout: output uses the scores after dropout, or their probabilities, too
probabilities_returned: refused: escape_after_dropout: output uses the scores after dropout, or their probabilities, too
maximum_returned: refused: escape_after_dropout: amax uses the scores after dropout, or their probabilities, too
several_products: refused: escape_after_dropout: matmul_2 uses the scores after dropout, or their probabilities, too
two_softmaxes: refused: escape_after_dropout: mul uses the scores after dropout, or their probabilities, too
two_softmaxes: refused: escape_after_dropout: softmax uses the scores after dropout, or their probabilities, too
one_draw_for_all_heads: refused: shared_dropout: this dropout may draw one number for several scores
two_draws_for_a_score: refused: shared_dropout: two draws of this dropout go into one score
shifted_before: refused: unsupported_op: aten.amax.default, which is not elementwise, is applied to the scores or probabilities
sink_dropped: refused: no_rule: aten.dropout.default, which is elementwise, but has no rule in this form, is applied to the scores or probabilities
other_dropout: refused: unsupported_op: aten.alpha_dropout.default, which is not elementwise, stands between the score matmul and the softmax""",
        )

    def test_dropped(self):
        def attention(q, k, v):
            return F.dropout(q @ k.mT * 0.5, 0.2).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score dropout
no mask
program(; sizes=0)
  %0 = keep 0.2
  %1 = const 1.25
  %2 = const 0.0
  %3 = where %0 %1 %2
  %4 = score
  %5 = const 0.5
  %6 = mul %4 %5
  %7 = mul %6 %3
  return %7""",
        )

    def test_a_mask_after_it_hides(self):
        def attention(q, k, v):
            future = torch.ones(L, L, dtype=torch.bool).triu(1)
            return F.dropout(q @ k.mT, 0.2).masked_fill(future, -torch.inf).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
causal, score dropout
k-q <= 0; rows see a key; replace -inf; skip above -inf
program(; sizes=0)
  %0 = index k
  %1 = index q
  %2 = sub %0 %1
  %3 = const 1
  %4 = const -inf
  %5 = keep 0.2
  %6 = const 1.25
  %7 = const 0.0
  %8 = where %5 %6 %7
  %9 = score
  %10 = mul %9 %8
  %11 = lt %2 %3
  %12 = where %11 %10 %4
  return %12""",
        )

    def test_a_mask_before_it_hides_no_tile(self):
        def attention(q, k, v):
            future = torch.ones(L, L, dtype=torch.bool).triu(1)
            return F.dropout((q @ k.mT).masked_fill(future, -1e9), 0.2).softmax(-1) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score dropout
no mask
program(; sizes=0)
  %0 = keep 0.2
  %1 = const 1.25
  %2 = const 0.0
  %3 = where %0 %1 %2
  %4 = index k
  %5 = index q
  %6 = sub %4 %5
  %7 = const 1
  %8 = const -1000000000.0
  %9 = score
  %10 = lt %6 %7
  %11 = where %10 %9 %8
  %12 = mul %11 %3
  return %12""",
        )

    def test_before_and_behind_the_softmax(self):
        def attention(q, k, v):
            return F.dropout(F.dropout(q @ k.mT, 0.2).softmax(-1), 0.25) @ v

        self.golden(
            attention,
            qkv(),
            """\
b 2, heads 2 of 2, q 6, k 6, d 4, dv 4
score dropout
no mask
program(; sizes=0)
  %0 = keep 0.2
  %1 = const 1.25
  %2 = const 0.0
  %3 = where %0 %1 %2
  %4 = score
  %5 = mul %4 %3
  return %5
dropout 0.25""",
        )
