"""A choice between two values that were computed in the same way: made where they first differ.

``where(c, f(x), f(y)) = f(where(c, x, y))``. Then the score goes one way, which recognition needs, and so does its gradient: of a value
that is not chosen it would be 0 times a derivative, which is NaN where that is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .builder import ProgramBuilder
from .ir import Node

_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
_COMMUTATIVE = frozenset({"add", "mul", "min", "max"})
_TAME = frozenset({"score", "add", "sub", "neg", "abs", "min", "max", "tanh", "sigmoid", "round", "where"})
"""Functions whose derivative is finite wherever they are."""


def choose(b: ProgramBuilder, condition: int, x: int, y: int) -> int | None:
    """``x`` where ``condition`` (which does not depend on the score) holds, else ``y``; None where the gradient might not be that of the choice."""
    if x == y:
        return x
    left, right = b.nodes[x], b.nodes[y]
    if left.type != right.type:
        return None
    read = [_reads_score(b, v) for v in (x, y)]
    if not all(read):
        return b.emit("where", condition, x, y) if all(_tame(b, v) for v, reads in zip((x, y), read) if reads) else None
    if (left.op, left.value, len(left.args)) == (right.op, right.value, len(right.args)) and left.args:
        chosen = [choose(b, condition, u, v) for u, v in zip(left.args, _aligned(b, left, right))]
        return None if None in chosen else b.emit(left.op, *(v for v in chosen if v is not None), value=left.value)
    apart = _apart(b, condition, x, y)
    if apart is None:
        return b.emit("where", condition, x, y) if _tame(b, x) and _tame(b, y) else None
    function, inner = apart
    value = choose(b, condition, *inner)
    return None if value is None else function(value)


def _apart(b: ProgramBuilder, condition: int, x: int, y: int) -> tuple[Callable[[int], int], tuple[int, int]] | None:
    """(f, (u, v)) such that the choice between ``x`` and ``y`` is f of the one between u and v: what only one of them does to the scores."""
    for at, other, first in ((x, y, True), (y, x, False)):
        node = b.nodes[at]
        inner = next((a for a in node.args if b.nodes[a].type == "float" and _reads_score(b, a)), -1)
        rest = tuple(a for a in node.args if a != inner)
        if inner == -1 or any(_reads_score(b, a) for a in rest) or (node.op in ("sub", "div") and node.args[0] != inner):
            continue
        pair = (inner, other) if first else (other, inner)
        if node.op in _NEUTRAL and len(rest) == 1:
            neutral = b.const(_NEUTRAL[node.op])
            operand = b.emit("where", condition, *((rest[0], neutral) if first else (neutral, rest[0])))
            return lambda value, op=node.op, operand=operand: b.emit(op, value, operand), pair  # type: ignore[misc]
        if node.op == "where" and node.args[1] == inner and b.nodes[node.args[2]].op == "const":
            kept = b.emit("or", node.args[0], b.emit("not", condition) if first else condition)
            return lambda value, kept=kept, fill=node.args[2]: b.emit("where", kept, value, fill), pair  # type: ignore[misc]
    return None


def _aligned(b: ProgramBuilder, left: Node, right: Node) -> tuple[int, ...]:
    """The arguments of ``right``, turned round if that puts the score where ``left`` has it."""
    reads = [[_reads_score(b, a) for a in node.args] for node in (left, right)]
    turn = left.op in _COMMUTATIVE and left.value is None and reads[0] != reads[1] and reads[0] == reads[1][::-1]
    return right.args[::-1] if turn else right.args


def _reads_score(b: ProgramBuilder, at: int) -> bool:
    return "score" in b.depends_on(at)


def _tame(b: ProgramBuilder, at: int) -> bool:
    """No step from the score to the value has an infinite derivative anywhere."""
    node = b.nodes[at]
    if node.op in ("mul", "div"):
        factor = b.nodes[node.args[1]]
        if factor.op != "const" or not math.isfinite(float(factor.value or 0)) or (node.op == "div" and not factor.value):
            return False
        return _tame(b, node.args[0])
    return node.op in _TAME and all(_tame(b, a) for a in node.args if _reads_score(b, a) and b.nodes[a].type == "float")
