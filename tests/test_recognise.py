"""What is recognised in mask and bias spellings: the program, its labels and the facts of its mask.

A fact line reads: the named conjuncts, "rest" if there are others, "rows see a key" if every row provably does, the fill and
whether it replaces hidden scores or is added to them, and above which running maximum a hidden tile cannot matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_inductor.analyse import analyse
from fa_inductor.facts import Affine, MaskFacts, ProgramFacts
from fa_inductor.find import find
from fa_inductor.graph import GraphContext
from fa_inductor.normalize import Normalized, normalize
from fa_inductor.program import Coordinates, ProgramBuilder, ScoreProgram, dependencies, evaluate
from fa_inductor.recognise import recognise, recognise_site
from fa_inductor.report import program_maths
from fa_inductor.site import AttentionSite

B, H, L, D = 2, 2, 6, 4
LOW = torch.finfo(torch.float32).min


def site_of(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> AttentionSite:
    """The only site of ``function``, analysed as the backend does it."""
    found: list[AttentionSite] = []

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        normal = normalize(gm)
        assert isinstance(normal, Normalized), normal
        context = GraphContext(normal.gm, torch.is_grad_enabled())
        found.extend(analyse(context, c) for c in find(normal.gm.graph))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    (site,) = found
    return site


def bound(a: Affine | None) -> str:
    assert a is not None
    words = [f"{'' if c == 1 else '-' if c == -1 else f'{c}*'}n{p}" for p, c in a.terms]
    return " + ".join(words + ([str(a.constant)] if a.constant or not words else []))


def facts_line(facts: ProgramFacts) -> str:
    mask = facts.mask
    if mask is None:
        return "no mask"
    terms = [{"upper": "k-q <= ", "lower": "k-q >= ", "key": "key"}[t.kind] + ("" if t.kind == "key" else bound(t.bound)) for t in mask.terms]
    rest = [] if mask.only_these_terms else ["rest"]
    visible = ["rows see a key"] if mask.every_row_visible else []
    return "; ".join([*terms, *rest, *visible, f"{mask.hidden} {mask.fill:g}", f"skip above {mask.skip_above:g}"])


SPELLINGS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]], str]] = {}


def qkv(lk: int = L) -> list[Any]:
    return [torch.randn(B, H, L, D), torch.randn(B, H, lk, D), torch.randn(B, H, lk, D)]


def padding() -> Tensor:
    """True where a key may be seen."""
    return torch.arange(L)[None] < torch.tensor([[L], [3]])


def spelling(expected: str, inputs: Callable[[], list[Any]] = list) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of the scores (and more inputs) whose program, labels and facts are ``expected``, a line each."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[function.__name__] = function, inputs, "\n".join(line.strip() for line in expected.strip().splitlines())
        return function

    return register


# -- causal --------------------------------------------------------------------------------------------------------------
@spelling(
    """
    0.5*s
    plain
    no mask
    """
)
def plain(s):
    return s / D**0.5


@spelling(
    """
    where(not where(k - q <= 0, 1, 0) == 0, s, -inf)
    mask
    rest; replace -inf; skip above -inf
    """
)
def tril_of_ones(s):
    return s.masked_fill(torch.tril(torch.ones(L, L)) == 0, -math.inf)


@spelling(
    """
    where(k - q <= 0, s, -inf)
    causal
    k-q <= 0; rows see a key; replace -inf; skip above -inf
    """
)
def tril_of_bools(s):
    return s.masked_fill(~torch.ones(L, L, dtype=torch.bool).tril(), -math.inf)


@spelling(
    """
    where(k - q < 1, s, min(float32))
    causal
    k-q <= 0; rows see a key; replace -3.40282e+38; skip above -1e+29
    """
)
def triu_above_diagonal(s):
    return s.masked_fill(torch.triu(torch.ones(L, L, dtype=torch.bool), diagonal=1), LOW)


@spelling(
    """
    s + where(k - q < 1, 0, -inf)
    causal
    k-q <= 0; rows see a key; add -inf; skip above -inf
    """
)
def triu_of_minus_infinity_added(s):
    return s + torch.triu(torch.full((L, L), -math.inf), diagonal=1)


@spelling(
    """
    where(k <= q, s, -inf)
    causal
    k-q <= 0; rows see a key; replace -inf; skip above -inf
    """
)
def arange_comparison(s):
    i = torch.arange(L)
    return torch.where(i[None, :] <= i[:, None], s, -math.inf)


@spelling(
    """
    where(q >= k, s, -inf)
    causal
    k-q <= 0; rows see a key; replace -inf; skip above -inf
    """
)
def arange_strictly_after(s):
    i = torch.arange(L)
    return torch.where(i.view(L, 1) < i.view(1, L), -math.inf, s)


@spelling(
    """
    where(k - q <= 0, s, -1e+09)
    causal
    k-q <= 0; rows see a key; replace -1e+09; skip above -9.99999e+08
    """
)
def distance_not_positive(s):
    i = torch.arange(L)
    return s.masked_fill((i[None] - i[:, None]) > 0, -1e9)


@spelling(
    """
    where(k - q <= 0, s, min(float32))
    causal
    k-q <= 0; rows see a key; replace -3.40282e+38; skip above -1e+29
    """
)
def gpt2_where(s):
    bias = torch.tril(torch.ones((16, 16), dtype=torch.bool)).view(1, 1, 16, 16)[:, :, :L, :L]
    return torch.where(bias, s, torch.full([], LOW))


@spelling(
    """
    s + -1e+09*(1 - where(k - q <= 0, 1, 0))
    position bias
    no mask
    """
)
def one_minus_tril_times_fill(s):
    return s + (1.0 - torch.tril(torch.ones(L, L))) * -1e9


@spelling(
    """
    where(not bool(where(k - q >= 1, 1, 0)), s, -10000)
    mask
    rest; replace -10000; skip above -9889.99
    """
)
def small_fill_replaces(s):
    return s.masked_fill(torch.triu(torch.ones(L, L), 1).bool(), -1e4)


@spelling(
    """
    FAIL BackendCompilerFailed backend='backend' raised:
    Refused: operand_layout: Q is not a reshape, permute or expand of a (batch, head, length, channel) tensor [tests/test_recognise.py:312]
    
    Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug to PyTorch). For even more developer context, set TORCH_LOGS="+dynamo"
    """,
    lambda: [torch.randn(B, H, 3, D)],
)
def bottom_right(s, q):
    """Three queries at the end of the keys."""
    i, j = torch.arange(3)[:, None] + (L - 3), torch.arange(L)[None]
    return s[:, :, :3].masked_fill(j > i, -math.inf)


@spelling(
    """
    where(not bool(where(k - q <= -1, 1, 0)), s, -inf)
    mask
    rest; replace -inf; skip above -inf
    """
)
def reversed_causal(s):
    return s.masked_fill(torch.tril(torch.ones(L, L), -1).bool(), -math.inf)


# -- windows -------------------------------------------------------------------------------------------------------------
@spelling(
    """
    where(q - k >= 0 and q - k < 3, s, -inf)
    causal, window
    k-q <= 0; k-q >= -2; rows see a key; replace -inf; skip above -inf
    """
)
def sliding_window(s):
    i = torch.arange(L)
    distance = i[:, None] - i[None]
    return s.masked_fill((distance < 0) | (distance >= 3), -math.inf)


@spelling(
    """
    where(abs(q - k) <= 2, s, -inf)
    mask
    rest; replace -inf; skip above -inf
    """
)
def symmetric_window(s):
    i = torch.arange(L)
    return torch.where((i[:, None] - i[None]).abs() <= 2, s, -math.inf)


@spelling(
    """
    where(k - q <= 0 and k - q >= -2, s, min(float32))
    causal, window
    k-q <= 0; k-q >= -2; rows see a key; replace -3.40282e+38; skip above -1e+29
    """
)
def window_by_two_triangles(s):
    keep = torch.ones(L, L, dtype=torch.bool).tril(0) & torch.ones(L, L, dtype=torch.bool).triu(-2)
    return s.masked_fill(keep.logical_not(), LOW)


@spelling(
    """
    where(q - k >= 1 and q - k <= 2, s, -inf)
    causal, window
    k-q <= -1; k-q >= -2; replace -inf; skip above -inf
    """
)
def window_before_the_diagonal(s):
    """Each query sees the two keys before it only: the first query sees none."""
    i = torch.arange(L)
    distance = i[:, None] - i[None]
    return s.masked_fill((distance < 1) | (distance > 2), -math.inf)


# -- padding -------------------------------------------------------------------------------------------------------------
@spelling(
    """
    where(c0[b, k], s, -inf)
    key padding
    key; replace -inf; skip above -inf
    """,
    lambda: [padding()],
)
def padding_true_is_visible(s, m):
    return s.masked_fill(~m[:, None, None, :], -math.inf)


@spelling(
    """
    where(not c0[b, k], s, -inf)
    key padding
    key; replace -inf; skip above -inf
    """,
    lambda: [~padding()],
)
def padding_true_is_hidden(s, m):
    return s.masked_fill(m.view(B, 1, 1, L), -math.inf)


@spelling(
    """
    where(c0[b, k] != 0, s, -1e+09)
    key padding
    key; replace -1e+09; skip above -9.99999e+08
    """,
    lambda: [padding().long()],
)
def padding_of_integers(s, m):
    return s.masked_fill(m[:, None, None] == 0, -1e9)


@spelling(
    """
    s + where(c0[b, k], 0, min(float32))
    key padding
    key; add -3.40282e+38; skip above -1e+29
    """,
    lambda: [padding()],
)
def inverted_bool_times_lowest(s, m):
    return s + (1.0 - m[:, None, None, :].float()) * LOW


@spelling(
    """
    s + -1e+09*(1 - c0[b, k])
    bias
    no mask
    """,
    lambda: [padding().float()],
)
def inverted_float_times_fill(s, m):
    """The mask may hold any number: it stays a bias."""
    return s + (1.0 - m[:, None, None, :]) * -1e9


@spelling(
    """
    s + where(c0[b, k], 0, -10000)
    bias
    no mask
    """,
    lambda: [padding()],
)
def small_fill_added(s, m):
    return s + (~m)[:, None, None].float() * -1e4


@spelling(
    """
    where(k < c0[b], s, -inf)
    key padding
    key; replace -inf; skip above -inf
    """,
    lambda: [torch.tensor([L, 3])],
)
def padding_by_lengths(s, n):
    return s.masked_fill(torch.arange(L)[None, None, None] >= n[:, None, None, None], -math.inf)


@spelling(
    """
    where(c0[b, q] and c0[b, k], s, min(float32))
    key padding, mask
    key; rest; replace -3.40282e+38; skip above -1e+29
    """,
    lambda: [padding()],
)
def padding_of_the_queries_too(s, m):
    both = m[:, None, :, None] & m[:, None, None, :]
    return s.masked_fill(~both, LOW)


@spelling(
    """
    where(k - q <= 0 and c0[b, k], s, min(float32))
    causal, key padding
    k-q <= 0; key; replace -3.40282e+38; skip above -1e+29
    """,
    lambda: [padding()],
)
def causal_and_padding_combined(s, m):
    keep = torch.tril(torch.ones(L, L, dtype=torch.bool))[None, None] & m[:, None, None]
    return torch.where(keep, s, LOW)


@spelling(
    """
    where(c0[b, k], where(k - q < 1, s, -inf), -inf)
    causal, key padding
    key; k-q <= 0; replace -inf; skip above -inf
    """,
    lambda: [padding()],
)
def two_masks_nested(s, m):
    s = s.masked_fill(torch.triu(torch.ones(L, L, dtype=torch.bool), 1), -math.inf)
    return s.masked_fill(~m[:, None, None], -math.inf)


@spelling(
    """
    s + where(k - q < 1, 0, min(float32)) + where(c0[b, k], 0, min(float32))
    causal, key padding
    key; k-q <= 0; add -3.40282e+38; skip above -1e+29
    """,
    lambda: [padding()],
)
def two_masks_added(s, m):
    causal = torch.triu(torch.full((L, L), LOW), 1)
    return s + causal + (1.0 - m[:, None, None].float()) * LOW


@spelling(
    """
    s + c0[b, k]
    bias
    no mask
    """,
    lambda: [torch.where(padding(), 0.0, -math.inf)],
)
def additive_tensor(s, m):
    return s + m[:, None, None]


@spelling(
    """
    where(not c0[q, k], s, -inf)
    mask
    rest; replace -inf; skip above -inf
    """,
    lambda: [torch.rand(L, L) > 0.5],
)
def any_mask(s, m):
    return s.masked_fill(m, -math.inf)


# -- documents, biases, soft-caps ------------------------------------------------------------------------------------------
@spelling(
    """
    where(c0[b, q] == c0[b, k], s, -inf)
    mask
    rest; rows see a key; replace -inf; skip above -inf
    """,
    lambda: [torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])],
)
def documents(s, d):
    return s.masked_fill(d[:, None, :, None] != d[:, None, None, :], -math.inf)


@spelling(
    """
    where(c0[b, q] == c0[b, k] and q >= k, s, min(float32))
    causal, mask
    k-q <= 0; rest; rows see a key; replace -3.40282e+38; skip above -1e+29
    """,
    lambda: [torch.tensor([[0, 0, 1, 0, 0, 1], [0, 1, 0, 1, 0, 0]])],
)
def documents_by_cumsum_and_causal(s, starts):
    d, i = starts.cumsum(-1), torch.arange(L)
    keep = (d[:, None, :, None] == d[:, None, None, :]) & (i[:, None] >= i)
    return torch.where(keep, s, LOW)


@spelling(
    """
    0.5*s + c0[h]*(k - q)
    ALiBi
    no mask
    """,
    lambda: [torch.rand(H)],
)
def alibi(s, slopes):
    i = torch.arange(L)
    return s * 0.5 + slopes.view(H, 1, 1) * (i[None] - i[:, None])


@spelling(
    """
    s + c0[h, q, k]
    bias
    no mask
    """,
    lambda: [torch.randn(H, L, L)],
)
def relative_bias(s, bias):
    return s + bias[None]


@spelling(
    """
    s - 0.1*abs(q - k)
    score function
    no mask
    """
)
def position_bias(s):
    i = torch.arange(L)
    return s - 0.1 * (i[:, None] - i[None]).abs()


@spelling(
    """
    where(k - q < 1, 30*tanh(s/30), -2.38198e+38)
    causal, soft-cap 30
    k-q <= 0; rows see a key; replace -2.38198e+38; skip above -1e+29
    """
)
def soft_cap_and_causal(s):
    s = 30.0 * torch.tanh(s / 30.0)
    return s.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -2.3819763e38)


@spelling(
    """
    s*exp(c0)
    score function
    no mask
    """,
    lambda: [torch.rand(())],
)
def learned_temperature(s, t):
    return s * t.exp()


@spelling(
    """
    where(not where(k - q <= 0, 1, 0) == 0, 0.5*s, -inf)
    mask
    rest; replace -inf; skip above -inf
    """
)
def scores_through_blocks(s):
    """A view to blocks of keys and back leaves no trace."""
    return (s.view(B, H, L, 3, 2) * 0.5).view(B, H, L, L).masked_fill(torch.ones(L, L).tril() == 0, -math.inf)


def recognised(name: str) -> tuple[AttentionSite, ProgramFacts, str]:
    function, more, _ = SPELLINGS[name]

    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return function(q @ k.mT, *rest).softmax(-1) @ v

    site = site_of(attention, *qkv(), *more())
    facts = recognise_site(site)
    return site, facts, "\n".join([program_maths(site.program), ", ".join(facts.labels), facts_line(facts)])


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    _, _, text = recognised(name)
    assert text == SPELLINGS[name][2], f"\n{text}"
