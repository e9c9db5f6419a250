"""Rewrites of a score program that a softmax kernel wants: base-2 exponents and constant factors taken out of sums.

``exp(y - m) = exp2(y log2(e) - m log2(e))``: where the program is a sum of moderate terms, ``log2(e)`` is multiplied into its
constants, which costs nothing per score (Dao et al., FlashAttention-2, arXiv:2307.08691, fold it into the scale the same way).
Where a term may be as large as ``finfo.min`` the product overflows fp32, and rows that see nothing would lose their uniform
distribution: such programs stay in natural units and the difference ``y - m``, which is exact there, is scaled instead.
"""

from __future__ import annotations

import math

from fa_inductor.program import ProgramBuilder, ScoreProgram, dependencies
from fa_inductor.program.ir import Node

LOG2E = math.log2(math.e)
_MODERATE = 1000.0  # additive constants up to here keep enough fp32 bits after the scaling


def moderate(program: ScoreProgram, root: int) -> bool:
    """No additive term of the value is a huge finite constant or a captured float, whose size is unknown."""
    nodes = program.nodes

    def visit(i: int, factor: float) -> bool:
        node = nodes[i]
        if node.op == "const":
            value = float(node.value) * factor  # type: ignore[arg-type]
            return abs(value) <= _MODERATE or abs(value) == math.inf
        if node.op == "load":
            return False
        if node.op in ("add", "sub", "min", "max"):
            return visit(node.args[0], factor) and visit(node.args[1], factor)
        if node.op in ("neg", "round", "abs"):
            return visit(node.args[0], factor)
        if node.op == "where":
            return visit(node.args[1], factor) and visit(node.args[2], factor)
        constant = _largest(nodes, node.args[1]) if node.op in ("mul", "div") else 0.0
        if constant and (node.op == "mul" or nodes[node.args[1]].op == "const"):
            return visit(node.args[0], factor * constant if node.op == "mul" else factor / constant)
        return factor <= _MODERATE

    return visit(root, 1.0)


def _largest(nodes: tuple[Node, ...], i: int) -> float:
    """Magnitude of a literal, or of the larger of two that are chosen between (the weight of a kept score); else 0."""
    node = nodes[i]
    if node.op == "where":
        return max(_largest(nodes, a) if nodes[a].op == "const" else 0.0 for a in node.args[1:])
    return abs(float(node.value)) if node.op == "const" else 0.0  # type: ignore[arg-type]


def may_be_minus_infinity(program: ScoreProgram, root: int) -> bool:
    """The value can be -inf by construction: through a constant, a captured float, or a function with a pole."""
    live = _cone(program.nodes, root)
    for i in live:
        node = program.nodes[i]
        if node.op == "const" and isinstance(node.value, float) and math.isinf(node.value):
            return True
        if node.type == "float" and node.op in ("load", "log", "log1p", "div", "exp", "exp2", "expm1", "sqrt") and not _by_constant(program.nodes, node):
            return True
    return False


def _by_constant(nodes: tuple[Node, ...], node: Node) -> bool:
    return node.op == "div" and nodes[node.args[1]].op == "const" and bool(nodes[node.args[1]].value)


def _cone(nodes: tuple[Node, ...], root: int) -> set[int]:
    live = {root}
    for i in range(root, -1, -1):
        if i in live:
            live.update(nodes[i].args)
    return live


def scaled(builder: ProgramBuilder, node: int, factor: float) -> int:
    """A node equal to ``factor * node``, with the factor multiplied into constants and score-free factors where there are some."""
    n = builder.nodes[node]
    if n.op == "const":
        return builder.const(float(n.value) * factor)  # type: ignore[arg-type]
    if n.op in ("add", "sub"):
        return builder.emit(n.op, scaled(builder, n.args[0], factor), scaled(builder, n.args[1], factor))
    if n.op == "neg":
        return builder.emit("neg", scaled(builder, n.args[0], factor))
    if n.op == "where":
        return builder.emit("where", n.args[0], scaled(builder, n.args[1], factor), scaled(builder, n.args[2], factor))
    if n.op in ("mul", "div"):
        left, right = n.args
        constant = builder.nodes[right]
        if constant.op == "const" and constant.value:
            value = float(constant.value)  # type: ignore[arg-type]
            return scaled(builder, left, factor * value if n.op == "mul" else factor / value)
        if n.op == "mul" and "score" not in builder.depends_on(right):
            return builder.emit("mul", left, scaled(builder, right, factor))
        return builder.emit(n.op, scaled(builder, left, factor), right)
    return builder.emit("mul", node, builder.const(factor))


def constant_factor(program: ScoreProgram, root: int) -> float:
    """c such that the value is ``c * f`` for some f free of that constant: a multiplication saved per score when f is summed."""
    nodes = program.nodes
    node = nodes[root]
    if node.op == "mul" and nodes[node.args[1]].op == "const":
        return float(nodes[node.args[1]].value) * constant_factor(program, node.args[0])  # type: ignore[arg-type]
    if node.op == "where":
        zero = [nodes[a].op == "const" and nodes[a].value == 0.0 for a in node.args[1:]]
        if zero == [False, True]:
            return constant_factor(program, node.args[1])
        if zero == [True, False]:
            return constant_factor(program, node.args[2])
    return 1.0


def without_factor(builder: ProgramBuilder, node: int) -> int:
    """``node`` with the constants that ``constant_factor`` finds taken away."""
    n = builder.nodes[node]
    if n.op == "mul" and builder.nodes[n.args[1]].op == "const":
        return without_factor(builder, n.args[0])
    if n.op == "where":
        zero = [builder.nodes[a].op == "const" and builder.nodes[a].value == 0.0 for a in n.args[1:]]
        if zero == [False, True]:
            return builder.emit("where", n.args[0], without_factor(builder, n.args[1]), n.args[2])
        if zero == [True, False]:
            return builder.emit("where", n.args[0], n.args[1], without_factor(builder, n.args[2]))
    return node


def score_scale(program: ScoreProgram, root: int) -> float | None:
    """c > 0 where the value is exactly ``c * score``, or that or -inf: the row maximum may then be taken before scaling."""
    split = choice_of(program, root, -math.inf)
    node = program.nodes[split[1] if split else root]
    if node.op == "score":
        return 1.0
    if node.op == "mul" and program.nodes[node.args[0]].op == "score" and program.nodes[node.args[1]].op == "const":
        value = float(program.nodes[node.args[1]].value)  # type: ignore[arg-type]
        return value if value > 0 else None
    return None


def unscaled(builder: ProgramBuilder, node: int) -> int:
    """Of a value that ``score_scale`` has a factor for, that without the factor."""
    n = builder.nodes[node]
    if n.op == "where":
        return builder.emit("where", n.args[0], *(unscaled(builder, a) for a in n.args[1:]))
    return n.args[0] if n.op == "mul" else node


def choice_of(program: ScoreProgram, root: int, constant: float) -> tuple[int, int, bool] | None:
    """(condition, value, whether the constant stands where the condition holds) of a choice between a value and a constant."""
    node = program.nodes[root]
    if node.op != "where":
        return None
    is_constant = [program.nodes[a].op == "const" and program.nodes[a].value == constant for a in node.args[1:]]
    return (node.args[0], node.args[1 + is_constant[0]], is_constant[0]) if is_constant in ([True, False], [False, True]) else None


def reads(program: ScoreProgram | None) -> set[int]:
    """Numbers of the captured tensors that a program reads."""
    return {int(n.value) for n in program.nodes if n.op == "load"} if program else set()  # type: ignore[arg-type]


def depends(program: ScoreProgram) -> tuple[frozenset[str], ...]:
    return dependencies(program.nodes)
