"""The site of a softmax over diagonals (see ``band``)."""

from __future__ import annotations

import math
from functools import partial

import sympy
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .band import ROW, Band, T
from .band_proof import DIAGONALS, prove
from .find import Candidate, reachable
from .finite import no_row_is_nan
from .graph import GraphContext
from .index import ZERO, Expr, Space, equal
from .isomorphism import correspondence
from .lift import Lifter, refuse
from .location import location_of
from .patterns import joins, overwrites
from .patterns.contraction import Contraction
from .patterns.views import is_static, name_of
from .recognise import recognise_site
from .refusal import Refused
from .region import DIM, OTHER_AXIS, K, Region
from .site import AttentionSite

_SPREADING = frozenset({*joins.NAMES, *overwrites.NAMES, "as_strided"})


def banded(context: GraphContext, candidate: Candidate) -> AttentionSite | None:
    """The site of a softmax over diagonals; None where it is not of this form. Raises Refused where it is, but cannot be fused."""
    anchor = candidate.anchor
    if candidate.miss is not None or anchor.quotient is not None or anchor.terms or anchor.masks or len(candidate.contractions) != 1:
        return None
    if not is_static(anchor.input) or not _spread_out(context, candidate):
        return None
    alike = (location_of(anchor.output), tuple(anchor.input.meta["val"].shape), candidate.contractions[0].meta["val"].shape)
    if alike in context.no_bands:
        raise context.no_bands[alike]
    try:
        with _disable_current_modes(), torch.no_grad():
            band = _known(context, candidate) or prove(context, candidate)
    except Refused as refused:
        context.no_bands[alike] = refused
        raise
    context.bands.append(band)
    return BandRegion(context, candidate, band).site()


def _spread_out(context: GraphContext, candidate: Candidate) -> bool:
    """Are the probabilities copied to other places on their way to the values?"""
    between = reachable(candidate.anchor.output, context.order[candidate.contractions[0]], context.order)
    return any(name_of(n) in _SPREADING for n in between)


def _known(context: GraphContext, candidate: Candidate) -> Band | None:
    """The band of an equal layer, in terms of this one's nodes."""
    anchor, second = candidate.anchor, candidate.contractions[0]
    for band in context.bands:
        one = band.softmax
        if (one.dim, one.spelling, one.factor) != (anchor.dim, anchor.spelling, anchor.factor):
            continue
        pairs = [(one.input, anchor.input), (band.values.second, second), (one.output, anchor.output)]
        old, new = band.values.second, second
        while old is not band.values.result and len(old.users) == 1 and len(new.users) == 1:
            old, new = next(iter(old.users)), next(iter(new.users))
            pairs.append((old, new))
        found = correspondence(context, pairs, {one.output, *band.ends})
        if found is not None:
            return band.of(anchor, found)
    return None


def _read_arm(arm: fx.Node, lifter: Lifter, node: fx.Node, index: tuple[Expr, ...]) -> int:
    lifter.touched.add(node)
    return lifter.operand(arm, index)


class BandRegion(Region):
    """The region of a softmax over diagonals, read at ``t = k + offset(q)``: a local symbol whose value stays within the diagonals there are."""

    def __init__(self, context: GraphContext, candidate: Candidate, band: Band) -> None:
        super().__init__(context, candidate, band.values.second, band.scores.product, result=band.values.result)
        self.values, self.scores, self.traced = band.values, band.scores, set(band.touched)
        self.others = {s.node: s for s in band.others if s.node not in self.before}
        self.hidden_rows, self.arms, self.row = band.rows, band.arms, ZERO

    key_axis = T

    def site(self) -> AttentionSite:
        found = super().site()
        if self.result in self.context.needs_grad and not no_row_is_nan(found, recognise_site(found)):
            text = "a row of scores may be -inf alone, or NaN, whose gradients would reach keys outside of its window, where eager has none"
            raise refuse(DIAGONALS, text, self.anchor.output)
        return found

    def product_with_values(self, space: Space, index: tuple[Expr, ...]) -> Contraction:
        v = self.values
        self.row = index[v.row]
        space.extent[T] = sympy.Integer(v.keys.shape[1])
        places = {**dict(zip(v.symbols, index, strict=True)), ROW: self.row}
        lhs, rhs = v.probabilities, v.values
        assert lhs.node is not None and rhs.node is not None
        return Contraction(v.second, lhs.node, lhs.at(space, places), rhs.node, rhs.at(space, places), sympy.Integer(v.n_keys))

    def product_of_scores(self, space: Space, node: fx.Node, index: tuple[Expr, ...]) -> Contraction | None:
        if node is not self.scores.node:
            return None
        lhs, rhs = self.scores.read(space, index, self.row)
        assert lhs.node is not None and rhs.node is not None
        return Contraction(self.scores.product, lhs.node, lhs.index, rhs.node, rhs.index, self.scores.size)

    def prepare(self, lifter: Lifter) -> None:
        b = lifter.builder
        last = b.const(self.values.keys.shape[1] - 1)
        lifter.bind(T, b.emit("max", b.emit("min", lifter.size(self._place()), last), b.const(0)))
        lifter.known |= {n: partial(_read_arm, arm) for n, arm in self.arms if n in self.before}
        lifter.known |= dict.fromkeys(self.others, self._read_other)

    def _place(self) -> Expr:
        return sympy.expand(K + self.values.offset.subs({ROW: self.row}))

    def _read_other(self, lifter: Lifter, node: fx.Node, index: tuple[Expr, ...]) -> int:
        """A tensor by diagonals beside the scores: of a mask, multiplied by ones to bring it there."""
        other, b = self.others[node], lifter.builder
        if other.size != 1 or node in self.context.needs_grad:
            raise refuse(OTHER_AXIS, "a second matrix product is added to scores stored by diagonals", node)
        sides = [
            b.const(x.value) if x.node is None else b.convert(lifter.element(x.node, tuple(i.subs({DIM: ZERO}) for i in x.index)), "float")
            for x in other.read(lifter.space, index, self.row)
        ]
        return lifter.rounded(other.product, b.emit("mul", *sides))

    def finished(self, lifter: Lifter, score: int) -> int:
        """Keys outside of the diagonals are not in the softmax."""
        b, total = lifter.builder, self.values.keys.shape[1]
        inside = b.emit("and", b.emit("ge", lifter.size(self._place()), b.const(0)), b.emit("lt", lifter.size(self._place()), b.const(total)))
        return b.emit("where", inside, score, b.const(-math.inf))

    def check_axis(self, space: Space, index: tuple[Expr, ...], second: Contraction) -> None:
        for position, i in enumerate(index):
            if (i == T) != (position == self.anchor.dim) or (K in i.free_symbols):
                raise refuse(OTHER_AXIS, "the probabilities are spread out along another dimension than the softmax's", self.second)
        if not any(equal(index[d], self.row) for d in self.hidden_rows):
            raise refuse(DIAGONALS, "the places that are -inf are counted along another dimension than the queries", self.anchor.output)
        self.first_key = ZERO
