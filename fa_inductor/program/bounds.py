"""How large a program's value can be: what proves that a row of scores is not NaN, nor -inf alone.

Scores, sizes and positions are taken to be finite and below 1e30 in magnitude; a tensor of floats may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from .ir import Node, ScoreProgram

SCORE = 1e30
LARGEST = 3.4028234663852886e38
"""The largest finite number in fp32."""
_INFINITE = 3.4028235677973366e38
"""The least number that rounds to infinity in fp32; sums below it round to a finite number."""


def surely_finite(program: ScoreProgram, *, fill: float | None = None, finite: Collection[int] = (), loads: float = math.inf) -> bool:
    """No score, position or (finite) scores' product makes ``program``'s value infinite or NaN.

    Args:
        fill: this literal does not count: where it stands, its row has another, finite, score.
        finite: captured tensors that hold numbers like scores.
        loads: bound of the floats in other captured tensors.
    """
    bounds: list[float] = []
    for node in program.nodes:
        if node.op == "load" and node.type == "float":
            bounds.append(SCORE if node.value in finite else loads)
            continue
        bounds.append(_bound(node, [bounds[a] for a in node.args], [program.nodes[a] for a in node.args], fill))
    return bounds[program.result] < _INFINITE


def _bound(node: Node, args: list[float], nodes: list[Node], fill: float | None) -> float:
    """Of the magnitude; infinite where the value may be infinite or NaN."""
    if node.type == "bool":
        return 1.0
    if node.op == "const":
        value = float(node.value)  # type: ignore[arg-type]
        return 0.0 if value == fill else math.inf if math.isnan(value) else abs(value)
    if node.type == "int" or node.op == "score":
        return SCORE
    if node.op in ("add", "sub"):
        return args[0] + args[1]
    if node.op == "mul":
        return math.inf if math.inf in args else args[0] * args[1]
    if node.op == "div" and nodes[1].op == "const" and nodes[1].value:
        return args[0] / abs(float(nodes[1].value))  # type: ignore[arg-type]
    if node.op in ("min", "max", "where"):
        return max(args)
    if node.op in ("neg", "abs", "round", "to_float"):
        return args[0]
    if node.op in ("tanh", "sigmoid"):
        return math.inf if math.isinf(args[0]) else 1.0  # of NaN it is NaN
    return math.inf
