"""Scores of which a part is written over, or padded around: a choice by the place.

    s[..., a:b] = x      s[:, i] = x      diagonal(s) = x      s[mask] = number      s.fill_(number)      F.pad(s, …, value=number)

In-place writes arrive here as ``slice_scatter``, ``select_scatter``, ``diagonal_scatter`` and ``index_put``. Where the index says for
certain on which side of the choice an element lies, it is that one's. What is read for elements of the other side does not count, but
must be in range.
"""

from __future__ import annotations

from typing import Any, Protocol

import sympy
import torch
from torch import fx

from fa_inductor.index import ZERO, Expr, Space, as_expr, nonnegative, shape_of
from fa_inductor.program import ProgramBuilder
from fa_inductor.program.choice import choose

from .joins import Arm, clamped
from .views import argument, name_of, overlaps

NAMES = frozenset({"select_scatter", "slice_scatter", "diagonal_scatter", "index_put", "pad", "constant_pad_nd", "fill"})


class Reader(Protocol):
    """The part of the lifter that these rules use."""

    builder: ProgramBuilder
    arms: tuple[Arm, ...]
    space: Space

    def size(self, expr: Expr) -> int: ...
    def element(self, node: fx.Node, index: tuple[Expr, ...]) -> int: ...
    def operand(self, x: Any, index: tuple[Expr, ...]) -> int: ...
    def local(self, extent: Expr, value: int) -> sympy.Symbol: ...


def accepts(node: fx.Node) -> bool:
    """Is it of a form that ``read`` has a rule for?"""
    name = name_of(node)
    base = node.args[0]
    if not node.meta["val"].dtype.is_floating_point or (name.endswith(("_scatter", "_put")) and isinstance(base, fx.Node) and overlaps(base)):
        return False
    if name == "index_put":
        return _mask_of(node) is not None
    if name in ("pad", "constant_pad_nd"):
        return padding(node) is not None
    if name == "fill":
        return not isinstance(node.args[1], fx.Node) or node.args[1].meta["val"].dim() == 0
    return name != "slice_scatter" or argument(node, 5, "step", 1) == 1


def read(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    """``node[index]``; None where it cannot be told."""
    name = name_of(node)
    if name == "fill":
        return reader.builder.convert(reader.operand(node.args[1], ()), "float")
    if name == "index_put":
        return _masked(reader, node, index)
    if name in ("pad", "constant_pad_nd"):
        return _padded(reader, node, index)
    if name == "diagonal_scatter":
        return _diagonal(reader, node, index)
    return _part(reader, node, index)


def _part(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    base, source = node.args[0], node.args[1]
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
    shape = shape_of(base.meta["val"])
    dim = int(argument(node, 2, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    selects = name_of(node) == "select_scatter"
    start = bound(argument(node, 3, "index" if selects else "start"), ZERO, shape[dim])
    if start is None:
        return None
    size = sympy.S.One if selects else shape_of(source.meta["val"])[dim]
    place = index[dim]

    def inner(at: Expr) -> tuple[Expr, ...]:
        return (*index[:dim], *(() if selects else (at,)), *index[dim + 1 :])

    if reader.space.within(place, start, start + size):
        return reader.element(source, inner(sympy.expand(place - start)))
    if _outside(reader.space, place, start, start + size):
        return reader.element(base, index)
    b = reader.builder
    at = ZERO if size == 1 else reader.local(size, clamped(reader, sympy.expand(place - start), size, start != 0))
    outer, reader.arms = reader.arms, (*reader.arms, Arm(place, start, at))
    written = b.convert(reader.element(source, inner(at)), "float")
    reader.arms = outer
    return choose(b, _between(reader, place, start, start + size), written, b.convert(reader.element(base, index), "float"))


def _diagonal(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    base, source = node.args[0], node.args[1]
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
    rank = len(index)
    offset = argument(node, 2, "offset", 0)
    row, column = (int(argument(node, p, n, d)) % rank for p, n, d in ((3, "dim1", 0), (4, "dim2", 1)))  # type: ignore[call-overload]
    if not isinstance(offset, int):
        return None
    b, length = reader.builder, shape_of(source.meta["val"])[-1]
    along = index[row] if offset >= 0 else index[column]
    at = ZERO if length == 1 else reader.local(length, clamped(reader, along, length, False))
    others = tuple(i for d, i in enumerate(index) if d not in (row, column))
    written = b.convert(reader.element(source, (*others, at)), "float")
    hit = b.emit("eq", reader.size(sympy.expand(index[column] - index[row])), b.const(offset))
    return choose(b, hit, written, b.convert(reader.element(base, index), "float"))


def _masked(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    """``base[mask] = number``, as ``masked_fill``: the mask may depend on the scores."""
    found = _mask_of(node)
    assert found is not None
    mask, skipped, number = found
    b, rank = reader.builder, mask.meta["val"].dim()
    hit = b.convert(reader.element(mask, index[skipped : skipped + rank]), "bool")
    value = b.convert(reader.operand(number, (ZERO,) * number.meta["val"].dim()), "float")
    base = node.args[0]
    assert isinstance(base, fx.Node)
    return b.emit("where", hit, value, b.convert(reader.element(base, index), "float"))


def _mask_of(node: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """(mask, dimensions before those that it covers, the one number that is written)."""
    indices, number = node.args[1], node.args[2]
    if not isinstance(indices, (list, tuple)) or not isinstance(number, fx.Node) or argument(node, 3, "accumulate", False):
        return None
    skipped = next((i for i, x in enumerate(indices) if x is not None), len(indices))
    masks = indices[skipped:]
    if len(masks) != 1 or not isinstance(masks[0], fx.Node) or masks[0].meta["val"].dtype != torch.bool:
        return None
    return (masks[0], skipped, number) if all(n == 1 for n in number.meta["val"].shape) else None


def _padded(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    found = padding(node)
    assert found is not None
    source, before, number = found
    b, shape = reader.builder, shape_of(source.meta["val"])
    conditions: list[int] = []
    places: list[Expr] = []
    for i, left, size, whole in zip(index, before, shape, shape_of(node.meta["val"]), strict=True):
        place = sympy.expand(i - left)
        if size == whole or reader.space.within(place, ZERO, size):
            places.append(place)
        elif _outside(reader.space, place, ZERO, size):
            return b.const(number)
        else:
            places.append(reader.local(size, clamped(reader, place, size, left != 0)))
            conditions.append(_between(reader, place, ZERO, size))
    value = b.convert(reader.element(source, tuple(places)), "float")
    for condition in conditions:
        chosen = choose(b, condition, value, b.const(number))
        if chosen is None:
            return None
        value = chosen
    return value


def padding(node: fx.Node) -> tuple[fx.Node, list[Expr], float] | None:
    """(what is padded, elements before it in each dimension, the number) for padding by a constant that cuts nothing off."""
    constant = name_of(node) == "constant_pad_nd" or argument(node, 2, "mode", "constant") == "constant"
    source, pads = node.args[0], node.args[1]
    number = argument(node, 2 if name_of(node) == "constant_pad_nd" else 3, "value", 0) or 0
    if not constant or not isinstance(source, fx.Node) or not isinstance(pads, (list, tuple)) or not isinstance(number, (int, float)):
        return None
    if not all(isinstance(p, int) and p >= 0 for p in pads):
        return None
    rank = source.meta["val"].dim()
    before = [sympy.Integer(p) for p in pads[::2]][::-1]  # type: ignore[arg-type]
    return source, [ZERO] * (rank - len(before)) + before, float(number)


def bound(value: object, default: Expr, size: Expr) -> Expr | None:
    """Where a slice begins, or a place is, as a non-negative number; None where that is not known."""
    if value is None:
        return default
    at = as_expr(value.meta["val"]) if isinstance(value, fx.Node) else as_expr(value)
    if at.is_Integer and at < 0:
        at = sympy.expand(at + size)
    return at if nonnegative(at) and nonnegative(sympy.expand(size - at)) else None


def _outside(space: Space, place: Expr, start: Expr, stop: Expr) -> bool:
    return _below(space, place, start) or nonnegative(sympy.expand(place - stop))


def _below(space: Space, place: Expr, stop: Expr) -> bool:
    """place < stop, provably."""
    top = space.upper(place)
    return top is not None and nonnegative(sympy.expand(stop - 1 - top))


def _between(reader: Reader, place: Expr, start: Expr, stop: Expr) -> int:
    """start <= place < stop as a condition of the program."""
    b = reader.builder
    result = b.const(True)
    if not nonnegative(sympy.expand(place - start)):
        result = b.emit("and", result, b.emit("ge", reader.size(place), reader.size(start)))
    if not _below(reader.space, place, stop):
        result = b.emit("and", result, b.emit("lt", reader.size(place), reader.size(sympy.expand(stop))))
    return result
