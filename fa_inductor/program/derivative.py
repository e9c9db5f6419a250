"""Reverse-mode derivative of a score program, as another score program.

For ``y = program(score, loads…)`` and the incoming gradient ``grad`` (the leaf of that name) the result is a program with
results ``(y, dscore, dload_0, dload_1, …)`` where ``dload_i`` belongs to the i-th entry of ``loads`` that is returned too:
the captured tensor's gradient at that element is the sum of ``dload_i`` over all (b, h, q, k) that read it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from .builder import ProgramBuilder
from .ir import Node, ScoreProgram


def differentiate(program: ScoreProgram, wanted: Collection[int] = ()) -> tuple[ScoreProgram, tuple[tuple[int, int], ...]]:
    """Gradient program of a single-valued ``program``.

    Args:
        wanted: numbers of the captured tensors whose gradient is needed.
    Returns:
        the program ``(y, dscore, dload…)``, and for each ``dload`` the pair (capture number, node of the load in the
        returned program, from which its index nodes are read).
    """
    builder = ProgramBuilder.like(program)
    placed = builder.inline(program)
    gradients: dict[int, int] = {placed[program.result]: builder.grad()}
    forward = len(builder.nodes)
    loads: list[int] = []
    dscore = builder.const(0.0)
    for i in range(forward - 1, -1, -1):
        node = builder.nodes[i]
        if i not in gradients or node.type != "float":
            continue
        gradient = gradients[i]
        if node.op == "score":
            dscore = gradient
        elif node.op == "load" and node.value in wanted:
            loads.append(i)
        for argument, contribution in _adjoints(builder, node, i, gradient):
            if argument in gradients:
                gradients[argument] = builder.emit("add", gradients[argument], contribution)
            else:
                gradients[argument] = contribution
    results = (placed[program.result], dscore, *(gradients[i] for i in loads))
    # `finish` drops dead nodes and renumbers, so the loads are kept alive and found again by their identity
    finished = builder.finish(*results, *loads)
    n = len(results)
    where = finished.results[n:]
    sites = tuple((int(finished.nodes[w].value), w) for w in where)  # type: ignore[arg-type]
    return ScoreProgram(finished.nodes, finished.results[:n], finished.captures, finished.n_sizes), sites


def _adjoints(b: ProgramBuilder, node: Node, i: int, g: int) -> list[tuple[int, int]]:
    """(argument, contribution to its gradient) for each float argument of ``node``; ``i`` is the node's own value."""
    x = node.args[0] if node.args else -1
    y = node.args[1] if len(node.args) > 1 else -1
    op, zero, one = node.op, b.const(0.0), b.const(1.0)
    if op == "add":
        return [(x, g), (y, g)]
    if op == "sub":
        return [(x, g), (y, b.emit("neg", g))]
    if op == "mul":
        return [(x, b.emit("mul", g, y)), (y, b.emit("mul", g, x))]
    if op == "div":
        over = b.emit("div", g, y)
        return [(x, over), (y, b.emit("neg", b.emit("mul", over, i)))]
    if op == "neg":
        return [(x, b.emit("neg", g))]
    if op == "exp":
        return [(x, b.emit("mul", g, i))]
    if op == "exp2":
        return [(x, b.emit("mul", g, b.emit("mul", i, b.const(math.log(2)))))]
    if op == "expm1":
        return [(x, b.emit("mul", g, b.emit("add", i, one)))]
    if op in ("log", "log1p"):
        return [(x, b.emit("div", g, x if op == "log" else b.emit("add", x, one)))]
    if op == "erf":
        bell = b.emit("exp", b.emit("neg", b.emit("mul", x, x)))
        return [(x, b.emit("mul", g, b.emit("mul", bell, b.const(2 / math.sqrt(math.pi)))))]
    if op == "sin":
        return [(x, b.emit("mul", g, b.emit("cos", x)))]
    if op == "cos":
        return [(x, b.emit("neg", b.emit("mul", g, b.emit("sin", x))))]
    if op == "tanh":
        return [(x, b.emit("mul", g, b.emit("sub", one, b.emit("mul", i, i))))]
    if op == "sigmoid":
        return [(x, b.emit("mul", g, b.emit("mul", i, b.emit("sub", one, i))))]
    if op == "sqrt":
        return [(x, b.emit("div", g, b.emit("mul", i, b.const(2.0))))]
    if op == "abs":
        sign = b.emit("where", b.emit("gt", x, zero), one, b.emit("where", b.emit("lt", x, zero), b.const(-1.0), zero))
        return [(x, b.emit("mul", g, sign))]  # as eager: an infinite gradient at 0 is NaN
    if op in ("min", "max"):
        if node.value is not None:
            wins = b.emit("gt" if op == "max" else "lt", *((y, x) if node.value == "first" else (x, y)))  # beyond a tie
            mine, other = (zero, g) if node.value == "first" else (g, zero)
            return [(x, b.emit("where", wins, mine, other)), (y, b.emit("where", wins, other, mine))]
        half = b.emit("mul", g, b.const(0.5))
        tie, left = b.emit("eq", x, y), b.emit("lt" if op == "min" else "gt", x, y)
        return [(x, b.emit("where", tie, half, b.emit("where", left, g, zero))), (y, b.emit("where", tie, half, b.emit("where", left, zero, g)))]
    if op == "where":
        return [(y, b.emit("where", x, g, zero)), (node.args[2], b.emit("where", x, zero, g))]
    if op == "round":
        return [(x, g)]
    return []
