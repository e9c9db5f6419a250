"""Symbolic sizes: what the guards that Dynamo made say of them is put into the sizes themselves.

A length that is viewed as windows of 8 leaves ``s`` and ``s // 8`` as sizes, and a guard that 8 divides s. Here s is then ``8*w``, with
w a symbol for the quotient: index algebra sees products of symbols. ``definition`` says what to compute where a graph needs w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

Expr = Any
"""A sympy expression (sympy is not typed)."""
ONE = sympy.Integer(1)

_definitions: dict[sympy.Symbol, Expr] = {}
"""By name: the same symbol stands for the same quotient in every compilation."""


def exact_quotient(x: Expr, n: Expr) -> Expr | None:
    """x / n if that is an integer polynomial, else None."""
    if n == 1:
        return x
    if x == n:
        return ONE
    if x.is_Integer and n.is_Integer:
        return x / n if x % n == 0 else None
    if x.has(FloorDiv, Mod) and not n.is_Integer and not x.is_Mul:
        return None
    quotient = sympy.cancel(x / n) if not x.has(FloorDiv, Mod) else x / n
    return sympy.expand(quotient) if quotient.as_numer_denom()[1] == 1 else None


def simplified(size: Any) -> Expr:
    """An expression that is equal to the SymInt wherever the guards made so far hold."""
    shapes = size.node.shape_env
    facts = _known.get(shapes)
    if facts is None or facts.replaced != len(shapes.replacements):
        facts = _known[shapes] = SizeFacts(len(shapes.replacements))
    facts.read(shapes.guards, shapes.replace)
    return facts.simplify(size.node.expr)


def definition(symbol: sympy.Symbol) -> Expr | None:
    """The quotient that ``symbol`` stands for; None of a size of Dynamo's."""
    return _definitions.get(symbol)


class SizeFacts:
    """Equations between products of sizes, each solved for a size or for a quotient.

    Args:
        replaced: how many symbols had been replaced by others when the first was read.
    """

    def __init__(self, replaced: int = 0) -> None:
        self.replaced = replaced
        self.sizes: dict[Expr, Expr] = {}
        self.quotients: dict[Expr, Expr] = {}
        self._count = 0
        self._simple: dict[Expr, Expr] = {}

    def read(self, guards: Sequence[Any], replace: Callable[[Expr], Expr]) -> None:
        """Learns from those of ``guards`` that are new; ``replace`` leaves one symbol of those that are equal."""
        if len(guards) == self._count:
            return
        new, self._count = guards[self._count :], len(guards)
        for guard in new:
            if isinstance(guard.expr, sympy.Eq) and guard.expr.has(FloorDiv, Mod):
                self.learn(*map(replace, guard.expr.args))

    def simplify(self, expr: Expr) -> Expr:
        """``expr`` in terms of the sizes that are left; ``(s*s) // s``, as shapes of products have it, is s."""
        if not self.sizes and not expr.has(FloorDiv):
            return expr
        if expr not in self._simple:
            self._simple[expr] = expr.xreplace(self.sizes).replace(FloorDiv, self._divided)
        return self._simple[expr]

    def _divided(self, x: Expr, n: Expr) -> Expr:
        exact = exact_quotient(x, n)
        quotient = FloorDiv(x, n) if exact is None else exact
        return self.quotients.get(quotient, quotient)

    def learn(self, left: Expr, right: Expr) -> None:
        """Solves ``left = right``, if both are products and one factor stands alone."""
        if isinstance(left, Mod) and right == 0:
            left, right = left.args[0], left.args[1] * FloorDiv(*left.args)
        named: dict[sympy.Symbol, Expr] = {}
        left, right = (_named(self.simplify(side), named) for side in (left, right))
        if not (_positive_product(left) and _positive_product(right)) or all(named.keys() & side.free_symbols for side in (left, right)):
            return  # a quotient may be 0, unless it is a factor of what is not
        found = list(_solutions(left / right))
        quotients = [(named[one], other) for one, other in found if one in named and not other.free_symbols & named.keys()]
        sizes = [(one, other) for one, other in found if one not in named]
        if quotients:
            self._add(self.quotients, *quotients[0])
        elif sizes:
            _definitions.update(named)
            self.quotients |= {quotient: symbol for symbol, quotient in named.items()}
            self._add(self.sizes, *sizes[0])

    def _add(self, table: dict[Expr, Expr], old: Expr, new: Expr) -> None:
        table[old] = new
        self._simple.clear()
        self.sizes = {size: self.simplify(value) for size, value in self.sizes.items()}
        quotients = ((FloorDiv(*map(self.simplify, quotient.args)), self.simplify(value)) for quotient, value in self.quotients.items())
        self.quotients = {quotient: value for quotient, value in quotients if isinstance(quotient, FloorDiv)}
        self._simple.clear()


_known: WeakKeyDictionary[Any, SizeFacts] = WeakKeyDictionary()


def _named(expr: Expr, named: dict[sympy.Symbol, Expr]) -> Expr:
    """``expr`` with a symbol for each quotient, which are put into ``named``."""

    def name(x: Expr, n: Expr) -> Expr:
        symbol = sympy.Symbol(str(FloorDiv(x, n)), integer=True, positive=True)
        named[symbol] = FloorDiv(x, n)
        return symbol

    return expr.replace(FloorDiv, name)


def _positive_product(expr: Expr) -> bool:
    powers = (f.as_base_exp() for f in sympy.Mul.make_args(expr))
    return all(exponent.is_Integer and exponent > 0 and base.is_positive and (base.is_Symbol or base.is_Integer) for base, exponent in powers)


def _solutions(ratio: Expr) -> Iterator[tuple[Expr, Expr]]:
    """(symbol, value) where ``ratio`` is 1 if and only if they are equal."""
    above, below = ratio.as_numer_denom()
    return ((one, other) for one, other in ((above, below), (below, above)) if one.is_Symbol)
