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
_ROUNDING = 1 + 2**-20
"""A product or quotient is larger than the exact one by less: kernels may divide by an approximate reciprocal."""


def surely_finite(program: ScoreProgram, *, fill: float | None = None, finite: Collection[int] = (), loads: float = math.inf) -> bool:
    """No score, position or (finite) scores' product makes ``program``'s first value infinite or NaN.

    Args:
        program: with values after the first, these are taken to be finite.
        fill: this literal does not count: where it stands, its row has another, finite, score.
        finite: captured tensors that hold numbers like scores.
        loads: bound of the floats in other captured tensors.
    """
    given = _finite_with(program.nodes, program.results[1:])
    bounds: list[float] = []
    for i, node in enumerate(program.nodes):
        if node.op == "load" and node.type == "float":
            bound = SCORE if node.value in finite else loads
        elif (cleaned := _without_infinities(program.nodes, i)) is not None:
            source, *others = (bounds[a] for a in cleaned)
            bound = max(LARGEST if math.isinf(source) else source, *others)
        else:
            bound = _bound(node, [bounds[a] for a in node.args], [program.nodes[a] for a in node.args], fill)
        bounds.append(min(bound, LARGEST) if i in given else bound if bound < _INFINITE else math.inf)
    return bounds[program.results[0]] < _INFINITE


def moderate(program: ScoreProgram, most: float, finite: Collection[int]) -> bool:
    """No number that ``program`` reads is larger than ``most``, but for infinity: neither literals nor floats in tensors other than ``finite``."""
    loads = [n for n in program.nodes if n.op == "load" and n.type == "float"]
    literals = [abs(float(n.value)) for n in program.nodes if n.op == "const" and n.type == "float"]  # type: ignore[arg-type]
    return all(n.value in finite for n in loads) and all(x <= most or math.isinf(x) for x in literals)


def sums_above(program: ScoreProgram) -> bool:
    """Is the first value more than a multiple of the others?"""
    seen, queue = set(program.results[1:]), [program.results[0]]
    while queue:
        at = queue.pop()
        node = program.nodes[at]
        if at in seen:
            continue
        seen.add(at)
        if node.op not in ("mul", "div", "neg", "round", "const"):
            return True
        queue += node.args
    return False


def _finite_with(nodes: tuple[Node, ...], given: Collection[int]) -> set[int]:
    """``given`` and what they could not be finite without: terms of sums, and what is multiplied by a number."""
    found, queue = set(given), list(given)
    while queue:
        node = nodes[queue.pop()]
        if node.op in ("add", "sub", "neg", "round"):
            below = list(node.args)
        else:
            below = [node.args[0]] if node.op in ("mul", "div") and nodes[node.args[1]].op == "const" and node.type == "float" else []
        queue += [a for a in below if a not in found]
        found.update(below)
    return found


def _without_infinities(nodes: tuple[Node, ...], at: int) -> tuple[int, ...] | None:
    """(x, what stands in for its NaN and infinities) where the value is ``nan_to_num`` of x: a choice against each in turn."""
    kept, others, tests, excluded = at, list[int](), list[Node](), set[str]()
    while nodes[kept].op == "where" and nodes[nodes[kept].args[0]].op == "not":
        tests.append(nodes[nodes[nodes[kept].args[0]].args[0]])
        others.append(nodes[kept].args[2])
        kept = nodes[kept].args[1]
    for test in tests:
        if test.op == "ne" and test.args == (kept, kept):
            excluded.add("nan")
        elif test.op == "eq" and kept in test.args:
            excluded |= {str(nodes[a].value) for a in test.args if nodes[a].op == "const"}
    return (kept, *others) if excluded >= {"nan", "inf", "-inf"} else None


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
        return math.inf if math.inf in args else args[0] * args[1] * (1.0 if any(map(_power_of_two, nodes)) else _ROUNDING)
    if node.op == "div" and nodes[1].op == "const" and nodes[1].value:
        return args[0] / abs(float(nodes[1].value)) * (1.0 if _power_of_two(nodes[1]) else _ROUNDING)  # type: ignore[arg-type]
    if node.op in ("min", "max", "where"):
        return max(args)
    if node.op in ("neg", "abs", "round", "to_float"):
        return args[0]
    if node.op in ("tanh", "sigmoid", "erf", "sin", "cos"):
        return math.inf if math.isinf(args[0]) else 1.0  # of NaN it is NaN
    return math.inf


def _power_of_two(node: Node) -> bool:
    return node.op == "const" and isinstance(node.value, float) and abs(math.frexp(node.value)[0]) == 0.5
