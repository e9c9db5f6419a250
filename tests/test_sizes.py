"""What equations between sizes say: a simplified size must have the same value wherever the equations hold."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.index import as_expr
from fa_inductor.sizes import SizeFacts, definition

A, B, C, D = (sympy.Symbol(n, integer=True, positive=True) for n in "abcd")
G = FloorDiv(A, B * C)
Equation = tuple[Any, Any]
CASES: dict[str, tuple[list[Equation], list[tuple[Any, str]]]] = {
    "a multiple": ([(Mod(A, 8), 0)], [(A, "8*(a//8)"), (FloorDiv(A, 8), "(a//8)"), (FloorDiv(A, 4), "2*(a//8)"), (FloorDiv(A, FloorDiv(A, 8)), "8")]),
    "a multiple of a multiple": ([(Mod(A, 4), 0), (Mod(A, 8), 0)], [(FloorDiv(A, 4), "2*((a//4)//2)")]),
    "a multiple of another size": ([(Mod(A, B), 0)], [(FloorDiv(A, B) * B - A, "0")]),
    "a view with a number": ([(Mod(A, 7), 0), (FloorDiv(A, 7), 9)], [(A, "63"), (FloorDiv(A, 9), "7")]),
    "number first": ([(FloorDiv(A, 7), 9), (Mod(A, 7), 0)], [(A, "63")]),
    "heads of a number left open": (
        [(A * D, B * C * D * G), (Mod(A, B), 0), (C, FloorDiv(A, B * G))],
        [(FloorDiv(A, B * G), "c"), (FloorDiv(A, B), "(a//(b*c))*c")],
    ),
    "windows by their number": (
        [(Mod(A, FloorDiv(A, 8)), 0), (FloorDiv(A, FloorDiv(A, 8)), 8)],
        [(FloorDiv(A, FloorDiv(A, 8)), "8"), (FloorDiv(A, 8) * 8 - A, "0")],
    ),
    "a quotient that is another size": ([(FloorDiv(A, 3), B)], [(FloorDiv(A, 3), "b"), (A, "a")]),
    "a quotient of products": ([(FloorDiv(A * B, 63), B), (Mod(A, 7), 0), (A, 7 * FloorDiv(A, 7))], [(A - 7 * FloorDiv(A, 7), "0")]),
}
NOTHING: dict[str, list[Equation]] = {
    "a remainder": [(Mod(A, 8), 1)],
    "a sum": [(Mod(A + 1, 8), 0)],
    "sizes in a sum": [(A + B, 8 * FloorDiv(C, 8))],
    "a factor that may be 0": [(A * FloorDiv(C, 8), B * FloorDiv(C, 8))],
    "a square": [(A * A, 4 * FloorDiv(B, 4))],
}


def learned(equations: list[Equation]) -> SizeFacts:
    facts = SizeFacts()
    for left, right in equations:
        facts.learn(left, sympy.sympify(right))
    return facts


def value(expr: Any, sizes: dict[Any, int]) -> int:
    """With all quotients computed."""
    if not expr.args:
        return int(expr) if expr.is_Integer else sizes[expr] if expr in sizes else value(definition(expr), sizes)
    values = [value(x, sizes) for x in expr.args]
    if isinstance(expr, (FloorDiv, Mod)):
        return values[0] // values[1] if isinstance(expr, FloorDiv) else values[0] % values[1]
    return sum(values) if expr.is_Add else math.prod(values) if expr.is_Mul else int(values[0] ** values[1])


@pytest.mark.parametrize("name", CASES)
def test_sizes_are_simplified_to_what_they_are(name: str) -> None:
    equations, expected = CASES[name]
    facts = learned(equations)
    assert [str(sympy.expand(facts.simplify(expr))) for expr, _ in expected] == [text for _, text in expected]


@pytest.mark.parametrize("name", [*CASES, *NOTHING])
def test_every_simplification_holds_where_the_equations_do(name: str) -> None:
    equations = CASES[name][0] if name in CASES else NOTHING[name]
    facts = learned(equations)
    exprs = [
        A,
        B,
        C,
        D,
        FloorDiv(A, 8),
        FloorDiv(A, B),
        FloorDiv(A * D, B * C),
        FloorDiv(A, FloorDiv(A, 8)),
        FloorDiv(C, 8),
        FloorDiv(A, 7),
        G,
        FloorDiv(A, B * G),
    ]
    met = 0
    for numbers in itertools.product([1, 2, 6, 7, 8, 9, 12, 24, 48, 63], [1, 2, 3, 7], [1, 2, 4, 8], [1, 5]):
        sizes = dict(zip((A, B, C, D), numbers))
        try:
            if any(value(x, sizes) != value(sympy.sympify(y), sizes) for x, y in equations):
                continue
        except ZeroDivisionError:
            continue
        for expr in exprs:
            with suppress(ZeroDivisionError):
                expected = value(expr, sizes)
                assert value(facts.simplify(expr), sizes) == expected, f"{expr} is not {facts.simplify(expr)} at {sizes}"
        met += 1
    assert met


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_follows_from_what_is_no_equation_of_products(name: str) -> None:
    facts = learned(NOTHING[name])
    assert not facts.sizes and not facts.quotients


def test_guards_of_a_compilation_are_read() -> None:
    """Those made after the first look too."""
    seen: list[tuple[str, str]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        (size,) = [x for x in inputs if isinstance(x, torch.SymInt)]
        before = as_expr(size // 8 * 8)
        assert size % 8 == 0
        seen.append((str(before), str(as_expr(size // 8 * 8) - as_expr(size))))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin(), backend=backend, dynamic=True)(torch.randn(48))
    assert len(seen) == 1 and "//8" in seen[0][0] and seen[0][1] == "0", seen
