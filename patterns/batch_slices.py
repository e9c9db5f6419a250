"""Equal slices of a tensor along a dimension of its batch: halves of the heads by chunk or slice, maps by select or unbind.

    x[:, i] V = (x V)[:, i]

so that a product with each of them can be one product with all. What lies in the last two dimensions, queries and keys, is no batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fa_inductor.index import as_expr, equal

from .exponentials import CASTS
from .views import argument, cut_dimension, name_of

MAP_CASTS = (*CASTS, "type_as")
_PIECES = ("chunk", "split", "unsafe_chunk", "unsafe_split")


@dataclass(frozen=True)
class Share:
    """Number ``at`` of ``count`` equal slices of the source along one of its batch dimensions, which ``selects`` drops."""

    source: fx.Node
    dim: int
    count: int
    at: int
    selects: bool

    @property
    def key(self) -> tuple[object, ...]:
        return self.source, self.dim, self.count, self.selects


def share_of(node: fx.Node) -> Share | None:
    """What ``node`` is a share of; None where it is not one of equal slices."""
    while name_of(node) in MAP_CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    dim = cut_dimension(node)
    share = None if dim is None else _cut(node, dim)
    return share if share is not None and share.dim < share.source.meta["val"].dim() - 2 else None


def _cut(node: fx.Node, dim: int) -> Share | None:
    """The share that ``node``, a part along ``dim``, may be; of any dimension."""
    name, source = name_of(node), node.args[0]
    assert isinstance(source, fx.Node)
    if name == "select":
        return _selected(source, dim, argument(node, 2, "index"))
    if name == "slice":
        return _sliced(node, source, dim)
    pieces, whole = source, source.args[0]
    if name != "getitem" or not isinstance(whole, fx.Node) or not isinstance(at := node.args[1], int):
        return None
    if name_of(pieces) == "unbind":
        return _selected(whole, dim, at)
    count = len(pieces.meta["val"])
    size, each = (as_expr(x.meta["val"].shape[dim]) for x in (whole, node))
    return Share(whole, dim, count, at, False) if name_of(pieces) in _PIECES and equal(size, each * count) else None


def _selected(source: fx.Node, dim: int, at: object) -> Share | None:
    count = source.meta["val"].shape[dim]
    return Share(source, dim, count, at % count, True) if isinstance(at, int) and isinstance(count, int) else None


def _sliced(node: fx.Node, source: fx.Node, dim: int) -> Share | None:
    """``source[start:stop]`` of a whole number of such slices."""
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    size, each = source.meta["val"].shape[dim], node.meta["val"].shape[dim]
    if not all(isinstance(x, int) for x in (start, size, each)) or step != 1 or not each:
        return None
    start %= size
    return Share(source, dim, size // each, start // each, False) if size % each == 0 and start % each == 0 else None
