"""Softmaxes that divide behind the matrix product: the proof that the quotient divides each row by its own sum.

``quotient[o] = (sum_k e[r, k] V[k]) / sum_k e[r, k]``: the row r that the product reads at o is the row that the divisor sums.
"""

from __future__ import annotations

import sympy
from torch import fx

from . import digits as D
from .graph import GraphContext
from .index import Expr, Space, broadcast_index, equal, shape_of
from .lift import Lifter, refuse
from .near_softmax import DEFERRED
from .operands import chain
from .patterns.contraction import describe, is_contraction
from .patterns.exponentials import without_floor
from .patterns.softmax import Quotient as Parts
from .patterns.softmax import Softmax
from .patterns.views import argument
from .program import ProgramBuilder

_SUMMED = D.symbol("summed")


class Quotient:
    """``parts.node`` read at ``index``; ``product``: where it reads the matrix product."""

    def __init__(self, context: GraphContext, space: Space, parts: Parts, index: tuple[Expr, ...]) -> None:
        self.context, self.space, self.parts, self.index = context, space, parts, index
        self.touched = {parts.node}
        self.product = self._below(parts.numerator, parts.product)

    def sums(self, anchor: Softmax, row: tuple[Expr, ...], names: dict[sympy.Symbol, str]) -> set[fx.Node]:
        """Proves that the divisor sums ``anchor.output`` at ``row`` over its whole axis; returns the nodes that do."""
        at = self._below(self.parts.divisor, self.parts.total)
        total, dim = self.parts.total, anchor.dim
        self.space.extent[_SUMMED] = shape_of(anchor.output.meta["val"])[dim]
        if is_contraction(total):
            read = self._ones(total, at, names)
        else:
            kept = bool(argument(total, 2, "keepdim", False))
            read = (*at[:dim], _SUMMED, *at[dim + 1 if kept else dim :])
        if read is None or any(not equal(a, b) for d, (a, b) in enumerate(zip(read, row, strict=True)) if d != dim) or read[dim] != _SUMMED:
            raise refuse(DEFERRED, "the matrix product with exp(x) is divided by the sums of other rows, or over another axis", self.parts.node)
        return self.touched

    def _ones(self, total: fx.Node, at: tuple[Expr, ...], names: dict[sympy.Symbol, str]) -> tuple[Expr, ...] | None:
        """Where ``total``, a product of the exponentials with ones, reads the exponentials; None if it is no such product."""
        found = describe(total, at, _SUMMED)
        if found is None or found.addend is not None:
            return None
        lifter = Lifter(self.context, self.space, dict.fromkeys((*names, _SUMMED), "b"), lambda *_: None, set(), ProgramBuilder())
        value = lifter.builder.nodes[lifter.element(found.rhs, found.rhs_index)]
        return found.lhs_index if value.op == "const" and value.value == 1 else None

    def _below(self, node: fx.Node, end: fx.Node) -> tuple[Expr, ...]:
        """The index of ``end`` that ``node``, a view of it, is read at; a limit that does nothing may lie between."""
        at = broadcast_index(shape_of(node.meta["val"]), self.index)
        while True:
            for current, index in chain(self.context, self.space, node, at):
                if current is end:
                    return index
                self.touched.add(current)
            below = without_floor(current)
            if below is current or not isinstance(below, fx.Node):
                raise refuse(DEFERRED, "the matrix product with exp(x) is divided by what is not a view of its sum", self.parts.node)
            node, at = below, index


def truth(builder: ProgramBuilder, value: int) -> int | None:
    """The condition under which ``value``, surely one of 0 and 1, is 1; None if it may be anything else."""
    node = builder.nodes[value]
    if node.type == "bool":
        return value
    if node.op in ("to_float", "to_int", "round"):
        return truth(builder, node.args[0])
    if node.op == "const" and node.value in (0, 1):
        return builder.const(bool(node.value))
    if node.op == "mul":
        both = [truth(builder, a) for a in node.args]
        return None if None in both else builder.emit("and", *both)  # type: ignore[arg-type]
    if node.op == "where":
        arms = [builder.nodes[a] for a in node.args[1:]]
        if all(a.op == "const" for a in arms) and [a.value for a in arms] in ([1, 0], [0, 1]):
            return node.args[0] if arms[0].value == 1 else builder.emit("not", node.args[0])
    return None
