"""NaN turned into 0 after a softmax: what code does about rows that a mask hides altogether."""

from __future__ import annotations

from torch import fx

from .generators import constant_of
from .views import argument, name_of

REPLACING = frozenset({"nan_to_num", "index_put"})
"""Ops of that kind which are nothing else per element."""
_NOT = frozenset({"logical_not", "bitwise_not"})


def without_nan(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """(x, what else is read) where ``node`` is x with its NaN replaced by 0, for x between 0 and 1; None for anything else."""
    if name_of(node) == "nan_to_num":
        source = node.args[0]
        return (source, ()) if isinstance(source, fx.Node) and argument(node, 1, "nan") in (None, 0) else None
    for test, x, value, is_nan in _choices(node):
        tests = _missing(test, x, is_nan)
        if tests and isinstance(x, fx.Node) and constant_of(value) == 0:
            return x, (*tests, value) if isinstance(value, fx.Node) else tests
    return None


def _choices(node: fx.Node) -> list[tuple[object, object, object, bool]]:
    """(condition, x, value, c) where ``node`` is ``value`` for elements whose condition is c, else x."""
    name, args = name_of(node), node.args
    if name == "where" and len(args) == 3:
        return [(args[0], args[2], args[1], True), (args[0], args[1], args[2], False)]
    if name == "masked_fill":
        return [(args[1], args[0], args[2], True)]
    if name == "index_put" and len(args[1]) == 1 and not argument(node, 3, "accumulate", False):  # type: ignore[arg-type]
        return [(args[1][0], args[0], args[2], True)]  # type: ignore[index]
    return []


def _missing(test: object, x: object, is_nan: bool) -> tuple[fx.Node, ...]:
    """The nodes of ``test`` if it says that ``x`` is NaN, or with ``is_nan`` False that it is not; else none."""
    if not isinstance(test, fx.Node) or not isinstance(x, fx.Node):
        return ()
    name = name_of(test)
    if name in _NOT:
        inner = _missing(test.args[0], x, not is_nan)
        return (test, *inner) if inner else ()
    twice = len(test.args) == 2 and test.args[0] is x and test.args[1] is x
    if is_nan:
        return (test,) if (name == "isnan" and test.args[0] is x) or (name in ("ne", "not_equal") and twice) else ()
    return (test,) if (name == "isfinite" and test.args[0] is x) or (name == "eq" and twice) else ()
