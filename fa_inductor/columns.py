"""Scores that a softmax runs over besides those of the keys: attention sinks, null columns, the 1 of softmax-plus-one.

    P = exp(s) / (sum_k exp(s) + sum_j exp(t_j))        O = O_keys * exp(lse) / (exp(lse) + sum_j exp(t_j))

O_keys and lse are those of the keys alone, which a kernel computes; the rest (``shares``) is elementwise on rows and differentiated by
autograd through the lse. The columns' scores t_j are lifted like all others, so they may be anything but products of their own
with many keys (Xiao et al. 2023, arXiv:2309.17453; the sinks of gpt-oss; Miller 2023, "Attention is off by one").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .graph import GraphContext
from .index import ONE, ZERO, Expr, Space
from .lift import Leaf, Lifter, refuse
from .patterns.softmax import Softmax
from .program import Coordinates, ProgramBuilder, ScoreProgram, evaluate
from .refusal import declare
from .site import Column

JOINED = declare(
    "joined_scores",
    "whole matrix products of the same queries may be joined, each with values of its own, and a few columns without values (attention sinks)",
)
MOST = 16
"""More scores than these besides the keys' own are another attention, whose scores would have to be in memory."""


class Columns:
    """What the rows of ``anchor`` sum over besides ``size`` keys: at the places ``gaps``, (start, length), and by terms of the sum.

    Args:
        index: of the probabilities; its entry at the softmax's dimension is ignored.
        names, key: the program's index names; a column is read at the index that ``key`` stands for.
        leaf, carriers: as for the lifter of the keys' scores; ``leaf`` raises Refused where a column is one of them.
    """

    def __init__(
        self, context: GraphContext, space: Space, anchor: Softmax, index: tuple[Expr, ...], names: dict[sympy.Symbol, str], key: sympy.Symbol
    ) -> None:
        self.context, self.space, self.anchor, self.index = context, space, anchor, index
        self.names, self.key = names, key
        self.found: list[Column] = []
        self.touched: set[fx.Node] = set()

    def read(self, gaps: Sequence[tuple[Expr, Expr]], size: Expr, leaf: Leaf, carriers: set[fx.Node], output: fx.Node) -> list[Column]:
        for start, length in gaps:
            if length == 0:
                continue
            lifter = self._lifter(length, leaf, carriers)
            self._add(lifter, lifter.element(self.anchor.input, self._at(start + self.key)), length)
            if not (length.is_Integer and length <= MOST):
                raise refuse(JOINED, f"the softmax runs over {length} scores besides those of the {size} keys", output)
        for term in self.anchor.terms:
            lifter = self._lifter(ONE, leaf, carriers)
            self._add(lifter, lifter.operand(term, self._at(ZERO)), ONE)
        return self.found

    def _at(self, place: Expr) -> tuple[Expr, ...]:
        return (*self.index[: self.anchor.dim], place, *self.index[self.anchor.dim + 1 :])

    def _lifter(self, length: Expr, leaf: Leaf, carriers: set[fx.Node]) -> Lifter:
        return Lifter(self.context, Space({**self.space.extent, self.key: length}), self.names, leaf, carriers, ProgramBuilder())

    def _add(self, lifter: Lifter, value: int, length: Expr) -> None:
        value = lifter.builder.convert(value, "float")
        if self.anchor.factor != 1:
            value = lifter.builder.emit("mul", value, lifter.builder.const(self.anchor.factor))
        program = lifter.builder.finish(value)
        self.found.append(Column(program, lifter.captures(), tuple(lifter.size_symbols), length))
        self.touched |= lifter.touched


def column_scores(program: ScoreProgram, box: Sequence[Any], sizes: Sequence[Any], out: Tensor, captures: Sequence[Tensor]) -> Tensor:
    """The scores of ``program`` over its columns, fp32, (columns, B, H, Lq) or broadcastable to it; ``box``: B, H, Lq and how many columns."""
    b, h, q, k = ((0, n) for n in box)
    (scores,) = evaluate(program, Coordinates(b, h, q, k), captures=captures, sizes=sizes, device=out.device)
    return scores.expand(*scores.shape[:3], box[3]).movedim(-1, 0)


def total_lse(lse: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """log sum exp over the keys, whose own is ``lse``, and over ``columns``."""
    for scores in columns:
        lse = torch.logaddexp(lse, scores.logsumexp(0))
    return lse


def rows_or_zero(out: Tensor, lse: Tensor) -> Tensor:
    """``out``, and 0 where the softmax's row is NaN: its maximum is -inf, inf or NaN."""
    return torch.where(lse.detach().isfinite().unsqueeze(-1), out, 0.0)
