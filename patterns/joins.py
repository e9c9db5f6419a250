"""Joins: ops whose output is several inputs side by side. An element lies in one of them, where its index says so for certain."""

from __future__ import annotations

from torch import fx

from fa_inductor.index import ZERO, Expr, Space, shape_of

from .views import Step, argument, name_of

NAMES = ("cat", "concat", "concatenate")


def parts(node: fx.Node) -> tuple[list[fx.Node], int]:
    """The tensors that a concatenation is made of, and its (non-negative) dimension. Empty 1-D tensors, which it ignores, are left out."""
    rank = node.meta["val"].dim()
    dim = argument(node, 1, "dim", 0)
    found = [n for n in node.args[0] if isinstance(n, fx.Node) and n.meta["val"].dim() == rank]  # type: ignore[union-attr]
    return found, dim + rank if dim < 0 else dim


def step(space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Step | None:
    """The part and its index that ``node[index]`` reads; None where the index may lie in several."""
    if name_of(node) not in NAMES:
        return None
    tensors, dim = parts(node)
    start = ZERO
    for tensor in tensors:
        size = shape_of(tensor.meta["val"])[dim]
        if space.within(index[dim], start, start + size):
            return tensor, (*index[:dim], index[dim] - start, *index[dim + 1 :])
        start = start + size
    return None
