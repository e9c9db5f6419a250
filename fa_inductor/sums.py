"""Products of a sum of probabilities with values, written out as a sum of products, each of which may be fused.

    (w1 P1 + w2 P2) V = w1 (P1 V) + w2 (P2 V)            w: numbers, or tensors that are constant along the keys

Differential attention (Ye et al. 2024, arXiv:2410.05258) subtracts one map from another. Both may be slices of one tensor of maps,
which then is multiplied with the values as a whole: x[:, :, i] V = (x V)[:, :, i]. What is written out stands in for the product
until one of its parts is fused; where none is, the product is put back as it was. A dropout of the sum stops it: one mask is drawn
for both maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import log
from .find import is_dropout
from .patterns import softmax, views
from .patterns.exponentials import CASTS, DIVISIONS, MULTIPLICATIONS, SUBTRACTIONS
from .patterns.views import argument, name_of
from .writer import Writer

aten = torch.ops.aten
_CASTS = (*CASTS, "type_as")


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
    products = [n for n in gm.graph.nodes if name_of(n) in ("matmul", "bmm") and isinstance(n.args[0], fx.Node)]
    removed = Removed()
    return [found for product in products if (found := _guarded(product, removed)) is not None]


def _guarded(product: fx.Node, removed: Removed) -> Sum | None:
    """A product that cannot be written out stays as it is."""
    maps = product.args[0]
    assert isinstance(maps, fx.Node)
    values: Any = product.args[1]
    terms = list(_terms(maps)) if min(maps.meta["val"].dim(), values.meta["val"].dim()) > 1 else []
    if len(terms) < 2 or not all(_is_map(t.map, maps) for t in terms) or not _moves(product, terms):
        return None
    writer = Writer(product)
    try:
        return _write_out(product, terms, writer, removed)
    except Exception as error:
        log.get().warning("a product of a sum of probabilities stays as it is: %s", error, exc_info=True)
        writer.erase()
        return None


def _terms(node: fx.Node) -> Iterator[Term]:
    """What ``node`` is the sum of."""
    name: str = name_of(node)
    args: Any = node.args
    if name in ("add", *SUBTRACTIONS) and all(isinstance(a, fx.Node) for a in args[:2]) and node.kwargs.get("alpha", 1) == 1:
        yield from _terms(args[0])
        for term in _terms(args[1]):
            yield term.times(aten.mul.Tensor, -1.0) if name in SUBTRACTIONS else term
    elif name == "neg":
        yield from (t.times(aten.mul.Tensor, -1.0) for t in _terms(args[0]))
    elif (name == "dropout" and not is_dropout(node)) or (name in _CASTS and args[0].meta["val"].dtype.is_floating_point):
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
        if isinstance(inner, fx.Node) and inner.meta["val"].shape == node.meta["val"].shape and _constant_along_keys(weight):
            yield target, inner, weight


def _constant_along_keys(weight: Any) -> bool:
    if not isinstance(weight, fx.Node):
        return isinstance(weight, (int, float))
    value = weight.meta["val"]
    return isinstance(value, torch.Tensor) and (value.dim() == 0 or (isinstance(value.shape[-1], int) and value.shape[-1] == 1))


def _is_map(node: fx.Node, maps: fx.Node) -> bool:
    """Of the same shape as the sum, and a view of a softmax (with its dropout, and factors)."""
    if node.meta["val"].shape != maps.meta["val"].shape:
        return False
    while softmax.match(node) is None:
        inner = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if name_of(node) in MULTIPLICATIONS:
            inner = [a for a in inner if a.meta["val"].shape == node.meta["val"].shape and a.op != "placeholder"]
        elif not (views.is_view(node) or name_of(node) in (*_CASTS, "dropout", "getitem", *views.SPLITS)):
            return False
        if not inner:
            return False
        node = inner[0]
    return True


def _moves(product: fx.Node, terms: list[Term]) -> bool:
    """May everything between be computed at the product instead: no op in between changes a tensor, or whether gradients are recorded?"""
    first = min({t.map for t in terms} | {w for t in terms for _, w in t.weights if isinstance(w, fx.Node)})
    between = [n for n in product.graph.nodes if first <= n < product and n.op == "call_function"]
    return not any(n.target is torch._C._set_grad_enabled or getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in between)


def _write_out(product: fx.Node, terms: list[Term], writer: Writer, removed: Removed) -> Sum:
    values = writer.cast(product.args[1])  # type: ignore[arg-type]  # autocast may have cast both
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
    output = writer.emit(aten.to.dtype, total, writer.dtype)
    assert output.meta["val"].shape == product.meta["val"].shape, f"{output.meta['val'].shape} is not {product.meta['val'].shape}"
    output.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(output)
    removed.take(product)
    return Sum(product, removed, output, tuple(parts), writer)


def _product(node: fx.Node, values: fx.Node, writer: Writer, known: dict[Any, fx.Node]) -> tuple[fx.Node, fx.Node]:
    """The product of a map with the values, and what of it belongs to ``node``: itself, or its share of a whole tensor of maps."""
    source, dim, count, at = _slice_of(node)
    if count is None:
        part = writer.emit(aten.matmul.default, writer.cast(node), values)
        return part, part
    key = source, dim, count
    after = source.meta["val"].dim() - dim  # dimensions from ``dim`` on
    own = values.meta["val"].dim() - after  # the same dimension of the values, if they have it
    if key not in known:
        if not count:
            beside = writer.emit(aten.unsqueeze.default, values, own + 1) if own >= -1 else values
        elif own >= 0 and values.meta["val"].shape[own] != 1:  # every slice meets the same values
            beside = writer.emit(aten.cat.default, [values] * count, own)
        else:
            beside = values
        known[key] = writer.emit(aten.matmul.default, writer.cast(source), beside)
    if not count:
        return known[key], writer.emit(aten.select.int, known[key], dim, at)
    each = node.meta["val"].shape[dim]
    return known[key], writer.emit(aten.slice.Tensor, known[key], dim, at * each, (at + 1) * each)


def _slice_of(node: fx.Node) -> tuple[fx.Node, int, int | None, int]:
    """(source, dimension, slices, which) if ``node`` is one of equal slices of the source's batch; 0 slices for a select, None if it is not."""
    while name_of(node) in _CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    source: Any = node.args[0] if node.args else None
    if name_of(node) == "select":
        at: Any = argument(node, 2, "index")
        rank = source.meta["val"].dim()
        dim = int(argument(node, 1, "dim")) % rank
        return (source, dim, 0, at) if dim < rank - 2 and isinstance(at, int) else (node, 0, None, 0)
    if name_of(node) == "getitem" and name_of(node.args[0]) in ("chunk", "split", "unsafe_chunk", "unsafe_split"):
        pieces, at = node.args
        assert isinstance(pieces, fx.Node) and isinstance(pieces.args[0], fx.Node) and isinstance(at, int)
        source = pieces.args[0]
        dim = int(argument(pieces, 2, "dim", 0)) % source.meta["val"].dim()
        size, each = source.meta["val"].shape[dim], node.meta["val"].shape[dim]
        if (
            dim < source.meta["val"].dim() - 2
            and isinstance(size, int)
            and isinstance(each, int)
            and size % each == 0
            and len(pieces.meta["val"]) == size // each
        ):
            return source, dim, size // each, at
    return node, 0, None, 0
