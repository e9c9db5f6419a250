"""Index algebra against brute force: every element of random views, and symbolic sizes with numbers put in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from fa_inductor.index import ONE, ZERO, Expr, Space, broadcast_index, equal, exact_quotient, mixed_radix, product, rejoined, view_index, window

Draw = Callable[..., Any]
S0, S1 = (sympy.Symbol(n, integer=True, positive=True) for n in ("s0", "s1"))
EXAMPLES = [{S0: a, S1: b} for a, b in ((1, 1), (1, 3), (2, 1), (2, 2), (3, 5), (4, 3))]


def symbols(count: int) -> list[sympy.Symbol]:
    return [sympy.Symbol(f"i{n}", integer=True, nonnegative=True) for n in range(count)]


def number(size: Expr, values: dict[Expr, int]) -> int:
    return int(sympy.sympify(size).subs(values))


def values_of(expr: Expr, extent: dict[Expr, Expr], sizes: dict[Expr, int]) -> np.ndarray:
    """``expr`` at every combination of its symbols, an axis for each symbol of ``extent`` in order."""
    names = list(extent)
    grid = np.meshgrid(*(np.arange(number(extent[n], sizes)) for n in names), indexing="ij") if names else []
    function = sympy.lambdify([*names, *sizes], expr, modules=[{"FloorDiv": lambda x, n: x // n, "Mod": lambda x, n: x % n}, "numpy"])
    shape = tuple(number(extent[n], sizes) for n in names)
    return np.broadcast_to(function(*grid, *sizes.values()), shape)


# -- views ---------------------------------------------------------------------------------------------------------------
def factorings(total: int) -> list[tuple[int, ...]]:
    """Shapes of up to four dimensions with ``total`` elements, ones included."""
    found = {(total,)}
    for rank in (2, 3, 4):
        for shape in itertools.product([d for d in range(1, total + 1) if total % d == 0], repeat=rank):
            if np.prod(shape) == total:
                found.add(shape)
    return sorted(found)


SHAPES = {n: factorings(n) for n in (6, 8, 12, 24, 36)}


@st.composite
def chains(draw: Draw) -> list[tuple[str, tuple[int, ...]]]:
    """A shape, then reshapes, permutes and expands."""
    total = draw(st.sampled_from(sorted(SHAPES)))
    shape = draw(st.sampled_from(SHAPES[total]))
    steps = [("start", shape)]
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["reshape", "reshape", "permute", "expand"]))
        if kind == "permute":
            order = tuple(draw(st.permutations(range(len(shape)))))
            steps.append((kind, order))
            shape = tuple(shape[d] for d in order)
        elif kind == "expand" and 1 in shape and np.prod(shape) <= 36:
            shape = tuple(draw(st.sampled_from((1, 2, 3))) if s == 1 else s for s in shape)
            steps.append((kind, shape))
        elif int(np.prod(shape)) in SHAPES:
            shape = draw(st.sampled_from(SHAPES[int(np.prod(shape))]))
            steps.append(("reshape", shape))
    return steps


def through(space: Space, steps: Sequence[tuple[str, tuple[int, ...]]], shapes: Sequence[tuple[int, ...]], index: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Index into the first tensor of the element ``index`` of the last."""
    for (kind, argument), before, after in zip(reversed(steps[1:]), reversed(shapes[:-1]), reversed(shapes[1:])):
        source, target = (tuple(map(sympy.Integer, s)) for s in (before, after))
        if kind == "reshape":
            index = view_index(space, source, target, index)
        elif kind == "expand":
            index = broadcast_index(source, index)
        else:
            inner = [ZERO] * len(index)
            for i, d in zip(index, argument):
                inner[d] = i
            index = tuple(inner)
    return index


@settings(max_examples=80, deadline=None)
@given(chains())
def test_views_read_the_element_that_torch_reads(steps: list[tuple[str, tuple[int, ...]]]) -> None:
    tensor = start = torch.arange(int(np.prod(steps[0][1]))).view(steps[0][1])
    shapes = [tuple(start.shape)]
    for kind, argument in steps[1:]:
        tensor = tensor.permute(argument) if kind == "permute" else tensor.expand(argument) if kind == "expand" else tensor.reshape(argument)
        shapes.append(tuple(tensor.shape))
    names = symbols(tensor.dim())
    extent = {n: sympy.Integer(s) for n, s in zip(names, tensor.shape)}
    index = through(Space(extent), steps, shapes, tuple(names))
    read = [torch.from_numpy(values_of(i, extent, {}).copy()) for i in index]
    assert torch.equal(start[tuple(read)].view(tensor.shape), tensor), f"{steps}: {index}"


@pytest.mark.parametrize("total", [12, 24])
def test_splitting_or_merging_and_back_leaves_no_trace(total: int) -> None:
    for shape, other in itertools.product(SHAPES[total][::2], SHAPES[total][1::3]):
        cuts, other_cuts = (set(np.cumprod(s)) for s in (shape, other))
        if not (cuts <= other_cuts or other_cuts <= cuts):
            continue  # dimensions that overlap without one containing the other
        names = symbols(len(shape))
        space = Space({n: sympy.Integer(s) for n, s in zip(names, shape)})
        source, target = (tuple(map(sympy.Integer, s)) for s in (shape, other))
        plain = tuple(ZERO if s == 1 else n for n, s in zip(names, shape))
        assert view_index(space, source, target, view_index(space, target, source, plain)) == plain, (shape, other)


# -- symbolic sizes ------------------------------------------------------------------------------------------------------
@st.composite
def symbolic_shapes(draw: Draw) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """Two shapes with the same number of elements: groupings of the same factors, perhaps in another order."""
    factors = [S0, *draw(st.lists(st.sampled_from([S1, S0, sympy.Integer(2), sympy.Integer(3), sympy.Integer(4)]), min_size=1, max_size=3))]
    factors = draw(st.permutations(factors))
    other = draw(st.permutations(factors)) if draw(st.booleans()) else factors
    return _grouped(draw, factors), _grouped(draw, other)


def _grouped(draw: Draw, factors: Sequence[Expr]) -> tuple[Expr, ...]:
    shape = [factors[0]]
    for f in factors[1:]:
        if draw(st.booleans()):
            shape.append(f)
        else:
            shape[-1] = shape[-1] * f
    return tuple(shape)


@settings(max_examples=80, deadline=None)
@given(symbolic_shapes())
def test_reshapes_of_symbolic_shapes_are_right_for_every_size(shapes: tuple[tuple[Expr, ...], tuple[Expr, ...]]) -> None:
    source, target = shapes
    names = symbols(len(target))
    extent = dict(zip(names, target))
    index = view_index(Space(extent), source, target, tuple(names))
    for sizes in EXAMPLES:
        before, after = ([number(s, sizes) for s in shape] for shape in shapes)
        expected = torch.arange(int(np.prod(before))).view(before)
        read = [torch.from_numpy(values_of(i, extent, sizes).copy()) for i in index]
        assert torch.equal(expected[tuple(read)], expected.view(after)), f"{source} -> {target} at {sizes}: {index}"


@st.composite
def expressions(draw: Draw) -> tuple[Expr, dict[Expr, Expr]]:
    """A non-negative index expression and the extents of its symbols: sums, quotients and remainders."""
    names = symbols(3)
    sizes = st.sampled_from([sympy.Integer(n) for n in (1, 2, 3, 4, 6)] + [S0, S1, 2 * S0, S0 * S1])
    extent = {n: draw(sizes) for n in names}
    space = Space(extent)
    coefficients = st.sampled_from([ZERO, ONE, sympy.Integer(2), sympy.Integer(3), sympy.Integer(6), S0, 2 * S0, S0 * S1])

    def term() -> Expr:
        n = draw(st.sampled_from(names))
        reverse = draw(st.integers(0, 5)) == 0
        atom = extent[n] - 1 - n if reverse else n
        return draw(coefficients) * atom

    expr = draw(st.sampled_from([0, 1, 2, 5])) + term() + term()
    for _ in range(draw(st.integers(0, 2))):
        n = draw(st.sampled_from([sympy.Integer(2), sympy.Integer(3), S0, 2 * S0]))
        expr = (space.div if draw(st.booleans()) else space.mod)(expr, n)
        expr = sympy.expand(expr * draw(coefficients) + term())
    return expr, extent


@settings(max_examples=120, deadline=None)
@given(expressions(), st.sampled_from([ONE, sympy.Integer(2), sympy.Integer(3), sympy.Integer(4), sympy.Integer(6), S0, S1, 2 * S0, S0 * S1]))
def test_division_remainder_and_bound(case: tuple[Expr, dict[Expr, Expr]], n: Expr) -> None:
    expr, extent = case
    space = Space(extent)
    quotient, rest, top, count = space.div(expr, n), space.mod(expr, n), space.upper(expr), space.extent_of(expr)
    for sizes in EXAMPLES:
        value, by = values_of(expr, extent, sizes), number(n, sizes)
        assume((value >= 0).all())
        assert (values_of(quotient, extent, sizes) == value // by).all(), f"({expr}) // {n} is not {quotient} at {sizes} with {extent}"
        assert (values_of(rest, extent, sizes) == value % by).all(), f"({expr}) % {n} is not {rest} at {sizes} with {extent}"
        if top is not None:
            assert value.max() <= number(top, sizes), f"{expr} exceeds {top} at {sizes} with {extent}"
        if count is not None:
            assert value.max() < number(count, sizes), f"{expr} has more than {count} values at {sizes} with {extent}"


@settings(max_examples=120, deadline=None)
@given(expressions(), st.sampled_from([ONE, sympy.Integer(6), sympy.Integer(12), S0, 2 * S0, 6 * S0, S0 * S1, 2 * S0 * S1]), st.booleans())
def test_mixed_radix_digits_make_up_the_index(case: tuple[Expr, dict[Expr, Expr]], size: Expr, merged: bool) -> None:
    expr, extent = case
    if merged:  # a true mixed-radix number, so that the digits are found
        a, b, _ = extent
        expr, size = a * extent[b] + b, sympy.expand(extent[a] * extent[b])
    digits = mixed_radix(Space(extent), expr, size)
    if merged and ONE not in (extent[a], extent[b]):
        assert digits == ((a, extent[a]), (b, extent[b]))
    if digits is None:
        return
    assert equal(product([e for _, e in digits]), size)
    for sizes in EXAMPLES:
        total: Any = 0
        for atom, count in digits:
            value = values_of(atom, extent, sizes)
            assert ((value >= 0) & (value < number(count, sizes))).all()
            total = total * number(count, sizes) + value
        assert (total == values_of(expr, extent, sizes)).all(), f"{expr} is not {digits}"


# -- single facts --------------------------------------------------------------------------------------------------------
def test_merging_and_splitting_symbolic_axes() -> None:
    b, h, q = symbols(3)
    space = Space({b: S0, h: sympy.Integer(8), q: S1})
    assert (space.div(8 * b + h, sympy.Integer(8)), space.mod(8 * b + h, sympy.Integer(8))) == (b, h)
    assert space.div(h * S1 + q, S1) == h and space.mod(h * S1 + q, S1) == q
    assert space.upper(8 * b + h) == 8 * S0 - 1
    assert mixed_radix(space, 8 * b + h, 8 * S0) == ((b, S0), (h, sympy.Integer(8)))
    assert mixed_radix(space, 8 * b + h, 9 * S0) is None
    assert mixed_radix(space, h, sympy.Integer(8)) == ((h, sympy.Integer(8)),)
    assert mixed_radix(space, ZERO, ONE) == ()


def test_what_is_not_known_is_not_claimed() -> None:
    i, j = symbols(2)
    space = Space({i: S0, j: S1})
    assert space.div(i, S1) == FloorDiv(i, S1) and space.mod(i, S1) == Mod(i, S1)
    assert space.upper(i - j) is None
    assert not equal(S0, S1)
    assert exact_quotient(S0, sympy.Integer(2)) is None
    assert exact_quotient(S0, S1) is None
    assert exact_quotient(6 * S0 * S1, 2 * S0) == 3 * S1
    assert space.extent_of(i + j) is None


def test_broadcasting_reads_size_one_at_zero() -> None:
    i, j, k = symbols(3)
    assert broadcast_index((ONE, S0), (i, j, k)) == (ZERO, k)
    assert broadcast_index((), (i, j, k)) == ()


def test_a_dimension_that_is_split_and_merged_is_itself_again() -> None:
    i, j, k = symbols(3)
    assert rejoined(6 * FloorDiv(k, 6) + Mod(k, 6) + 1) == k + 1
    assert rejoined(S0 * j + S1 * FloorDiv(k, S1) + Mod(k, S1)) == S0 * j + k
    other = 6 * FloorDiv(k, 6) + Mod(k, 3)
    assert rejoined(other) == other
    blocks = Space({i: S0, k: 8 * S1})
    inner = view_index(blocks, (S0, S1, sympy.Integer(8)), (S0, 8 * S1), (i, k))
    assert inner == (i, FloorDiv(k, 8), Mod(k, 8))
    assert view_index(blocks, (S0, 8 * S1), (S0, S1, sympy.Integer(8)), inner) == (i, k)


def test_an_index_that_may_be_negative_does_not_fit() -> None:
    i = sympy.Symbol("i", integer=True, nonnegative=True)
    space = Space({i: sympy.Integer(2)})
    assert space.div(2 * S0 - 2 + i, S0) == 2 + FloorDiv(i - 2, S0)  # 2 would be wrong: the last two of two rows lie in row 1
    assert space.mod(2 * S0 - 2 + i, S0) == Mod(i - 2, S0)
    assert space.div(2 * S0 - 1 + i, S0 + 1) == FloorDiv(2 * S0 - 1 + i, S0 + 1)


def test_a_window_ends_with_its_dimension_or_begins_where_it_surely_may() -> None:
    i, j = symbols(2)
    space = Space({i: S1, j: sympy.Integer(3)})
    assert window(space, S0 - S1 + i, S0) == (((i, S1),), S0 - S1, S1)
    assert window(space, S0 - 3 + j, S0) == (((j, sympy.Integer(3)),), S0 - 3, 3)
    assert window(space, i + 2, S0) == (((i, S1),), 2, S1)
    assert window(space, S0 - S1 + i - 1, S0) is None and window(space, S0 - 4 + j, S0) is None


def test_within_is_proved() -> None:
    i = sympy.Symbol("i", integer=True, nonnegative=True)
    space = Space({i: S0})
    assert space.within(i, sympy.Integer(0), S0) and space.within(i + 3, sympy.Integer(3), S0 + 3) and space.within(i + 2 * S0 - 1, S0, 3 * S0)
    assert not space.within(i, sympy.Integer(0), S0 - 1) and not space.within(i + 3, sympy.Integer(4), S0 + 4) and not space.within(i, sympy.Integer(0), S1)


def test_a_negative_literal_left_by_a_size_is_a_remainder() -> None:
    assert Space({}).mod(2 * S0 - 1, sympy.Integer(2)) == 1
