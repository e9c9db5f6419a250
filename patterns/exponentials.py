"""What softmaxes by hand are made of: exponentials, their sums, maxima and quotients, and how each is told apart from what only looks alike."""

from __future__ import annotations

import math

import torch
from torch import fx

from fa_inductor.index import ONE, equal, shape_of

from .views import argument, name_of

CASTS = ("to", "_to_copy")
PURE = frozenset({*CASTS, "exp", "sub", "add", "mul", "div", "neg", "amax", "max", "getitem", "detach"})
SUBTRACTIONS = ("sub", "subtract")
DIVISIONS = ("div", "divide", "true_divide")
MULTIPLICATIONS = ("mul", "multiply")
MAXIMA = ("amax", "max")
RESTORE_AXIS = ("unsqueeze", "view", "reshape", "_unsafe_view")


def normal(dim: object, node: fx.Node) -> int | None:
    """One axis as a non-negative int; None for several axes or none."""
    rank = node.meta["val"].dim()
    if isinstance(dim, (list, tuple)):
        if len(dim) != 1:
            return None
        dim = dim[0]
    if not isinstance(dim, int):
        return None
    return dim + rank if dim < 0 else dim


def reduction(node: object, names: tuple[str, ...], operand: object, also: tuple[str, ...] = ()) -> fx.Node | None:
    """The node below ``node`` that reduces ``operand`` over one axis, if ``node`` is its result with that axis kept as size 1."""
    found = through_casts(node, also=(*RESTORE_AXIS, "getitem", *also))
    if found is None or name_of(found) not in names or len(found.args) < 2:
        return None
    x, source = through_casts(operand, also=also), through_casts(found.args[0], also=also)
    if isinstance(found.meta["val"], torch.Tensor) and isinstance(source, fx.Node) and not holds(found.meta["val"].dtype, source.meta["val"].dtype):
        return None  # a sum of whole numbers, or one that overflows
    if x is None or not same(x, source) or not isinstance(node, fx.Node):
        return None
    axis = normal(argument(found, 1, "dim"), x)
    shape, full = shape_of(node.meta["val"]), shape_of(x.meta["val"])
    if axis is None or len(shape) != len(full):
        return None
    return found if all(equal(a, ONE if i == axis else b) for i, (a, b) in enumerate(zip(shape, full))) else None


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """``wide`` is ``narrow`` or a larger float format."""
    return wide == narrow or (wide.is_floating_point and narrow.is_floating_point and wide.itemsize > narrow.itemsize)


def same(a: object, b: object) -> bool:
    """One node, or the same pure expression written twice."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is b or (type(a) is type(b) and a == b)
    if a.target is not b.target or name_of(a) not in PURE or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(same(x, y) for x, y in zip(a.args, b.args))


def through_casts(node: object, also: tuple[str, ...] = ()) -> fx.Node | None:
    """The node below widening float casts (their values are equal) and the named ops; of a pair, below its first item."""
    while isinstance(node, fx.Node) and name_of(node) in (*CASTS, *also):
        source = node.args[0]
        if not isinstance(source, fx.Node) or (name_of(node) == "getitem" and node.args[1] != 0):
            break
        if name_of(node) != "getitem":
            before, after = source.meta["val"].dtype, node.meta["val"].dtype
            if before != after and not (name_of(node) in CASTS and holds(after, before)):
                break
        node = source
    return node if isinstance(node, fx.Node) else None


def quotients(node: fx.Node) -> list[tuple[object, object]]:
    """(a, b) where ``node`` is a / b, also as a * (1 / b)."""
    if name_of(node) in DIVISIONS and node.kwargs.get("rounding_mode") is None:
        return [(node.args[0], node.args[1])]
    if name_of(node) not in MULTIPLICATIONS:
        return []
    found: list[tuple[object, object]] = []
    for a, b in (node.args[:2], node.args[1::-1]):
        divisor = inverted(b)
        if divisor is not None:
            found.append((a, divisor))
    return found


def inverted(node: object) -> object | None:
    """x for ``1 / x`` (which PyTorch runs as ``reciprocal(x) * 1``)."""
    inner = through_casts(node)
    if inner is not None and name_of(inner) == "mul" and inner.args[1] == 1:
        inner = through_casts(inner.args[0])
    if inner is not None and (name_of(inner) == "reciprocal" or (name_of(inner) == "pow" and inner.args[1] == -1)):
        return inner.args[0]
    return None


def without_floor(node: object) -> object:
    """x for ``x + tiny`` and ``clamp(x, min=…)`` that leave any x >= 1 as it is."""
    inner = through_casts(node)
    if inner is None:
        return node
    if name_of(inner) == "add" and isinstance(inner.args[1], (int, float)) and inner.kwargs.get("alpha", 1) == 1:
        return inner.args[0] if 0 <= inner.args[1] <= torch.finfo(inner.meta["val"].dtype).eps / 4 else node
    if name_of(inner) in ("clamp", "clamp_min", "clip"):
        low, high = argument(inner, 1, "min"), argument(inner, 2, "max")
        return inner.args[0] if isinstance(low, (int, float)) and low <= 1 and high is None else node
    return node


def addends(node: object, name: str) -> list[tuple[object, object]]:
    """(x, y) and (y, x) for ``name(x, y)``."""
    inner = through_casts(node)
    if inner is None or name_of(inner) != name or inner.kwargs.get("alpha", 1) != 1:
        return []
    return [(inner.args[0], inner.args[1]), (inner.args[1], inner.args[0])]


def shared_limit(node: fx.Node, dim: object) -> fx.Node | None:
    """m for ``x - m`` where m is the maximum of some scores over one axis, or a bound on it: ``max(x).clamp(min=0)``."""
    if name_of(node) not in SUBTRACTIONS or node.kwargs.get("alpha", 1) != 1 or not isinstance(node.args[1], fx.Node):
        return None
    limit = node.args[1]
    peak = through_casts(limit, also=(*RESTORE_AXIS, "getitem", "detach", "clamp", "clamp_min", "relu", "maximum"))
    return limit if peak is not None and name_of(peak) in MAXIMA and constant_along(limit, dim, node) else None


def logarithm(node: object, limit: fx.Node | None) -> fx.Node | float | None:
    """t where ``node`` is ``exp(t)``, or ``exp(t - limit)`` if there is a limit; None for what is not known to be one."""
    if isinstance(node, (int, float)):
        return math.log(node) if limit is None and node > 0 else None
    inner = through_casts(node)
    if inner is None or name_of(inner) != "exp":
        return None
    power = inner.args[0]
    if limit is None:
        return power if isinstance(power, fx.Node) else None
    if not isinstance(power, fx.Node) or power.kwargs.get("alpha", 1) != 1:
        return None
    if name_of(power) == "neg":
        return 0.0 if same(power.args[0], limit) else None
    x, m = {"sub": power.args[:2], "subtract": power.args[:2], "rsub": power.args[1::-1]}.get(name_of(power), (None, None))  # type: ignore[assignment]
    return (float(x) if isinstance(x, (int, float)) else x) if m is not None and same(m, limit) else None  # type: ignore[return-value]


def constant_along(node: object, dim: object, result: fx.Node) -> bool:
    """A number, or a tensor that broadcasts along axis ``dim`` of ``result``."""
    axis = normal(dim, result)
    if axis is None or not isinstance(node, fx.Node):
        return axis is not None and isinstance(node, (int, float))
    shape = shape_of(node.meta["val"])
    at = axis - (result.meta["val"].dim() - len(shape))
    return bool(at < 0 or shape[at] == 1)


def without_shift(node: fx.Node, dim: object) -> fx.Node:
    """x for ``x - max(x, dim)`` (through casts and ``detach``), else ``node``."""
    inner = through_casts(node)
    if inner is None or name_of(inner) not in SUBTRACTIONS or inner.kwargs.get("alpha", 1) != 1:
        return node
    x, peak = inner.args[0], reduction(inner.args[1], MAXIMA, inner.args[0], also=("detach",))
    if peak is None or normal(argument(peak, 1, "dim"), inner) != normal(dim, inner):
        return node
    assert isinstance(x, fx.Node)
    return x


def shifts(node: fx.Node, dim: int) -> dict[fx.Node, fx.Node]:
    """x for each ``x - max(x, dim)`` that only moves ``node`` by a constant along ``dim``.

    Every way from it to ``node`` leads through sums, casts and factors that are positive numbers alone.
    """
    found: dict[fx.Node, fx.Node] = {}
    seen, queue = {node}, [node]
    while queue:
        current = queue.pop()
        source = without_shift(current, dim)
        below = [source] if source is not current else _grows_with(current)
        if source is not current:
            found[current] = source
        for n in below:
            if n.op == "call_function" and n.meta["val"].dim() == node.meta["val"].dim() and n not in seen:
                seen.add(n)
                queue.append(n)
    if found.keys() <= {node}:
        return found
    behind = _ancestors(node)
    return {shift: x for shift, x in found.items() if shift is node or _grows_all_the_way(shift, node, behind)}


def _grows_with(node: fx.Node) -> list[fx.Node]:
    """The inputs in which ``node`` is linear with positive numbers as coefficients; none where it is not, or not known to be."""
    name = name_of(node)
    if not node.meta["val"].dtype.is_floating_point or node.kwargs.get("rounding_mode") is not None or not _positive(node.kwargs.get("alpha", 1)):
        return []
    if name in (*MULTIPLICATIONS, *DIVISIONS):
        return [node.args[0]] if isinstance(node.args[0], fx.Node) and _positive(node.args[1]) else []
    if name in SUBTRACTIONS:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) and node.args[0] is not node.args[1] else []
    return list(node.all_input_nodes) if name in ("add", *CASTS) else []


def _positive(x: object) -> bool:
    """A finite number above 0: with any other, what is infinite would not come out as the shifted value does."""
    return isinstance(x, (int, float)) and 0 < x < math.inf


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """What ``node`` is made of, itself included."""
    seen, queue = {node}, [node]
    while queue:
        for n in queue.pop().all_input_nodes:
            if n not in seen:
                seen.add(n)
                queue.append(n)
    return seen


def _grows_all_the_way(start: fx.Node, end: fx.Node, behind: set[fx.Node]) -> bool:
    """Does each step on every way from ``start`` to ``end`` grow with the one before? ``behind``: what ``end`` is made of."""
    seen, queue = {start}, [start]
    while queue:
        current = queue.pop()
        for user in current.users:
            if current is end or user not in behind:
                continue
            if current not in _grows_with(user):
                return False
            if user not in seen:
                seen.add(user)
                queue.append(user)
    return True


def power(node: object) -> tuple[fx.Node, float] | None:
    """(x, c) for ``exp(c * x)``: exp, exp2 and powers of a number, through casts."""
    inner = through_casts(node)
    if inner is None:
        return None
    name, x = name_of(inner), inner.args[0] if inner.args else None
    if name in ("exp", "exp2", "special_exp2") and isinstance(x, fx.Node):
        return x, 1.0 if name == "exp" else math.log(2)
    if name == "pow" and isinstance(x, (int, float)) and x > 1 and isinstance(inner.args[1], fx.Node):
        return inner.args[1], math.log(x)
    return None


def log_of_sum(node: object, x: fx.Node) -> fx.Node | None:
    """The sum in ``log(sum(exp(x)))``, if ``node`` is that with the summed axis kept as size 1."""
    log = through_casts(node, also=RESTORE_AXIS)
    total = through_casts(log.args[0], also=RESTORE_AXIS) if log is not None and name_of(log) == "log" else None
    exponential = through_casts(total.args[0]) if total is not None and name_of(total) == "sum" else None
    found = power(exponential)
    if found is None or found[1] != 1.0 or not same(found[0], x):
        return None
    return reduction(node, ("sum",), exponential, also=("log",))
