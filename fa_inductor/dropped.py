"""Dropouts of an attention: one on the scores before the softmax, one on the probabilities behind it.

A kernel draws anew for every (b, h, q, k), from the call's seed; each of the two has a stream of its own. That has eager's distribution
only where eager draws one number for each of these, once, and nothing else sees them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import sympy
from torch import fx

from .find import reachable
from .index import Expr, Space
from .lift import Lifter, refuse
from .operands import AxisName, as_view, covers
from .patterns.views import argument
from .refusal import declare

ESCAPED = declare(
    "escape_after_dropout",
    "the scores or probabilities after dropout are used elsewhere too, with the same random mask; return them before dropout, or set p=0",
)
DROPS_ALL = declare("dropout_of_everything", "p=1 leaves nothing to compute; a smaller p can be fused")
TWICE = declare("dropout_twice", "one dropout before the softmax and one between softmax and matmul can be fused")
SHARED = declare("shared_dropout", "a fused dropout draws for each score; drop out after heads or batches are expanded, not before")


@dataclass(frozen=True)
class Dropped:
    """A dropout that drops something, read at ``index``."""

    node: fx.Node
    index: tuple[Expr, ...]
    what: Literal["score", "probability"]

    @property
    def p(self) -> float:
        return float(argument(self.node, 1, "p"))

    def value(self, lifter: Lifter) -> int:
        """What is dropped."""
        return lifter.element(self.node.args[0], self.index)  # type: ignore[arg-type]


def dropped(node: fx.Node, index: tuple[Expr, ...], what: Literal["score", "probability"]) -> Dropped:
    if argument(node, 1, "p") == 1:
        raise refuse(DROPS_ALL, f"this dropout sets every {what} to zero", node)
    return Dropped(node, index, what)


def lone(found: list[Dropped]) -> Dropped | None:
    """The only dropout of one kind."""
    if len({d.node for d in found}) > 1:
        place = "before the softmax" if found[-1].what == "score" else "between softmax and matmul"
        raise refuse(TWICE, f"two dropouts stand {place}", found[-1].node)
    if len({d.index for d in found}) > 1:
        raise refuse(SHARED, f"two draws of this dropout go into one {found[0].what}", found[0].node)
    return found[0] if found else None


def kept_score(lifter: Lifter, drawn: Dropped) -> int:
    """``x * [keep] / (1 - p)``, as eager computes it: a dropped infinity is NaN."""
    b = lifter.builder
    weight = b.emit("where", b.keep(drawn.p), b.const(1 / (1 - drawn.p)), b.const(0.0))
    return b.emit("mul", b.convert(drawn.value(lifter), "float"), weight)


def check_draws(space: Space, axes: dict[sympy.Symbol, AxisName], drawn: Dropped) -> None:
    """Is each element of the dropout that is read that of one (b, h, q, k)?"""
    view = as_view(space, axes, drawn.node, drawn.index, windows=True)
    if view is None or not covers(space, axes, view):
        what = {"score": "scores", "probability": "probabilities"}[drawn.what]
        raise refuse(SHARED, f"this dropout may draw one number for several {what}", drawn.node)


def check_uses(drawn: Dropped, order: dict[fx.Node, int], region: frozenset[fx.Node], results: Collection[fx.Node]) -> None:
    """Does what the dropout gives go nowhere but, through ``region``, into ``results``?"""
    inside = set(region)
    random = sorted(reachable(drawn.node, max(order[n] for n in results), order, results), key=order.__getitem__)
    for node in reversed(random):  # what only the region uses, such as a row's maximum
        if node.users and inside.issuperset(node.users):
            inside.add(node)
    outside = [user for node in random if node in inside for user in node.users if user not in inside]
    if outside:
        what = "probabilities after dropout" if drawn.what == "probability" else "scores after dropout, or their probabilities,"
        raise refuse(ESCAPED, f"{outside[0].name} uses the {what} too", outside[0])
