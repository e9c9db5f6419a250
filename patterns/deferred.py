"""Softmaxes that divide behind the matrix product: ``(exp(y) @ v) / sum(exp(y))``, which is ``softmax(y) @ v``.

What is said here is only where the parts are; that the quotient reads them at matching indices is proved in ``analyse``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from . import views
from .contraction import is_contraction
from .exponentials import CASTS, holds, normal, quotients, same, through_casts, without_floor
from .views import argument, name_of

MOST = 64
"""Nodes that are looked at behind one exponential."""


def divisions(exponential: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, fx.Node]]:
    """(quotient, numerator, product, divisor) for every matrix product of ``exponential`` that is divided afterwards."""
    for product in _products(exponential):
        behind = _moved(product)
        for user in sorted({u for n in behind for u in n.users}):
            for numerator, divisor in quotients(user):
                if isinstance(numerator, fx.Node) and isinstance(divisor, fx.Node) and numerator in behind:
                    yield user, numerator, product, divisor


def total_of(exponential: fx.Node, divisor: object) -> tuple[fx.Node, int] | None:
    """The sum of ``exponential`` over one axis that ``divisor`` is a view of, also as a product with ones, and that axis."""
    total = _below(divisor)
    if total is None:
        return None
    if name_of(total) == "sum" and len(total.args) > 1:
        source = total.args[0]
        if isinstance(source, fx.Node) and _is(source, exponential) and holds(total.meta["val"].dtype, source.meta["val"].dtype):
            axis = normal(argument(total, 1, "dim"), source)
            return None if axis is None else (total, axis)
    if name_of(total) in ("matmul", "bmm", "mm") and isinstance(total.args[0], fx.Node) and _is(total.args[0], exponential):
        return total, exponential.meta["val"].dim() - 1
    return None


def limited(divisor: object) -> object:
    """``divisor`` without a tiny number that is added to it, or a lower limit of at most 1."""
    return without_floor(_below(divisor) or divisor)


def _is(node: fx.Node, exponential: fx.Node) -> bool:
    return same(through_casts(node), exponential)


def _below(node: object) -> fx.Node | None:
    """What ``node`` is a view or a widened copy of."""
    node = through_casts(node)
    while node is not None and views.is_view(node) and isinstance(node.args[0], fx.Node):
        node = through_casts(node.args[0])
    return node


def _products(exponential: fx.Node) -> list[fx.Node]:
    """Matrix products that ``exponential`` reaches through elementwise ops and views."""
    found, seen, queue = [], {exponential}, [exponential]
    while queue and len(seen) < MOST:
        for user in queue.pop(0).users:
            if user in seen:
                continue
            seen.add(user)
            if is_contraction(user):
                found.append(user)
            elif views.is_view(user) or name_of(user) in (*CASTS, "mul", "dropout", "masked_fill", "where"):
                queue.append(user)
    return found


def _moved(product: fx.Node) -> set[fx.Node]:
    """``product`` and the views and widened copies of it."""
    seen, queue = {product}, [product]
    while queue:
        for user in queue.pop().users:
            cast = name_of(user) in CASTS and through_casts(user) is not user
            if user not in seen and (views.is_view(user) or cast) and user.args[0] in seen:
                seen.add(user)
                queue.append(user)
    return seen
