"""Factors on the probabilities: ``P' = P * factor`` read off a lifted expression that must be linear in P."""

from __future__ import annotations

from collections.abc import Sequence

from .program import ProgramBuilder
from .refusal import Refusal, Refused, declare

POST_OP = declare(
    "post_softmax_op",
    "between softmax and matmul only dropout, casts, masks, factors, NaN turned into 0, and sums of probabilities before one product can be fused",
)


def factor_of(source: ProgramBuilder, value: int, target: ProgramBuilder, captures: Sequence[int], sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The factor of ``value`` (an expression of ``source`` in its ``score`` leaf, which stands for P) as a node of ``target``.

    ``captures`` and ``sizes`` give the target's capture number and node for each of the source's. Also returned: the conditions under
    which 0 is chosen instead of P. For a P of NaN that is another thing than a factor of 0.
    """
    zeroed: list[int] = []
    depends = [source.depends_on(i) for i in range(len(source.nodes))]
    copies: dict[int, int] = {}

    def copy(i: int) -> int:
        if i not in copies:
            node = source.nodes[i]
            args = [copy(a) for a in node.args]
            if node.op == "const":
                copies[i] = target.const(node.value)  # type: ignore[arg-type]
            elif node.op == "index":
                copies[i] = target.index(str(node.value))
            elif node.op == "size":
                copies[i] = sizes[int(node.value)]  # type: ignore[arg-type]
            elif node.op == "load":
                copies[i] = target.load(captures[int(node.value)], args)  # type: ignore[arg-type]
            else:
                copies[i] = target.emit(node.op, *args, value=node.value)
        return copies[i]

    def factor(i: int) -> int:
        node = source.nodes[i]
        random = ["score" in depends[a] for a in node.args]
        if node.op == "score":
            return target.const(1.0)
        if node.op == "mul" and sum(random) == 1:
            p, other = node.args if random[0] else node.args[::-1]
            return target.emit("mul", factor(p), copy(other))
        if node.op == "div" and random == [True, False]:
            return target.emit("div", factor(node.args[0]), copy(node.args[1]))
        if node.op == "where" and sum(random) == 1 and not random[0]:
            kept, other = (1, 2) if random[1] else (2, 1)
            literal = source.nodes[node.args[other]]
            if literal.op == "const" and literal.value == 0:
                zero, branch, condition = target.const(0.0), factor(node.args[kept]), copy(node.args[0])
                zeroed.append(target.emit("not", condition) if kept == 1 else condition)
                return target.emit("where", condition, *((branch, zero) if kept == 1 else (zero, branch)))
        raise Refused(Refusal(POST_OP, f"the probabilities go through '{node.op}' before the matmul"))

    return factor(value), tuple(zeroed)
