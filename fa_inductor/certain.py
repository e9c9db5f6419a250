"""What elements hold whatever the inputs of a graph are: where code hides scores by -inf for certain."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx

from .finite import like_scores
from .patterns.batch_slices import MAP_CASTS
from .patterns.views import name_of
from .provenance import Fragment, Index, Tracer, broadcast, places_of


class Certain:
    """What elements hold whatever the inputs are: -inf, or 0 for what is no NaN and not +inf; NaN where nothing is known."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def value(self, node: fx.Node, index: Index, ids: Tensor) -> Tensor:
        result, order = torch.full(ids.shape, math.nan, dtype=torch.float64), places_of(ids)
        for f in self.tracer.trace(node, index, ids):
            result[order[f.ids]] = self._of(f)
        return result

    def _of(self, f: Fragment) -> Tensor:
        unknown = torch.full(f.ids.shape, math.nan, dtype=torch.float64)
        if f.node is None:
            return self._number(f.value, f.ids)
        name, args = name_of(f.node), f.node.args
        if self.tracer.context.is_written(f.node):
            return unknown
        if name in MAP_CASTS:
            return self._operand(args[0], f)
        if name == "where" and len(args) == 3:
            return self._either(args[0], args[1], args[2], f)
        if name == "masked_fill":
            return self._either(args[1], args[2], args[0], f)
        if name == "add" and not f.node.kwargs:
            return self._operand(args[0], f) + self._operand(args[1], f)
        if name in ("mul", "div") and isinstance(args[1], (int, float)) and 1e-6 <= args[1] <= 1e6:
            return self._operand(args[0], f)
        return torch.zeros_like(unknown) if like_scores(f.node) else unknown

    def _number(self, value: float, ids: Tensor) -> Tensor:
        """Numbers up to 1e30 may be added up without becoming infinite."""
        known = value if value == -math.inf else 0.0 if value <= 1e30 else math.nan
        return torch.full(ids.shape, known, dtype=torch.float64)

    def _operand(self, x: object, f: Fragment) -> Tensor:
        if isinstance(x, fx.Node):
            return self.value(x, broadcast(f.index, x), f.ids)
        return self._number(float(x), f.ids)  # type: ignore[arg-type]

    def _either(self, condition: object, x: object, y: object, f: Fragment) -> Tensor:
        """A choice of which the condition may be known at some places."""
        assert isinstance(condition, fx.Node)
        may, must = self._truth(condition, broadcast(f.index, condition), f.ids)
        one, other = self._operand(x, f), self._operand(y, f)
        both = torch.where(one == other, one, torch.where(one.isnan() | other.isnan(), math.nan, 0.0))
        return torch.where(must, one, torch.where(may, both, other))

    def _truth(self, node: fx.Node, index: Index, ids: Tensor) -> tuple[Tensor, Tensor]:
        """May a condition hold, and must it?"""
        known = self.tracer.known(node, index, ids)
        if known is not None:
            return known, known
        may, must, order = torch.ones(ids.shape, dtype=torch.bool), torch.zeros(ids.shape, dtype=torch.bool), places_of(ids)
        for f in self.tracer.trace(node, index, ids):
            parts = [a for a in f.node.args if isinstance(a, fx.Node)] if f.node is not None and name_of(f.node) in _LOGIC else []
            if f.node is None or not parts or self.tracer.context.is_written(f.node) or any(p.meta["val"].dtype != torch.bool for p in parts):
                continue
            found = [self._truth(p, broadcast(f.index, p), f.ids) for p in parts]
            at = order[f.ids]
            may[at], must[at] = _LOGIC[name_of(f.node)](*zip(*found, strict=True))
        return may, must


Pair = tuple[Tensor, ...]
_LOGIC: dict[str, Callable[[Pair, Pair], tuple[Tensor, Tensor]]] = {
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), lambda may, must: (may[0] | may[1], must[0] | must[1])),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), lambda may, must: (may[0] & may[1], must[0] & must[1])),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda may, must: (~must[0], ~may[0])),
}
