"""Text form of a score program; ``from_text(to_text(p)) == p``.

One node a line, results last::

    program(bool[2], float32[0]; sizes=1)
      %0 = score
      %1 = const 0.125
      %2 = mul %0 %1
      return %2
"""

from __future__ import annotations

import ast

from .ir import Capture, Node, ProgramError, ScoreProgram, Type, capture_type, literal_type, operation_type, verify

_SPECIAL = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def to_text(program: ScoreProgram) -> str:
    """Readable form; floats are written so that they read back to the same bits."""
    captures = ", ".join(f"{c.dtype}[{c.rank}]" for c in program.captures)
    lines = [f"program({captures}; sizes={program.n_sizes})"]
    for i, node in enumerate(program.nodes):
        words = [node.op]
        if node.value is not None:
            words.append(str(node.value) if isinstance(node.value, str) else repr(node.value))
        words += [f"%{a}" for a in node.args]
        lines.append(f"  %{i} = {' '.join(words)}")
    lines.append("  return " + " ".join(f"%{r}" for r in program.results))
    return "\n".join(lines)


def from_text(text: str) -> ScoreProgram:
    """Parse ``to_text``'s form; raises ProgramError naming the line that does not parse."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if len(lines) < 2 or not lines[0].startswith("program("):
        raise ProgramError("a program starts with 'program(' and ends with 'return'")
    captures, n_sizes = _header(lines[0])
    nodes: list[Node] = []
    for line in lines[1:-1]:
        nodes.append(_node(line, nodes, captures))
    word, *results = lines[-1].split()
    if word != "return":
        raise ProgramError(f"last line must be 'return …', got {lines[-1]!r}")
    return verify(ScoreProgram(tuple(nodes), tuple(int(r[1:]) for r in results), captures, n_sizes))


def _header(line: str) -> tuple[tuple[Capture, ...], int]:
    inside = line[len("program(") : -1]
    tensors, _, sizes = inside.partition(";")
    captures = []
    for word in filter(None, (w.strip() for w in tensors.split(","))):
        dtype, _, rank = word[:-1].partition("[")
        captures.append(Capture(dtype, int(rank)))
    return tuple(captures), int(sizes.strip().removeprefix("sizes="))


def _node(line: str, earlier: list[Node], captures: tuple[Capture, ...]) -> Node:
    left, _, right = line.partition(" = ")
    if left != f"%{len(earlier)}":
        raise ProgramError(f"expected %{len(earlier)}, got {line!r}")
    op, *words = right.split()
    args = tuple(int(w[1:]) for w in words if w.startswith("%"))
    literals = [w for w in words if not w.startswith("%")]
    value = None
    if literals:
        value = literals[0] if op in ("index", "round", "min", "max") else _SPECIAL[literals[0]] if literals[0] in _SPECIAL else ast.literal_eval(literals[0])
    kind = _type(op, tuple(earlier[a].type for a in args), value, captures)
    if kind is None:
        raise ProgramError(f"cannot type {line!r}")
    return Node(op, kind, args, value)


def _type(op: str, args: tuple[Type, ...], value: object, captures: tuple[Capture, ...]) -> Type | None:
    fixed: dict[str, Type] = {"score": "float", "grad": "float", "keep": "bool", "round": "float", "index": "int", "size": "int", "not": "bool"}
    if op in fixed:
        return fixed[op]
    if op == "const":
        return literal_type(value)  # type: ignore[arg-type]
    if op == "load" and isinstance(value, int) and value < len(captures):
        return capture_type(captures[value].dtype)
    if op.startswith("to_"):
        return {"to_float": "float", "to_int": "int", "to_bool": "bool"}.get(op)  # type: ignore[return-value]
    if op == "where":
        return args[1] if len(args) == 3 else None
    return operation_type(op, args) if args else None
