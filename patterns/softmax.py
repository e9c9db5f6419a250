"""Softmax in its spellings: the library op, ``log_softmax().exp()``, and exp / sum by hand, with or without the row maximum.

softmax(x) = exp(x - c) / sum(exp(x - c)) for any c that is constant along the axis, so a subtracted maximum is dropped. With the
maximum subtracted the sum is at least 1, so a tiny number added to it, or a lower limit of at most 1, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fa_inductor.index import ONE, equal, shape_of

from .views import argument, name_of

CASTS = ("to", "_to_copy", "float")
PURE = frozenset({*CASTS, "exp", "sub", "add", "mul", "div", "neg", "amax", "max", "getitem", "detach"})
SUBTRACTIONS = ("sub", "subtract")
DIVISIONS = ("div", "divide", "true_divide")
MULTIPLICATIONS = ("mul", "multiply")
MAXIMA = ("amax", "max")
RESTORE_AXIS = ("unsqueeze", "view", "reshape", "_unsafe_view")


@dataclass(frozen=True)
class Softmax:
    """``output = softmax(input, dim)``; ``dim`` is non-negative. ``spelling`` is a word for the report.

    ``parts``: the nodes from ``input`` to ``output`` that the gradient goes through (it cancels on the side of a subtracted maximum).
    """

    output: fx.Node
    input: fx.Node
    dim: int
    spelling: str
    parts: tuple[fx.Node, ...] = ()


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
    return None if axis is None else Softmax(output, source, axis, spelling, _between(source, output))


def _between(source: fx.Node, output: fx.Node) -> tuple[fx.Node, ...]:
    """All nodes that ``output`` is made of from ``source``, but for maxima that are subtracted."""
    found, queue, seen = [], [output], {source, _through_casts(source)}
    while queue:
        node = queue.pop()
        found.append(node)
        maximum = name_of(node) in SUBTRACTIONS and name_of(_through_casts(node.args[1], also=(*RESTORE_AXIS, "getitem", "detach"))) in MAXIMA
        for n in node.all_input_nodes:
            if n not in seen and n.op == "call_function" and not (maximum and n is node.args[1]):
                seen.add(n)
                queue.append(n)
    return tuple(found)


def _library(node: fx.Node) -> Softmax | None:
    if name_of(node) in ("softmax", "_softmax", "special_softmax"):
        source, dim = node.args[0], argument(node, 1, "dim")
        return _anchor(node, without_shift(source, dim) if isinstance(source, fx.Node) else source, dim, "softmax")
    return None


def _exp_of_log_softmax(node: fx.Node) -> Softmax | None:
    inner = _through_casts(node.args[0]) if name_of(node) == "exp" else None
    if inner is not None and name_of(inner) in ("log_softmax", "_log_softmax", "special_log_softmax"):
        return _anchor(node, inner.args[0], argument(inner, 1, "dim"), "log_softmax.exp")
    return None


def _exp_of_difference(node: fx.Node) -> Softmax | None:
    """exp(x - logsumexp(x, dim))."""
    inner = _through_casts(node.args[0]) if name_of(node) == "exp" else None
    if inner is None or name_of(inner) not in SUBTRACTIONS or inner.kwargs.get("alpha", 1) != 1:
        return None
    x, total = inner.args[0], _reduction(inner.args[1], ("logsumexp",), inner.args[0])
    if total is None:
        return None
    return _anchor(node, x, argument(total, 1, "dim"), "exp(x - logsumexp)")


def _exp_over_sum(node: fx.Node) -> Softmax | None:
    """exp(y) / sum(exp(y), dim), y perhaps x - max(x, dim)."""
    for numerator, divisor in _quotients(node):
        exponential = _through_casts(numerator)
        if exponential is None or name_of(exponential) != "exp":
            continue
        shifted = exponential.args[0]
        assert isinstance(shifted, fx.Node)
        plain = _reduction(divisor, ("sum",), exponential)
        total = plain or _reduction(_without_floor(divisor), ("sum",), exponential)
        if total is None:
            continue
        dim = argument(total, 1, "dim")
        source = without_shift(shifted, dim)
        if plain is None and source is shifted:
            continue  # without the maximum the sum may be small, and what is added to it counts
        return _anchor(node, source, dim, "exp / sum" if source is shifted else "exp(x - max) / sum")
    return None


def _quotients(node: fx.Node) -> list[tuple[object, object]]:
    """(a, b) where ``node`` is a / b, also as a * (1 / b)."""
    if name_of(node) in DIVISIONS and node.kwargs.get("rounding_mode") is None:
        return [(node.args[0], node.args[1])]
    if name_of(node) not in MULTIPLICATIONS:
        return []
    found: list[tuple[object, object]] = []
    for a, b in (node.args[:2], node.args[1::-1]):
        divisor = _inverted(b)
        if divisor is not None:
            found.append((a, divisor))
    return found


def _inverted(node: object) -> object | None:
    """x for ``1 / x`` (which PyTorch runs as ``reciprocal(x) * 1``)."""
    inner = _through_casts(node)
    if inner is not None and name_of(inner) == "mul" and inner.args[1] == 1:
        inner = _through_casts(inner.args[0])
    if inner is not None and (name_of(inner) == "reciprocal" or (name_of(inner) == "pow" and inner.args[1] == -1)):
        return inner.args[0]
    return None


def _without_floor(node: object) -> object:
    """x for ``x + tiny`` and ``clamp(x, min=…)`` that leave any x >= 1 as it is."""
    inner = _through_casts(node)
    if inner is None:
        return node
    if name_of(inner) == "add" and isinstance(inner.args[1], (int, float)) and inner.kwargs.get("alpha", 1) == 1:
        return inner.args[0] if 0 <= inner.args[1] <= torch.finfo(inner.meta["val"].dtype).eps / 4 else node
    if name_of(inner) in ("clamp", "clamp_min", "clip"):
        low, high = argument(inner, 1, "min"), argument(inner, 2, "max")
        return inner.args[0] if isinstance(low, (int, float)) and low <= 1 and high is None else node
    return node


def _reduction(node: object, names: tuple[str, ...], operand: object, also: tuple[str, ...] = ()) -> fx.Node | None:
    """The node below ``node`` that reduces ``operand`` over one axis, if ``node`` is its result with that axis kept as size 1."""
    found = _through_casts(node, also=(*RESTORE_AXIS, "getitem", *also))
    if found is None or name_of(found) not in names or len(found.args) < 2:
        return None
    x, source = _through_casts(operand, also=also), _through_casts(found.args[0], also=also)
    if isinstance(found.meta["val"], torch.Tensor) and isinstance(source, fx.Node) and not _holds(found.meta["val"].dtype, source.meta["val"].dtype):
        return None  # a sum of whole numbers, or one that overflows
    if x is None or not _same(x, source) or not isinstance(node, fx.Node):
        return None
    axis = _normal(argument(found, 1, "dim"), x)
    shape, full = shape_of(node.meta["val"]), shape_of(x.meta["val"])
    if axis is None or len(shape) != len(full):
        return None
    return found if all(equal(a, ONE if i == axis else b) for i, (a, b) in enumerate(zip(shape, full))) else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """``wide`` is ``narrow`` or a larger float format."""
    return wide == narrow or (wide.is_floating_point and narrow.is_floating_point and wide.itemsize > narrow.itemsize)


def _same(a: object, b: object) -> bool:
    """One node, or the same pure expression written twice."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is b or (type(a) is type(b) and a == b)
    if a.target is not b.target or name_of(a) not in PURE or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(_same(x, y) for x, y in zip(a.args, b.args))


def without_shift(node: fx.Node, dim: object) -> fx.Node:
    """x for ``x - max(x, dim)`` (through casts and ``detach``), else ``node``."""
    inner = _through_casts(node)
    if inner is None or name_of(inner) not in SUBTRACTIONS or inner.kwargs.get("alpha", 1) != 1:
        return node
    x, peak = inner.args[0], _reduction(inner.args[1], MAXIMA, inner.args[0], also=("detach",))
    if peak is None or _normal(argument(peak, 1, "dim"), inner) != _normal(dim, inner):
        return node
    assert isinstance(x, fx.Node)
    return x


def _through_casts(node: object, also: tuple[str, ...] = ()) -> fx.Node | None:
    """The node below widening float casts (their values are equal) and the named ops; of a pair, below its first item."""
    while isinstance(node, fx.Node) and name_of(node) in (*CASTS, *also):
        source = node.args[0]
        if not isinstance(source, fx.Node) or (name_of(node) == "getitem" and node.args[1] != 0):
            break
        if name_of(node) != "getitem":
            before, after = source.meta["val"].dtype, node.meta["val"].dtype
            if before != after and not (name_of(node) in CASTS and _holds(after, before)):
                break
        node = source
    return node if isinstance(node, fx.Node) else None


RULES: tuple[Callable[[fx.Node], Softmax | None], ...] = (_library, _exp_of_log_softmax, _exp_of_difference, _exp_over_sum)
