"""Attention that a graph break tears apart: the softmax is in one graph, one of the products, or both, in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from . import log
from .breaks import CALLER, Break, Shape, active, ended_by, function_of, resumed, uncompiled_caller
from .find import Candidate, score_contractions
from .lift import liftable
from .location import Frame, place_of
from .patterns.contraction import NAMES
from .patterns.softmax import Softmax
from .refusal import Refusal

_BEFORE = "the graph is broken between the score matmul and the softmax"
_AFTER = "the graph is broken between the softmax and the matmul with the values"
_PICKS = ("index", "index_select", "gather", "take_along_dim")
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


def torn(candidate: Candidate, end: Break | None) -> Refusal | None:
    """The break that ``candidate`` misses a product for; ``end`` is the one at which its graph ended."""
    anchor = candidate.anchor
    products = score_contractions(anchor.input)[0]
    if not products:
        before = _break_before(anchor.input, bool(candidate.contractions))
        if before is not None or not candidate.contractions:
            return before.refusal(_BEFORE, anchor.output.name) if before else None
        return _given_by_uncompiled(anchor)
    if candidate.contractions or not any(n.op == "output" for n in candidate.others) or not any(map(_pairs_activations, products)):
        return None
    after = end or _break_around(anchor.output)
    return after.refusal(_AFTER, anchor.output.name) if after else None


def _break_before(scores: fx.Node, reaches_values: bool) -> Break | None:
    """The break that the graph inputs which ``scores`` is made of were computed before."""
    inputs = [n for n in _graph_inputs(scores) if not _learned(n)]
    if not inputs:
        return None
    breaks = active()
    shapes = [_shape(n.meta["val"]) for n in inputs]
    found = next((b for b in breaks if any(_alike(s, left) for s in shapes for left in b.scores)), None)
    at = resumed(scores)
    if found is not None or at is None or not reaches_values:
        return found
    return next((b for b in breaks if b.at == at), None) or Break("", (Frame(*at, ""),))


def _given_by_uncompiled(anchor: Softmax) -> Refusal | None:
    """The scores are given to a compiled function by one that is not."""
    caller = uncompiled_caller()
    if caller is None or all(map(_learned, _graph_inputs(anchor.input))) or any((caller.file, caller.line) == b.at for b in active()):
        return None
    text = f"its scores are computed outside this graph, in or above {caller.function}, which is not compiled: a graph break in a loop, try or with does that"
    return Refusal(CALLER, text, anchor.output.name, place_of((caller,)))


def _break_around(probabilities: fx.Node) -> Break | None:
    """The probabilities are returned to a function that was broken because of something below the call."""
    own = function_of(probabilities)
    return next((b for b in active() if own and len(b.frames) > 1 and own != (b.frames[0].file, b.frames[0].function)), None)


def _graph_inputs(node: fx.Node) -> list[fx.Node]:
    """Floating-point inputs of the graph that ``node`` is made of through views, elementwise ops and a choice of heads or rows."""
    found, seen, queue = [], {node}, [node]
    while queue:
        node = queue.pop(0)
        if node.op == "placeholder" and node.meta["val"].is_floating_point() and node.meta["val"].dim() > 1:
            found.append(node)
        for n in node.all_input_nodes if liftable(node) or _name(node) in _PICKS else ():
            if n not in seen and isinstance(n.meta.get("val"), torch.Tensor):
                seen.add(n)
                queue.append(n)
    return found


def _pairs_activations(product: fx.Node) -> bool:
    """Both factors are computed: a product with a weight makes logits or a projection."""
    factors = [n for n in product.all_input_nodes if isinstance(_value(n), torch.Tensor)]
    return _name(product) != "linear" and not any(map(_learned, factors))


def _learned(node: fx.Node) -> bool:
    """Made of one parameter alone."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter) or isinstance(_value(node), torch.nn.Parameter)


# -- what a graph leaves behind ------------------------------------------------------------------------------------------------
def left_by(gm: fx.GraphModule) -> Break | None:
    """The break at the end of a graph of Dynamo's, with the outputs that may be scores."""
    end = ended_by(gm)
    if end is None:
        return None
    try:
        return replace(end, scores=tuple(dict.fromkeys(_shape(_value(n)) for n in _scores(gm.graph))))
    except Exception as error:  # a tensor of an unusual kind: the report says less, the model compiles
        log.get().debug("the outputs of a broken graph: %s", error, exc_info=True)
        return end


def _scores(graph: fx.Graph) -> Iterator[fx.Node]:
    """Outputs that are a product of activations, changed by nothing but ops that keep its shape."""
    (output,) = graph.find_nodes(op="output")
    for start in output.all_input_nodes:
        seen, queue = {start}, [start] if isinstance(_value(start), torch.Tensor) and _value(start).dim() > 1 else []
        while queue:
            node = queue.pop()
            if _name(node) in _PRODUCTS and _pairs_activations(node):
                yield start
                break
            if _name(node) in NAMES or "softmax" in _name(node):
                continue
            inputs = [n for n in node.all_input_nodes if n not in seen and isinstance(_value(n), torch.Tensor)]
            inputs = [n for n in inputs if _shape(_value(n))[1:] == _shape(_value(start))[1:]]
            seen.update(inputs)
            queue += inputs


def _name(node: fx.Node) -> str:
    """Of the operator, in Dynamo's graphs as in normalised ones."""
    return (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).split(".")[0]


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _shape(value: torch.Tensor) -> Shape:
    return value.dtype, *(n if isinstance(n, int) else None for n in value.shape)


def _alike(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and a[0] == b[0] and all(x is None or y is None or x == y for x, y in zip(a[1:], b[1:]))
