"""A score program as one readable formula: ``where(k <= q, 0.125*s, -inf)``.

For people only: constants are rounded to six digits and conversions to float are left out; ``program.to_text`` is exact. ``s``
is the score, ``c0[b, k]`` an element of captured tensor 0, ``n0`` size argument 0. A longer value that is used more than once
gets a name, on a line of its own.
"""

from __future__ import annotations

import math
from collections import Counter

from .program import Node, ScoreProgram

_INFIX = {"or": 1, "and": 2, "lt": 4, "le": 4, "gt": 4, "ge": 4, "eq": 4, "ne": 4, "add": 5, "sub": 5, "mul": 6, "div": 6, "floordiv": 6, "mod": 6}
_SYMBOL = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
_NOT, _NEGATE, _ATOM = 3, 7, 9
_RIGHT_MATTERS = frozenset({"sub", "div", "floordiv", "mod"})
_LOWEST = {-3.4028234663852886e38: "min(float32)", -65504.0: "min(float16)", -3.3895313892515355e38: "min(bfloat16)"}
_INLINE_LENGTH = 16


def program_maths(program: ScoreProgram) -> str:
    """The formula of ``program``'s result(s), preceded by one line per named value."""
    uses = Counter(a for node in program.nodes for a in node.args)
    named: list[str] = []
    rendered: list[tuple[str, int]] = []
    for i, node in enumerate(program.nodes):
        text, precedence = _render(node, [rendered[a] for a in node.args])
        if uses[i] > 1 and len(text) > _INLINE_LENGTH:
            named.append(f"t{len(named)} = {text}")
            text, precedence = f"t{len(named) - 1}", _ATOM
        rendered.append((text, precedence))
    results = ", ".join(rendered[r][0] for r in program.results)
    return "\n".join([*named, results])


def _render(node: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    """Text of one node and how tightly it binds."""
    texts = [text for text, _ in args]
    if node.op in _INFIX:
        return _infix(node.op, args), _INFIX[node.op]
    if node.op == "neg":
        return f"-{_bracket(args[0], _NEGATE)}", _NEGATE
    if node.op == "not":
        return f"not {_bracket(args[0], _NOT)}", _NOT
    if node.op == "to_float":
        return args[0]
    if node.op == "const":
        text = _constant(node.value)
        return text, _NEGATE if text.startswith("-") else _ATOM
    if node.op == "load":
        return f"c{node.value}[{', '.join(texts)}]" if texts else f"c{node.value}", _ATOM
    leaves = {"score": "s", "grad": "ds", "index": str(node.value), "size": f"n{node.value}", "keep": f"keep(p={node.value})"}
    if node.op in leaves:
        return leaves[node.op], _ATOM
    name = {"to_int": "int", "to_bool": "bool", "round": str(node.value)}.get(node.op, node.op)
    return f"{name}({', '.join(texts)})", _ATOM


def _infix(op: str, args: list[tuple[str, int]]) -> str:
    level = _INFIX[op]
    symbol = _SYMBOL.get(op, op)
    comparison = level == _INFIX["lt"]  # comparisons do not associate
    left = _bracket(args[0], level + comparison)
    right = _bracket(args[1], level + (comparison or op in _RIGHT_MATTERS))
    if op == "mul" and args[1][0].lstrip("-")[0].isdigit() and args[1][1] >= _NEGATE:
        left, right = args[1][0], _bracket(args[0], level + 1)  # programs keep constants right, people write them left
    space = "" if level == _INFIX["mul"] else " "
    return f"{left}{space}{symbol}{space}{right}"


def _bracket(arg: tuple[str, int], level: int) -> str:
    text, precedence = arg
    return text if precedence >= level else f"({text})"


def _constant(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if value in _LOWEST:
        return _LOWEST[value]
    return f"{value:.6g}" if math.isfinite(value) else repr(value)
