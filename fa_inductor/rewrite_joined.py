"""Rewriting a softmax over joined scores: one call for each piece, and each product with values the sum of its pieces' shares (see ``joined``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from .graph import GraphContext
from .index import ONE, Expr
from .lift import liftable, refuse
from .normalize.aliases import writes
from .patterns.views import SPLITS, name_of
from .refusal import declare
from .request import Plan
from .rewrite import Placed, SiteEmitter, call_of, column_scores_of, erase_dead, exchange, lse_of, result_of
from .shares import shares
from .site import AttentionSite, Piece

aten = torch.ops.aten
ORDER = declare("joined_order", "compute the queries, keys and values of all joined pieces before the first product with values")


def gather_before(context: GraphContext, site: AttentionSite) -> fx.Node:
    """The first output of the pieces, with all that they read moved before it; raises Refused where that cannot be moved."""
    place = {n: i for i, n in enumerate(context.graph.nodes)}
    first = min((p.site.output.node for p in site.joined), key=place.__getitem__)
    late: set[fx.Node] = set()
    queue = [*site.reads, *(n for p in site.joined for n in p.site.reads)]
    while queue:
        node = queue.pop()
        if node not in place:
            raise refuse(ORDER, "a piece reads an output that was fused before it", first)
        if place[node] < place[first] or node in late:
            continue
        if node is first or not _movable(context, node, first):
            raise refuse(ORDER, f"{node.name} is computed after the first of the outputs and read for another", node)
        late.add(node)
        queue += node.all_input_nodes
    for node in sorted(late, key=place.__getitem__):
        first.prepend(node)
    return first


def _movable(context: GraphContext, node: fx.Node, first: fx.Node) -> bool:
    """A view or an elementwise op between whose old place and ``first`` nothing that it reads is written to."""
    order, mode = context.order, context.grad_mode
    sizes = isinstance(node.meta.get("val"), torch.SymInt)
    if node not in order or not (liftable(node) or name_of(node) in SPLITS or sizes) or writes(node) or mode[node] != mode[first]:
        return False
    return context.written_between(set(node.all_input_nodes), order[first] - 1, order[node]) is None


def replace_joined(context: GraphContext, site: AttentionSite, made: list[tuple[SiteEmitter, Placed, Plan]], zero_rows: bool) -> None:
    """Put the pieces' calls in the places of their outputs; ``made``: of each piece of ``site.joined``."""
    calls = [call_of(emitter, p.site, placed, plan) for p, (emitter, placed, plan) in zip(site.joined, made, strict=True)]
    emitter = made[0][0]
    high: list[fx.Node] = []
    low: list[fx.Node | None] = []
    for piece, call, (_, _, plan) in zip(site.joined, calls, made, strict=True):
        parts = lse_of(emitter, call, plan)
        high.append(_rows(emitter, piece, parts[0]))
        low.append(None if parts[1] is None else _rows(emitter, piece, parts[1]))
    found = emitter.record(partial(shares, zero_rows=zero_rows), high, low, _columns(emitter, site, result_of(emitter, calls[0], 0)))
    outputs: dict[fx.Node, fx.Node] = {}
    for i, (piece, call) in enumerate(zip(site.joined, calls, strict=True)):
        old, ax = piece.site.output.node, piece.site.axes
        share = emitter.arranged(emitter.call(aten.select.int, found, 0, i), piece.rows, "out", {**_extents(piece.site), "d": ONE}, torch.float32)
        out = emitter.call(aten.mul.Tensor, result_of(emitter, call, 0), share)
        out = emitter.original(out, piece.site.output, {"b": ax.b, "h": ax.hq, "q": ax.q, "d": ax.dv}, torch.float32)
        outputs[old] = emitter.call(aten.add.Tensor, outputs[old], out) if old in outputs else out
    for old, out in outputs.items():
        dtype = old.meta["val"].dtype
        exchange(emitter, old, out if out.meta["val"].dtype == dtype else emitter.call(aten.to.dtype, out, dtype))
    region = frozenset(n for p in site.joined for n in p.site.region)
    for old in outputs:
        erase_dead(context, old, region)


def _extents(site: AttentionSite) -> dict[str, Expr]:
    return {"b": site.axes.b, "h": site.axes.hq, "q": site.axes.q}


def _rows(emitter: SiteEmitter, piece: Piece, node: fx.Node) -> fx.Node:
    """A (B, H, Lq) tensor of ``piece`` as a tensor of the softmax's rows."""
    return emitter.original(node, piece.rows, _extents(piece.site), torch.float32)


def _columns(emitter: SiteEmitter, site: AttentionSite, out: fx.Node) -> list[fx.Node]:
    """The scores that are no product with many keys, each a tensor of the softmax's rows: those of ``site``, the first piece."""
    piece, found = site.joined[0], []
    box = [emitter.size(e) for e in _extents(site).values()]
    for column, scores in zip(site.columns, column_scores_of(emitter, site, out), strict=True):
        for i in range(int(column.length)):
            one = emitter.call(aten.expand.default, emitter.call(aten.select.int, scores, 0, i), box)
            found.append(emitter.call(aten.unsqueeze.default, _rows(emitter, piece, one), 0))
    return found
