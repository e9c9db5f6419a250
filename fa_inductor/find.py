"""Finding: every softmax of a graph, and the contractions that its probabilities reach."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from .lift import liftable
from .near_softmax import near_softmax
from .patterns import softmax
from .patterns.contraction import is_contraction
from .patterns.nan import REPLACING
from .patterns.softmax import Softmax
from .patterns.views import SPLITS, argument, name_of
from .refusal import Refusal


@dataclass(frozen=True)
class Candidate:
    """A softmax, the contractions its probabilities reach through views and pointwise ops, and where else they go.

    ``miss``: it is only nearly a softmax, and this is what it lacks.
    """

    anchor: Softmax
    contractions: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]
    miss: Refusal | None = None


def find(graph: fx.Graph) -> list[Candidate]:
    """All softmaxes in program order, and what was meant for one."""
    found = {node: _candidate(anchor) for node in graph.nodes if (anchor := softmax.match(node)) is not None}
    parts = {part for candidate in found.values() for part in candidate.anchor.parts}
    for node in graph.nodes:
        near = near_softmax(node, parts) if node not in parts else None
        if near is not None:
            found[node] = Candidate(near[0], (), (), near[1])
    return [found[node] for node in graph.nodes if node in found]


def _candidate(anchor: Softmax) -> Candidate:
    contractions: list[fx.Node] = []
    others: list[fx.Node] = []
    seen = {anchor.output}
    queue = [anchor.output]
    while queue:
        for user in queue.pop(0).users:
            if user in seen:
                continue
            seen.add(user)
            if is_contraction(user):
                contractions.append(user)
            elif is_dropout(user) or liftable(user) or name_of(user) in (*SPLITS, *REPLACING):
                queue.append(user)
            else:
                others.append(user)
    if anchor.quotient is not None:
        return Candidate(anchor, (anchor.quotient.product,), tuple(others))
    return Candidate(anchor, tuple(contractions), tuple(others))


def reaches_contraction(node: fx.Node) -> bool:
    """Does ``node`` feed a contraction through views and pointwise ops?"""
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if is_contraction(user):
                return True
            if user not in seen and (liftable(user) or name_of(user) in ("getitem", *SPLITS)):
                seen.add(user)
                queue.append(user)
    return False


def is_dropout(node: fx.Node) -> bool:
    """A dropout that drops something (training mode, p > 0)."""
    return name_of(node) == "dropout" and bool(argument(node, 2, "train")) and argument(node, 1, "p") != 0


def reachable(start: fx.Node, last: int, order: dict[fx.Node, int], ends: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Nodes that depend on ``start`` (itself included), up to position ``last`` and not through ``ends``."""
    seen = {start}
    queue = [start]
    while queue:
        for user in queue.pop().users:
            if user not in seen and order.get(user, last + 1) <= last and user not in ends:
                seen.add(user)
                queue.append(user)
    return seen


def score_contractions(source: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """(contractions that ``source`` is made of through views, dropouts and pointwise ops alone, the ops that ended the search); nearest first."""
    found: list[fx.Node] = []
    ends: list[fx.Node] = []
    seen = {source}
    queue = [source]
    while queue:
        node = queue.pop(0)
        if is_contraction(node):
            found.append(node)
        elif liftable(node) or is_dropout(node) or name_of(node) in SPLITS:
            for n in node.all_input_nodes:
                if n not in seen:
                    seen.add(n)
                    queue.append(n)
        elif node.op == "call_function":
            ends.append(node)
    return found, ends


def blocker(ends: list[fx.Node]) -> fx.Node | None:
    """The op nearest to the softmax, between it and a matrix product, that cannot be lifted; behind it only ops that keep the shape are passed."""
    for end in ends:
        node = end.args[0] if name_of(end) == "getitem" else end  # one output of an op with several
        assert isinstance(node, fx.Node)
        if any(map(_comes_from_product, _tensors(node))):
            return node
    return None


def _comes_from_product(node: fx.Node) -> bool:
    seen, queue = {node}, [node]
    while queue:
        found, ends = score_contractions(queue.pop())
        if found:
            return True
        same = [n for end in ends for n in _tensors(end) if n not in seen and _shape(n) == _shape(end)]
        seen.update(same)
        queue += same
    return False


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _shape(node: fx.Node) -> tuple[object, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
