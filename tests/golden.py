"""What is lifted and recognised from a function, as text; and a test case that compares it with text in the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from expecttest import TestCase
from torch import Tensor

from fa_inductor import library_calls, sums
from fa_inductor.analyse import analyse
from fa_inductor.facts import Affine, ProgramFacts
from fa_inductor.find import find
from fa_inductor.graph import GraphContext
from fa_inductor.normalize import Normalized, normalize
from fa_inductor.patterns.views import name_of
from fa_inductor.recognise import recognise_site
from fa_inductor.refusal import Refusal, Refused
from fa_inductor.report import program_maths
from fa_inductor.site import AttentionSite

B, H, L, D = 2, 2, 6, 4
"""Sizes in the tests with golden text."""
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""New scores of the scores, a matrix of numbers and one of truth values."""
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys, values and a matrix of numbers."""


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def qkv(lq: int = L) -> list[Tensor]:
    """Only sizes matter for what is recognised."""
    return [ones(B, H, lq, D), ones(B, H, L, D), ones(B, H, L, D)]


def verdicts_of(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, operators: set[str] | None = None) -> list[AttentionSite | Refusal]:
    """Each softmax of ``function``, analysed as the backend does it; ``operators`` receives the names of all in the normalised graph."""
    found: list[AttentionSite | Refusal] = []

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        normal = normalize(gm)
        assert isinstance(normal, Normalized), normal
        library_calls.write_out(normal.gm)
        sums.write_out(normal.gm)
        if operators is not None:
            operators.update(name_of(node) for node in normal.gm.graph.nodes)
        context = GraphContext(normal.gm, torch.is_grad_enabled())
        for candidate in find(normal.gm.graph):
            try:
                found.append(analyse(context, candidate))
            except Refused as refused:
                found.append(refused.refusal)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found


def site_of(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> AttentionSite:
    """The only site of ``function``."""
    (site,) = verdicts_of(function, *inputs, dynamic=dynamic)
    assert isinstance(site, AttentionSite), site
    return site


def bound(a: Affine | None) -> str:
    assert a is not None
    words = [f"{'' if c == 1 else '-' if c == -1 else f'{c}*'}n{p}" for p, c in a.terms]
    return " + ".join(words + ([str(a.constant)] if a.constant or not words else []))


def facts_line(facts: ProgramFacts) -> str:
    """The named conjuncts of the mask, "rest" if there are others, "rows see a key" if every row provably does, the fill and whether it
    replaces hidden scores or is added to them, and above which running maximum a hidden tile cannot matter."""
    mask = facts.mask
    if mask is None:
        return "no mask"
    terms = [{"upper": "k-q <= ", "lower": "k-q >= ", "key": "key"}[t.kind] + ("" if t.kind == "key" else bound(t.bound)) for t in mask.terms]
    rest = [] if mask.only_these_terms else ["rest"]
    visible = ["rows see a key"] if mask.every_row_visible else []
    return "; ".join([*terms, *rest, *visible, f"{mask.hidden} {mask.fill:g}", f"skip above {mask.skip_above:g}"])


def text_of(verdict: AttentionSite | Refusal) -> str:
    """Sizes, labels, facts and programs of a site; code and sentence of a refusal."""
    if isinstance(verdict, Refusal):
        return f"refused: {verdict.code}: {verdict.text}"
    a, facts = verdict.axes, recognise_site(verdict)
    lines = [f"b {a.b}, heads {a.hq} of {a.hkv}, q {a.q}, k {a.k}, d {a.d}, dv {a.dv}", ", ".join(facts.labels), facts_line(facts), str(verdict.program)]
    lines += [f"after the softmax: {verdict.post}"] if verdict.post is not None else []
    lines += [f"{c.length} more columns: {c.program}" for c in verdict.columns]
    lines += [f"dropout {verdict.dropout_p:g}"] if verdict.dropout_p else []
    lines += ["the probabilities escape"] if verdict.escapes else []
    return "\n".join(lines)


class Golden(TestCase):
    """``EXPECTTEST_ACCEPT=1`` writes the texts anew."""

    def golden(self, function: Callable[..., Any], inputs: Sequence[Any], expected: str) -> None:
        text = "\n\n".join(text_of(verdict) for verdict in verdicts_of(function, *inputs))
        self.assertExpectedInline(text, expected, skip=1)


class GoldenLines(TestCase):
    """A line for each case, which must hold the operator that it is named after."""

    def lines(self, cases: dict[str, Scores], expected: str) -> None:
        self.assertExpectedInline("\n".join(_line(name, _with_scores(scores)) for name, scores in cases.items()), expected, skip=1)

    def spelled(self, cases: dict[str, Attention], expected: str) -> None:
        self.assertExpectedInline("\n".join(_line(name, attention, spelling=True) for name, attention in cases.items()), expected, skip=1)


def _with_scores(scores: Scores) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, c: Tensor, m: Tensor) -> Tensor:
        return scores(q @ k.mT, c, m).softmax(-1).to(v.dtype) @ v

    return attention


def _line(name: str, attention: Callable[..., Tensor], spelling: bool = False) -> str:
    operators: set[str] = set()
    inputs = [*qkv(), ones(L, L), torch.ones(L, L, dtype=torch.bool)]
    (verdict,) = verdicts_of(attention, *inputs[: 4 if spelling else 5], operators=operators)
    assert isinstance(verdict, AttentionSite), (name, verdict)
    assert name in operators, (name, operators)
    columns = [f"also over {program_maths(c.program)}" for c in verdict.columns]
    return "; ".join([f"{name:<19} {program_maths(verdict.program)}", *columns, *([verdict.anchor.spelling] if spelling else [])])
