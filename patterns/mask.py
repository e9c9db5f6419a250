"""Recognising masks in a score program: which predicate hides a score, what a hidden score becomes, what that lets a kernel skip.

``where(visible, x, fill)`` replaces, ``x + where(visible, 0, fill)`` adds; nested masks are the conjunction of their predicates.
The predicate's conjuncts ``k - q <= u`` (causal), ``k - q >= l`` (window) and those of (b, h, k) alone (padding) are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fa_inductor.facts import Affine, MaskFacts, MaskTerm
from fa_inductor.program import Node, ProgramBuilder, ScoreProgram, dependencies

HUGE = 1e30
"""|x + fill| >= HUGE for any score below HUGE in magnitude, and exp(x + fill - m) is 0 for any row maximum m above -HUGE/10."""
UNDERFLOW = 110.0
"""exp(-t) is exactly 0 in fp32 for t >= 104; a margin for the rounding of the difference."""


@dataclass(frozen=True)
class Peeled:
    """A program seen as masks around a core: ``core`` is the node of the unmasked scores, ``terms`` are the predicates that
    must all hold for a score to be visible."""

    core: int
    terms: tuple[int, ...]
    fill: float | None
    hidden: str


def peel(program: ScoreProgram) -> Peeled:
    """Take the masks off, outermost first, as long as they make one mask together.

    Two finite fills, a finite one and -inf, or one that is added to a hidden score's fill (finfo.min twice is -inf) give scores
    that are hidden in different degrees: the inner mask then stays in the core.
    """
    nodes, depends = program.nodes, dependencies(program.nodes)
    at, hidden = program.result, ""
    fills: list[float] = []
    predicates: list[int] = []
    while True:
        node = nodes[at]
        found = _replace(nodes, depends, node) or _add(nodes, depends, node)
        if found is None:
            break
        inner, predicate, fill, kind = found
        if fills and (fill != fills[0] or (hidden != "replace" and math.isfinite(fill))):
            break
        at, hidden = inner, kind if hidden in ("", kind) else "mixed"
        fills.append(fill)
        predicates += _conjuncts(nodes, predicate)
    return Peeled(at, tuple(dict.fromkeys(predicates)), fills[0] if fills else None, hidden or "replace")


Found = tuple[int, int, float, str]
_TAME = frozenset({"score", "add", "sub", "mul", "div", "neg", "abs", "min", "max", "where", "round", "tanh", "sigmoid", "erf", "sin", "cos", "to_float"})
"""A value of these is huge only where a score is; division by a literal."""


def _fill(node: Node, most: float) -> float | None:
    ok = node.op == "const" and isinstance(node.value, float) and node.value <= most
    return float(node.value) if ok else None  # type: ignore[arg-type]


def _replace(nodes: tuple[Node, ...], depends: tuple[frozenset[str], ...], node: Node) -> Found | None:
    if node.op != "where" or "score" in depends[node.args[0]]:
        return None
    predicate, kept, other = node.args  # the builder puts literals last
    fill = _fill(nodes[other], -1e3)
    return (kept, predicate, fill, "replace") if fill is not None and "score" in depends[kept] else None


def _add(nodes: tuple[Node, ...], depends: tuple[frozenset[str], ...], node: Node) -> Found | None:
    """x + where(p, 0, fill) and its commuted form (the builder turns (1 - [p]) * fill into this)."""
    if node.op != "add":
        return None
    for x, y in (node.args, node.args[::-1]):
        if "score" in depends[y] or "score" not in depends[x]:
            continue
        found = _zero_or_fill(nodes, y)
        if found is not None and not _outweighs(nodes, x):
            return (x, *found, "add")
    return None


def _outweighs(nodes: tuple[Node, ...], at: int) -> bool:
    """The value holds a literal that is as large as a fill: with the fill added it would not be hidden."""
    node = nodes[at]
    if node.op == "const":
        return isinstance(node.value, float) and node.value > HUGE / 10
    return any(_outweighs(nodes, a) for a in (node.args[1:] if node.op == "where" else node.args) if nodes[a].type == "float")


def _zero_or_fill(nodes: tuple[Node, ...], at: int) -> tuple[int, float] | None:
    node = nodes[at]
    if node.op == "round":
        return _zero_or_fill(nodes, node.args[0])
    if node.op == "where" and nodes[node.args[1]].op == "const" and nodes[node.args[1]].value == 0:
        fill = _fill(nodes[node.args[2]], -HUGE)
        return None if fill is None else (node.args[0], fill)
    return None


def _conjuncts(nodes: tuple[Node, ...], at: int) -> list[int]:
    """Predicates whose conjunction is ``at``."""
    node = nodes[at]
    return [c for a in node.args for c in _conjuncts(nodes, a)] if node.op == "and" else [at]


def linear(nodes: tuple[Node, ...], at: int) -> dict[str | int, int] | None:
    """An integer node as coefficients of b, h, q, k, the size arguments (by position) and 1 (key "one"); None if not linear."""
    node = nodes[at]
    if node.op == "const" and isinstance(node.value, int):
        return {"one": node.value}
    if node.op == "index":
        return {str(node.value): 1}
    if node.op == "size":
        return {int(node.value): 1}  # type: ignore[arg-type]
    if node.op == "to_float" and nodes[node.args[0]].type == "int":
        return linear(nodes, node.args[0])
    if node.op == "neg":
        return _scaled(linear(nodes, node.args[0]), -1)
    if node.op in ("add", "sub"):
        x, y = (linear(nodes, a) for a in node.args)
        y = _scaled(y, -1) if node.op == "sub" else y
        return None if x is None or y is None else {n: x.get(n, 0) + y.get(n, 0) for n in {*x, *y}}
    if node.op == "mul":
        for a, b in (node.args, node.args[::-1]):
            if nodes[b].op == "const" and isinstance(nodes[b].value, int):
                return _scaled(linear(nodes, a), int(nodes[b].value))  # type: ignore[arg-type]
    return None


def _scaled(x: dict[str | int, int] | None, factor: int) -> dict[str | int, int] | None:
    return None if x is None else {name: c * factor for name, c in x.items()}


def diagonal(nodes: tuple[Node, ...], at: int) -> tuple[str, Affine] | None:
    """("upper", u) for a comparison that says k - q <= u, ("lower", l) for k - q >= l, else None."""
    node, op = nodes[at], nodes[at].op
    if op not in ("lt", "le", "gt", "ge") or nodes[node.args[0]].type == "bool":
        return None
    x, y = (linear(nodes, a) for a in node.args)
    if x is None or y is None:
        return None
    difference = {n: x.get(n, 0) - y.get(n, 0) for n in {*x, *y}}  # x - y, compared with 0
    if difference.get("b") or difference.get("h"):
        return None
    if op in ("gt", "ge"):  # turn round: d >= 0 is -d <= 0
        difference, op = {n: -c for n, c in difference.items()}, {"gt": "lt", "ge": "le"}[op]
    constant = difference.get("one", 0) + (1 if op == "lt" else 0)  # integers: d < 0 is d + 1 <= 0
    sizes = tuple(sorted((n, c) for n, c in difference.items() if isinstance(n, int) and c))
    if (difference.get("k", 0), difference.get("q", 0)) == (1, -1):  # k - q + rest <= 0
        return "upper", Affine(-constant, tuple((n, -c) for n, c in sizes))
    if (difference.get("k", 0), difference.get("q", 0)) == (-1, 1):  # q - k + rest <= 0
        return "lower", Affine(constant, sizes)
    return None


def mask_facts(
    program: ScoreProgram, peeled: Peeled, lowest: float, at_least: Callable[[Affine, int], bool], square_at_least: Callable[[Affine], bool]
) -> MaskFacts | None:
    """Facts of the peeled mask.

    Args:
        lowest: no unmasked score is below this, if a captured tensor or another mask does not make it so.
        at_least: proves ``affine >= constant`` for every length.
        square_at_least: proves ``Lk - Lq >= affine`` for every length.
    """
    if peeled.fill is None:
        return None
    depends = dependencies(program.nodes)
    terms, places = list[MaskTerm](), list[int]()
    for node in peeled.terms:
        found = diagonal(program.nodes, node)
        if found is not None:
            terms.append(MaskTerm(found[0], node, found[1]))  # type: ignore[arg-type]
        elif not depends[node] & {"q", "score"}:
            terms.append(MaskTerm("key", node))
        else:
            places.append(node)
    upper = [t.bound for t in terms if t.kind == "upper" and t.bound]
    lower = [t.bound for t in terms if t.kind == "lower" and t.bound]
    own_key = [n for n in peeled.terms if not any(t.node == n and t.kind != "key" for t in terms)]
    first = not lower and not own_key and all(at_least(u, 0) for u in upper)  # key 0 is visible to every row
    diagonals = all(at_least(u, 0) for u in upper) and all(at_least(_minus(low), 0) for low in lower)
    own = diagonals and square_at_least(Affine(0)) and all(_holds_on_diagonal(program, n) for n in own_key)
    infinite = math.isinf(peeled.fill)
    visible = (first or own) and peeled.fill <= lowest and _above(program.nodes, peeled.core, -1e3, infinite)  # own: row q sees key q
    kept = (first or own) and infinite and _above(program.nodes, peeled.core, -math.inf, True)
    return MaskFacts(peeled.fill, peeled.hidden, tuple(terms), visible, _skip_above(peeled), kept, tuple(places))  # type: ignore[arg-type]


def _minus(a: Affine) -> Affine:
    return Affine(-a.constant, tuple((n, -c) for n, c in a.terms))


def _holds_on_diagonal(program: ScoreProgram, predicate: int) -> bool:
    """Is the predicate true for k = q whatever the captured tensors hold (the same document as itself)?"""
    builder = ProgramBuilder.like(program)
    q = builder.index("q")
    leaves = {i: q for i, n in enumerate(program.nodes) if n.op == "index" and n.value == "k"}
    at = builder.inline(program, leaves)[predicate]
    return builder.nodes[at].op == "const" and builder.nodes[at].value is True


def _above(nodes: tuple[Node, ...], at: int, floor: float, loads: bool) -> bool:
    """Do the unmasked scores surely stay above the ``floor``?

    Not with another mask in them, a captured tensor unless ``loads`` may be, nor a function that makes a huge or infinite number of a score.
    """
    node = nodes[at]
    if node.type != "float":
        return True
    if node.op in ("load", "const"):
        return loads if node.op == "load" else float(node.value or 0) > floor  # type: ignore[arg-type]
    if node.op not in _TAME or (node.op == "div" and not (nodes[node.args[1]].op == "const" and nodes[node.args[1]].value)):
        return False
    return all(_above(nodes, a, floor, loads) for a in (node.args[1:] if node.op == "where" else node.args))


def _skip_above(peeled: Peeled) -> float:
    fill = peeled.fill
    assert fill is not None
    if math.isinf(fill):
        return fill
    if fill <= -HUGE:
        return -HUGE / 10
    return fill + UNDERFLOW + abs(fill) * 1e-6  # the fill's own rounding
