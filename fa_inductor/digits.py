"""Digits: a first guess at how the output's dimensions split into batch, head and query axes.

The guess only chooses names. What a site claims is proved afterwards by lifting the region at the chosen names
(``analyse.py``): a bad guess ends in a refusal, never in a wrong rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from .index import ONE, ZERO, Expr, Space, exact_quotient


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


@dataclass
class Digits:
    """For each dimension of a tensor its digits, slowest first, and the extents of all digits."""

    dimensions: list[list[sympy.Symbol]] = field(default_factory=list)
    extent: dict[sympy.Symbol, Expr] = field(default_factory=dict)

    @staticmethod
    def of(shape: Sequence[Expr]) -> Digits:
        digits = Digits()
        for position, size in enumerate(shape):
            if size == 1:
                digits.dimensions.append([])
            else:
                x = symbol(f"x{position}")
                digits.dimensions.append([x])
                digits.extent[x] = size
        return digits

    def index(self) -> tuple[Expr, ...]:
        """The tensor's index in terms of the digits."""
        return tuple(self._merge(d) for d in self.dimensions)

    def _merge(self, digits: list[sympy.Symbol]) -> Expr:
        value: Expr = ZERO
        for x in digits:
            value = value * self.extent[x] + x
        return sympy.expand(value)

    def order(self) -> list[sympy.Symbol]:
        return [x for d in self.dimensions for x in d]

    def refine(self, indices: Iterable[tuple[Expr, ...]]) -> bool:
        """Split a digit x that some index reads as both ``x // m`` and ``x % m``; False when there is none."""
        for index in indices:
            atoms = {a for i in index for a in sympy.preorder_traversal(i) if isinstance(a, (FloorDiv, Mod)) and a.args[0] in self.extent}
            for a in atoms:
                x, m = a.args
                partner = Mod(x, m) if isinstance(a, FloorDiv) else FloorDiv(x, m)
                if partner in atoms and self._split(x, m):
                    return True
        return False

    def _split(self, x: sympy.Symbol, m: Expr) -> bool:
        high = exact_quotient(self.extent[x], m)
        if high is None or high == 1 or m == 1:
            return False
        slow, fast = symbol(x.name + "h"), symbol(x.name + "l")
        self.extent[slow], self.extent[fast] = high, m
        del self.extent[x]
        self.dimensions = [[y for z in d for y in ((slow, fast) if z == x else (z,))] for d in self.dimensions]
        return True


@dataclass(frozen=True)
class Roles:
    """Which digits make up the batch, the heads, the queries and the value channels (each slowest first)."""

    batch: tuple[sympy.Symbol, ...]
    heads: tuple[sympy.Symbol, ...]
    query: tuple[sympy.Symbol, ...]
    value: tuple[sympy.Symbol, ...]


def assignments(digits: Digits, length: Expr, probability: set[sympy.Symbol], key: set[sympy.Symbol], value: set[sympy.Symbol]) -> Iterator[Roles]:
    """Roles from which operands depend on which digit, the likeliest first.

    A digit that keys and values do not depend on is the query, or a group of heads that share their keys: each in turn is tried
    as the query, first one as long as the keys, then the longest, then the one nearest the end.

    Args:
        length: number of keys.
        probability, key, value: the digits in the indices of the probabilities, keys and values.
    """
    order = digits.order()
    free = [x for x in order if x in probability and x not in key and x not in value]
    keyed = [x for x in order if x in probability and x not in free]
    channels = tuple(x for x in order if x not in probability)

    def likely(x: sympy.Symbol) -> tuple[bool, int, int]:
        extent = digits.extent[x]
        return extent == length, int(extent) if extent.is_Integer else 0, order.index(x)

    for query in sorted(free, key=likely, reverse=True):
        shared = [x for x in free if x is not query]
        own = keyed[-1:] if len(keyed) > 1 or not shared else []  # a lone batch dimension counts as heads: only these may share keys
        yield Roles(tuple(x for x in keyed if x not in own), (*own, *shared), (query,), channels)
    if not free:
        yield Roles(tuple(keyed[:-1]), tuple(keyed[-1:]), (), channels)


def axis_index(digits: Sequence[sympy.Symbol], extents: dict[sympy.Symbol, Expr], axis: sympy.Symbol, space: Space) -> dict[sympy.Symbol, Expr]:
    """Each digit as a function of the canonical axis that is their merge."""
    result: dict[sympy.Symbol, Expr] = {}
    stride: Expr = ONE
    for position, x in enumerate(reversed(digits)):
        quotient = space.div(axis, stride)
        result[x] = quotient if position == len(digits) - 1 else space.mod(quotient, extents[x])
        stride = stride * extents[x]
    return result
