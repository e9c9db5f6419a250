"""Softmax in its spellings: the library op, ``log_softmax().exp()``, and exp / sum by hand, with or without the row maximum.

softmax(x) = exp(x - c) / sum(exp(x - c)) for any c that is constant along the axis, so a subtracted maximum is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from .views import argument, name_of


@dataclass(frozen=True)
class Softmax:
    """``output = softmax(input, dim)``; ``dim`` is non-negative. ``spelling`` is a word for the report."""

    output: fx.Node
    input: fx.Node
    dim: int
    spelling: str


def match(node: fx.Node) -> Softmax | None:
    """The softmax that ``node`` is the result of, if any."""
    for rule in RULES:
        found = rule(node)
        if found is not None:
            return found
    return None


def _normal(dim: object, node: fx.Node) -> int | None:
    """One axis as a non-negative int; None for several axes or none."""
    rank = node.meta["val"].dim()
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return None
        dim = dim[0]
    if not isinstance(dim, int):
        return None
    return dim + rank if dim < 0 else dim


def _anchor(output: fx.Node, source: object, dim: object, spelling: str) -> Softmax | None:
    if not isinstance(source, fx.Node) or "val" not in source.meta or source.meta["val"].dim() == 0:
        return None
    axis = _normal(dim, source)
    return None if axis is None else Softmax(output, source, axis, spelling)


def _library(node: fx.Node) -> Softmax | None:
    if name_of(node) in ("softmax", "_softmax", "special_softmax"):
        return _anchor(node, node.args[0], argument(node, 1, "dim"), "softmax")
    return None


def _exp_of_log_softmax(node: fx.Node) -> Softmax | None:
    inner = _through_casts(node.args[0]) if name_of(node) == "exp" else None
    if inner is not None and name_of(inner) in ("log_softmax", "_log_softmax", "special_log_softmax"):
        return _anchor(node, inner.args[0], argument(inner, 1, "dim"), "log_softmax.exp")
    return None


def _exp_of_difference(node: fx.Node) -> Softmax | None:
    """exp(x - logsumexp(x, dim, keepdim))."""
    inner = _through_casts(node.args[0]) if name_of(node) == "exp" else None
    if inner is None or name_of(inner) not in ("sub", "subtract") or inner.kwargs.get("alpha", 1) != 1:
        return None
    x, total = inner.args[:2]
    total = _through_casts(total)
    if total is None or name_of(total) != "logsumexp" or _through_casts(total.args[0]) is not _through_casts(x) or not argument(total, 2, "keepdim", False):
        return None
    return _anchor(node, x, argument(total, 1, "dim"), "exp(x - logsumexp)")


def _exp_over_sum(node: fx.Node) -> Softmax | None:
    """exp(y) / sum(exp(y), dim, keepdim=True), y perhaps x - max(x, dim, keepdim=True)."""
    if name_of(node) not in ("div", "divide", "true_divide") or node.kwargs.get("rounding_mode") is not None:
        return None
    numerator, total = _through_casts(node.args[0]), _through_casts(node.args[1])
    if numerator is None or total is None or name_of(numerator) != "exp" or name_of(total) != "sum":
        return None
    if _through_casts(total.args[0]) is not numerator or not argument(total, 2, "keepdim", False):
        return None
    dim, shifted = argument(total, 1, "dim"), numerator.args[0]
    assert isinstance(shifted, fx.Node)
    source = without_shift(shifted, dim)
    return _anchor(node, source, dim, "exp / sum" if source is shifted else "exp(x - max) / sum")


def without_shift(node: fx.Node, dim: object) -> fx.Node:
    """x for ``x - max(x, dim, keepdim)`` (through casts and ``detach``), else ``node``."""
    inner = _through_casts(node)
    if inner is None or name_of(inner) not in ("sub", "subtract") or inner.kwargs.get("alpha", 1) != 1:
        return node
    x, peak = inner.args[:2]
    peak = _through_casts(peak, also=("detach",))
    if peak is not None and name_of(peak) == "getitem" and peak.args[1] == 0:
        peak = peak.args[0]
    if not isinstance(peak, fx.Node) or name_of(peak) not in ("amax", "max") or len(peak.args) < 2 or not argument(peak, 2, "keepdim", False):
        return node
    axis = _normal(argument(peak, 1, "dim"), inner)
    if axis is None or axis != _normal(dim, inner) or _through_casts(peak.args[0], also=("detach",)) is not _through_casts(x):
        return node
    assert isinstance(x, fx.Node)
    return x


def _through_casts(node: object, also: tuple[str, ...] = ()) -> fx.Node | None:
    """The node below widening float casts (their values are equal) and the named ops."""
    while isinstance(node, fx.Node) and name_of(node) in ("to", "_to_copy", "float", *also):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if not (before.is_floating_point and after.is_floating_point and after.itemsize >= before.itemsize):
            break
        node = source
    return node if isinstance(node, fx.Node) else None


RULES: tuple[Callable[[fx.Node], Softmax | None], ...] = (_library, _exp_of_log_softmax, _exp_of_difference, _exp_over_sum)
