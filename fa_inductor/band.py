"""Scores stored by diagonals, as sliding-window attention in chunks stores them (Longformer): ``s[q, t]`` is the score of key ``k = t + q - w``.

    out[q] = sum_t softmax_t(f(s[q, t])) V[t + q - w]    =    softmax_k(where(0 <= k - q + w < T, f(Q K^T), -inf)) V

Overlapping chunks of queries and keys are multiplied, triangles of the products copied together, and the probabilities spread out
again for the products with chunks of values. No index formula survives that, so it is proved element by element (``provenance``):
with which key each place (q, t) is paired by the values and by the scores, and that all other places are -inf. Then t is only another
name of the key, and the site an attention over all keys of which those in the window are visible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from torch import Tensor, fx

from . import digits as D
from .index import Expr, Space, equal
from .isomorphism import depends_on_input
from .lift import refuse
from .patterns.softmax import Softmax
from .provenance import grid
from .region import OTHER_AXIS

T, ROW = D.symbol("t"), D.symbol("row")


@dataclass(frozen=True)
class Template:
    """``node`` read at ``index``, in terms of ``ROW``, of ``K`` or ``T``, and of symbols for what is not listed; without a node the number ``value``."""

    node: fx.Node | None
    index: tuple[Expr, ...] = ()
    value: float = 0.0

    def of(self, names: dict[fx.Node, fx.Node]) -> Template:
        return replace(self, node=None if self.node is None else names[self.node])

    def at(self, space: Space, places: dict[sympy.Symbol, Expr]) -> tuple[Expr, ...]:
        return tuple(space.simplified(i.subs(places, simultaneous=True)) for i in self.index)


@dataclass(frozen=True)
class Values:
    """The product with values: ``result[.., row, ..] = sum over t of probabilities[.., row, t] * values[.., keys[row, t], ..]``."""

    second: fx.Node
    result: fx.Node
    row: int
    """The dimension of ``result``."""
    symbols: tuple[sympy.Symbol, ...]
    probabilities: Template
    values: Template
    keys: Tensor
    """(rows, T) of the key at each place; -1 where none belongs to it."""
    n_keys: int
    offset: Expr
    """``t - k`` in terms of ``ROW``."""

    def listed(self, with_key: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers, rows and t of the places that have a key, or of those that have none."""
        ids = ((self.keys.flatten() >= 0) == with_key).nonzero().flatten()
        rows, places = (x[ids] for x in grid(*self.keys.shape))
        return ids, rows, places

    def of(self, names: dict[fx.Node, fx.Node]) -> Values:
        nodes = {"second": names[self.second], "result": names[self.result]}
        return replace(self, **nodes, probabilities=self.probabilities.of(names), values=self.values.of(names))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scores:
    """A tensor by diagonals whose places (row, t) with a key hold ``sum_d lhs[..] * rhs[..]``; dimensions are counted from the end."""

    node: fx.Node
    product: fx.Node
    row: int
    t: int
    symbols: tuple[sympy.Symbol, ...]
    lhs: Template
    rhs: Template
    size: Expr

    def of(self, names: dict[fx.Node, fx.Node]) -> Scores:
        return replace(self, node=names[self.node], product=names[self.product], lhs=self.lhs.of(names), rhs=self.rhs.of(names))

    def read(self, space: Space, index: tuple[Expr, ...], row: Expr) -> list[Template]:
        """Both operands at ``index``, whose row is ``row``."""
        if index[self.t] != T or not equal(index[self.row], row):
            raise refuse(OTHER_AXIS, "scores stored by diagonals are read along other dimensions", self.node)
        places = {**dict(zip(self.symbols, index, strict=True)), ROW: row}
        return [replace(side, index=side.at(space, places)) for side in (self.lhs, self.rhs)]


@dataclass(frozen=True)
class Band:
    """All that is proved of one softmax; ``others``: tensors by diagonals beside the ``scores``."""

    softmax: Softmax
    values: Values
    scores: Scores
    others: tuple[Scores, ...]
    rows: frozenset[int]
    """Dimensions of the softmax's input: where such a one counts the rows, all places without a key are -inf."""
    arms: tuple[tuple[fx.Node, fx.Node], ...]
    """Choices by constants, each with the arm that all places with a key take."""
    touched: frozenset[fx.Node]

    @property
    def ends(self) -> set[fx.Node]:
        """The operands of the attention that depend on an input: their contents cannot have served the proof."""
        operands = (self.values.values.node, self.scores.lhs.node, self.scores.rhs.node)
        return {n for n in operands if n is not None and depends_on_input(n)}

    def of(self, softmax: Softmax, names: dict[fx.Node, fx.Node]) -> Band:
        """The same of other nodes."""
        touched = frozenset(names[n] for n in self.touched)
        others = tuple(s.of(names) for s in self.others)
        arms = tuple((names[n], names[arm]) for n, arm in self.arms)
        return Band(softmax, self.values.of(names), self.scores.of(names), others, self.rows, arms, touched)
