"""Softmax in its spellings: the library op, ``log_softmax().exp()``, and exp / sum by hand, with or without the row maximum; also
with a term more in the sum, as in exp(x) / (1 + sum(exp(x))).

softmax(x) = exp(x - c) / sum(exp(x - c)) for any c that is constant along the axis, so a subtracted maximum is dropped. With the
maximum subtracted the sum is at least 1, so a tiny number added to it, or a lower limit of at most 1, changes nothing.
"""

from __future__ import annotations

import math
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

    ``terms``: with them it is ``exp(input) / (sum(exp(input), dim) + sum(exp(term)))``, each a number or constant along the axis.
    ``parts``: the nodes from ``input`` to ``output`` that the gradient goes through (it cancels on the side of a subtracted maximum).
    """

    output: fx.Node
    input: fx.Node
    dim: int
    spelling: str
    parts: tuple[fx.Node, ...] = ()
    terms: tuple[fx.Node | float, ...] = ()


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


def _anchor(output: fx.Node, source: object, dim: object, spelling: str, terms: tuple[fx.Node | float, ...] = ()) -> Softmax | None:
    if not isinstance(source, fx.Node) or "val" not in source.meta or source.meta["val"].dim() == 0:
        return None
    axis = _normal(dim, source)
    return None if axis is None else Softmax(output, source, axis, spelling, _between(source, output, terms), terms)


def _between(source: fx.Node, output: fx.Node, terms: tuple[fx.Node | float, ...]) -> tuple[fx.Node, ...]:
    """All nodes that ``output`` is made of from ``source`` and ``terms``, but for maxima that are subtracted."""
    found, queue, seen = [], [output], {source, _through_casts(source), *terms}
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
    x = inner.args[0]
    for logsum, *terms in ([inner.args[1]], *_addends(inner.args[1], "logaddexp", inner)):
        total = _reduction(logsum, ("logsumexp",), x)
        if total is not None and all(_constant_along(t, argument(total, 1, "dim"), inner) for t in terms):
            return _anchor(node, x, argument(total, 1, "dim"), "exp(x - logsumexp)", tuple(terms))  # type: ignore[arg-type]
    return None


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
            larger = _larger_sum(node, exponential, shifted, divisor)
            if larger is not None:
                return larger
            continue
        dim = argument(total, 1, "dim")
        source = without_shift(shifted, dim)
        if plain is None and source is shifted:  # without the maximum the sum may be small, and what is added to it counts
            return _larger_sum(node, exponential, shifted, divisor)
        return _anchor(node, source, dim, "exp / sum" if source is shifted else "exp(x - max) / sum")
    return None


def _larger_sum(node: fx.Node, exponential: fx.Node, shifted: fx.Node, divisor: object) -> Softmax | None:
    """exp(y) / (sum(exp(y), dim) + exp(t)), both y and t perhaps less the same limit m >= max(x, dim): the m cancels."""
    for part, addend in _addends(divisor, "add", node):
        total = _reduction(part, ("sum",), exponential)
        if total is None:
            continue
        dim = argument(total, 1, "dim")
        limit = _limit(shifted, dim)
        term = _logarithm(addend, limit)
        if term is not None and _constant_along(term, dim, node):
            return _anchor(node, shifted if limit is None else shifted.args[0], dim, "exp / (sum + term)", (term,))
    return None


def _addends(node: object, name: str, result: fx.Node) -> list[tuple[object, object]]:
    """(x, y) and (y, x) for ``name(x, y)``."""
    inner = _through_casts(node)
    if inner is None or name_of(inner) != name or inner.kwargs.get("alpha", 1) != 1:
        return []
    return [(inner.args[0], inner.args[1]), (inner.args[1], inner.args[0])]


def _limit(node: fx.Node, dim: object) -> fx.Node | None:
    """m for ``x - m`` where m is the maximum of some scores over one axis, or a bound on it: ``max(x).clamp(min=0)``."""
    if name_of(node) not in SUBTRACTIONS or node.kwargs.get("alpha", 1) != 1 or not isinstance(node.args[1], fx.Node):
        return None
    limit = node.args[1]
    peak = _through_casts(limit, also=(*RESTORE_AXIS, "getitem", "detach", "clamp", "clamp_min", "relu", "maximum"))
    return limit if peak is not None and name_of(peak) in MAXIMA and _constant_along(limit, dim, node) else None


def _logarithm(node: object, limit: fx.Node | None) -> fx.Node | float | None:
    """t where ``node`` is ``exp(t)``, or ``exp(t - limit)`` if there is a limit; None for what is not known to be one."""
    if isinstance(node, (int, float)):
        return math.log(node) if limit is None and node > 0 else None
    inner = _through_casts(node)
    if inner is None or name_of(inner) != "exp":
        return None
    power = inner.args[0]
    if limit is None:
        return power if isinstance(power, fx.Node) else None
    if not isinstance(power, fx.Node) or power.kwargs.get("alpha", 1) != 1:
        return None
    if name_of(power) == "neg":
        return 0.0 if _same(power.args[0], limit) else None
    x, m = {"sub": power.args[:2], "subtract": power.args[:2], "rsub": power.args[1::-1]}.get(name_of(power), (None, None))  # type: ignore[assignment]
    return (float(x) if isinstance(x, (int, float)) else x) if m is not None and _same(m, limit) else None  # type: ignore[return-value]


def _constant_along(node: object, dim: object, result: fx.Node) -> bool:
    """A number, or a tensor that broadcasts along axis ``dim`` of ``result``."""
    axis = _normal(dim, result)
    if axis is None or not isinstance(node, fx.Node):
        return axis is not None and isinstance(node, (int, float))
    shape = shape_of(node.meta["val"])
    at = axis - (result.meta["val"].dim() - len(shape))
    return bool(at < 0 or shape[at] == 1)


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
