"""Which element of which tensor an element is, told for many elements at once.

Where indices are no formulas that algebra can follow — triangles copied together from overlapping chunks, rows of one length read as
rows of another — the places along a few dimensions are listed one by one and followed down as numbers; all other dimensions stay
symbols. What is found holds for the listed places alone, so a proof lists all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv, Mod

from .constants import Constants
from .graph import GraphContext
from .index import ZERO, Expr, Space, shape_of
from .patterns import joins, overwrites, views
from .patterns.batch_slices import MAP_CASTS
from .patterns.cell import rounded
from .patterns.generators import constant_of
from .patterns.views import argument, is_static, name_of


class Untold(Exception):
    """Symbols and listed places meet where neither rule applies."""


@dataclass(frozen=True)
class Place:
    """A place along one dimension: ``fixed + at``, with ``at`` one number for each element (None: 0 for all)."""

    fixed: Expr = ZERO
    at: Tensor | None = None

    def plus(self, other: Place) -> Place:
        at = other.at if self.at is None else self.at if other.at is None else self.at + other.at
        return Place(self.fixed + other.fixed, at)

    def only(self, chosen: Tensor) -> Place:
        """For the elements that a mask chooses."""
        return self if self.at is None else replace(self, at=self.at[chosen])

    def listed(self, ids: Tensor) -> Tensor:
        """The place of each of the elements ``ids`` as a number."""
        if not self.fixed.is_Integer:
            raise Untold
        return torch.full_like(ids, int(self.fixed)) if self.at is None else self.at + int(self.fixed)


Index = tuple[Place, ...]


@dataclass(frozen=True)
class Fragment:
    """The elements ``ids`` are those of ``node`` at ``index``, or the number ``value``."""

    ids: Tensor
    node: fx.Node | None
    index: Index = ()
    value: float = 0.0


class Views:
    """What each view of a graph reads, in terms of a symbol for each of its dimensions."""

    def __init__(self) -> None:
        self.known: dict[fx.Node, tuple[list[sympy.Symbol], views.Step | None]] = {}

    def below(self, node: fx.Node) -> tuple[list[sympy.Symbol], views.Step | None]:
        if node not in self.known:
            shape = shape_of(node.meta["val"])
            symbols = [sympy.Dummy(f"i{d}", integer=True, nonnegative=True) for d in range(len(shape))]
            self.known[node] = symbols, views.step(Space(dict(zip(symbols, shape, strict=True))), node, tuple(symbols))
        return self.known[node]


class Tracer:
    """Follows elements down through views, joins, overwrites, padding and fixed choices.

    Args:
        extents: of the symbols in indices.
    """

    def __init__(self, context: GraphContext, constants: Constants, known: Views, extents: dict[sympy.Symbol, Expr]) -> None:
        self.context, self.constants, self.views, self.space = context, constants, known, Space(extents)
        self.touched: set[fx.Node] = set()
        self.arms: dict[fx.Node, object] = {}
        """Of each choice that was followed the arm that all elements took; None where they went different ways."""

    def trace(self, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment]:
        """Fragments that are all of ``ids``, each once; of ops that are not followed an element is its own."""
        if ids.numel() == 0:
            return []
        followed = node.op == "call_function" and not self.context.is_written(node) and all(map(is_static, [node, *node.all_input_nodes]))
        found = self._below(node, index, ids) if followed else None
        if found is None:
            return [Fragment(ids, node, index)]
        self.touched.add(node)
        return [f for f in found if f.ids.numel()]

    def _below(self, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment] | None:
        name = name_of(node)
        number = constant_of(node.args[1] if name == "fill" else node)
        if isinstance(number, (int, float)):
            return [Fragment(ids, None, value=rounded(number, node.meta["val"].dtype))]
        if name in views.RULES:
            return self._view(node, index, ids)
        if name in joins.NAMES:
            return self._join(node, index, ids)
        if name in ("slice_scatter", "select_scatter"):
            return self._scatter(node, index, ids)
        if name in ("pad", "constant_pad_nd"):
            return self._pad(node, index, ids)
        if name == "where" and len(node.args) == 3:
            return self._choice(node.args[0], node.args[1], node.args[2], node, index, ids)
        if name == "masked_fill":
            return self._choice(node.args[1], node.args[2], node.args[0], node, index, ids)
        return None

    def _view(self, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment] | None:
        symbols, below = self.views.below(node)
        if below is None or self._changes(node, below[0]):
            return None
        if name_of(node) == "getitem":
            self.touched.update(node.all_input_nodes)
        places = dict(zip(symbols, index, strict=True))
        return self.trace(below[0], tuple(self.at(i, places) for i in below[1]), ids)

    def _changes(self, node: fx.Node, below: fx.Node) -> bool:
        """Is it a copy with contents of its own, or does a gradient end here?"""
        return self.context.copies_and_changes(node, below) or (node in self.context.needs_grad) != (below in self.context.needs_grad)

    def at(self, expr: Expr, places: dict[sympy.Symbol, Place]) -> Place:
        """An index expression at the places of its symbols."""
        if expr in places:
            return places[expr]
        if expr.is_Integer or (isinstance(expr, sympy.Symbol) and expr in self.space.extent):
            return Place(expr)
        if expr.is_Add:
            total = Place()
            for term in expr.args:
                total = total.plus(self.at(term, places))
            return total
        if expr.is_Mul and expr.args[0].is_Integer and len(expr.args) == 2:
            place = self.at(expr.args[1], places)
            return Place(sympy.expand(place.fixed * expr.args[0]), None if place.at is None else place.at * int(expr.args[0]))
        if isinstance(expr, (FloorDiv, Mod)) and expr.args[1].is_Integer:
            return self._divided(self.at(expr.args[0], places), expr.args[1], isinstance(expr, FloorDiv))
        raise Untold

    def _divided(self, place: Place, n: Expr, quotient: bool) -> Place:
        fixed = sympy.expand(place.fixed)
        if place.at is None:
            return Place(self.space.div(fixed, n) if quotient else self.space.mod(fixed, n))
        whole, rest = self.space.split(fixed, n)
        if not rest.is_Integer:
            raise Untold
        at = place.at + int(rest)
        return Place(whole, at // int(n)) if quotient else Place(ZERO, at % int(n))

    def _join(self, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment]:
        tensors, dim = joins.parts(node)
        at, start, found = index[dim].listed(ids), 0, list[Fragment]()
        for tensor, extent in zip(tensors, joins.sizes(node), strict=True):
            size = int(extent)
            inside = (at >= start) & (at < start + size)
            own = () if name_of(node) == "stack" else (Place(ZERO, at - start),)
            found += self._part(node, tensor, (*index[:dim], *own, *index[dim + 1 :]), ids, inside)
            start += size
        return found

    def _part(self, whole: fx.Node, node: fx.Node, index: Index, ids: Tensor, chosen: Tensor) -> list[Fragment]:
        """Of ``whole`` the elements that are those of ``node``."""
        if node in self.context.needs_grad and whole not in self.context.needs_grad:
            raise Untold  # a gradient ends here
        if not bool(chosen.any()):
            return []
        return self.trace(node, index, ids) if bool(chosen.all()) else self.trace(node, tuple(p.only(chosen) for p in index), ids[chosen])

    def _scatter(self, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment] | None:
        base, source = node.args[0], node.args[1]
        assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
        shape = shape_of(base.meta["val"])
        dim, selects = int(argument(node, 2, "dim", 0)) % len(shape), name_of(node) == "select_scatter"
        begin = overwrites.bound(argument(node, 3, "index" if selects else "start"), ZERO, shape[dim])
        if begin is None or not begin.is_Integer or views.overlaps(base) or (not selects and argument(node, 5, "step", 1) != 1):
            return None
        size, start = 1 if selects else int(source.meta["val"].shape[dim]), int(begin)
        if start == 0 and size == shape[dim] and not selects:
            return self._part(node, source, index, ids, torch.ones_like(ids, dtype=torch.bool))
        at = index[dim].listed(ids)
        inside = (at >= start) & (at < start + size)
        own = () if selects else (Place(ZERO, at - start),)
        return [*self._part(node, source, (*index[:dim], *own, *index[dim + 1 :]), ids, inside), *self._part(node, base, index, ids, ~inside)]

    def _pad(self, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment] | None:
        padding = overwrites.padding(node)
        if padding is None:
            return None
        source, before, number = padding
        inside, places = torch.ones_like(ids, dtype=torch.bool), list[Place]()
        for place, left, size, whole in zip(index, before, source.meta["val"].shape, node.meta["val"].shape, strict=True):
            if size == whole:
                places.append(place)
                continue
            at = place.listed(ids) - int(left)
            inside &= (at >= 0) & (at < int(size))
            places.append(Place(ZERO, at))
        return [*self._part(node, source, tuple(places), ids, inside), Fragment(ids[~inside], None, value=rounded(number, node.meta["val"].dtype))]

    def _choice(self, condition: object, x: object, y: object, node: fx.Node, index: Index, ids: Tensor) -> list[Fragment] | None:
        chosen = self.known(condition, broadcast(index, condition), ids) if isinstance(condition, fx.Node) else None
        if chosen is None:
            return None
        arm = x if bool(chosen.all()) else y if not bool(chosen.any()) else None
        self.arms[node] = arm if self.arms.get(node, arm) is arm else None
        return [*self._arm(x, node, index, ids, chosen), *self._arm(y, node, index, ids, ~chosen)]

    def known(self, node: fx.Node, index: Index, ids: Tensor) -> Tensor | None:
        """Is ``node`` other than 0, of each element? None where that depends on an input."""
        order = places_of(ids)
        result = torch.empty(ids.shape, dtype=torch.bool)
        for f in self.trace(node, index, ids):
            found = torch.tensor(bool(f.value)) if f.node is None else None
            if f.node is not None and name_of(f.node) in MAP_CASTS and not self.context.is_written(f.node):
                source = f.node.args[0]
                found = self.known(source, f.index, f.ids) if isinstance(source, fx.Node) else None
            elif f.node is not None:
                held = self.constants.of(f.node)
                found = None if held is None else held.bool()[tuple(0 if size == 1 else p.listed(f.ids) for p, size in zip(f.index, held.shape, strict=True))]
            if found is None:
                return None
            result[order[f.ids]] = found
        return result

    def _arm(self, x: object, node: fx.Node, index: Index, ids: Tensor, chosen: Tensor) -> list[Fragment]:
        if isinstance(x, (int, float)):
            return [Fragment(ids[chosen], None, value=rounded(x, node.meta["val"].dtype))]
        if not isinstance(x, fx.Node):
            raise Untold
        return self._part(node, x, broadcast(index, x), ids, chosen)


def broadcast(index: Index, node: fx.Node) -> Index:
    """The index of an operand that broadcasts to what is read at ``index``."""
    shape = node.meta["val"].shape
    return tuple(Place() if size == 1 else place for size, place in zip(shape, index[len(index) - len(shape) :], strict=True))


def grid(*sizes: int) -> list[Tensor]:
    """The places along each of some dimensions for all combinations of them, the last fastest."""
    return [x.flatten() for x in torch.meshgrid([torch.arange(n) for n in sizes], indexing="ij")]


def places_of(ids: Tensor) -> Tensor:
    """For each of ``ids`` where it stands among them."""
    order = torch.empty(int(ids.max()) + 1 if ids.numel() else 0, dtype=torch.long)
    order[ids] = torch.arange(ids.numel())
    return order


def only_moving(index: Sequence[Place]) -> int | None:
    """The one dimension along which places are listed; None where there are more or none."""
    moving = [d for d, place in enumerate(index) if place.at is not None]
    return moving[0] if len(moving) == 1 and index[moving[0]].fixed.is_Integer else None
