"""Which tiles of a score matrix a predicate leaves empty, and which it fills: a program's condition evaluated on tiles instead of elements.

Every number is an interval and every condition a pair (may hold, must hold), for all tiles at once::

    [a, b] - [c, d] = [a - d, b - c]        [a, b] <= [c, d]:  may hold if a <= d, must hold if b <= c

so a tile that is called empty or full is so for certain, whatever lies between. Positions are exact; a tensor that is read at positions
counts with its smallest and largest value in each tile, which is one pass over it; what else is read, and what is computed of scores, is
not known. Interval arithmetic: Moore, Interval Analysis, 1966.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .builder import ProgramBuilder
from .evaluate import load_axes
from .ir import Node, ScoreProgram

EXACT = float(2**52)
"""Whole numbers up to this are exact in the double precision that intervals are kept in."""
MARGIN = 2.0**-20
"""A product in fp32 may be this far (relatively) from the exact one, however it is computed."""


class Interval(NamedTuple):
    """All numbers that an element of a tile may be; tensors that broadcast to (B, H, q tiles, k tiles)."""

    low: Tensor
    high: Tensor


class Truth(NamedTuple):
    """Of a condition: may it hold for an element of a tile, and must it for all?"""

    may: Tensor
    must: Tensor


Known = Interval | Truth


@dataclass(frozen=True)
class Tiling:
    """A (batch, heads, lq, lk) score tensor in tiles of ``q`` x ``k``."""

    batch: int
    heads: int
    lq: int
    lk: int
    q: int
    k: int
    device: torch.device

    def places(self, name: str) -> Interval:
        """The index ``name`` in each tile."""
        step = {"q": self.q, "k": self.k}.get(name, 1)
        length = {"b": self.batch, "h": self.heads, "q": self.lq, "k": self.lk}[name]
        shape = [1, 1, 1, 1]
        shape["bhqk".index(name)] = -1
        low = torch.arange(0, length, step, device=self.device, dtype=torch.float64)
        return Interval(low.view(shape), (low + step).clamp(max=length).sub(1).view(shape))


def tile_map(program: ScoreProgram, conditions: Sequence[int], tiling: Tiling, captures: Sequence[Tensor | None] = (), sizes: Sequence[int] = ()) -> Truth:
    """Where the conjunction of the boolean nodes ``conditions`` may hold and must hold, (B or 1, H or 1, q tiles, k tiles).

    Args:
        captures: the tensors that the program reads; None for one whose values are not known.
    """
    evaluation = _Evaluation(program, tiling, captures, sizes)
    shape = (1, 1, math.ceil(tiling.lq / tiling.q), math.ceil(tiling.lk / tiling.k))
    may = must = torch.ones(shape, dtype=torch.bool, device=tiling.device)
    for node in conditions:
        found = evaluation.value(node)
        assert isinstance(found, Truth)
        may, must = may & found.may, must & found.must
    return Truth(may, must)


def conditions(program: ScoreProgram, predicates: Sequence[int], above: int | None = None, floor: float = 0.0) -> ScoreProgram:
    """The boolean nodes ``predicates``, and that the number ``above`` exceeds ``floor``, as the results of one program."""
    builder = ProgramBuilder.like(program)
    placed = builder.inline(program)
    found = [placed[p] for p in predicates]
    return builder.finish(*found, *([builder.emit("gt", placed[above], builder.const(floor))] if above is not None else []))


class _Evaluation:
    def __init__(self, program: ScoreProgram, tiling: Tiling, captures: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        self.program, self.tiling, self.captures, self.sizes = program, tiling, captures, sizes
        self.known: dict[int, Known] = {}

    def value(self, at: int) -> Known:
        if at not in self.known:
            node = self.program.nodes[at]
            self.known[at] = self._leaf(node) or self._operation(node, [self.value(a) for a in node.args])
        return self.known[at]

    def _leaf(self, node: Node) -> Known | None:
        if node.op == "index":
            return self.tiling.places(str(node.value))
        if node.op == "const" and node.type == "bool":
            held = torch.full((1, 1, 1, 1), bool(node.value), device=self.tiling.device)
            return Truth(held, held)
        if node.op in ("const", "size"):
            number = float(self.sizes[int(node.value)] if node.op == "size" else node.value)  # type: ignore[arg-type]
            held = torch.full((1, 1, 1, 1), number, device=self.tiling.device, dtype=torch.float64)
            return self._unknown(node) if math.isnan(number) else Interval(held, held)
        if node.op == "load":
            return self._load(node)
        return self._unknown(node) if node.op in ("score", "grad", "keep") else None

    def _unknown(self, node: Node) -> Known:
        if node.type == "bool":
            held = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.tiling.device)
            return Truth(held, ~held)
        held = torch.full((1, 1, 1, 1), math.inf, device=self.tiling.device, dtype=torch.float64)
        return Interval(-held, held)

    def _load(self, node: Node) -> Known:
        tensor, axes = self.captures[int(node.value)], load_axes(self.program, node)  # type: ignore[arg-type]
        if tensor is None or axes is None:
            return self._unknown(node)
        t = self.tiling
        extent = {"b": t.batch, "h": t.heads, "q": t.lq, "k": t.lk}
        view = tensor[tuple(a if isinstance(a, int) else slice(extent[a]) for a in axes)]
        named = [a for a in axes if isinstance(a, str)]
        view = view.permute([named.index(a) for a in "bhqk" if a in named])
        view = view[tuple(slice(None) if a in named else None for a in "bhqk")]
        if node.type == "bool":
            held = view.to(torch.uint8)
            return Truth(self._reduced(held, "amax", 0).bool(), self._reduced(held, "amin", 1).bool())
        low = self._reduced(view, "amin", _largest(view.dtype)).double()  # of NaN both are NaN, so not known
        high = self._reduced(view, "amax", _smallest(view.dtype)).double()
        return _checked(low, high, node)

    def _reduced(self, view: Tensor, how: str, neutral: float) -> Tensor:
        """The least or greatest in each tile."""
        reduce: Callable[..., Tensor] = torch.amin if how == "amin" else torch.amax
        for dim, step in ((2, self.tiling.q), (3, self.tiling.k)):
            size = view.shape[dim]
            if size == 1:
                continue
            rest = -size % step
            if rest:
                pad = list(view.shape)
                pad[dim] = rest
                view = torch.cat([view, view.new_full(pad, neutral)], dim)
            view = reduce(view.reshape(*view.shape[:dim], -1, step, *view.shape[dim + 1 :]), dim + 1)
        return view

    def _operation(self, node: Node, args: list[Known]) -> Known:
        if node.op == "where":
            return _chosen(*args)
        if all(isinstance(a, Truth) for a in args) and node.type == "bool":
            found = _LOGIC.get(node.op)
            return found(*args) if found else self._unknown(node)
        if node.op in ("to_float", "to_int", "to_bool"):
            return self._converted(node, args[0])
        intervals = [a for a in args if isinstance(a, Interval)]
        if len(intervals) < len(args):
            return self._unknown(node)
        anything = _stacked(*(torch.isinf(a.low) & torch.isinf(a.high) & (a.low < a.high) for a in intervals)).any(0)
        if node.op in _COMPARISONS:
            may, must = _COMPARISONS[node.op](*args)
            return Truth(may | anything, must & ~anything)  # NaN is nowhere in an order
        rule = _ARITHMETIC.get(node.op)
        if rule is None:
            return self._unknown(node)
        low, high = (torch.where(anything, end, bound) for end, bound in zip((-math.inf, math.inf), rule(*args), strict=True))
        if node.type == "float" and node.op in ("mul", "div"):
            low, high = low - low.abs() * MARGIN, high + high.abs() * MARGIN
        if node.type == "float":
            low, high = low.float().double(), high.float().double()  # rounding keeps the order
        return _checked(low, high, node)

    def _converted(self, node: Node, x: Known) -> Known:
        if isinstance(x, Truth):
            return x if node.op == "to_bool" else Interval(x.must.double(), x.may.double())
        if node.op == "to_bool":
            zero = (x.low <= 0) & (x.high >= 0)
            return Truth(~((x.low == 0) & (x.high == 0)), ~zero)
        if node.op == "to_int":
            return _checked(x.low.trunc(), x.high.trunc(), node)
        return Interval(x.low.float().double(), x.high.float().double())


def _largest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _smallest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _checked(low: Tensor, high: Tensor, node: Node) -> Interval:
    """Bounds that are no numbers, or no longer exact, are not known."""
    limit = EXACT if node.type == "int" else math.inf
    low = torch.where(torch.isnan(low) | (low < -limit), -math.inf, low)
    high = torch.where(torch.isnan(high) | (high > limit), math.inf, high)
    return Interval(torch.where(low > limit, -math.inf, low), torch.where(high < -limit, math.inf, high))


def _chosen(condition: Known, x: Known, y: Known) -> Known:
    assert isinstance(condition, Truth)
    may, must = condition
    if isinstance(x, Truth) and isinstance(y, Truth):
        return Truth((may & x.may) | (~must & y.may), (~may | x.must) & (must | y.must))
    assert isinstance(x, Interval) and isinstance(y, Interval)
    low = torch.where(must, x.low, torch.where(may, torch.minimum(x.low, y.low), y.low))
    high = torch.where(must, x.high, torch.where(may, torch.maximum(x.high, y.high), y.high))
    return Interval(low, high)


def _products(x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    return _corners(x, y, torch.mul, torch.ones_like(y.low, dtype=torch.bool))


def _quotients(x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    return _corners(x, y, torch.div, y.low > 0)


def _stacked(*tensors: Tensor) -> Tensor:
    """Tensors that broadcast together, along a new first dimension."""
    return torch.stack(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def _corners(x: Interval, y: Interval, function: Callable[[Tensor, Tensor], Tensor], where: Tensor) -> tuple[Tensor, Tensor]:
    """A function that is monotone in each argument has its extremes at the ends; 0 times infinity is not among them."""
    ends = _stacked(*(function(a, b) for a in x for b in y))
    known = where & _stacked(*(end.isfinite() for end in (*x, *y))).all(0)
    return torch.where(known, ends.amin(0), -math.inf), torch.where(known, ends.amax(0), math.inf)


def _floors(x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    low, high = _quotients(x, y)
    return low.floor(), high.floor()


def _rests(x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    """Of floor division by one positive number: within one period the rest grows as x does."""
    n = y.low
    one = (n > 0) & (n == y.high)
    within = torch.floor(x.low / n) == torch.floor(x.high / n)
    low, high = torch.where(within, torch.remainder(x.low, n), 0.0), torch.where(within, torch.remainder(x.high, n), n - 1)
    return torch.where(one, low, -math.inf), torch.where(one, high, math.inf)


def _absolute(x: Interval) -> tuple[Tensor, Tensor]:
    inside = (x.low <= 0) & (x.high >= 0)
    ends = torch.minimum(x.low.abs(), x.high.abs()), torch.maximum(x.low.abs(), x.high.abs())
    return torch.where(inside, 0.0, ends[0]), ends[1]


_ARITHMETIC: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "add": lambda x, y: (x.low + y.low, x.high + y.high),
    "sub": lambda x, y: (x.low - y.high, x.high - y.low),
    "neg": lambda x: (-x.high, -x.low),
    "min": lambda x, y: (torch.minimum(x.low, y.low), torch.minimum(x.high, y.high)),
    "max": lambda x, y: (torch.maximum(x.low, y.low), torch.maximum(x.high, y.high)),
    "mul": _products,
    "div": _quotients,
    "floordiv": _floors,
    "mod": _rests,
    "abs": _absolute,
}


def _equal(x: Interval, y: Interval) -> Truth:
    return Truth((x.low <= y.high) & (y.low <= x.high), (x.low == x.high) & (y.low == y.high) & (x.low == y.low))


def _less(x: Interval, y: Interval) -> Truth:
    return Truth(x.low < y.high, x.high < y.low)


def _at_most(x: Interval, y: Interval) -> Truth:
    return Truth(x.low <= y.high, x.high <= y.low)


def _not(x: Truth) -> Truth:
    return Truth(~x.must, ~x.may)


_COMPARISONS: dict[str, Callable[..., Truth]] = {
    "lt": _less,
    "le": _at_most,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _at_most(y, x),
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
}
_LOGIC: dict[str, Callable[..., Truth]] = {
    "and": lambda x, y: Truth(x.may & y.may, x.must & y.must),
    "or": lambda x, y: Truth(x.may | y.may, x.must | y.must),
    "not": _not,
    "eq": lambda x, y: Truth((x.may & y.may) | (~x.must & ~y.must), (x.must & y.must) | (~x.may & ~y.may)),
    "ne": lambda x, y: Truth((x.may & ~y.must) | (~x.must & y.may), (x.must & ~y.may) | (~x.may & y.must)),
}
