"""Softmax in its spellings: the library op, ``log_softmax().exp()``, and exp / sum by hand, with or without the row maximum; also
with a term more in the sum, as in exp(x) / (1 + sum(exp(x))), with a mask on the exponentials, or divided behind the matrix product.

softmax(x) = exp(x - c) / sum(exp(x - c)) for any c that is constant along the axis, so a subtracted maximum is dropped. With the
maximum subtracted the sum is at least 1, so a tiny number added to it, or a lower limit of at most 1, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import fx

from fa_inductor.index import ZERO, equal, shape_of

from .deferred import divisions, limited, total_of
from .exponentials import (
    MAXIMA,
    RESTORE_AXIS,
    SUBTRACTIONS,
    addends,
    constant_along,
    log_of_sum,
    logarithm,
    normal,
    power,
    quotients,
    reduction,
    shared_limit,
    through_casts,
    without_floor,
    without_shift,
)
from .kept import Mask, below_masks
from .views import argument, name_of


@dataclass(frozen=True)
class Softmax:
    """``output = softmax(factor * input, dim)`` (a base other than e makes a factor); ``dim`` is non-negative. ``spelling`` is a word for the report.

    ``terms``: with them it is ``exp(input) / (sum(exp(input), dim) + sum(exp(term)))``, each a number or constant along the axis.
    ``parts``: the nodes from ``input`` to ``output`` that the gradient goes through (it cancels on the side of a subtracted maximum).
    """

    output: fx.Node
    input: fx.Node
    dim: int
    spelling: str
    parts: tuple[fx.Node, ...] = ()
    terms: tuple[fx.Node | float, ...] = ()
    factor: float = 1.0
    zero_rows: bool = False
    """A row of -inf alone is 0, not NaN."""
    guarded: bool = True
    """NaN only in rows whose maximum is not finite: without the maximum, a row of small scores alone is 0 / 0 too."""
    masks: tuple[Mask, ...] = ()
    """What hides exponentials from the sum: ``input`` is -inf there."""
    quotient: Quotient | None = None
    """``output`` is not divided yet."""


@dataclass(frozen=True)
class Quotient:
    """``node = numerator / divisor``: a view of ``product``, the matrix product of ``output``, over a view of ``total``, which sums ``output``."""

    node: fx.Node
    numerator: fx.Node
    product: fx.Node
    divisor: fx.Node
    total: fx.Node


def match(node: fx.Node) -> Softmax | None:
    """The softmax that ``node`` is the result of, if any."""
    for rule in RULES:
        found = rule(node)
        if found is not None:
            return found
    return None


def _anchor(
    output: fx.Node, source: object, dim: object, spelling: str, terms: tuple[fx.Node | float, ...] = (), factor: float = 1.0, masks: tuple[Mask, ...] = ()
) -> Softmax | None:
    if not isinstance(source, fx.Node) or "val" not in source.meta or source.meta["val"].dim() == 0:
        return None
    if not all(equal(a, b) for a, b in zip_longest(shape_of(output.meta["val"]), shape_of(source.meta["val"]), fillvalue=ZERO)):
        return None
    axis = normal(dim, source)
    beside = (*terms, *(m.node for m in masks))
    return None if axis is None else Softmax(output, source, axis, spelling, _between(source, output, beside), terms, factor, masks=masks)


def _between(source: fx.Node, output: fx.Node, terms: tuple[fx.Node | float, ...]) -> tuple[fx.Node, ...]:
    """All nodes that ``output`` is made of from ``source`` and ``terms``, but for maxima that are subtracted."""
    found, queue, seen = [], [output], {source, through_casts(source), *terms}
    while queue:
        node = queue.pop()
        found.append(node)
        maximum = name_of(node) in SUBTRACTIONS and name_of(through_casts(node.args[1], also=(*RESTORE_AXIS, "getitem", "detach"))) in MAXIMA
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


def _safe(node: fx.Node) -> Softmax | None:
    found = _anchor(node, node.args[0], argument(node, 1, "dim"), "safe softmax") if name_of(node) == "_safe_softmax" else None
    return found and replace(found, zero_rows=True)


def _exp_of_log_softmax(node: fx.Node) -> Softmax | None:
    inner = through_casts(node.args[0]) if name_of(node) == "exp" else None
    if inner is not None and name_of(inner) in ("log_softmax", "_log_softmax", "special_log_softmax"):
        return _anchor(node, inner.args[0], argument(inner, 1, "dim"), "log_softmax.exp")
    return None


def _exp_of_difference(node: fx.Node) -> Softmax | None:
    """exp(x - logsumexp(x, dim)), or exp(y - log(sum(exp(y), dim))) with y perhaps x - max(x, dim)."""
    inner = through_casts(node.args[0]) if name_of(node) == "exp" else None
    if inner is None or name_of(inner) not in SUBTRACTIONS or inner.kwargs.get("alpha", 1) != 1:
        return None
    x = inner.args[0]
    by_hand = log_of_sum(inner.args[1], x) if isinstance(x, fx.Node) else None
    if by_hand is not None and isinstance(x, fx.Node):
        dim = argument(by_hand, 1, "dim")
        source = without_shift(x, dim)
        found = _anchor(node, source, dim, "exp(x - log(sum))")
        return found and replace(found, guarded=source is not x)
    for logsum, *terms in ([inner.args[1]], *addends(inner.args[1], "logaddexp")):
        total = reduction(logsum, ("logsumexp",), x)
        if total is not None and all(constant_along(t, argument(total, 1, "dim"), inner) for t in terms):
            return _anchor(node, x, argument(total, 1, "dim"), "exp(x - logsumexp)", tuple(terms))  # type: ignore[arg-type]
    return None


def _exp_over_sum(node: fx.Node) -> Softmax | None:
    """exp(y) / sum(exp(y), dim), y perhaps x - max(x, dim)."""
    for numerator, divisor in quotients(node):
        exponential, raised = through_casts(numerator), power(numerator)
        if exponential is None or raised is None:
            continue
        shifted, factor = raised
        plain = reduction(divisor, ("sum",), exponential)
        total = plain or reduction(without_floor(divisor), ("sum",), exponential)
        if total is None:
            larger = _larger_sum(node, exponential, shifted, divisor) if factor == 1 else None
            if larger is not None:
                return larger
            continue
        dim = argument(total, 1, "dim")
        source = without_shift(shifted, dim)
        if plain is None and source is shifted:  # without the maximum the sum may be small, and what is added to it counts
            return _larger_sum(node, exponential, shifted, divisor) if factor == 1 else None
        found = _anchor(node, source, dim, "exp / sum" if source is shifted else "exp(x - max) / sum", factor=factor)
        return found and replace(found, guarded=source is not shifted)
    return None


def _larger_sum(node: fx.Node, exponential: fx.Node, shifted: fx.Node, divisor: object) -> Softmax | None:
    """exp(y) / (sum(exp(y), dim) + exp(t)), both y and t perhaps less the same limit m >= max(x, dim): the m cancels."""
    for part, addend in addends(divisor, "add"):
        total = reduction(part, ("sum",), exponential)
        if total is None:
            continue
        dim = argument(total, 1, "dim")
        limit = shared_limit(shifted, dim)
        term = logarithm(addend, limit)
        if term is not None and constant_along(term, dim, node):
            found = _anchor(node, shifted if limit is None else shifted.args[0], dim, "exp / (sum + term)", (term,))
            return found and replace(found, guarded=False)
    return None


def _masked_exp_over_sum(node: fx.Node) -> Softmax | None:
    """(exp(y) * m) / sum(exp(y) * m, dim); nothing may be added to the sum, which may be small."""
    for numerator, divisor in quotients(node):
        kept, masked = through_casts(numerator), below_masks(numerator)
        total = reduction(divisor, ("sum",), kept) if kept is not None and masked is not None and masked[1] else None
        if total is None or masked is None:
            continue
        shifted, factor = power(masked[0])  # type: ignore[misc]
        dim = argument(total, 1, "dim")
        return _anchor(node, without_shift(shifted, dim), dim, "masked exp / sum", factor=factor, masks=masked[1])
    return None


def _divided_later(node: fx.Node) -> Softmax | None:
    """exp(y), perhaps masked, whose product with values is divided by its own sum."""
    masked = below_masks(node)
    if masked is None or through_casts(node) is not node:
        return None
    shifted, factor = power(masked[0])  # type: ignore[misc]
    for quotient, numerator, product, divisor in divisions(node):
        plain = total_of(node, divisor)
        found = plain or (total_of(node, limited(divisor)) if not masked[1] else None)
        if found is None:
            continue
        total, dim = found
        source = without_shift(shifted, dim)
        if plain is None and source is shifted:
            continue  # without the maximum the sum may be small, and what is added to it counts
        anchor = _anchor(node, source, dim, "exp, divided by its sum behind the product", factor=factor, masks=masked[1])
        if anchor is not None:
            parts = (*anchor.parts, *_between(node, divisor, ()), product, quotient)
            return replace(anchor, quotient=Quotient(quotient, numerator, product, divisor, total), parts=parts)
    return None


RULES: tuple[Callable[[fx.Node], Softmax | None], ...] = (
    _library,
    _safe,
    _exp_of_log_softmax,
    _exp_of_difference,
    _exp_over_sum,
    _masked_exp_over_sum,
    _divided_later,
)
