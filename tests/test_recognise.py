"""What is recognised in mask and bias spellings: the program, its labels and the facts of its mask.

How to read a fact line says ``golden.facts_line``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from fusing import check
from golden import B, D, H, L, facts_line, site_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_inductor.facts import ProgramFacts
from fa_inductor.options import Options
from fa_inductor.program import Coordinates, ProgramBuilder, ScoreProgram, evaluate, from_text
from fa_inductor.recognise import recognise, recognise_site
from fa_inductor.report import program_maths
from fa_inductor.site import AttentionSite

LOW = torch.finfo(torch.float32).min


SPELLINGS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]], str, int]] = {}


def qkv(lq: int = L) -> list[Any]:
    return [torch.randn(B, H, lq, D), torch.randn(B, H, L, D), torch.randn(B, H, L, D)]


def padding() -> Tensor:
    """True where a key may be seen."""
    return torch.arange(L)[None] < torch.tensor([[L], [3]])


def spelling(expected: str, inputs: Callable[[], list[Any]] = list, lq: int = L) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of the scores (and more inputs) whose program, labels and facts are ``expected``, a line each."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[function.__name__] = function, inputs, "\n".join(line.strip() for line in expected.strip().splitlines()), lq
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
    where(k - q <= 0, s, -inf)
    causal
    k-q <= 0; rows see a key; replace -inf; skip above -inf
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
    k-q <= 0; replace -1e+09; skip above -9.99999e+08
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
    s + where(k - q <= 0, 0, -1e+09)
    position bias
    no mask
    """
)
def one_minus_tril_times_fill(s):
    return s + (1.0 - torch.tril(torch.ones(L, L))) * -1e9


@spelling(
    """
    where(k - q < 1, s, -10000)
    causal
    k-q <= 0; replace -10000; skip above -9889.99
    """
)
def small_fill_replaces(s):
    return s.masked_fill(torch.triu(torch.ones(L, L), 1).bool(), -1e4)


@spelling(
    """
    where(k <= q + 2, s, -inf)
    causal
    k-q <= 2; rows see a key; replace -inf; skip above -inf
    """,
    lq=4,
)
def bottom_right(s):
    """Four queries at the end of the keys."""
    i, j = torch.arange(4)[:, None] + (L - 4), torch.arange(L)[None]
    return s.masked_fill(j > i, -math.inf)


@spelling(
    """
    s + where(k - q < 3, 0, min(float32))
    causal
    k-q <= 2; rows see a key; add -3.40282e+38; skip above -1e+29
    """,
    lq=4,
)
def bottom_right_by_triu(s):
    return s + torch.full((4, L), LOW).triu(1 + s.shape[-1] - s.shape[-2])


@spelling(
    """
    where(k - q < 1, s, -inf)
    causal
    k-q <= 0; rows see a key; replace -inf; skip above -inf
    """,
    lq=9,
)
def top_left_with_more_queries_than_keys(s):
    return s.masked_fill(torch.ones(9, L, dtype=torch.bool).triu(1), -math.inf)


@spelling(
    """
    where(k - q < -2, s, -inf)
    causal
    k-q <= -3; replace -inf; skip above -inf
    """,
    lq=9,
)
def bottom_right_with_more_queries_than_keys(s):
    """The first three queries see nothing."""
    return s.masked_fill(torch.ones(9, L, dtype=torch.bool).triu(1 + L - 9), -math.inf)


@spelling(
    """
    where(k - q > -1, s, -inf)
    window
    k-q >= 0; rows see a key; replace -inf; skip above -inf
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
    where(q - k <= 2 and q - k >= -2, s, -inf)
    window
    k-q >= -2; k-q <= 2; rows see a key; replace -inf; skip above -inf
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
    key padding, query padding
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
    key padding, position bias
    key; add -3.40282e+38; skip above -1e+29
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
    documents
    rest; rows see a key; replace -inf; skip above -inf
    """,
    lambda: [torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])],
)
def documents(s, d):
    return s.masked_fill(d[:, None, :, None] != d[:, None, None, :], -math.inf)


@spelling(
    """
    where(c0[b, q] == c0[b, k] and q >= k, s, min(float32))
    causal, documents
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
    s*c0
    score function
    no mask
    """,
    lambda: [torch.rand(())],
)
def learned_temperature(s, t):
    return s * t.exp()


@spelling(
    """
    where(k - q <= 0, 0.5*s, -inf)
    causal
    k-q <= 0; rows see a key; replace -inf; skip above -inf
    """
)
def scores_through_blocks(s):
    """A view to blocks of keys and back leaves no trace."""
    return (s.view(B, H, L, 3, 2) * 0.5).view(B, H, L, L).masked_fill(torch.ones(L, L).tril() == 0, -math.inf)


def test_a_table_of_distances_is_no_alibi() -> None:
    """Nor is a product with positions, as in images: each is read at a place that depends on the query or the key."""
    table = """program(float32[2]; sizes=0)
      %0 = score
      %1 = index k
      %2 = index q
      %3 = sub %1 %2
      %4 = const 16
      %5 = add %3 %4
      %6 = index h
      %7 = load 0 %5 %6
      %8 = add %0 %7
      return %8"""
    length = sympy.Integer(L)
    assert recognise(from_text(table), length, length, ()).labels == ("bias",)


def recognised(name: str) -> tuple[AttentionSite, ProgramFacts, str]:
    function, more, _, lq = SPELLINGS[name]

    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return function(q @ k.mT, *rest).softmax(-1) @ v

    site = site_of(attention, *qkv(lq), *more())
    facts = recognise_site(site)
    return site, facts, "\n".join([program_maths(site.program), ", ".join(facts.labels), facts_line(facts)])


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    _, _, text = recognised(name)
    assert text == SPELLINGS[name][2], f"\n{text}"


# -- lengths that are not known -------------------------------------------------------------------------------------------
def test_bottom_right_with_symbolic_lengths() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lq, lk = q.shape[2], k.shape[2]
        keep = torch.ones(lq, lk, dtype=torch.bool).tril(lk - lq)
        return (q @ k.mT).masked_fill(~keep, LOW).softmax(-1) @ v

    q, k, v = (torch.randn(2, 2, n, D) for n in (5, 9, 9))
    for t, dims in ((q, [2]), (k, [2]), (v, [2])):
        torch._dynamo.mark_dynamic(t, dims)
    site = site_of(attention, q, k, v)
    facts = recognise_site(site)
    (term,) = facts.mask.terms if facts.mask else ()
    assert term.kind == "upper" and term.bound is not None
    for lq, lk in ((5, 9), (3, 3), (8, 2)):
        sizes = [int(e.subs({site.axes.q: lq, site.axes.k: lk})) for e in site.size_symbols]
        assert term.bound.value(sizes) == lk - lq
    assert facts.labels == ("causal",)
    assert facts.mask is not None and not facts.mask.every_row_visible, "with more queries than keys the first rows see nothing"


def test_causal_with_symbolic_lengths_shows_key_zero_to_every_row() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return torch.where(j <= i, q @ k.mT, torch.finfo(q.dtype).min).softmax(-1) @ v  # a global float would be symbolic

    site = site_of(attention, *(torch.randn(2, 2, n, D) for n in (5, 9, 9)), dynamic=True)
    assert facts_line(recognise_site(site)) == "k-q <= 0; rows see a key; replace -3.40282e+38; skip above -1e+29"


# -- masks that hide in different degrees ---------------------------------------------------------------------------------
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()


def positions() -> Tensor:
    i = torch.arange(L)
    return i[None] <= i[:, None]


DEGREES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lowest added twice": lambda s, m: s + torch.where(CAUSAL, 0.0, LOW) + torch.where(m, 0.0, LOW),
    "lowest over infinite": lambda s, m: s.masked_fill(~CAUSAL, -math.inf).masked_fill(~m, LOW),
    "infinite over lowest": lambda s, m: s.masked_fill(~CAUSAL, LOW).masked_fill(~m, -math.inf),
    "lowest over lowest": lambda s, m: s.masked_fill(~CAUSAL, LOW).masked_fill(~m, LOW),
    "small over large": lambda s, m: s.masked_fill(~CAUSAL, -1e9).masked_fill(~m, -1e4),
    "large over small": lambda s, m: s.masked_fill(~CAUSAL, -1e4).masked_fill(~m, -1e9),
    "added over replaced": lambda s, m: s.masked_fill(~CAUSAL, LOW) + torch.where(m, 0.0, LOW),
    "replaced over added by position": lambda s, m: (s + torch.where(positions(), 0.0, LOW)).masked_fill(~m, LOW),
    "replaced over added": lambda s, m: (s + torch.where(CAUSAL, 0.0, LOW)).masked_fill(~m, LOW),
    "causal over a bias that hides": lambda s, m: (s + torch.where(m, 0.0, LOW)).masked_fill(~CAUSAL, LOW),
}


@pytest.mark.parametrize("name", DEGREES)
def test_a_row_that_sees_nothing_is_eagers(name: str) -> None:
    """Left padding under a causal mask: the first rows of the second sequence see no key, and average over what is hidden least."""
    m = (torch.arange(L) >= torch.tensor([[0], [3]]))[:, None, None]

    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return DEGREES[name](q @ k.mT, m).softmax(-1) @ v

    check(attention, [*(x.requires_grad_() for x in qkv()), m], options=Options(kernel="tiled"))


@pytest.mark.parametrize("low", [LOW, -math.inf])
def test_a_captured_bias_may_hide_what_the_mask_shows(low: float) -> None:
    """Row 0 sees key 0 by the causal mask alone, but the bias hides that key: what the causal mask hides matters again."""
    bias = torch.where(torch.arange(L) >= torch.tensor([[0], [3]]), 0.0, low)[:, None, None]

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias).masked_fill(~CAUSAL, LOW).softmax(-1) @ v

    site = site_of(attention, *qkv(), bias)
    facts = recognise_site(site)
    assert facts.mask is not None and not facts.mask.every_row_visible
    check(attention, [*(x.requires_grad_() for x in qkv()), bias], options=Options(kernel="tiled"))


@pytest.mark.parametrize("fill", [-1e9, -math.inf])
def test_a_fill_has_the_value_it_has_in_half_precision(fill: float) -> None:
    """-1e9 is -inf in float16: a row without a key is NaN in eager."""
    m = torch.ones(L, L, dtype=torch.bool)
    m[2] = False

    def added(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ k.mT + torch.where(m, 0.0, fill).half()).softmax(-1) @ v

    def chosen(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return torch.where(m, q @ k.mT, fill).softmax(-1) @ v

    for attention in (added, chosen):
        inputs = [x.half() for x in qkv()]
        site = site_of(attention, *inputs, m)
        facts = recognise_site(site)
        assert facts.mask is not None and facts.mask.fill == -math.inf
        assert attention(*inputs, m).isnan().any()


def test_a_literal_is_compared_in_the_tensors_format() -> None:
    """bfloat16(0.1) == 0.1 in eager."""
    t = torch.full((L,), 0.1).bfloat16()

    def attention(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return torch.where(t <= 0.1, q @ k.mT, -math.inf).softmax(-1) @ v

    check(attention, [*qkv(), t])


# -- claims about random masks against brute force ------------------------------------------------------------------------
def _diagonal(b: ProgramBuilder, draw: Callable[..., Any]) -> int:
    """A comparison of k - q with a number or with Lk - Lq, in one of its spellings."""
    q, k = b.index("q"), b.index("k")
    c = b.const(draw(st.integers(-2, 3)))
    if draw(st.booleans()):
        c = b.emit("add", b.emit("sub", b.size(1), b.size(0)), c)
    op = draw(st.sampled_from(("lt", "le", "gt", "ge")))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return b.emit(op, b.emit("sub", k, q), c)
    if kind == 1:
        return b.emit(op, b.emit("sub", q, k), c)
    if kind == 2:
        return b.emit(op, k, b.emit("add", q, c))
    return b.emit(op, b.emit("abs", b.emit("sub", q, k)), b.const(draw(st.integers(-1, 3))))


@st.composite
def predicates(draw: Callable[..., Any], b: ProgramBuilder) -> int:
    index = {n: b.index(n) for n in "bhqk"}
    kind = draw(st.sampled_from(("diagonal", "diagonal", "padding", "length", "document", "any", "head", "not", "and", "or")))
    if kind == "diagonal":
        return _diagonal(b, draw)
    if kind == "padding":
        return b.load(0, [index["b"], index["k"]])
    if kind == "length":
        return b.emit("lt", index["k"], b.load(1, [index["b"]]))
    if kind == "document":
        return b.emit("eq", *(b.load(2, [index["b"], b.emit("floordiv", index[n], b.const(2))]) for n in "qk"))
    if kind == "any":
        return b.load(3, [index["q"], index["k"]])
    if kind == "head":
        return b.emit("ge", b.emit("add", index["h"], index["k"]), b.const(1))
    if kind == "not":
        return b.emit("not", draw(predicates(b)))
    return b.emit(kind, draw(predicates(b)), draw(predicates(b)))


@st.composite
def masked_programs(draw: Callable[..., Any]) -> ScoreProgram:
    b = ProgramBuilder()
    for dtype, rank in (("bool", 2), ("int64", 1), ("int64", 2), ("bool", 2)):
        b.capture(dtype, rank)
    b.size(1)
    value = b.score()
    for _ in range(draw(st.integers(1, 3))):
        predicate, fill = draw(predicates(b)), draw(st.sampled_from((-math.inf, LOW, LOW, -1e9, -1e4)))
        if draw(st.booleans()):
            value = b.emit("where", predicate, value, b.const(fill))
        else:
            value = b.emit("add", value, b.emit("where", predicate, b.const(0.0), b.const(fill)))
    return b.finish(value)


@settings(max_examples=250, deadline=None)
@given(masked_programs(), st.booleans(), st.integers(0, 3))
def test_every_claim_about_a_mask_holds(program: ScoreProgram, symbolic: bool, seed: int) -> None:
    lengths = [(3, 5), (4, 4), (5, 2), (1, 3), (6, 1)]
    s0, s1 = (sympy.Symbol(n, integer=True, positive=True) for n in ("s0", "s1"))
    for lq, lk in lengths:
        facts = recognise(program, s0, s1, (s0, s1)) if symbolic else recognise(program, *map(sympy.Integer, (lq, lk)), tuple(map(sympy.Integer, (lq, lk))))
        _holds(program, facts, lq, lk, seed)


def _holds(program: ScoreProgram, facts: ProgramFacts, lq: int, lk: int, seed: int) -> None:
    mask = facts.mask
    if mask is None:
        return
    generator = torch.Generator().manual_seed(seed)
    captures = [
        torch.rand(2, lk, generator=generator) < 0.6,
        torch.randint(0, lk + 1, (2,), generator=generator),
        torch.randint(0, 2, (2, 6), generator=generator),
        torch.rand(lq, lk, generator=generator) < 0.6,
    ]
    shape, box = (2, 2, lq, lk), Coordinates((0, 2), (0, 2), (0, lq), (0, lk))

    def run(p: ScoreProgram, score: float) -> list[Tensor]:
        values = evaluate(p, box, score=torch.full(shape, score), captures=captures, sizes=(lq, lk), device=torch.device("cpu"))
        return [v.expand(shape) for v in values]

    (low,), (high,) = run(program, 0.0), run(program, 8192.0)
    outer = run(ScoreProgram(program.nodes, tuple(t.node for t in mask.terms), program.captures, program.n_sizes), 0.0) if mask.terms else []
    named = torch.ones(shape, dtype=torch.bool)
    difference = torch.arange(lk)[None] - torch.arange(lq)[:, None]
    for term, value in zip(mask.terms, outer):
        named &= value
        if term.kind == "key":
            assert (value == value[:, :, :1]).all(), f"{program}"
        else:
            assert term.bound is not None
            limit = term.bound.value((lq, lk))
            assert torch.equal(value, (difference <= limit if term.kind == "upper" else difference >= limit).expand(shape)), f"{program}"
    sees = low != high  # hidden scores swallow any score
    assert not (sees & ~named).any(), f"a score that a term hides is visible\n{program}"
    hidden = ~named
    if mask.hidden == "replace":
        assert (low[hidden] == mask.fill).all(), f"a hidden score is not {mask.fill}\n{program}"
    else:
        assert (low[hidden] <= mask.fill).all() and (mask.fill <= -1e30), f"{program}"
    assert (torch.exp(low[hidden] - max(mask.skip_above, -3e38)) == 0).all(), f"skipping a hidden tile changes a row\n{program}"
    if mask.every_row_keeps_a_key:
        rest = run(ScoreProgram(program.nodes, mask.places, program.captures, program.n_sizes), 0.0) if mask.places else []
        assert torch.stack([named, *rest]).all(0).any(-1).all(), f"a row is hidden as a whole at {lq} x {lk}\n{program}"
    if mask.every_row_visible:
        assert sees.any(-1).all(), f"a row sees no key at {lq} x {lk}\n{program}"
    if mask.only_these_terms and facts.scale is not None and facts.bias is None:
        assert torch.equal(sees, named), f"the terms are not the whole mask\n{program}"
