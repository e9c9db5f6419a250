"""Joins: ops whose output is several inputs side by side. An element lies in one of them: where its index says for certain in which,
it is that one's, elsewhere a choice between all by the place along the joined dimension.

In the choice a part is read at places of its own, and only its value there counts. Where it was cut out of a larger tensor at the
same places, as when groups of heads are treated apart and joined again, that tensor is read at the place itself (``rejoined``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import sympy
from torch import fx

from fa_inductor.index import ZERO, Expr, Space, shape_of
from fa_inductor.program import ProgramBuilder
from fa_inductor.program.choice import choose

from .views import Step, argument, cut_dimension, name_of

NAMES = ("cat", "concat", "concatenate", "stack")
"""``stack`` joins along a dimension that its parts do not have, one place each."""


@dataclass(frozen=True)
class Arm:
    """One part of a choice: it counts where ``place`` is ``start + local``."""

    place: Expr
    start: Expr
    local: Expr


class Sized(Protocol):
    """What turns sizes into program values."""

    builder: ProgramBuilder

    def size(self, expr: Expr) -> int: ...


class Reader(Sized, Protocol):
    """The part of the lifter that a choice uses."""

    arms: tuple[Arm, ...]

    def element(self, node: fx.Node, index: tuple[Expr, ...]) -> int: ...
    def local(self, extent: Expr, value: int) -> sympy.Symbol: ...


def parts(node: fx.Node) -> tuple[list[fx.Node], int]:
    """The tensors that a join is made of, and its (non-negative) dimension. Empty 1-D tensors, which ``cat`` ignores, are left out."""
    rank = node.meta["val"].dim()
    dim = argument(node, 1, "dim", 0)
    own = rank - 1 if name_of(node) == "stack" else rank
    found = [n for n in node.args[0] if isinstance(n, fx.Node) and n.meta["val"].dim() == own]  # type: ignore[union-attr]
    return found, dim + rank if dim < 0 else dim


def sizes(node: fx.Node) -> list[Expr]:
    """What each part takes of the joined dimension."""
    tensors, dim = parts(node)
    return [sympy.S.One if name_of(node) == "stack" else shape_of(t.meta["val"])[dim] for t in tensors]


def _read(node: fx.Node, index: tuple[Expr, ...], dim: int, place: Expr) -> tuple[Expr, ...]:
    """The index of a part that is read at ``place`` along the joined dimension."""
    return (*index[:dim], *(() if name_of(node) == "stack" else (place,)), *index[dim + 1 :])


def step(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    """The part and its index that ``node[index]`` reads; None where the index may lie in several."""
    if name_of(node) not in NAMES:
        return None
    tensors, dim = parts(node)
    start = ZERO
    for tensor, size in zip(tensors, sizes(node), strict=True):
        if space.within(index[dim], start, start + size):
            return tensor, _read(node, index, dim, index[dim] - start)
        start = start + size
    return None


def choice(reader: Reader, node: fx.Node, index: tuple[Expr, ...]) -> int | None:
    """``node[index]`` for a join of floats, any part of which the index may lie in; None where it cannot be told."""
    tensors, dim = parts(node)
    if not node.meta["val"].dtype.is_floating_point:
        return None
    b, place, outer = reader.builder, index[dim], reader.arms
    found: list[tuple[Expr, int]] = []
    start = ZERO
    for tensor, size in zip(tensors, sizes(node), strict=True):
        local = ZERO if size == 1 else reader.local(size, clamped(reader, sympy.expand(place - start), size, start != 0))
        reader.arms = (*outer, Arm(place, start, local))
        value = b.convert(reader.element(tensor, _read(node, index, dim, local)), "float") if size != 0 else -1
        reader.arms, start = outer, sympy.expand(start + size)
        found += [(start, value)] if size != 0 else []
    result: int | None = found[-1][1] if found else None
    for end, value in reversed(found[:-1]):
        result = choose(b, b.emit("lt", reader.size(place), reader.size(end)), value, result) if result is not None else None
    return result


def clamped(reader: Sized, place: Expr, size: Expr, below: bool) -> int:
    """``place`` moved into the ``size`` places of a part, so that what does not count is read there; ``below``: it may be negative."""
    b = reader.builder
    value = b.emit("min", reader.size(place), reader.size(size - 1))
    return b.emit("max", value, b.const(0)) if below else value


def rejoined(space: Space, arms: tuple[Arm, ...], node: fx.Node, below: Step) -> Step:
    """What the view ``node`` reads, at the place itself where that is all that counts: cut out at ``start``, read at ``start + local``."""
    dim = cut_dimension(node)
    if dim is None:
        return below
    source, index = below
    size = shape_of(source.meta["val"])[dim]
    for arm in reversed(arms):
        if arm.place not in index and index[dim] == sympy.expand(arm.start + arm.local) and space.within(arm.place, ZERO, size):
            index = (*index[:dim], arm.place, *index[dim + 1 :])
    return source, index
