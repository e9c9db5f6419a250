"""The proof that a softmax runs over diagonals (see ``band``): every place (q, t) is listed and followed down to its key."""

from __future__ import annotations

import math

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv

from . import digits as D
from .band import ROW, Band, Scores, T, Template, Values
from .certain import Certain
from .constants import Constants
from .find import Candidate, reachable, score_contractions
from .graph import GraphContext
from .index import ZERO, Expr
from .lift import refuse
from .patterns import joins, overwrites, pointwise, views
from .patterns.contraction import Contraction, describe, is_contraction
from .patterns.views import is_static, name_of
from .provenance import Fragment, Index, Place, Tracer, Untold, Views, broadcast, grid, only_moving
from .refusal import declare
from .region import DIM, K

DIAGONALS = declare(
    "diagonals",
    "sliding windows by diagonals can be fused where lengths are numbers and the corners are hidden by -inf, by a mask made of positions (arange) alone",
)
MOST_PLACES = 1 << 24
"""More places than this are not listed: it would take about ten seconds and 3 GB."""
_MOVES = frozenset({*views.RULES, *joins.NAMES, *overwrites.NAMES})


def prove(context: GraphContext, candidate: Candidate) -> Band:
    """Raises Refused where the softmax does not run over diagonals, or that is not certain."""
    finder, anchor = _Finder(context, candidate), candidate.anchor
    values = finder.values(candidate.contractions[0])
    scores = finder.scores(values) if values is not None and ROW in values.offset.free_symbols else []
    found = score_contractions(anchor.input)[0]
    first = next((s for s in scores if s.product in found and s.lhs.node is not None and s.rhs.node is not None), None)
    if values is None or first is None:
        text = "the probabilities are copied to other places before the product with the values, and it is not seen that these are windows of keys"
        raise refuse(DIAGONALS, text, candidate.contractions[0])
    rows = finder.hidden_rows(values)
    arms = finder.arms(values, rows)
    return Band(anchor, values, first, tuple(s for s in scores if s is not first), rows, arms, frozenset(finder.touched))


class _Finder:
    """Proves what ``Values`` and ``Scores`` say."""

    def __init__(self, context: GraphContext, candidate: Candidate) -> None:
        self.context, self.anchor = context, candidate.anchor
        self.constants, self.views = Constants(context), Views()
        self.touched: set[fx.Node] = set()
        last = context.order[candidate.contractions[0]]
        self.after = reachable(self.anchor.output, last, context.order, {n for n in context.order if is_contraction(n)})

    def values(self, second: fx.Node) -> Values | None:
        """From the product, or what it is reshaped to, for the first dimension that may be the softmax's rows."""
        lengths = {int(n) for d, n in enumerate(self.anchor.input.meta["val"].shape) if d != self.anchor.dim}
        result = second
        for _ in range(4 if is_static(second) else 0):
            shape = result.meta["val"].shape
            for row in sorted((d for d, n in enumerate(shape) if n in lengths), key=lambda d: -int(shape[d])):
                try:
                    return self._values(second, result, row)
                except Untold:
                    continue
            after = list(result.users)
            if len(after) != 1 or not views.is_view(after[0]) or not is_static(after[0]):
                return None
            result = after[0]
        return None

    def _values(self, second: fx.Node, result: fx.Node, row: int) -> Values:
        shape, places = result.meta["val"].shape, int(self.anchor.input.meta["val"].shape[self.anchor.dim])
        summed = describe(second, _symbols(second), DIM)
        if summed is None or summed.addend is not None or not summed.size.is_Integer:
            raise Untold
        listed = int(shape[row]) * max(int(summed.size), places)
        if listed > MOST_PLACES:
            text = f"the probabilities are copied to other places before the product with the values, too many ({listed}) to see whether windows of keys are"
            raise refuse(DIAGONALS, text, second)
        rows, sums = grid(int(shape[row]), int(summed.size))
        symbols, index, tracer = self._tracer(shape, {row: rows})
        ids = torch.arange(rows.numel())
        (top,) = tracer.trace(result, index, ids) if result is not second else [Fragment(ids, second, index)]
        if top.node is not second:
            raise Untold
        at = {**dict(zip(_symbols(second), top.index, strict=True)), DIM: Place(ZERO, sums)}
        sides = [tracer.trace(n, tuple(tracer.at(i, at) for i in x), ids) for n, x in _operands(summed)]
        after = [any(f.node in self.after for f in side) for side in sides]
        if after.count(True) != 1:
            raise Untold
        probabilities, values = _single(sides[after.index(True)]), _single(sides[after.index(False)])
        numbers = [{f.value for f in sides[after.index(of_softmax)] if f.node is None} for of_softmax in (True, False)]
        if numbers[0] - {0.0} or not all(map(math.isfinite, numbers[1])):
            raise Untold  # a probability that is another number than 0, or 0 times infinity
        self.touched |= tracer.touched
        read, keys, n_keys = self._pairs(rows, probabilities, values, int(shape[row]), places)
        return Values(second, result, row, symbols, *read, keys, n_keys, _offset(keys, n_keys))

    def _pairs(self, rows: Tensor, p: Fragment, v: Fragment, n_rows: int, places: int) -> tuple[tuple[Template, Template], Tensor, int]:
        """How probabilities and values are read, which key each place of the probabilities is multiplied with, and how many keys there are."""
        assert p.node is not None and v.node is not None
        key_dim, moving = only_moving(v.index), [d for d, place in enumerate(p.index) if place.at is not None]
        own = [d for d in moving if torch.equal(p.index[d].listed(p.ids), rows[p.ids])]
        if key_dim is None or len(moving) != 2 or not own:
            raise Untold
        t_dim = next(d for d in moving if d != own[0])
        n_keys = int(v.node.meta["val"].shape[key_dim])
        if int(p.node.meta["val"].shape[t_dim]) != places or int(p.node.meta["val"].shape[own[0]]) != n_rows:
            raise Untold
        place = p.index[own[0]].listed(p.ids) * places + p.index[t_dim].listed(p.ids)
        if torch.bincount(place, minlength=n_rows * places).max() > 1:
            raise Untold  # a probability that counts twice
        slots = torch.full((len(rows),), -1)
        slots[v.ids] = v.index[key_dim].listed(v.ids)
        keys = torch.full((n_rows * places,), -1)
        keys[place] = slots[p.ids]
        return (_template(p, {own[0]: ROW, t_dim: T}), _template(v, {key_dim: K})), keys.view(n_rows, places), n_keys

    def scores(self, values: Values) -> list[Scores]:
        """The tensors by diagonals that the softmax's input is made of through elementwise ops."""
        found, seen, queue = list[Scores](), {self.anchor.input}, [self.anchor.input]
        while queue:
            node = queue.pop()
            here = self._scores(node, values) if name_of(node) in _MOVES else []
            found += here
            if not here and name_of(node) in (*_MOVES, *pointwise.RULES):
                inputs = [n for n in node.all_input_nodes if n not in seen and isinstance(n.meta.get("val"), Tensor)]
                seen.update(inputs)
                queue += inputs
        return found

    def _scores(self, node: fx.Node, values: Values) -> list[Scores]:
        rank, t = node.meta["val"].dim(), self.anchor.dim - self.anchor.input.meta["val"].dim()
        for row in range(-rank, 0):
            if row == t or rank < -t or tuple(node.meta["val"].shape[d] for d in (row, t)) != tuple(values.keys.shape):
                continue
            try:
                return [self._paired_scores(node, row, t, values)]
            except Untold:
                continue
        return []

    def _paired_scores(self, node: fx.Node, row: int, t: int, values: Values) -> Scores:
        shape = node.meta["val"].shape
        ids, rows, places = values.listed(with_key=True)  # what the other places hold is for ``hidden_rows`` to say
        symbols, index, tracer = self._tracer(shape, {len(shape) + row: rows, len(shape) + t: places})
        fragments = tracer.trace(node, index, ids)
        product = fragments[0].node
        summed = describe(product, _symbols(product), DIM) if product is not None and is_contraction(product) else None
        if product is None or summed is None or summed.addend is not None or any(f.node is not product for f in fragments):
            raise Untold
        tracer.space.extent[DIM] = summed.size
        sides: list[list[Fragment]] = [[], []]
        for f in fragments:
            at = dict(zip(_symbols(product), f.index, strict=True))
            for side, (n, x) in zip(sides, _operands(summed), strict=True):
                side += tracer.trace(n, tuple(tracer.at(i, at) for i in x), f.ids)
        self.touched |= tracer.touched | {product}
        lhs, rhs = (self._operand(side, values) for side in sides)
        return Scores(node, product, row, t, symbols, lhs, rhs, summed.size)

    def _operand(self, fragments: list[Fragment], values: Values) -> Template:
        """Is it read at the row or at the key of each place, or one number?"""
        numbers = {f.value for f in fragments if f.node is None}
        if len(numbers) == 1 and all(f.node is None for f in fragments):
            return Template(None, value=numbers.pop())
        whole = _single(fragments)
        dim = only_moving(whole.index)
        if dim is None or whole.node is None or len(whole.ids) != int((values.keys >= 0).sum()):
            raise Untold
        size, at = int(whole.node.meta["val"].shape[dim]), whole.index[dim].listed(whole.ids)
        if size == values.n_keys and torch.equal(at, values.keys.flatten()[whole.ids]):
            return _template(whole, {dim: K})
        if size == values.keys.shape[0] and torch.equal(at, whole.ids // values.keys.shape[1]):
            return _template(whole, {dim: ROW})
        raise Untold

    def _tracer(self, shape: torch.Size, listed: dict[int, Tensor]) -> tuple[tuple[sympy.Symbol, ...], Index, Tracer]:
        """Symbols for the dimensions of a tensor, its index with those that are listed as numbers, and what follows it down."""
        symbols = tuple(D.symbol(f"y{d}") for d in range(len(shape)))
        rest = {d: s for d, s in enumerate(symbols) if d not in listed and shape[d] != 1}
        index = tuple(Place(ZERO, listed[d]) if d in listed else Place(rest.get(d, ZERO)) for d in range(len(shape)))
        return symbols, index, Tracer(self.context, self.constants, self.views, {s: sympy.Integer(int(shape[d])) for d, s in rest.items()})

    def hidden_rows(self, values: Values) -> frozenset[int]:
        """The dimensions that may count the rows for all places without a key to hold -inf in the softmax's input."""
        shape, dim = self.anchor.input.meta["val"].shape, self.anchor.dim
        ids, rows, places = values.listed(with_key=False)
        found = set()
        for row in (d for d in range(len(shape)) if d != dim and shape[d] == values.keys.shape[0]):
            _, index, tracer = self._tracer(shape, {row: rows, dim: places})
            try:
                certain = Certain(tracer).value(self.anchor.input, index, ids)
            except Untold:
                continue
            if bool((certain == -math.inf).all()):
                self.touched |= tracer.touched
                found.add(row)
        if not found:
            text = "scores are stored by diagonals, and it is not certain that those which belong to no key are -inf"
            raise refuse(DIAGONALS, text, self.anchor.output)
        return frozenset(found)

    def arms(self, values: Values, rows_at: frozenset[int]) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """The choices above the scores that are none where there is a key, such as what hides the corners."""
        shape, dim = self.anchor.input.meta["val"].shape, self.anchor.dim
        ids, rows, places = values.listed(with_key=True)
        found: dict[fx.Node, object] = {}
        for row in rows_at:
            _, index, tracer = self._tracer(shape, {row: rows, dim: places})
            queue = [(self.anchor.input, index, ids)]
            while queue:
                try:
                    fragments = tracer.trace(*queue.pop())
                except Untold:
                    return ()
                for f in fragments:
                    if f.node is not None and name_of(f.node) in pointwise.RULES:
                        queue += [(n, broadcast(f.index, n), f.ids) for n in f.node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
            found |= {n: arm if found.get(n, arm) is arm else None for n, arm in tracer.arms.items()}
        return tuple((n, arm) for n, arm in found.items() if isinstance(arm, fx.Node))


def _symbols(node: fx.Node) -> tuple[sympy.Symbol, ...]:
    return tuple(D.symbol(f"z{d}") for d in range(node.meta["val"].dim()))


def _operands(summed: Contraction) -> tuple[tuple[fx.Node, tuple[Expr, ...]], ...]:
    return (summed.lhs, summed.lhs_index), (summed.rhs, summed.rhs_index)


def _single(fragments: list[Fragment]) -> Fragment:
    """All fragments that are no numbers as one: of one tensor, with listed places along the same dimensions."""
    found = [f for f in fragments if f.node is not None and f.ids.numel()]
    if not found or len({f.node for f in found}) != 1:
        raise Untold
    ids, order = torch.cat([f.ids for f in found]).sort()
    index = []
    for places in zip(*(f.index for f in found), strict=True):
        if len({sympy.expand(p.fixed) for p in places}) == 1 and all(p.at is None for p in places):
            index.append(places[0])
        else:
            index.append(Place(ZERO, torch.cat([p.listed(f.ids) for p, f in zip(places, found, strict=True)])[order]))
    return Fragment(ids, found[0].node, tuple(index))


def _template(fragment: Fragment, names: dict[int, sympy.Symbol]) -> Template:
    assert fragment.node is not None
    return Template(fragment.node, tuple(names.get(d, place.fixed) for d, place in enumerate(fragment.index)))


def _offset(keys: Tensor, n_keys: int) -> Expr:
    """``t - k`` as a formula of the row that tells exactly which places have which key; raises Untold where there is none."""
    places = torch.arange(keys.shape[1])
    with_key = keys >= 0
    shifts = torch.where(with_key, places - keys, torch.iinfo(torch.int64).min).max(dim=1).values
    if not bool(with_key.any(dim=1).all()):
        raise Untold
    start, step = int(shifts[0]), next((i for i, x in enumerate(shifts.tolist()) if x != int(shifts[0])), 0)
    formula: Expr = sympy.Integer(start)
    if step:
        formula = formula + ((int(shifts[step]) - start) * (ROW if step == 1 else FloorDiv(ROW, sympy.Integer(step))))
    rows = torch.arange(keys.shape[0])
    told = start + (int(shifts[step]) - start) * (rows // step) if step else torch.full_like(rows, start)
    expected = places - told[:, None]
    expected = torch.where((expected >= 0) & (expected < n_keys), expected, -1)
    if not torch.equal(expected, keys):
        raise Untold
    return sympy.expand(formula)
