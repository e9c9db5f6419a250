"""Softmaxes over the joined scores of several products: prefix or memory keys, text and image keys, global and local blocks.

    softmax(cat([Q K1^T, Q K2^T], -1)) = [p1, p2]        p1 V1 + p2 V2 = share_1 O_1 + share_2 O_2

Each piece of the keys is an attention of its own, O_i with its lse, and has the share ``exp(lse_i)`` of each row (see ``shares``). The
products with the values may be one for each piece, or one for several: then that one is the sum over its parts. Where the outputs are
added up is nobody's business here: each product with values is replaced by what it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import sympy
from torch import fx

from .analyse import BY_INDEX, analyse, with_symbols
from .band_region import banded
from .columns import JOINED, MOST
from .find import Candidate, is_dropout, score_contractions
from .graph import GraphContext
from .index import ZERO, Expr, equal, nonnegative, shape_of
from .lift import Straddles, liftable, refuse
from .patterns import joins
from .patterns.views import name_of
from .refusal import Refused
from .region import MUTATION, K, Part, Region
from .site import AttentionSite, Column, Piece

MOST_PIECES = 16


def search(context: GraphContext, candidate: Candidate) -> AttentionSite:
    """The site of ``candidate``, in pieces where it is not one attention; raises Refused."""
    try:
        return _search(context, candidate)
    except Refused as refused:
        first = refused
    try:
        site = banded(context, candidate)
    except Refused as refused:
        raise (first if first.refusal.code not in BY_INDEX else refused) from None
    if site is None:
        raise with_symbols(first, candidate)
    return site


def _search(context: GraphContext, candidate: Candidate) -> AttentionSite:
    if candidate.miss is not None or candidate.anchor.zero_rows or not candidate.contractions or not _joins(candidate.anchor.input):
        return analyse(context, candidate)
    join, many = _Join(context, candidate), len(candidate.contractions) > 1
    try:
        return join.site() if many else analyse(context, candidate)
    except Refused as refused:
        first = refused
    try:
        return analyse(context, candidate) if many else join.site()
    except Refused as second:
        of_join, of_one = (first, second) if many else (second, first)
        pieces = len(join.groups) if many else sum(len(g.regions) for g in join.groups) - 1
        raise of_join if pieces > 0 or isinstance(of_one, Straddles) else of_one from None


def _joins(source: fx.Node) -> bool:
    """Is ``source`` made by a concatenation, through views and elementwise ops?"""
    seen, queue = {source}, [source]
    while queue:
        node = queue.pop()
        if name_of(node) in joins.NAMES:
            return True
        found = [n for n in node.all_input_nodes if n not in seen and n.op == "call_function"] if liftable(node) or is_dropout(node) else []
        seen.update(found)
        queue += found
    return False


def _split(part: Part, straddles: Straddles) -> list[Part]:
    """The parts whose scores are each one part of the concatenation that ``straddles`` names."""
    _, dim = joins.parts(straddles.node)
    first, cuts, at = sympy.expand(straddles.index[dim] - K), [], ZERO
    for size in joins.sizes(straddles.node):
        at = sympy.expand(at + size)
        cuts.append(sympy.expand(at - first))
    size = straddles.space.extent[K] if part.size is None else part.size
    inside = [c for c in cuts if nonnegative(c - 1) and nonnegative(sympy.expand(size - c - 1))]
    if first.free_symbols & set(straddles.space.extent) or not inside:
        raise straddles
    places = list(dict.fromkeys([ZERO, *inside, size]))
    return [Part(sympy.expand(part.start + a), sympy.expand(b - a)) for a, b in pairwise(places)]


@dataclass(frozen=True)
class _Group:
    """The pieces that one product with values sums over."""

    regions: tuple[tuple[Region, AttentionSite], ...]


@dataclass(frozen=True)
class _Cover:
    """Pieces that follow each other along the softmax's axis, and the few places (start, length) that none of them has."""

    regions: tuple[tuple[Region, AttentionSite], ...]
    gaps: tuple[tuple[Expr, Expr], ...]


class _Join:
    def __init__(self, context: GraphContext, candidate: Candidate) -> None:
        self.context, self.candidate, self.anchor = context, candidate, candidate.anchor
        self.groups: list[_Group] = []

    def site(self) -> AttentionSite:
        failure: Refused | None = None
        firsts, _ = score_contractions(self.anchor.input)
        for second in self.candidate.contractions[:MOST_PIECES]:
            try:
                self.groups.append(self._group(second, firsts[:MOST_PIECES]))
            except Refused as refused:
                failure = failure or refused
        cover = self._cover(failure)
        pieces = [Piece(s, r.rows) for r, s in cover.regions if r.rows is not None]
        if len(pieces) < 2:
            raise refuse(JOINED, "the scores are those of one matrix product", self.anchor.output)
        if any(p.site.cleaned for p in pieces):
            raise refuse(JOINED, "rows of NaN are replaced after a softmax over joined scores", self.anchor.output)
        self._check_dropout(cover)
        columns = self._columns(cover)
        self._check_writes(pieces)
        return replace(pieces[0].site, columns=columns, joined=tuple(pieces))

    def _group(self, second: fx.Node, firsts: list[fx.Node]) -> _Group:
        """``second`` in as many parts as there are concatenated scores that it reads."""
        found: list[tuple[Region, AttentionSite]] = []
        todo = [Part()]
        while todo:
            part = todo.pop(0)
            region = self._part(second, firsts, part)
            if isinstance(region, list):
                todo = [*region, *todo]
            else:
                found.append(region)
            if len(found) + len(todo) > MOST_PIECES:
                raise refuse(JOINED, f"more than {MOST_PIECES} matrix products are joined", second)
        return _Group(tuple(found))

    def _part(self, second: fx.Node, firsts: list[fx.Node], part: Part) -> tuple[Region, AttentionSite] | list[Part]:
        """The attention of ``part``, or the smaller parts that it falls into."""
        failure: Refused | None = None
        without_scores = True
        for first in firsts:
            region = Region(self.context, self.candidate, second, first, part)
            try:
                return region, region.site()
            except Straddles as straddles:
                return _split(part, straddles)
            except Refused as refused:
                failure = failure if failure is not None and not region.reads_scores else refused
                without_scores = without_scores and region.without_scores
        if without_scores or failure is None:
            raise refuse(JOINED, "some of the joined scores that have values of their own are no matrix product", second)
        raise failure

    def _cover(self, failure: Refused | None) -> _Cover:
        shape = shape_of(self.anchor.input.meta["val"])
        at, total, chosen, gaps = ZERO, shape[self.anchor.dim], list[tuple[Region, AttentionSite]](), list[tuple[Expr, Expr]]()
        found = [piece for group in self.groups for piece in group.regions]
        while not equal(at, total):
            near = None
            for region, site in found:
                distance = sympy.expand(region.first_key - at)
                if distance.is_Integer and 0 <= distance <= MOST and (near is None or distance < near[0]):
                    near = distance, (region, site)
            gap = near[0] if near is not None else sympy.expand(total - at)
            if near is None and not (chosen and gap.is_Integer and 0 < gap <= MOST):
                keys = " and ".join(str(site.axes.k) for _, site in chosen) or "no"
                raise failure or refuse(JOINED, f"the softmax runs over {gap} scores besides those of {keys} keys", self.anchor.output)
            if gap != 0:
                gaps.append((at, gap))
                at = sympy.expand(at + gap)
            if near is not None:
                chosen.append(near[1])
                at = sympy.expand(at + near[1][1].axes.k)
        partly = [g for g in self.groups if 0 < sum(piece in chosen for piece in g.regions) < len(g.regions)]
        if partly:
            raise refuse(JOINED, "products with values sum over overlapping parts of the softmax's axis", partly[0].regions[0][0].second)
        return _Cover(tuple(chosen), tuple(gaps))

    def _check_dropout(self, cover: _Cover) -> None:
        together = frozenset(n for _, s in cover.regions for n in s.region)
        results = {r.result for r, _ in cover.regions}
        for region, _ in cover.regions:
            region.escapes(together, results)

    def _columns(self, cover: _Cover) -> tuple[Column, ...]:
        """The scores of the gaps, in terms of the first piece."""
        region, site = cover.regions[0]
        columns, touched = region.columns(cover.gaps, site.axes.k)
        last = self.context.order[region.result]
        for node in {c.node for column in columns for c in column.captures}:
            self._unwritten({node}, self.context.first_read(node, touched, last), last)
        return tuple(columns)

    def _check_writes(self, pieces: list[Piece]) -> None:
        """All pieces are computed where the first output is: what they read is the same there as where eager reads it."""
        order = self.context.order
        first = min(order[p.site.output.node] for p in pieces)
        for site in (p.site for p in pieces):
            self._unwritten({site.q.node, site.k.node, site.v.node, *(c.node for c in site.captures)}, first - 1, order[site.output.node])

    def _unwritten(self, nodes: set[fx.Node], first: int, last: int) -> None:
        write = self.context.written_between(nodes, first, last)
        if write is not None:
            raise refuse(MUTATION, f"{write.target} writes to a tensor that a piece of the attention reads", write)
