"""Index algebra: which element of a view's input an element of the view is.

Indices are sympy expressions over symbols of known extent. Division and remainder by a size are simplified with the extents
known (``(b*H + h) // H`` is ``b`` because ``0 <= h < H``), so that reshaping there and back leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

from .sizes import ONE as ONE
from .sizes import Expr as Expr
from .sizes import exact_quotient as exact_quotient
from .sizes import simplified

ZERO = sympy.Integer(0)


def as_expr(size: Any) -> Expr:
    """Sympy expression of an int, SymInt or sympy value."""
    return simplified(size) if isinstance(size, torch.SymInt) else sympy.sympify(size)


def shape_of(value: Any) -> tuple[Expr, ...]:
    """Shape of a (fake) tensor as expressions."""
    return tuple(as_expr(s) for s in value.shape)


def product(sizes: Sequence[Expr]) -> Expr:
    return reduce(lambda x, y: x * y, sizes, ONE)


def equal(x: Expr, y: Expr) -> bool:
    """Provably equal (False where it is not known)."""
    return bool(x == y or sympy.expand(x - y) == 0)


def nonnegative(expr: Expr) -> bool:
    """Provably at least 0, given that sizes are at least 1: 2*s - 1 is."""
    sizes = {s: 1 + sympy.Dummy(integer=True, nonnegative=True) for s in expr.free_symbols if s.is_positive}
    return sympy.expand(expr.subs(sizes)).is_nonnegative is True


class Space:
    """Symbols with their extents: each symbol s satisfies ``0 <= s < extent[s]``."""

    def __init__(self, extents: Mapping[sympy.Symbol, Expr]) -> None:
        self.extent: dict[sympy.Symbol, Expr] = dict(extents)

    def upper(self, expr: Expr) -> Expr | None:
        """An inclusive upper bound of an expression linear in the symbols, or None."""
        bound = ZERO
        for term in sympy.Add.make_args(sympy.expand(expr)):
            mine = [s for s in term.free_symbols if s in self.extent]
            if not mine:
                bound += term
                continue
            coefficient = term
            for s in mine:
                coefficient = coefficient / s
            if coefficient.free_symbols & set(self.extent) or term.has(FloorDiv, Mod):
                extent = self.extent_of(term)
                if extent is None:
                    return None
                bound += extent - 1
                continue
            if coefficient.is_nonnegative is not True:
                return None
            bound += coefficient * product([self.extent[s] - 1 for s in mine])
        return sympy.expand(bound)

    def extent_of(self, expr: Expr) -> Expr | None:
        """Number of values of an atom: a symbol, ``s // n`` or ``s % n`` (with n dividing the extent of s), or None."""
        if expr in self.extent:
            return self.extent[expr]
        if isinstance(expr, FloorDiv):
            inner = self.extent_of(expr.args[0])
            return None if inner is None else exact_quotient(inner, expr.args[1])
        if isinstance(expr, Mod):
            inner = self.extent_of(expr.args[0])
            return None if inner is None or exact_quotient(inner, expr.args[1]) is None else expr.args[1]
        return None

    def within(self, expr: Expr, start: Expr, stop: Expr) -> bool:
        """start <= expr < stop, provably."""
        return self._fits(sympy.expand(expr - start), sympy.expand(stop - start))

    def _fits(self, expr: Expr, size: Expr) -> bool:
        """0 <= expr < size, provably."""
        if expr == 0:
            return True
        if not nonnegative(expr):
            return False
        top = self.upper(expr)
        if top is None:
            return False
        slack = sympy.expand(size - 1 - top)
        return slack == 0 or slack.is_nonnegative is True

    def split(self, expr: Expr, n: Expr) -> tuple[Expr, Expr]:
        """``expr = n * quotient + rest``, taking to the quotient every term that n divides."""
        quotient, rest = ZERO, ZERO
        for term in sympy.Add.make_args(sympy.expand(expr)):
            part = exact_quotient(term, n)
            if part is not None:
                quotient += part
            else:
                rest += term
        return quotient, rest

    def div(self, expr: Expr, n: Expr) -> Expr:
        """``expr // n`` for non-negative ``expr``."""
        if n == 1 or expr == 0:
            return expr
        quotient, rest = self.split(expr, n)
        if self._fits(rest, n):
            return quotient
        nested = self._through_floordiv(expr, n)
        return nested if nested is not None else quotient + FloorDiv(rest, n)

    def _through_floordiv(self, expr: Expr, n: Expr) -> Expr | None:
        return FloorDiv(expr.args[0], expr.args[1] * n) if isinstance(expr, FloorDiv) else None

    def mod(self, expr: Expr, n: Expr) -> Expr:
        """``expr % n`` for non-negative ``expr``."""
        if n == 1 or expr == 0:
            return ZERO
        _, rest = self.split(expr, n)
        if rest.is_Integer and n.is_Integer:
            return rest % n  # -1 is left of 2*s - 1
        return rest if self._fits(rest, n) else Mod(rest, n)

    def simplified(self, expr: Expr) -> Expr:
        """``expr`` with its divisions done again, with the extents known."""
        if isinstance(expr, (FloorDiv, Mod)):
            inner, n = (self.simplified(a) for a in expr.args)
            return self.div(inner, n) if isinstance(expr, FloorDiv) else self.mod(inner, n)
        return sympy.expand(expr.func(*map(self.simplified, expr.args)) if expr.args else expr)


def rejoined(expr: Expr) -> Expr:
    """``n*(x // n) + x % n`` put together again: x. Left by a dimension that was split and merged."""
    for rest in expr.atoms(Mod):
        x, n = rest.args
        quotient = FloorDiv(x.args[0], x.args[1] * n) if isinstance(x, FloorDiv) else FloorDiv(x, n)
        weight = expr.coeff(rest)
        if weight != 0 and equal(expr.coeff(quotient), weight * n):
            return rejoined(sympy.expand(expr + weight * (x - rest - n * quotient)))
    return expr


def view_index(space: Space, source: Sequence[Expr], target: Sequence[Expr], index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Index into a tensor of shape ``source`` of element ``index`` of its reshape to ``target`` (row-major order kept)."""
    result: list[Expr] = []
    for inner, outer in _groups(source, target):
        sizes, out_sizes, out_index = source[inner], target[outer], index[outer]
        flat = ZERO
        for size, i in zip(out_sizes, out_index):
            flat = flat * size + i
        flat = rejoined(sympy.expand(flat))
        stride = product(sizes)
        for position, size in enumerate(sizes):
            stride = exact_quotient(stride, size) if size != 1 else stride
            stride = product(sizes[position + 1 :]) if stride is None else stride
            part = space.div(flat, stride)
            result.append(ZERO if size == 1 else part if position == 0 else space.mod(part, size))
    return tuple(result)


def _groups(source: Sequence[Expr], target: Sequence[Expr]) -> list[tuple[slice, slice]]:
    """Smallest runs of dimensions of both shapes with equal products: a reshape acts on each run alone."""
    groups: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        start_i, start_j = i, j
        left = source[i] if i < len(source) else ONE
        right = target[j] if j < len(target) else ONE
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while not equal(left, right):
            grow_left = i < len(source) and (j >= len(target) or exact_quotient(sympy.expand(right), sympy.expand(left)) is not None)
            if grow_left:
                left, i = left * source[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            elif i < len(source):
                left, i = left * source[i], i + 1
            else:
                break  # products differ only by facts sympy does not know: one group to the end is still right
        groups.append((slice(start_i, i), slice(start_j, j)))
    return groups


def mixed_radix(space: Space, index: Expr, size: Expr) -> tuple[tuple[Expr, Expr], ...] | None:
    """``index`` as the digits (atom, extent) of a mixed-radix number that fills ``size``, slowest first; None if it is not one."""
    found = _digits(space, index)
    return found[0] if found is not None and equal(found[1], size) else None


def window(space: Space, index: Expr, size: Expr) -> tuple[tuple[tuple[Expr, Expr], ...], Expr, Expr] | None:
    """The same of an index, in range as all are that views give, that fills a part of a dimension of ``size``: (digits, start, length)."""
    rest = sum((t for t in sympy.Add.make_args(sympy.expand(index)) if t.free_symbols & set(space.extent)), ZERO)
    found = _digits(space, rest)
    start = sympy.expand(index - rest)
    return (found[0], start, found[1]) if found is not None and (nonnegative(start) or equal(start + found[1], size)) else None


def _digits(space: Space, index: Expr) -> tuple[tuple[tuple[Expr, Expr], ...], Expr] | None:
    """The digits and how many numbers they make."""
    terms = [] if index == 0 else [_digit(space, t) for t in sympy.Add.make_args(sympy.expand(index))]
    digits: list[tuple[Expr, Expr]] = []
    weight: Expr = ONE
    while terms:
        found = next((t for t in terms if t is not None and equal(t[0], weight)), None)
        if found is None:
            return None
        terms.remove(found)
        digits.append((found[1], found[2]))
        weight = weight * found[2]
    return tuple(reversed(digits)), weight


def _digit(space: Space, term: Expr) -> tuple[Expr, Expr, Expr] | None:
    """(weight, atom, extent of the atom) of a product with one factor that depends on the space's symbols."""
    factors = sympy.Mul.make_args(term)
    mine = [f for f in factors if f.free_symbols & set(space.extent)]
    extent = space.extent_of(mine[0]) if len(mine) == 1 else None
    return None if extent is None else (product([f for f in factors if f is not mine[0]]), mine[0], extent)


def broadcast_index(shape: Sequence[Expr], index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Index into an operand of ``shape`` that broadcasts (aligned right) to a result read at ``index``."""
    tail = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else i for size, i in zip(shape, tail))
