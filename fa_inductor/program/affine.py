"""Programs that are affine in the score: ``program(score) = scale * score + offset``, the form that library kernels take.

A mask that replaces hidden scores by a fill is brought to this form by adding the fill instead; the fills treated so are
reported, since adding and replacing agree only where a hidden score cannot matter, or where the fill swallows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .builder import ProgramBuilder
from .ir import ScoreProgram


@dataclass(frozen=True)
class AffineForm:
    """``offset``: a program that does not read the score, None where it is zero. ``replaced``: fills that replaced the score."""

    scale: float
    offset: ScoreProgram | None
    replaced: tuple[float, ...] = ()


def affine_form(program: ScoreProgram) -> AffineForm | None:
    """The affine form of a single-valued program; None where it has none (soft-cap, a tensor factor …)."""
    analysis = _Affine(program)
    found = analysis.of(program.result)
    if found is None or found[0] == 0.0:
        return None
    scale, offset = found
    node = analysis.builder.nodes[offset]
    zero = node.op == "const" and node.value == 0
    return AffineForm(scale, None if zero else analysis.builder.finish(offset), tuple(analysis.replaced))


class _Affine:
    """Walks the program from its result; offsets are built in ``builder``, where the whole program is inlined too."""

    def __init__(self, program: ScoreProgram) -> None:
        self.nodes = program.nodes
        self.builder = ProgramBuilder.like(program)
        self.placed = self.builder.inline(program)
        self.replaced: list[float] = []

    def of(self, i: int) -> tuple[float, int] | None:
        """(coefficient of the score, offset node in the builder)."""
        node, emit = self.nodes[i], self.builder.emit
        if "score" not in self.builder.depends_on(self.placed[i]):
            return 0.0, self.placed[i]
        if node.op == "score":
            return 1.0, self.builder.const(0.0)
        if node.op == "where":
            return self._where(node.args)
        if node.op == "neg":
            inner = self.of(node.args[0])
            return inner and (-inner[0], emit("neg", inner[1]))
        if node.op not in ("add", "sub", "mul", "div"):
            return None
        x, y = self.of(node.args[0]), self.of(node.args[1])
        if x is None or y is None:
            return None
        if node.op in ("add", "sub"):
            return x[0] + y[0] if node.op == "add" else x[0] - y[0], emit(node.op, x[1], y[1])
        return self._scaled(node.op, x, y)

    def _scaled(self, op: str, x: tuple[float, int], y: tuple[float, int]) -> tuple[float, int] | None:
        if op == "mul" and x[0] == 0.0:
            x, y = y, x
        factor = self.builder.nodes[y[1]]
        if y[0] != 0.0 or factor.op != "const" or not factor.value:
            return None
        value = float(factor.value)
        offset = self.builder.nodes[x[1]]
        # an offset of zero stays zero, so that a plain scale has no offset
        scaled = x[1] if offset.op == "const" and offset.value == 0 else self.builder.emit(op, x[1], y[1])
        return x[0] * value if op == "mul" else x[0] / value, scaled

    def _where(self, args: tuple[int, ...]) -> tuple[float, int] | None:
        condition, x, y = args[0], self.of(args[1]), self.of(args[2])
        if x is None or y is None or "score" in self.builder.depends_on(self.placed[condition]):
            return None
        if x[0] != y[0]:
            fill = self.builder.nodes[x[1] if x[0] == 0.0 else y[1]]
            if 0.0 not in (x[0], y[0]) or fill.op != "const":
                return None
            self.replaced.append(float(fill.value))  # type: ignore[arg-type]
        return x[0] or y[0], self.builder.emit("where", self.placed[condition], x[1], y[1])
