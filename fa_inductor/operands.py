"""Q, K, V and the output as canonical 4-D tensors: which reshape, permute and expand of which graph node they are.

A dimension that is read at ``b*H + h`` is the merge of the atoms ``b`` and ``h``; each canonical axis is the merge of its
atoms in turn. A head axis read at ``h // g`` is a grouped key head: K and V are then used without the expansion.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Literal

import sympy
from torch import fx

from .graph import GraphContext
from .index import ONE, Expr, Space, equal, mixed_radix, product, shape_of, window
from .lift import elements
from .patterns import joins, views
from .site import Atom, View4

AxisName = Literal["b", "h", "q", "k", "d"]


def chain(context: GraphContext, space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Iterator[tuple[fx.Node, tuple[Expr, ...]]]:
    """The operand and what it is a view or copy of, outermost first; exact widening casts are passed through, and joins of which one part is read.

    It ends where a copy is written to, and where a gradient is cut (a view made under no_grad).
    """
    yield node, index
    while True:
        below = views.step(space, node, index)
        if below is None and views.name_of(node) in ("to", "_to_copy", "float"):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            before, after = source.meta["val"].dtype, node.meta["val"].dtype
            if not before.is_floating_point or after.itemsize < before.itemsize or (before != after and after.itemsize == before.itemsize):
                return
            if source.meta["val"].device != node.meta["val"].device:
                return
            below = source, index
        if below is None:
            below = joins.step(space, node, index)
            below = None if below is None or below[0].meta["val"].dtype != node.meta["val"].dtype else below
        if below is None or context.copies_and_changes(node, below[0]):
            return
        source_trains, trains = below[0] in context.needs_grad, node in context.needs_grad
        if source_trains != trains and (source_trains or views.name_of(node) not in joins.NAMES):  # of what is joined some may train
            return
        node, index = below
        yield node, index


def atoms_of(space: Space, axes: dict[sympy.Symbol, AxisName], index: Expr, size: Expr) -> tuple[Atom, ...] | None:
    """``index`` as a mixed-radix number whose digits are atoms of the axes, slowest first; None where it is not one."""
    digits = mixed_radix(space, index, size)
    return None if digits is None else _named(space, axes, digits)


def _named(space: Space, axes: dict[sympy.Symbol, AxisName], digits: tuple[tuple[Expr, Expr], ...]) -> tuple[Atom, ...] | None:
    atoms = []
    for expr, extent in digits:
        symbols = expr.free_symbols & set(space.extent)
        if len(symbols) != 1 or (symbol := symbols.pop()) not in axes:
            return None
        atoms.append(Atom(axes[symbol], expr, extent))
    return tuple(atoms)


def as_view(space: Space, axes: dict[sympy.Symbol, AxisName], node: fx.Node, index: tuple[Expr, ...], windows: bool = False) -> View4 | None:
    """``node`` read at ``index`` as a View4 in which every axis is complete, or None. ``windows``: it may be a slice of the node."""
    return view_of(space, axes, node, index, shape_of(node.meta["val"]), windows)


def view_of(
    space: Space, axes: dict[sympy.Symbol, AxisName], node: fx.Node, index: tuple[Expr, ...], shape: tuple[Expr, ...], windows: bool = False
) -> View4 | None:
    """``as_view`` of a tensor of ``shape``, which ``node`` only names."""
    dimensions, cut = [], []
    for dim, (i, size) in enumerate(zip(index, shape, strict=True)):
        atoms = atoms_of(space, axes, i, size)
        part = window(space, i, size) if atoms is None and windows else None
        if part is not None:
            atoms, start, length = _named(space, axes, part[0]), *part[1:]
            cut.append((dim, start, length))
        if atoms is None:
            return None
        dimensions.append(atoms)
    view = View4(node, tuple(dimensions), tuple(cut))
    flat = [a for atoms in dimensions for a in atoms]
    if len({a.expr for a in flat}) != len(flat):
        return None
    return view if all(ordered(space, symbol, axis, view) is not None for symbol, axis in axes.items()) else None


def covers(space: Space, axes: dict[sympy.Symbol, AxisName], view: View4) -> bool:
    """Has the tensor an element for every combination of the axes' places: does it lack none of them?"""
    atoms = [a for dimension in view.dimensions for a in dimension]
    return all(equal(product([a.extent for a in atoms if a.axis == name]), space.extent[symbol]) for symbol, name in axes.items())


def ordered(space: Space, symbol: sympy.Symbol, axis: AxisName, view: View4) -> tuple[Atom, ...] | None:
    """The atoms of ``axis`` from the slowest, if together they make up the axis (or a group index of it); () if absent."""
    mine = [a for atoms in view.dimensions for a in atoms if a.axis == axis]
    if len(mine) == 1 and axis == "h" and mine[0].expr.func.__name__ == "FloorDiv" and mine[0].expr.args[0] == symbol:
        return tuple(mine)
    for order in permutations(mine):
        if _recompose(space, symbol, order):
            return order
    return () if not mine else None


def _recompose(space: Space, symbol: sympy.Symbol, atoms: tuple[Atom, ...]) -> bool:
    """Are ``atoms`` the digits of ``symbol`` in the mixed radix of their extents?"""
    if not equal(product([a.extent for a in atoms]), space.extent[symbol]):
        return False
    for position, atom in enumerate(atoms):
        quotient = space.div(symbol, product([a.extent for a in atoms[position + 1 :]]))
        if atom.expr != (quotient if position == 0 else space.mod(quotient, atom.extent)):
            return False
    return True


def group_of(space: Space, h: sympy.Symbol, view: View4) -> Expr:
    """Query heads per key head that ``view`` implies: 1 for a full head axis, the extent of ``h`` for none."""
    mine = [a for atoms in view.dimensions for a in atoms if a.axis == "h"]
    if not mine:
        return space.extent[h]
    expr = mine[0].expr
    if len(mine) == 1 and expr.func.__name__ == "FloorDiv" and expr.args[0] == h:
        return expr.args[1]
    return ONE


def candidates(context: GraphContext, space: Space, axes: dict[sympy.Symbol, AxisName], node: fx.Node, index: tuple[Expr, ...]) -> list[View4]:
    """All nodes along the view chain from which the operand can be had, cheapest first.

    Cheapest: fewest elements in memory; then the outermost, unless a copy (clone, contiguous) can be avoided by going deeper.
    """
    found: list[tuple[int, int, View4]] = []
    depth = 0
    for below, i in chain(context, space, node, index):
        view = as_view(space, axes, below, i, windows=True)
        if view is not None:
            found.append((elements(below), depth, view))
        if views.name_of(below) in ("clone", "contiguous", "reshape"):
            depth -= 100  # what lies below a possible copy is better
        depth += 1
    return [view for _, _, view in sorted(found, key=lambda x: x[:2])]
