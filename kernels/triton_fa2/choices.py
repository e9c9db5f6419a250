"""Choices between two numbers by conditions on integers: device functions whose names say the condition, in postfix order.

    fa2_where_le_eq64_and(x, y, a, b, c, d) = x where a <= b and c == d (the latter in 64 bits), else y

In assembly, because LLVM gathers the comparisons of a thread's elements into vectors of bits, which it packs and unpacks: with ``tl.where`` the
masked tiles of a causal forward pass took 1,118 instructions a thread where the others take 504, with this 743 (Triton 3.6, sm_90a, D = 64).
Words whose sign says what holds, and no predicates, took 846 and more registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

PREFIX = "fa2_where_"
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_LOGIC = {"and": "&", "or": "|"}


def names_in(text: str) -> list[str]:
    """The functions of this module that a kernel calls."""
    return sorted(set(re.findall(rf"\b({PREFIX}\w+)\(", text)))


def function(name: str, on_gpu: bool) -> str:
    """Source of the function ``name``: assembly, or what it means for Triton's interpreter."""
    tokens = name.removeprefix(PREFIX).split("_")
    arguments = [f"{side}{i}" for i, sides in enumerate(map(_sides, (t for t in tokens if _sides(t)))) for side in sides]
    widths = [f"tl.int{64 if t.endswith('64') else 32}" for t in tokens for _ in _sides(t)]
    body = [f"{a} = ({a} + tl.zeros([1, 1], {width})).to({width})" for a, width in zip(arguments, widths, strict=True)]  # lengths may be constants
    body += [f"return {_assembly(tokens, arguments) if on_gpu else f'tl.where({_expression(tokens)}, x, y)'}"]
    return "\n    ".join([f"\n\n@triton.jit\ndef {name}(x, y, {', '.join(arguments)}):", *body]) + "\n"


def _sides(token: str) -> str:
    """Operands of a token: two numbers that are compared, or one that is true unless it is 0."""
    return "ab" if token.removesuffix("64") in _COMPARISONS else "a" if token == "on" else ""


def _carried_out(tokens: list[str], compare: Callable[[str, int], str], join: Callable[[str, str, str], str], negate: Callable[[str], str]) -> str:
    """The text of a condition from the texts of its parts; ``compare`` is given the number of the comparison."""
    stack: list[str] = []
    leaves = 0
    for token in tokens:
        if token in _LOGIC:
            right, left = stack.pop(), stack.pop()
            stack.append(join(token, left, right))
        elif token == "not":
            stack.append(negate(stack.pop()))
        else:
            stack.append(compare(token, leaves))
            leaves += 1
    return stack.pop()


def _expression(tokens: list[str]) -> str:
    def compare(token: str, leaf: int) -> str:
        return f"(a{leaf} != 0)" if token == "on" else f"(a{leaf} {_COMPARISONS[token.removesuffix('64')]} b{leaf})"

    return _carried_out(tokens, compare, lambda word, left, right: f"({left} {_LOGIC[word]} {right})", lambda x: f"({x} == 0)")


def _assembly(tokens: list[str], arguments: list[str]) -> str:
    place = {a: f"${3 + i}" for i, a in enumerate(arguments)}
    constraints, steps = ["=f", "f", "f"], []

    def compare(token: str, leaf: int) -> str:
        kind, bits = ("ne", 32) if token == "on" else (token.removesuffix("64"), 64 if token.endswith("64") else 32)
        sides = [place[f"{side}{leaf}"] for side in _sides(token)]
        constraints.extend(["l" if bits == 64 else "r"] * len(sides))
        steps.append(f"setp.{kind}.s{bits} p{leaf}, {', '.join([*sides, *(['0'] if token == 'on' else [])])};")
        return f"p{leaf}"

    def join(word: str, left: str, right: str) -> str:
        steps.append(f"{word}.pred {left}, {left}, {right};")
        return left

    def negate(x: str) -> str:
        steps.append(f"not.pred {x}, {x};")
        return x

    chosen = _carried_out(tokens, compare, join, negate)
    text = f"{{ .reg .pred p<{len(tokens)}>; {' '.join(steps)} selp.f32 $0, $1, $2, {chosen}; }}"
    return f'tl.inline_asm_elementwise("{text}", "{",".join(constraints)}", [x, y, {", ".join(arguments)}], dtype=tl.float32, is_pure=True, pack=1)'
