"""Products of a sum of probabilities with values, written out as a sum of products, each of which may be fused.

    (w1 P1 + w2 P2) V = w1 (P1 V) + w2 (P2 V)            w: numbers, or tensors that are constant along the keys

Differential attention (Ye et al. 2024, arXiv:2410.05258) subtracts one map from another. Both may be slices of one tensor of maps,
which then is multiplied with the values as a whole: x[:, :, i] V = (x V)[:, :, i]. What is written out stands in for the product
until one of its parts is fused; where none is, the product is put back as it was. A dropout of the sum stops it: one mask is drawn
for both maps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import log
from .find import is_dropout
from .patterns import softmax, views
from .patterns.batch_slices import MAP_CASTS, Share, share_of
from .patterns.contraction import labels_of
from .patterns.exponentials import DIVISIONS, MULTIPLICATIONS, SUBTRACTIONS
from .patterns.views import name_of
from .writer import Writer

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """``node`` as ``(maps @ values.permute(order)[places])``, its dimensions then put in the order ``out``; None where nothing is to be moved.

    ``places`` are the dimensions of size 1 that the permuted values get.
    """

    node: fx.Node
    maps: fx.Node
    values: fx.Node
    order: tuple[int, ...] | None = None
    places: tuple[int, ...] = ()
    out: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Term:
    """``map`` times each of ``weights``: a target (mul or div) and a number or node."""

    map: fx.Node
    weights: tuple[tuple[Any, Any], ...] = ()

    def times(self, target: Any, weight: Any) -> Term:
        return Term(self.map, (*self.weights, (target, weight)))


class Removed:
    """Nodes taken out of a graph, with all that is needed to make them again; several products may have shared them."""

    def __init__(self) -> None:
        self.how: dict[fx.Node, dict[str, Any]] = {}
        self.made: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        """Erase ``node`` and what only it used."""
        if node.users or node.op != "call_function" or node.is_impure():
            return
        inputs = node.all_input_nodes
        self.how[node] = {name: getattr(node, name) for name in ("target", "args", "kwargs", "meta")}
        node.graph.erase_node(node)
        for n in inputs:
            self.take(n)

    def again(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """``node``, made again before another node if it was taken; to be asked for in the order of the graph."""
        if node not in self.how:
            return node
        if node not in self.made:
            how = self.how[node]
            args, kwargs = fx.node.map_arg((how["args"], how["kwargs"]), lambda n: self.again(n, before))
            with before.graph.inserting_before(before):
                self.made[node] = before.graph.call_function(how["target"], args, kwargs)
            self.made[node].meta = how["meta"]
        return self.made[node]


@dataclass
class Sum:
    """One product, taken out of the graph with what only it used; ``output`` stands in for it."""

    product: fx.Node
    removed: Removed
    output: fx.Node
    parts: tuple[fx.Node, ...]
    writer: Writer

    def settle(self) -> None:
        """Where no part was fused (its node would be gone), put the product back and drop what stood in for it."""
        if any(part._erased for part in self.parts):
            return
        self.output.replace_all_uses_with(self.removed.again(self.product, self.output))
        self.writer.erase()


def write_out(gm: fx.GraphModule) -> list[Sum]:
    """Replace the products of sums of probabilities."""
    removed = Removed()
    nodes = [n for n in gm.graph.nodes if name_of(n) in ("matmul", "bmm", "einsum")]
    return [found for node in nodes if (found := next((x for x in (_guarded(p, removed) for p in _products(node)) if x), None)) is not None]


def _products(node: fx.Node) -> Iterator[Product]:
    """The ways to read ``node`` as probabilities times values."""
    left, right = (node.args[0], node.args[1]) if name_of(node) != "einsum" else (None, None)
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        yield Product(node, left, right)
        return
    operands: Any = node.args[1]
    labels = labels_of(node)
    if labels is None:
        return
    words, out = labels
    for maps, values in ((0, 1), (1, 0)):
        if len(words[maps]) < 2:
            continue
        *batch, query, key = words[maps]
        others = [x for x in words[values] if x not in (*batch, key)]
        if len(others) != 1 or key not in words[values] or sorted(out) != sorted([*batch, query, *others]):
            continue
        rest = [*(x for x in batch if x in words[values]), key, *others]
        yield Product(
            node,
            operands[maps],
            operands[values],
            tuple(words[values].index(x) for x in rest),
            tuple(i for i, x in enumerate(batch) if x not in words[values]),
            tuple([*batch, query, *others].index(x) for x in out),
        )


def _guarded(product: Product, removed: Removed) -> Sum | None:
    """A product that cannot be written out stays as it is."""
    maps, values = product.maps, product.values
    writer = Writer(product.node)
    try:
        terms = list(_terms(maps)) if min(maps.meta["val"].dim(), values.meta["val"].dim()) > 1 else []
        if len(terms) < 2 or not all(_is_map(t.map, maps) for t in terms) or not _moves(product.node, terms):
            return None
        return _write_out(product, terms, writer, removed)
    except Exception as error:
        log.get().warning("a product of a sum of probabilities stays as it is: %s", error, exc_info=True)
        writer.erase()
        return None


def _terms(node: fx.Node) -> Iterator[Term]:
    """What ``node`` is the sum of."""
    name: str = name_of(node)
    args: Any = node.args
    alpha: Any = node.kwargs.get("alpha", 1)
    if name in ("add", *SUBTRACTIONS) and all(isinstance(a, fx.Node) for a in args[:2]) and isinstance(alpha, (int, float)):
        yield from _terms(args[0])
        weight = -float(alpha) if name in SUBTRACTIONS else float(alpha)
        for term in _terms(args[1]):
            yield term if weight == 1 else term.times(aten.mul.Tensor, weight)
    elif name == "neg":
        yield from (t.times(aten.mul.Tensor, -1.0) for t in _terms(args[0]))
    elif (name == "dropout" and not is_dropout(node)) or (
        name in MAP_CASTS and isinstance(args[0].meta["val"], torch.Tensor) and args[0].meta["val"].dtype.is_floating_point
    ):
        yield from _terms(args[0])
    else:
        weighted = next(_weighted(node), None)
        if weighted is None:
            yield Term(node)
        else:
            target, inner, weight = weighted
            yield from (t.times(target, weight) for t in _terms(inner))


def _weighted(node: fx.Node) -> Iterator[tuple[Any, fx.Node, Any]]:
    """(mul or div, x, weight) for ``node`` as x with a weight that is constant along the last dimension."""
    pairs: tuple[Any, ...]
    if name_of(node) in MULTIPLICATIONS:
        pairs, target = (node.args[:2], node.args[1::-1]), aten.mul.Tensor
    elif name_of(node) in DIVISIONS and node.kwargs.get("rounding_mode") is None:
        pairs, target = (node.args[:2],), aten.div.Tensor
    else:
        return
    for inner, weight in pairs:
        if isinstance(inner, fx.Node) and _alike(inner, node) and _constant_along_keys(weight):
            yield target, inner, weight


def _constant_along_keys(weight: Any) -> bool:
    if not isinstance(weight, fx.Node):
        return isinstance(weight, (int, float))
    value = weight.meta["val"]
    return isinstance(value, torch.Tensor) and (value.dim() == 0 or (isinstance(value.shape[-1], int) and value.shape[-1] == 1))


def _is_map(node: fx.Node, maps: fx.Node) -> bool:
    """Of the same shape as the sum, and a view of a softmax (with its dropout, and factors)."""
    if not _alike(node, maps):
        return False
    while softmax.match(node) is None:
        inner = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if name_of(node) in MULTIPLICATIONS:
            inner = [a for a in inner if _alike(a, node) and a.op != "placeholder"]
        elif not (views.is_view(node) or name_of(node) in (*MAP_CASTS, "dropout", "getitem", *views.SPLITS)):
            return False
        if not inner:
            return False
        node = inner[0]
    return True


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Tensors of one shape; a symbolic number is none."""
    x, y = a.meta["val"], b.meta["val"]
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape


def _moves(product: fx.Node, terms: list[Term]) -> bool:
    """May everything between be computed at the product instead: no op in between changes a tensor, or whether gradients are recorded?"""
    first = min({t.map for t in terms} | {w for t in terms for _, w in t.weights if isinstance(w, fx.Node)})
    between = [n for n in product.graph.nodes if first <= n < product and n.op == "call_function"]
    return not any(n.target is torch._C._set_grad_enabled or getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in between)


def _write_out(product: Product, terms: list[Term], writer: Writer, removed: Removed) -> Sum:
    node = product.node
    values = writer.cast(product.values)  # autocast may have cast both
    if product.order is not None:
        values = writer.emit(aten.permute.default, values, list(product.order))
    for dim in product.places:
        values = writer.emit(aten.unsqueeze.default, values, dim)
    known: dict[Any, fx.Node] = {}
    parts = []
    total: fx.Node | None = None
    for term in terms:
        part, out = _product(term.map, values, writer, known)
        parts.append(part)
        for target, weight in term.weights:
            out = writer.emit(target, out, weight)
        total = out if total is None else writer.emit(aten.add.Tensor, total, out)
    assert total is not None
    if product.out is not None:
        total = writer.emit(aten.permute.default, total, list(product.out))
    output = writer.emit(aten.to.dtype, total, writer.dtype)
    assert output.meta["val"].shape == node.meta["val"].shape, f"{output.meta['val'].shape} is not {node.meta['val'].shape}"
    output.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(output)
    removed.take(node)
    return Sum(node, removed, output, tuple(parts), writer)


def _product(node: fx.Node, values: fx.Node, writer: Writer, known: dict[Any, fx.Node]) -> tuple[fx.Node, fx.Node]:
    """The product of a map with the values, and what of it belongs to ``node``: itself, or its share of a whole tensor of maps."""
    share = share_of(node)
    if share is None:
        part = writer.emit(aten.matmul.default, writer.cast(node), values)
        return part, part
    if share.key not in known:
        known[share.key] = writer.emit(aten.matmul.default, writer.cast(share.source), _beside(values, share, writer))
    whole = known[share.key]
    if share.selects:
        return whole, writer.emit(aten.select.int, whole, share.dim, share.at)
    return whole, writer.emit(operator.getitem, writer.emit(aten.chunk.default, whole, share.count, share.dim), share.at)


def _beside(values: fx.Node, share: Share, writer: Writer) -> fx.Node:
    """The values that all of ``share.source`` is multiplied with: every share meets the same."""
    rank = values.meta["val"].dim()
    own = rank - (share.source.meta["val"].dim() - share.dim)  # the same dimension of the values, if they have it
    if not share.selects:
        return values if own < 0 or values.meta["val"].shape[own] == 1 else writer.emit(aten.cat.default, [values] * share.count, own)
    if own < -1:
        return values
    beside = writer.emit(aten.unsqueeze.default, values, own + 1)
    if own + 1 == rank - 2:  # the innermost of the batch: heads that follow each other share values
        return beside
    return writer.emit(aten.expand.default, beside, [-1 if i != own + 1 else share.count for i in range(rank + 1)])
