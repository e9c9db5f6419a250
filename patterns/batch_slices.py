"""Equal slices of a tensor along a dimension of its batch: halves of the heads by chunk or slice, maps by select or unbind.

    x[:, i] V = (x V)[:, i]

so that a product with each of them can be one product with all. What lies in the last two dimensions, queries and keys, is no batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fa_inductor.index import as_expr, equal

from .exponentials import CASTS
from .views import argument, name_of

_CASTS = (*CASTS, "type_as")
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
    while name_of(node) in _CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    name, pieces = name_of(node), node.args[0] if node.args else None
    if not isinstance(pieces, fx.Node):
        return None
    if name == "select":
        return _selected(pieces, argument(node, 1, "dim"), argument(node, 2, "index"))
    if name == "slice":
        return _sliced(node, pieces)
    inner = pieces.args[0] if pieces.args else None
    if name != "getitem" or not isinstance(inner, fx.Node) or not isinstance(at := node.args[1], int):
        return None
    if name_of(pieces) == "unbind":
        return _selected(inner, argument(pieces, 1, "dim", 0), at)
    if name_of(pieces) not in _PIECES:
        return None
    share = Share(inner, int(argument(pieces, 2, "dim", 0)) % inner.meta["val"].dim(), len(pieces.meta["val"]), at, False)  # type: ignore[call-overload]
    size, each = (as_expr(x.meta["val"].shape[share.dim]) for x in (inner, node))
    return share if _of_the_batch(share) and equal(size, each * share.count) else None


def _selected(source: fx.Node, dim: Any, at: Any) -> Share | None:
    dim = dim % source.meta["val"].dim()
    count = source.meta["val"].shape[dim]
    if not isinstance(at, int) or not isinstance(count, int):
        return None
    share = Share(source, dim, count, at % count, True)
    return share if _of_the_batch(share) else None


def _sliced(node: fx.Node, source: fx.Node) -> Share | None:
    """``source[start:stop]`` of a whole number of such slices."""
    dim = int(argument(node, 1, "dim", 0)) % source.meta["val"].dim()  # type: ignore[call-overload]
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    size, each = source.meta["val"].shape[dim], node.meta["val"].shape[dim]
    if not all(isinstance(x, int) for x in (start, size, each)) or step != 1 or not each:
        return None
    start %= size
    share = Share(source, dim, size // each, start // each, False)
    return share if _of_the_batch(share) and size % each == 0 and start % each == 0 else None


def _of_the_batch(share: Share) -> bool:
    return bool(share.dim < share.source.meta["val"].dim() - 2)
