"""Softmaxes written by hand that are not quite one, or not in a form that is known: each gets a reason instead of silence.

An exponential whose sum over one axis divides it again, or divides what a matrix product makes of it, was meant as a softmax.
"""

from __future__ import annotations

import torch
from torch import fx

from .lift import liftable
from .location import location_of
from .patterns.contraction import is_contraction
from .patterns.exponentials import DIVISIONS, MULTIPLICATIONS, power, quotients, reduction, through_casts, without_floor, without_shift
from .patterns.softmax import Softmax
from .patterns.views import argument, name_of
from .refusal import Refusal, declare

DEFERRED = declare(
    "deferred_division", "divide the product by the sums of its own rows, (e @ v) / e.sum(-1, keepdim=True), or before it, (e / e.sum(-1, keepdim=True)) @ v"
)
ALTERED = declare(
    "altered_softmax",
    "only exp(x) over its own sum along one axis is a softmax; 1 or exp(t) may be added to the sum, or where the maximum is subtracted exp(t - max) or "
    "a number up to a quarter of the dtype's eps (3e-8 in float32), which alone changes nothing; beside a mask on exp(x) no number may",
)
OTHERS = ("_masked_softmax",)
SUMS = ("sum", "nansum", "mean", "norm", "linalg_vector_norm", "cumsum")


def near_softmax(node: fx.Node, parts: set[fx.Node]) -> tuple[Softmax, Refusal] | None:
    """The softmax that ``node``, an exponential, was meant for, and why it is not taken for one; ``parts`` belong to others."""
    if name_of(node) in OTHERS:
        return _other(node)
    if power(node) is None:
        return None
    values = _elementwise({node}, parts)
    products = {u for v in values for u in v.users if is_contraction(u)}
    if not products:
        return None
    source = power(node)[0]  # type: ignore[index]
    logsum = next((n for n in _behind(node) if name_of(n) in ("logsumexp", "log_softmax") or _log_of_exponentials(n)), None)
    if logsum is not None:
        what = "the log of the sum of the exponentials" if name_of(logsum) == "log" else logsum.target
        why = Refusal(ALTERED, f"what is subtracted before exp is not {what} of the same scores over one axis", node.name, location_of(node))
        return Softmax(node, source, node.meta["val"].dim() - 1, "exp(x - logsumexp)", (node,)), why
    outputs = _elementwise(products, parts)
    same = values | _elementwise(_written_again(node, parts), parts)
    for total in sorted({u for v in same for u in v.users if name_of(u) in SUMS} | products):
        axis = argument(total, 1, "dim") if total not in products else -1
        axis = axis[0] if isinstance(axis, (list, tuple)) and axis else axis
        division = _division(_elementwise({total}, parts), values if total in products else values | outputs)
        if isinstance(axis, int) and division is not None:
            deferred = not any(n in values for n in division.all_input_nodes)
            return Softmax(node, source, axis % node.meta["val"].dim(), "exp / sum", (node,)), _why(node, division, total, deferred)
    return None


def _log_of_exponentials(node: fx.Node) -> bool:
    sums = [n for n in _behind(node) if name_of(n) in SUMS] if name_of(node) == "log" else []
    return any(power(n) is not None for s in sums for n in s.all_input_nodes)


def _other(node: fx.Node) -> tuple[Softmax, Refusal] | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.meta["val"].dim() == 0:
        return None
    why = Refusal(ALTERED, f"{node.target} treats rows without a visible key in its own way", node.name, location_of(node))
    return Softmax(node, source, source.meta["val"].dim() - 1, name_of(node), (node,)), why


def _why(node: fx.Node, division: fx.Node, total: fx.Node, deferred: bool) -> Refusal:
    where = division.name, location_of(division)
    added = _number_added(division, total)
    if added is not None:
        return Refusal(ALTERED, added, *where)
    if deferred:
        return Refusal(DEFERRED, "the matrix product with exp(x) is divided by the sum of exp(x) afterwards", *where)
    return Refusal(ALTERED, f"what {division.target} applies to exp(x) is not its own sum over one axis", *where)


def _number_added(division: fx.Node, total: fx.Node) -> str | None:
    """A sentence on the number that is added to ``total``, or limits it, where that is what matters."""
    for divisor in (divisor for _, divisor in quotients(division)):
        inner = through_casts(divisor)
        if inner is None or name_of(inner) not in ("add", "clamp", "clamp_min", "clip") or len(inner.args) < 2 or not isinstance(inner.args[1], (int, float)):
            continue
        if reduction(inner.args[0], ("sum",), total.args[0]) is not total:
            continue
        adds = name_of(inner) == "add"
        number = f"{inner.args[1]:g} is added to the sum" if adds else f"the sum is made at least {inner.args[1]:g}"
        exponential = power(total.args[0])
        if exponential is None:
            return f"{number}, which a mask may have made as small"
        if without_shift(exponential[0], argument(total, 1, "dim")) is exponential[0]:
            return f"{number}, which may be as small: no maximum is subtracted"
        if without_floor(divisor) is divisor:
            lost = f", in which only up to {torch.finfo(inner.meta['val'].dtype).eps / 4:.1g} is lost" if adds else ""
            return f"{number} and counts: the sum may be 1{lost}"
    return None


def _division(sums: set[fx.Node], values: set[fx.Node]) -> fx.Node | None:
    """A node that multiplies or divides one of ``values`` by what comes from the sum."""
    for node in sorted(sums):
        if name_of(node) in (*DIVISIONS, *MULTIPLICATIONS) and any(n in values and n not in sums for n in node.all_input_nodes):
            return node
    return None


def _written_again(node: fx.Node, parts: set[fx.Node]) -> set[fx.Node]:
    """Other exponentials of the same scores."""
    scores = {n for n in _behind(node) if is_contraction(n)}
    found = {n for s in scores for n in _elementwise({s}, parts) if name_of(n) in ("exp", "exp2")}
    return found - {node}


def _behind(node: fx.Node) -> set[fx.Node]:
    """What ``node`` is made of through views and elementwise ops, and the ops that end them."""
    seen, queue = set[fx.Node](), [node]
    while queue:
        for n in queue.pop().all_input_nodes:
            if n not in seen and n.op == "call_function":
                seen.add(n)
                if liftable(n) or name_of(n) in ("detach", "getitem"):
                    queue.append(n)
    return seen


def _elementwise(start: set[fx.Node], parts: set[fx.Node]) -> set[fx.Node]:
    """What ``start`` reaches through views and elementwise ops outside ``parts``, ``start`` included."""
    seen, queue = set(start), list(start)
    while queue:
        for user in queue.pop().users:
            if user not in seen and user not in parts and (liftable(user) or name_of(user) in ("detach", "dropout")):
                seen.add(user)
                queue.append(user)
    return seen
