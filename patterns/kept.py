"""Masks on exponentials: ``exp(y) * m`` with m 0 or 1, ``exp(y).masked_fill(hidden, 0)``, ``where(keep, exp(y), 0)``.

Summed and divided by, they are the softmax of y with -inf where the mask is 0: a row without any is 0 / 0 there and NaN here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from .exponentials import MULTIPLICATIONS, power, through_casts
from .views import name_of


@dataclass(frozen=True)
class Mask:
    """``node`` is true where exponentials are kept, or where they are hidden; a "factor" must be proved to be 0 or 1."""

    node: fx.Node
    sense: Literal["keep", "hide", "factor"]


def below_masks(node: object, most: int = 4) -> tuple[fx.Node, tuple[Mask, ...]] | None:
    """The exponential that ``node`` is, and the masks on it, outermost first; at most so many."""
    inner = through_casts(node)
    if inner is None:
        return None
    if power(inner) is not None:
        return inner, ()
    for below, mask in _masked(inner) if most else ():
        found = below_masks(below, most - 1)
        if found is not None:
            return found[0], (mask, *found[1])
    return None


def _masked(node: fx.Node) -> list[tuple[object, Mask]]:
    """(x, mask) for each way to read ``node`` as a masked x."""
    name, args = name_of(node), node.args
    if name in MULTIPLICATIONS:
        return [(x, Mask(m, "factor")) for x, m in (args[:2], args[1::-1]) if isinstance(m, fx.Node)]
    if name == "masked_fill" and isinstance(args[1], fx.Node) and _zero(args[2]):
        return [(args[0], Mask(args[1], "hide"))]
    if name == "where" and len(args) == 3 and isinstance(args[0], fx.Node):
        return [(x, Mask(args[0], sense)) for x, other, sense in ((args[1], args[2], "keep"), (args[2], args[1], "hide")) if _zero(other)]  # type: ignore[arg-type]
    return []


def _zero(x: object) -> bool:
    return isinstance(x, (int, float)) and x == 0
